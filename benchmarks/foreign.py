"""Scripts of others on a mesh: `python benchmarks/foreign.py`, with `--only dp2 tp2` and `--script sft basic` for a part.

TRL's SFT, DPO, KTO and Reward scripts as the wheel ships them, and the loops of accelerate's documentation
(`foreign_loops`), run under `accelerate launch` with the callback or the plugin added at run time (`foreign_run`), on tiny
models and data on disk. What they log is compared with the same script without hf_parallel on the same global batch: on one
process, or on two stock replicas where the layout has replicas. A row is right, or refused before the first update;
anything else fails the run.

Writes build/reports/foreign.json, and from it the table of docs/foreign.md. A partial run renews its own rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from foreign_data import write_all  # noqa: E402
from tables import with_tables  # noqa: E402


PAGE = ROOT / "docs" / "foreign.md"
TOUR = ROOT / "benchmarks" / "foreign_trainer" / "quick_tour.py"
LORA = (
    "--use_peft",
    "--lora_r",
    "4",
    "--lora_alpha",
    "8",
    "--lora_dropout",
    "0",
    "--lora_target_modules",
    "q_proj",
    "v_proj",
)
LOOPS = ROOT / "benchmarks" / "foreign_loops"
TOLERANCE = 1e-5
ROWS = 4  # of a batch, over all replicas
# Times, and what stock itself counts by rank.
UNCOMPARED = re.compile(r"runtime|per_second|total_flos|epoch|^step$|updates")
REFUSAL = re.compile(r"^(?:\[rank\d+\]: )?hf_parallel\.(?:\w+\.)+(\w+): (.*)$", re.MULTILINE)
# name -> (recipe, model copies)
LAYOUTS = {
    "dp2": ("cpu_dp2.yaml", 2),
    "tp2": ("cpu_tp2.yaml", 1),
    "pp2": ("cpu_pp2.yaml", 1),
    "zero1": ("cpu_dp2_zero1.yaml", 2),
    "zero3": ("cpu_dp2_zero3.yaml", 2),
}


@dataclass(frozen=True)
class Script:
    """A script and how it is called.

    Args:
        name: For the table.
        path: Of the file.
        model: Folder in the data.
        data: Kind of rows; "" for a loop, which has its own.
        more: Arguments beside the usual ones.
    """

    name: str
    path: Path
    model: str = "llama"
    data: str = ""
    more: tuple[str, ...] = ()


@dataclass
class Row:
    """What one script did under one layout.

    Args:
        script: Its name.
        layout: Its layout.
        verdict: `right`, `refused`, `WRONG`, `crashed`, `hung` or `no reference`.
        code: Exit code.
        loss: Largest relative difference of a loss.
        other: Largest relative difference of anything else that was logged.
        text: The message, or where it differs.
        seconds: Of the run.
    """

    script: str
    layout: str
    verdict: str
    code: int | None = None
    loss: float | None = None
    other: float | None = None
    text: str = ""
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return self.verdict in ("right", "refused")


def scripts() -> list[Script]:
    """TRL's scripts where the wheel put them, then the loops."""
    found: list[Script] = []
    package = importlib.util.find_spec("trl")
    if package is not None and package.submodule_search_locations:
        place = Path(package.submodule_search_locations[0]) / "scripts"
        found = [
            Script("sft", place / "sft.py", data="text"),
            Script("sft-completion", place / "sft.py", "gpt2", "completion", ("--gradient_accumulation_steps", "2")),
            Script("sft-lora", place / "sft.py", data="text", more=LORA),
            Script("dpo", place / "dpo.py", data="preference"),
            Script("dpo-lora", place / "dpo.py", data="preference", more=LORA),
            Script("kto", place / "kto.py", data="unpaired"),
            Script("reward", place / "reward.py", "reward", "preference"),
        ]
    found.append(Script("quick-tour", TOUR, data="text"))
    return found + [Script(path.stem, path) for path in sorted(LOOPS.glob("*.py")) if path.stem != "parts"]


def arguments_of(script: Script, folder: Path, copies: int) -> list[str]:
    if not script.data:
        return []
    settings = {
        "model_name_or_path": folder / script.model,
        "dataset_name": folder / "data" / script.data,
        "output_dir": folder / "out",
        "per_device_train_batch_size": ROWS // copies,
        "per_device_eval_batch_size": ROWS // copies,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "attn_implementation": "eager",
        "disable_tqdm": True,
    }
    return [*(word for key, value in settings.items() for word in (f"--{key}", str(value))), *script.more]


