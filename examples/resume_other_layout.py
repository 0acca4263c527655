"""Train under one recipe, go on under another from the same checkpoint, and compare with a run that was never interrupted.

    python examples/resume_other_layout.py --demo
    python examples/resume_other_layout.py --recipes pp2.yaml tp2.yaml one --steps 100 --output_dir runs/moved -- \
        examples/pretrain_streaming.py --config_name path/to/config.json ...

It starts `accelerate launch` by itself, once a recipe; `one` is one process without a launcher. What follows `--` is any script
with a Trainer and `HFParallelCallback` that takes TrainingArguments. A recipe with two replicas needs half of the
`--per_device_train_batch_size`: write it beside the recipe, as `dp2.yaml:4`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


EXAMPLES = Path(__file__).resolve().parent
ONE = "one"
DEMO_RECIPES = [str(EXAMPLES.parent / "recipes" / f"{name}.yaml") for name in ("cpu_pp2", "cpu_tp2")]
DEMO_SCRIPT = [str(EXAMPLES / "pretrain_streaming.py"), "--demo"]


def parse_arguments() -> argparse.Namespace:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = argparse.ArgumentParser(description="Move a run from layout to layout.")
    parser.add_argument("--recipes", nargs="+", help="one after another; `one` is one process")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps under each recipe")
    parser.add_argument("--output_dir", type=Path, default=Path("build/demo_resume"), help="of all runs")
    parser.add_argument("--demo", action="store_true", help="two stages, two shards and one process, on the CPU")
    parser.add_argument("script", nargs="*", help="after `--`: the script and its arguments")
    arguments = parser.parse_args()
    if arguments.demo:
        arguments.recipes = arguments.recipes or [*DEMO_RECIPES, ONE]
        arguments.script = arguments.script or DEMO_SCRIPT
    elif not (arguments.recipes and arguments.script):
        parser.error("give --recipes and, after --, a script with its arguments; or --demo")
    return arguments


def train(script: list[str], recipe: str, folder: Path, last: int, checkpoint: Path | None) -> Path:
    """Train until step `last` under `recipe`; returns the checkpoint."""
    recipe, _, rows = recipe.partition(":")
    launcher = [] if recipe == ONE else ["-m", "accelerate.commands.launch", "--config_file", recipe]
    options = ["--output_dir", str(folder), "--max_steps", str(last), "--lr_scheduler_type", "constant"]
    options += ["--logging_steps", "1", "--save_strategy", "steps", "--save_steps", str(last)]
    options += ["--per_device_train_batch_size", rows] if rows else []
    options += ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []
    print(f"steps to {last} under {recipe}", flush=True)
    subprocess.run([sys.executable, *launcher, *script, *options], check=True)
    return folder / f"checkpoint-{last}"


def losses(checkpoint: Path) -> list[float]:
    """The loss of every step until a checkpoint, also of the runs before it."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def main() -> None:
    """Train under one recipe after another, and once under the last one only."""
    arguments = parse_arguments()
    script, steps, names = arguments.script, arguments.steps, arguments.recipes
    moved: list[Path] = []
    for number, recipe in enumerate(names, start=1):
        checkpoint = moved[-1] if moved else None
        moved.append(train(script, recipe, arguments.output_dir / "moved", number * steps, checkpoint))
    whole = train(script, names[-1], arguments.output_dir / "whole", len(names) * steps, None)
    rows = list(zip(losses(moved[-1]), losses(whole), strict=True))
    print("\nstep  moved     uninterrupted  layout")
    for step, (one, other) in enumerate(rows):
        print(f"{step + 1:4}  {one:.6f}  {other:.6f}       {Path(names[step // steps]).stem}")
    worst = max(abs(one - other) / other for one, other in rows)
    print(f"largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
