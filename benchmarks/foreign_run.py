"""Run a script that knows nothing of hf_parallel, with one line added: `foreign_run.py RECORD KIND SCRIPT ARGUMENTS...`.

KIND is `trainer` (HFParallelCallback joins the callbacks that every Trainer starts with), `loop` (`Accelerator(` in the
script gets the plugin), or either with `-stock`, which adds nothing. The script's file is not changed. What was logged goes
to RECORD on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


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
    sys.path.insert(0, str(script.parent))
    text, space = script.read_text(), {"__name__": "__main__", "__file__": str(script)}
    if not stock:
        import hf_parallel

        space["HFParallelPlugin"] = hf_parallel.HFParallelPlugin
        if "Accelerator(" not in text:
            raise ValueError(f"{script} makes no Accelerator")
        text = text.replace("Accelerator(", PLUGIN)
    try:
        exec(compile(text, str(script), "exec"), space)
    finally:  # a refusal after the first update is no refusal
        if space.get("history"):
            write(record, space["history"])


def main() -> None:
    record, kind, script = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    sys.argv = sys.argv[3:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if kind.endswith("-stock"):  # the launcher read a recipe of ours; stock is not to know
        for name in [name for name in os.environ if "PARALLELISM_CONFIG" in name]:
            del os.environ[name]
    run = run_loop if kind.startswith("loop") else run_trainer
    run(script, record, kind.endswith("-stock"))


if __name__ == "__main__":
    main()