def job_of(script: Script, folder: Path, layout: str, stock: bool, timeout_s: float) -> dict[str, Any]:
    """What `foreign_run` is told of one script."""
    copies = LAYOUTS[layout][1]
    place = folder / f"{script.name}-{layout}{'-stock' if stock else ''}"
    place.mkdir()
    named = {"MODEL": folder / script.model, "DATA": folder / "data" / (script.data or "text")}
    named |= {"COPIES": copies, "OUTPUT": place}
    return {
        "place": str(place),
        "kind": ("trainer" if script.data else "loop") + ("-stock" if stock else ""),
        "arguments": [str(script.path), *(str(word) for word in arguments_of(script, folder, copies))],
        "environment": {f"FOREIGN_{name}": str(value) for name, value in named.items()},
        "port": free_port(),
        "timeout_s": timeout_s,
    }


def free_port() -> int:
    """For a store of the job's own: that of the launcher has the keys of the job before.

    Below the ports that a system gives to connections (from 32768 on Linux): minutes pass before the job takes it.
    """
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def command_of(jobs: Path, layout: str, stock: bool) -> list[str]:
    recipe, copies = LAYOUTS[layout]
    launch = [sys.executable]
    if not stock or copies > 1:
        launch += ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / recipe)]
    return [*launch, str(ROOT / "benchmarks" / "foreign_run.py"), str(jobs)]


def execute(command: list[str], log: Path, environment: dict[str, str], timeout_s: float) -> None:
    """Run it; leaves no process behind."""
    with log.open("w") as output:
        process = psutil.Popen(command, cwd=log.parent, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            print(f"{log} was not done after {timeout_s:.0f} s", flush=True)
        finally:
            if process.is_running():
                for member in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()


@dataclass
class Ended:
    """A run: exit code, what was logged, its output, seconds."""

    code: int | None
    history: list[dict[str, Any]]
    log: str
    seconds: float


def environment_of(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "HF_PARALLEL_"))}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return {**kept, **threads, **offline, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}


def run(chosen: list[Script], folder: Path, layout: str, stock: bool, timeout_s: float) -> list[Ended]:
    """Every script once, in one launch of `accelerate`: a process is forked for each of them on each rank."""
    jobs = [job_of(script, folder, layout, stock, timeout_s) for script in chosen]
    name = f"{layout}{'-stock' if stock else ''}"
    (folder / f"{name}.json").write_text(json.dumps(jobs))
    command = command_of(folder / f"{name}.json", layout, stock)
    execute(command, folder / f"{name}.log", environment_of(folder), 120 + timeout_s * len(jobs))
    return [ended(Path(job["place"]), folder / f"{name}.log") for job in jobs]


def ended(place: Path, launch_log: Path) -> Ended:
    """What a job left in its folder."""
    ends = [json.loads(path.read_text()) for path in sorted(place.glob("ended-*.json"))]
    if not ends:
        return Ended(1, [], launch_log.read_text(errors="replace"), 0.0)
    codes = [end["code"] for end in ends]
    code = None if None in codes else max(codes) or min(codes)  # those that were told to end have negative ones
    record = place / "record.json"
    history = json.loads(record.read_text()) if record.exists() else []
    log = "\n".join(path.read_text(errors="replace") for path in sorted(place.glob("log-*.txt")))
    return Ended(code, history, log, max(end["seconds"] for end in ends))


# -- the verdict -----------------------------------------------------------------------------------------------------


def compare(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float, str]:
    """Largest relative difference of losses, of the rest, and where the largest is."""
    if len(mine) != len(other):
        return math.inf, 0.0, f"{len(mine)} entries were logged, not {len(other)}"
    worst: dict[bool, float] = {True: 0.0, False: 0.0}
    where = (0.0, "")
    for index, (here, there) in enumerate(zip(mine, other, strict=True)):
        for key, value in there.items():
            if UNCOMPARED.search(key) or not isinstance(value, (int, float)) or is_tie(key, there):
                continue
            found = abs(here[key] - value) / max(abs(value), 0.1) if key in here else math.inf
            found = math.inf if math.isnan(found) else found
            is_loss = key in ("loss", "eval_loss", "train_loss")
            worst[is_loss] = max(worst[is_loss], found)
            where = max(where, (found, f"{key} of entry {index}: {here.get(key)} instead of {value}"))
    return worst[True], worst[False], where[1]


def is_tie(key: str, entry: dict[str, Any]) -> bool:
    """Whether rounding decides which of two rewards is larger: a reference model that equals the model gives none."""
    what, margins = "rewards/accuracies", "rewards/margins"
    return key.endswith(what) and abs(entry.get(key.replace(what, margins), 1.0)) <= TOLERANCE / 10


def refusal(log: str) -> str:
    """The message of ours that ended the run, of the rank that has one of its own."""
    found = REFUSAL.findall(log)
    own = [f"{kind}: {text}" for kind, text in found if kind != "RankFailure"]
    return own[0] if own else ""


