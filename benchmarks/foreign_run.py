"""Run scripts that know nothing of hf_parallel, with one line added: `foreign_run.py JOBS.json` on each rank.

A job's kind is `trainer` (HFParallelCallback joins the callbacks that every Trainer starts with), `loop` (`Accelerator(` in the
script gets the plugin), or either with `-stock`, which adds nothing. The script's file is not changed. What was logged goes
to `record.json` in the job's folder on rank 0. Packages are imported once; each script is a process of its own, forked before
anything ran in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


STRAGGLING_S = 30.0  # after which torch's launcher kills what it told to end
PLUGIN = "Accelerator(parallelism_config=HFParallelPlugin(), "


def write(record: Path, history: list[dict[str, Any]]) -> None:
    if os.environ.get("RANK", "0") == "0":
        record.write_text(json.dumps(history, default=float))


def run_trainer(script: Path, record: Path, stock: bool) -> None:
    """`python SCRIPT` with a callback more in every Trainer."""
    import runpy

    if not stock:
        import hf_parallel
    import torch
    import transformers.trainer as stock_trainer

    class Recorder(stock_trainer.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write(record, [{"updates": state.global_step}])

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write(record, state.log_history)

    added = [] if stock else [hf_parallel.HFParallelCallback()]
    stock_trainer.DEFAULT_CALLBACKS = [*stock_trainer.DEFAULT_CALLBACKS, *added, Recorder]
    torch.manual_seed(0)
    runpy.run_path(str(script), run_name="__main__")


def run_loop(script: Path, record: Path, stock: bool) -> None:
    """`python SCRIPT` with the plugin in its Accelerator."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    sys.path.insert(0, str(script.parent))
    text, space = script.read_text(), {"__name__": "__main__", "__file__": str(script)}
    if not stock:
        import hf_parallel

        space["HFParallelPlugin"] = hf_parallel.HFParallelPlugin
        if "Accelerator(" not in text:
            raise ValueError(f"{script} makes no Accelerator")
        text = text.replace("Accelerator(", PLUGIN)
    updates: list[bool] = []
    register_optimizer_step_post_hook(lambda *args: updates.append(True))
    try:
        exec(compile(text, str(script), "exec"), space)
    finally:  # a refusal after the first update is no refusal
        if updates and space.get("history"):
            write(record, space["history"])


def start(job: dict[str, Any]) -> None:
    """Become the process of one script: from here on this is `python SCRIPT ARGUMENTS...`."""
    place = Path(job["place"])
    output = os.open(place / f"log-{os.environ.get('RANK', '0')}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(place)
    os.environ |= job["environment"]
    if "RANK" in os.environ:
        os.environ |= {"MASTER_PORT": str(job["port"]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    sys.argv = list(job["arguments"])
    stock = job["kind"].endswith("-stock")
    if stock:  # the launcher read a recipe of ours; stock is not to know
        for name in [name for name in os.environ if "PARALLELISM_CONFIG" in name]:
            del os.environ[name]
    run = run_loop if job["kind"].startswith("loop") else run_trainer
    run(Path(sys.argv[0]), place / "record.json", stock)


def wait_for(process: int, job: dict[str, Any], world_size: int) -> None:
    """Note how the process of this rank ends; as torch's launcher, end it when that of another rank has failed."""
    place, begun = Path(job["place"]), time.monotonic()
    told = killed = False
    while True:
        finished, status = os.waitpid(process, os.WNOHANG)
        seconds = time.monotonic() - begun
        if finished:
            break
        ends = [json.loads(path.read_text()) for path in place.glob("ended-*.json")]
        if not told and any(end["code"] != 0 for end in ends):
            os.kill(process, signal.SIGTERM)
            told = True
        if seconds > job["timeout_s"] + (STRAGGLING_S if told else 0) and not killed:
            os.kill(process, signal.SIGKILL)
            killed = True
        time.sleep(0.05)
    code = None if killed and not told else os.waitstatus_to_exitcode(status)
    part = place / f"part-{os.environ.get('RANK', '0')}"
    part.write_text(json.dumps({"code": code, "seconds": round(seconds, 1)}))
    part.rename(place / f"ended-{os.environ.get('RANK', '0')}.json")
    while len(list(place.glob("ended-*.json"))) < world_size:
        time.sleep(0.05)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if any(job["kind"].startswith("trainer") for job in jobs) and importlib.util.find_spec("trl") is not None:
        from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer  # noqa: F401  imported once for all scripts
    else:
        import transformers.trainer  # noqa: F401
    for job in jobs:
        process = os.fork()
        if process == 0:
            start(job)
            return
        wait_for(process, job, int(os.environ.get("WORLD_SIZE", "1")))


if __name__ == "__main__":
    main()
