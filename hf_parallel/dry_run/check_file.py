"""Every problem of a config file at once, with its line: our section, the accelerate file around it, the machine, memory."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from hf_parallel.deepspeed.keys import zero_keys
from hf_parallel.deepspeed.rules import inline_problems, inline_warnings, json_problems, json_warnings
from hf_parallel.dry_run.accelerate_file import file_problems, file_warnings, group_problems
from hf_parallel.errors import MAX_LINES, ConfigError, ParallelError, bounded
from hf_parallel.machine.facts import Machine
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.file import MAX_JSON_BYTES, key_lines, parse_json, parse_yaml, read_bounded
from hf_parallel.settings.precision import fp16_on_cpu
from hf_parallel.settings.recipes import KEY, SECTION, check_accelerate, meant_sections, odd_sections, section_of
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.values import spelled


Severity = Literal["error", "warning"]
AMPERE: Final = (8, 0)
OURS: Final = "our section"  # no key's name, so that it is told from the keys in messages


@dataclass(frozen=True)
class Finding:
    """A problem of a file.

    Args:
        severity: Whether the run cannot work, or may not.
        message: Key path and value, rule, fix.
        file: File that it is about; None without one.
        line: From 1; the first if the key is not written there, None of a file that cannot be read.
    """

    severity: Severity
    message: str
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return f"{place}{self.message}" if self.severity == "error" else f"{place}warning: {self.message}"


@dataclass(frozen=True)
class Checked:
    """A file and what is wrong with it.

    Args:
        path: The file.
        config: Our settings; None if they are not valid.
        accelerate: The whole file.
        deepspeed: The content of the DeepSpeed file that it names, if any.
        findings: Errors first.
    """

    path: Path
    config: HFParallelConfig | None
    accelerate: Mapping[str, Any]
    deepspeed: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> list[Finding]:
        """Findings that keep a run from starting."""
        return [finding for finding in self.findings if finding.severity == "error"]


@dataclass
class _Place:
    """A file whose problems are named by their lines."""

    path: Path
    text: str
    ours: str = f"{SECTION}.{KEY}."  # where our section stands
    lines: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = key_lines(self.text)

    def findings(self, severity: Severity, messages: Iterable[str], prefix: str = "") -> Iterator[Finding]:
        for message in islice(messages, MAX_LINES):
            yield Finding(severity, bounded(message), self.path, self._line(prefix, message))

    def _line(self, prefix: str, message: str) -> int:
        """The line of the longest part of the key path that is written in the file, here or in our section; else the first."""
        found = re.match(r"\w[\w.-]*", message)
        for start in dict.fromkeys((prefix, self.ours)):
            parts = (start + found[0] if found else start).rstrip(".").split(".")
            own = start.count(".")  # a problem of the file around our section is not a problem of the whole section
            for length in range(len(parts), own if start != prefix else 0, -1):
                line = self.lines.get(".".join(parts[:length]))
                if line is not None:
                    return line
        return 1


def check_file(path: Path, machine: Machine) -> Checked:
    """Check a config file against all rules.

    Args:
        path: An accelerate config file.
        machine: Machine that rules about hardware look at.
    """
    text = ""
    try:
        text = read_bounded(path)
        section, accelerate = section_of(text, path)
    except ConfigError as error:
        return Checked(path, None, {}, findings=tuple(_unreadable(path, text, str(error))))
    place = _Place(path, text)
    config, found = _check_section(place, section)
    found += _not_indented(place, section, accelerate)
    found += place.findings("error", file_problems(accelerate))
    ours = accelerate if section is not None else {k: v for k, v in accelerate.items() if k != SECTION}
    found += place.findings("error", _lines_of(_fit, config or _sizes_only(section), ours))
    found += place.findings("error", group_problems(accelerate, (config or _sizes_only(section)).tp_size))
    found += place.findings("warning", file_warnings(accelerate))
    engine = config is not None and config.zero.engine == "deepspeed"
    found += place.findings("error", machine_problems(accelerate, machine, deepspeed=engine))
    found += place.findings("warning", machine_warnings(accelerate, machine, deepspeed=engine))
    found += place.findings("warning", _not_installed(engine or accelerate.get("distributed_type") == "DEEPSPEED"))
    deepspeed, foreign = _check_deepspeed(place, accelerate, machine)
    found += foreign
    findings = sorted(dict.fromkeys(found), key=lambda finding: (finding.severity, finding.line or 0))
    return Checked(path, config, accelerate, deepspeed, tuple(findings))


def _unreadable(path: Path, text: str, error: str) -> list[Finding]:
    """The problems of a file whose sections cannot be told apart, and those of other keys around ours."""
    place = _Place(path, text)
    found = list(_named(place, error))
    try:
        accelerate = parse_yaml(text, path)
    except ConfigError:
        return found
    if isinstance(accelerate, dict) and not odd_sections(path, accelerate):
        told = set(re.findall(r"\w+", error))
        others = (message for message in file_problems(accelerate) if not told & set(re.findall(r"^\w+", message)))
        found += place.findings("error", others)
        meant = meant_sections(accelerate)
        if len(meant) == 1:
            [(where, section)] = meant.items()
            found += _elsewhere(_Place(path, text, f"{where}."), section, accelerate)
    return sorted(dict.fromkeys(found), key=lambda finding: finding.line or 0)


def _elsewhere(place: _Place, section: Mapping[str, Any], accelerate: Mapping[str, Any]) -> list[Finding]:
    """The problems of the content of our section, which stands where `place` has it."""
    config, found = _check_section(place, section)
    around = {key: value for key, value in accelerate.items() if key != SECTION}
    found += place.findings("error", _lines_of(_fit, config or _sizes_only(section), around))
    return [finding for finding in found if finding.severity == "error"]


def _not_indented(
    place: _Place, section: Mapping[str, Any] | None, accelerate: Mapping[str, Any]
) -> Iterator[Finding]:
    """A section of ours in which nothing is written, and the problems of keys beside it that are meant to be inside."""
    if section is None or accelerate[SECTION][KEY] is not None:
        return
    beside = {key: value for key, value in accelerate[SECTION].items() if key != KEY and not key.startswith(SECTION)}
    text = (
        f"{SECTION}.{KEY}: nothing is written in it, so hf_parallel only copies the model. Write settings below it with more spaces in front, for "
        "example pp_size: 2, or layout: auto."
    )
    yield from place.findings("warning", [text])
    if beside:
        found = _check_section(_Place(place.path, place.text, f"{SECTION}."), beside)[1]
        yield from (one for one in found if one.severity == "error" and not re.match(r"\w+: unknown key", one.message))


def _named(place: _Place, error: str) -> Iterator[Finding]:
    """The parts of an error about a whole file, each at the line that it names."""
    path, text = place.path, place.text
    for message in re.split(rf"(?:^|\n){re.escape(str(path))}:(?=\d+: | )", error):
        number, rest = re.match(r"(?:(\d+):)? ?(.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
        if number:
            yield Finding("error", rest, path, int(number))
        elif rest:
            yield from place.findings("error", [rest]) if text else [Finding("error", rest, path)]


def _check_section(place: _Place, section: Mapping[str, Any] | None) -> tuple[HFParallelConfig | None, list[Finding]]:
    """The settings of hf_parallel, or their problems."""
    if section is None:
        text = (
            f"{SECTION}.{KEY}: there is no such section, so hf_parallel would only copy the model. Add one, for example "
            f"{KEY}: {{pp_size: 2}}."
        )
        return HFParallelConfig(), list(place.findings("warning", [text]))
    prefix = place.ours
    try:
        config = HFParallelConfig.from_mapping(section, source=OURS)
    except ConfigError as error:
        messages = [line.removeprefix(f"{OURS}: ") for line in str(error).splitlines() if line != f"{OURS}:"]
        return None, list(place.findings("error", messages, prefix))
    problems = _lines_of(ScheduleChoice, config.pipeline, config.pp_size) if config.pp_size > 1 else []
    found = [*place.findings("error", problems, prefix), *place.findings("warning", _poor(config), prefix)]
    return config, found


def _poor(config: HFParallelConfig) -> Iterator[str]:
    """Settings of ours that work, and badly."""
    stages, settings = config.pp_size, config.pipeline
    if stages > 1 and settings.num_microbatches == 1 and settings.schedule not in ("naive", *ASYNCHRONOUS):
        yield (
            f"pipeline.num_microbatches=1 with pp_size={stages}: one stage works at a time, so {(stages - 1) / stages:.0%} of the "
            f"step is idle. Set pipeline.num_microbatches to {2 * stages} or 'auto'."
        )


def _lines_of(check: Any, *arguments: object) -> list[str]:
    """The problems that a check raises, one each."""
    try:
        check(*arguments)
    except ParallelError as error:
        return str(error).splitlines()
    return []


def _fit(config: HFParallelConfig, accelerate: Mapping[str, Any]) -> None:
    """`check_accelerate` for a number of processes that is one."""
    processes = accelerate.get("num_processes")
    whole = isinstance(processes, int) and not isinstance(processes, bool)
    check_accelerate(config, accelerate if whole else {**accelerate, "num_processes": -1})


SIZES = ("tp_size", "pp_size", "sp_size")


def _sizes_only(section: Mapping[str, Any] | None) -> HFParallelConfig:
    """The sizes of invalid settings, so that the rest of the file can be checked against them."""
    try:
        return HFParallelConfig.from_mapping({k: v for k, v in (section or {}).items() if k in SIZES})
    except ConfigError:
        return HFParallelConfig()


def machine_problems(accelerate: Mapping[str, Any], machine: Machine, *, deepspeed: bool) -> Iterator[str]:
    """Settings that this machine cannot do.

    Args:
        accelerate: The whole file.
        machine: This machine.
        deepspeed: Whether our section asks for DeepSpeed.
    """
    if deepspeed or (accelerate.get("distributed_type") == "DEEPSPEED" and accelerate.get("use_cpu") is not True):
        key = "zero.engine=deepspeed" if deepspeed else "distributed_type='DEEPSPEED'"
        for lock in machine.locks:
            yield (
                f"{key}: {lock} is the lock of a build that has no library: every process would wait for it, silently. Remove "
                "it if no build is running."
            )
    if accelerate.get("use_cpu") is True:
        return
    asked = "mixed_precision='fp16' on a machine without a GPU"
    yield from fp16_on_cpu(accelerate.get("mixed_precision"), on_cpu=not machine.gpus, asked=asked)
    old = [gpu for gpu in machine.gpus if gpu.capability < AMPERE]
    if old and str(accelerate.get("mixed_precision")).lower() == "bf16":
        major, minor = old[0].capability
        yield (
            f"mixed_precision='bf16': {old[0].name} has compute capability {major}.{minor}, and bf16 needs 8.0 (Ampere). Set "
            "mixed_precision to fp16."
        )


def _not_installed(deepspeed: bool) -> Iterator[str]:
    """A package that the run needs; a file may be checked on another machine."""
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        yield "zero.engine=deepspeed: DeepSpeed is not installed here. Run pip install 'hf_parallel[deepspeed]' where it runs."


def machine_warnings(accelerate: Mapping[str, Any], machine: Machine, *, deepspeed: bool) -> Iterator[str]:
    """Settings that this machine does badly; arguments as for `machine_problems`."""
    if machine.gpus and all(gpu.capability >= AMPERE for gpu in machine.gpus):
        if str(accelerate.get("mixed_precision")).lower() == "fp16":
            yield (
                f"mixed_precision='fp16': {machine.gpus[0].name} has bf16, which needs no loss scaling. Set mixed_precision to "
                "bf16."
            )
    elif not machine.gpus and accelerate.get("distributed_type") == "DEEPSPEED" and not deepspeed:
        yield (
            "distributed_type='DEEPSPEED' on a machine without a GPU: processes only find each other with "
            "TrainingArguments(ddp_backend='gloo') and without use_cpu. Set both there."
        )


def _check_deepspeed(
    place: _Place, accelerate: Mapping[str, Any], machine: Machine
) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    """The DeepSpeed file that is named, and the problems of it and of the section."""
    block = accelerate.get("deepspeed_config") or {}
    if not isinstance(block, Mapping) or not block:
        return None, []
    keys = zero_keys()
    found = list(place.findings("error", inline_problems(block, accelerate.get("mixed_precision"), keys)))
    found += place.findings("warning", inline_warnings(block))
    named = block.get("deepspeed_config_file")
    if named is None:
        return None, found
    file = Path(os.path.expanduser(str(named)))
    try:
        text = read_bounded(file, MAX_JSON_BYTES, "a DeepSpeed JSON file")
        config = parse_json(text, file)
    except ConfigError as error:
        problem = (
            f"deepspeed_config.deepspeed_config_file={spelled(str(named))}: {error} Name a JSON file that can be read."
        )
        return None, [*found, *place.findings("error", [problem])]
    if not isinstance(config, dict):
        return None, [*found, Finding("error", 'expected a mapping. Write {"zero_optimization": {"stage": 2}}.', file)]
    inner, processes = _Place(file, text), accelerate.get("num_processes")
    is_number = isinstance(processes, int) and not isinstance(processes, bool)
    world = processes if is_number and processes is not None and processes > 0 else None
    found += inner.findings("error", json_problems(config, keys, world))
    found += inner.findings("warning", json_warnings(config, keys, machine.gpu_bytes))
    half = config.get("fp16")
    problems = fp16_on_cpu(
        "fp16" if isinstance(half, Mapping) and half.get("enabled") is True else None,
        on_cpu=accelerate.get("use_cpu") is True or not machine.gpus,
        asked="fp16.enabled=true without a GPU",
        fix="Set fp16.enabled to false and bf16.enabled to true.",
    )
    return config, [*found, *inner.findings("error", problems)]