def last_error(log: str) -> str:
    lines = [
        line for line in log.splitlines() if re.match(r"^(\[rank\d+\]: )?[A-Za-z_.]*(Error|Exception|Failure)\b", line)
    ]
    first = [line for line in lines if "ChildFailed" not in line and "RankFailure" not in line]
    return (first or lines or [log[-300:]])[0]


def judge(script: Script, layout: str, mine: Ended, reference: Ended) -> Row:
    row = Row(script.name, layout, "", mine.code, seconds=round(mine.seconds, 1))
    if reference.code != 0:
        row.verdict, row.text = "no reference", last_error(reference.log)
    elif mine.code is None:
        row.verdict, row.text = "hung", refusal(mine.log) or last_error(mine.log)
    elif mine.code != 0:
        message = refusal(mine.log)
        early = not mine.history
        row.verdict = "refused" if message and early else "crashed"
        row.text = message or last_error(mine.log)
        if message and not early:
            row.text = f"refused late: {message}"
    else:
        row.loss, row.other, where = compare(mine.history, reference.history)
        row.verdict = "right" if max(row.loss, row.other) <= TOLERANCE else "WRONG"
        row.text = "" if row.verdict == "right" else where
    return row


# -- the page --------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    lines = ["| script | layout | exit code | loss | anything else logged | verdict |", "|---|---|---|---|---|---|"]
    for row in rows:
        figures = ("" if value is None else f"{value:.0e}" for value in (row.loss, row.other))
        text = row.text.replace("|", "/").replace("\n", " ")
        text = text if len(text) <= 220 else f"{text[:220].rsplit(' ', 1)[0]} ..."
        verdict = f"{row.verdict}: {text}" if text else row.verdict
        code = "none" if row.code is None else row.code
        lines.append(f"| `{row.script}` | {row.layout} | {code} | {' | '.join(figures)} | {verdict} |")
    return lines


def write_page(rows: list[Row], page: Path) -> None:
    trl = [row for row in rows if not (LOOPS / f"{row.script}.py").exists()]
    loops = [row for row in rows if row not in trl]
    page.write_text(with_tables(page.read_text(), {"trl-table": table(trl), "accelerate-table": table(loops)}))


def known(report: Path) -> dict[tuple[str, str], Row]:
    """The rows of the last report."""
    if not report.exists():
        return {}
    return {(row["script"], row["layout"]): Row(**row) for row in json.loads(report.read_text())["rows"]}


def ordered(rows: dict[tuple[str, str], Row], every: list[Script]) -> list[Row]:
    return [rows[script.name, layout] for script in every for layout in LAYOUTS if (script.name, layout) in rows]


def write_report(report: Path, rows: list[Row]) -> None:
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps({"tolerance": TOLERANCE, "rows": [asdict(row) for row in rows]}, indent=1))


def keep(row: Row, run: Ended) -> None:
    """The output of a run that is neither right nor refused."""
    kept = ROOT / "build" / "foreign"
    kept.mkdir(parents=True, exist_ok=True)
    (kept / f"{row.script}-{row.layout}.log").write_text(run.log)


def main() -> int:
    """Run, print, write the report and the page; returns the exit code."""
    every = scripts()
    parser = argparse.ArgumentParser(
        description="Run scripts of others on a mesh and compare with what they do alone."
    )
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="layouts")
    parser.add_argument("--script", nargs="+", choices=[script.name for script in every], help="scripts")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a run may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "foreign.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--no-page", action="store_true", help="leave the documentation as it is")
    options = parser.parse_args()
    if len([script for script in every if script.data]) == 1:
        print("trl is not installed: its scripts are left out. Install hf_parallel[trl].")
    chosen = [script for script in every if options.script is None or script.name in options.script]
    fresh: list[Row] = []
    rows = known(options.report)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        write_all(folder)
        references: dict[int, list[Ended]] = {}
        for layout in options.only:
            copies = LAYOUTS[layout][1]
            if copies not in references:
                references[copies] = run(chosen, folder, layout, True, options.timeout)
            found = run(chosen, folder, layout, False, options.timeout)
            for script, mine, reference in zip(chosen, found, references[copies], strict=True):
                row = judge(script, layout, mine, reference)
                rows[script.name, layout] = row
                fresh.append(row)
                print(f"{script.name:18}{layout:7}{row.verdict:9}{row.seconds:6.0f} s  {row.text[:300]}", flush=True)
                if not row.fine:
                    keep(row, mine if row.verdict != "no reference" else reference)
            write_report(options.report, ordered(rows, every))
    order = ordered(rows, every)
    if not options.no_page:
        write_page(order, options.page)
    wrong = [row for row in fresh if not row.fine]
    print(f"{len(fresh) - len(wrong)} of {len(fresh)} rows are right or refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
