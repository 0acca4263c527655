"""The `hf-parallel config` command: questions, each answer checked with those before it, and a file of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hf_parallel.cli.recipe_file import FIRST_MACHINE, accelerate_settings, write_recipe
from hf_parallel.cli.recipes import facts
from hf_parallel.dry_run.accelerate_file import file_problems, group_problems
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import gpus
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import check_accelerate


Answers = Mapping[str, Any]
BACK: Final = ("b", "back")
TRUTH: Final = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}


@dataclass(frozen=True)
class Question:
    """A question to the user.

    Args:
        key: Key of the answer, and name of the option that gives it.
        text: The question.
        kind: Kind of the answer: a truth, an integer, or a word (an integer if it looks like one).
        default: The answer of an empty line, after those before.
        applies: Whether the answers before leave it open.
    """

    key: str
    text: str
    kind: type
    default: Callable[[Answers], Any]
    applies: Callable[[Answers], bool] = lambda _: True

    def read(self, text: str) -> Any:
        """The answer that a text gives.

        Raises:
            ConfigError: It is none.
        """
        text = text.strip()
        if self.kind is bool:
            if text.lower() not in TRUTH:
                raise ConfigError(f"{self.key}={text!r}: expected yes or no. Write y or n.")
            return TRUTH[text.lower()]
        whole = text.lstrip("+-").isdigit()
        if self.kind is int and not whole:
            raise ConfigError(f"{self.key}={text!r}: expected an integer. Write digits only.")
        return int(text) if whole else text


def _copies(answers: Answers) -> int:
    copies: int = answers["num_processes"] // (answers["tp_size"] * answers["pp_size"])
    return copies


def _given(answers: Answers) -> bool:
    return not answers["auto"]


QUESTIONS: Final = (
    Question("use_cpu", "Train on the CPU (y/n)", bool, lambda _: not gpus()),
    Question("num_machines", "Machines", int, lambda _: 1),
    Question(
        *("main_process_ip", "Name or address of machine 0", str, lambda _: FIRST_MACHINE),
        applies=lambda answers: answers["num_machines"] > 1,
    ),
    Question(
        *("num_processes", "Processes on all machines (one for each GPU)", int),
        default=lambda answers: answers["num_machines"] * (2 if answers["use_cpu"] else max(len(gpus()), 1)),
    ),
    Question(
        *("auto", "Let the planner choose the layout when training starts (y/n)", bool, lambda _: False),
        applies=lambda answers: answers["num_processes"] > 1,
    ),
    Question("pp_size", "Pipeline stages (pp_size)", int, lambda _: 1, _given),
    Question("tp_size", "Ranks that share each layer (tp_size)", int, lambda _: 1, _given),
    Question(
        *("schedule", "Schedule (1f1b, gpipe, interleaved, zb, zbv, dualpipev)", str, lambda _: "1f1b"),
        applies=lambda answers: answers["pp_size"] > 1,
    ),
    Question(
        *("num_microbatches", "Microbatches per forward (an integer or auto)", str, lambda _: "auto"),
        applies=lambda answers: answers["pp_size"] > 1,
    ),
    Question(
        *("zero_stage", "ZeRO stage over the replicas (0 to 3; 3 shares parameters too)", int, lambda _: 0),
        applies=lambda answers: not answers["auto"] and _copies(answers) > 1,
    ),
    Question(
        *("offload", "Offload what ZeRO shares to host memory (none, cpu)", str, lambda _: "none"),
        applies=lambda answers: answers["zero_stage"] > 0,
    ),
    Question(
        *("checkpoint_every", "Recompute activations: one checkpoint for how many blocks (0: none)", int, lambda _: 0),
        applies=lambda answers: not answers["auto"],
    ),
    Question("mixed_precision", "Mixed precision (no, bf16, fp16)", str, lambda _: "no"),
)
UNASKED: Final[Answers] = {
    **{"use_cpu": False, "num_machines": 1, "main_process_ip": None, "num_processes": 1, "auto": False},
    **{"pp_size": 1, "tp_size": 1, "schedule": "1f1b", "num_microbatches": "auto", "zero_stage": 0, "offload": "none"},
    **{"checkpoint_every": 0, "mixed_precision": "no"},
}


def config(  # noqa: PLR0913 - each is an option
    output: Annotated[
        Path | None, typer.Option(help="File to write; accelerate's default config file if not given.")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="Processes on all machines.")] = None,
    num_machines: Annotated[int | None, typer.Option(help="Machines.")] = None,
    main_process_ip: Annotated[str | None, typer.Option(help="Name or address of machine 0.")] = None,
    auto: Annotated[bool | None, typer.Option("--auto/--given", help="Let the planner choose the layout.")] = None,
    tp_size: Annotated[int | None, typer.Option(help="Ranks that share each layer.")] = None,
    pp_size: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the pipeline, such as 1f1b or zbv.")] = None,
    num_microbatches: Annotated[str | None, typer.Option(help="Microbatches per forward: an integer or auto.")] = None,
    zero_stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    offload: Annotated[str | None, typer.Option(help="Where to what ZeRO shares is offloaded: none or cpu.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Blocks of an activation checkpoint, 0: none.")] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    use_cpu: Annotated[bool | None, typer.Option("--use-cpu/--use-gpu", help="Train on the CPU.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: defaults for what is not given, overwrite.")
    ] = False,
) -> None:
    """Write an accelerate config file; asks for what is not given as an option. An answer of b goes back."""
    given = {key: value for key, value in locals().items() if key in UNASKED and value is not None}
    from accelerate.commands.config.config_args import default_yaml_config_file

    path = output or Path(default_yaml_config_file)
    if path.exists() and not yes:
        typer.confirm(f"{path} exists. Overwrite it?", abort=True)
    try:
        answers = _answers(given, ask=not yes)
        write_recipe(path, HFParallelConfig.from_mapping(_section(answers), source="answers"), _accelerate(answers))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {path}: {facts(str(path))['layout']}")
    typer.echo(f"start with: accelerate launch --config_file {path} SCRIPT.py")


def _answers(given: Answers, *, ask: bool) -> dict[str, Any]:
    """Go through the questions; an answer that cannot work with those before is asked for again.

    Raises:
        ConfigError: An option cannot work, or has no effect.
    """
    answers: dict[str, Any] = {}
    asked: list[int] = []
    index = 0
    while index < len(QUESTIONS):
        question, index = QUESTIONS[index], index + 1
        known = {**UNASKED, **answers}
        if not question.applies(known):
            if given.get(question.key, UNASKED[question.key]) != UNASKED[question.key]:
                raise ConfigError(f"{_option(question.key)} has no effect with the answers before it. Remove it.")
            continue
        if question.key in given or not ask:
            value = given.get(question.key, question.default(known))
            answers[question.key] = question.read(value) if isinstance(value, str) else value
            _check({**UNASKED, **answers})
            continue
        value = _ask(question, known)
        if value is None:
            index = asked.pop() if asked else index - 1
            for later in QUESTIONS[index:]:
                answers.pop(later.key, None)
        else:
            answers[question.key] = value
            asked.append(index - 1)
    return {**UNASKED, **answers}


def _ask(question: Question, known: Answers) -> Any:
    """An answer that can work; None to go back."""
    default = question.default(known)
    shown = {True: "y", False: "n"}[default] if isinstance(default, bool) else str(default)
    while True:
        text = str(typer.prompt(question.text, default=shown))
        if text.strip().lower() in BACK:
            return None
        try:
            value = question.read(text)
            _check({**known, question.key: value})
        except ConfigError as error:
            typer.echo(str(error).removeprefix("answers:\n"), err=True)
        else:
            return value


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _check(answers: Answers) -> None:
    """Refuse answers that cannot work together.

    Raises:
        ConfigError: Every problem.
    """
    problems = list(_problems(answers))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _problems(answers: Answers) -> Iterator[str]:
    for key in ("num_machines", "num_processes"):
        if answers[key] < 1:
            yield f"{key}={answers[key]}: expected an integer of 1 or more. Write 1 or more."
            return
    if answers["mixed_precision"] not in ("no", "bf16", "fp16"):
        yield f"mixed_precision={answers['mixed_precision']!r}: expected no, bf16 or fp16. Write bf16."
        return
    accelerate = _accelerate(answers)
    yield from _lines(HFParallelConfig.from_mapping, _section(answers), "answers")
    if answers["tp_size"] > 0:
        yield from group_problems(accelerate, answers["tp_size"])
    started = answers["num_processes"] > 1 or answers["tp_size"] * answers["pp_size"] > 1
    yield from file_problems(accelerate) if started else ()
    try:
        ours = HFParallelConfig.from_mapping(_section(answers))
    except ConfigError:
        return
    yield from _lines(check_accelerate, ours, accelerate)


def _lines(check: Callable[..., object], *arguments: object) -> Sequence[str]:
    try:
        check(*arguments)
    except ConfigError as error:
        return [line for line in str(error).splitlines() if line != "answers:"]
    return []


def _section(answers: Answers) -> dict[str, Any]:
    """The settings of hf_parallel, of the answers."""
    if answers["auto"]:
        return {"layout": "auto"}
    found: dict[str, Any] = {"tp_size": answers["tp_size"], "pp_size": answers["pp_size"]}
    if answers["pp_size"] > 1:
        found["pipeline"] = {"schedule": answers["schedule"], "num_microbatches": answers["num_microbatches"]}
    if answers["zero_stage"]:
        found["zero"] = {"stage": answers["zero_stage"]}
        if answers["offload"] != "none":
            offloaded = ("optimizer", "param") if answers["zero_stage"] == 3 else ("optimizer",)
            found["zero"] |= {f"offload_{what}": answers["offload"] for what in offloaded}
    if answers["checkpoint_every"]:
        found["activation_checkpointing"] = {"every": answers["checkpoint_every"]}
    return found


def _accelerate(answers: Answers) -> dict[str, Any]:
    """The keys of accelerate that stand around our section."""
    found = accelerate_settings(
        *(answers["num_processes"], answers["mixed_precision"], answers["use_cpu"]), nodes=answers["num_machines"]
    )
    return found | ({"main_process_ip": answers["main_process_ip"]} if answers["main_process_ip"] else {})
