"""What the planner chooses for the machines, model and batch of each GPU recipe, beside the recipe's layout.

Prints it; `--write` also writes it into the head of each recipe, with why the recipe is not that.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final


sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipes_page import checked_recipe, config_of, run_of

from hf_parallel.errors import ConfigError
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.predict import predict
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.planner.search import TIE, plan
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import recipes_folder


CLUSTERS: Final[dict[str, dict[str, Any]]] = {
    "budget_3090": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 256},
    "budget_3090_7b": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 192},
    "budget_3090_lora": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 64},
    "qlora_2x24gb": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 64},
    "qlora_2xt4": {"gpus_per_node": 2, "gpu": "t4", "ram_gb": 30},
    "llama2_7b_4xa100": {"gpus_per_node": 4, "gpu": "a100_80"},
    "llama_70b_64xh100": {"nodes": 8, "gpus_per_node": 8, "gpu": "h100"},
    "gpt3_175b_1024gpu": {"nodes": 128, "gpus_per_node": 8, "gpu": "a100_80"},
    "ddp": {"gpus_per_node": 8, "gpu": "a100_40"},
    "ethernet_pp_powersgd": {"nodes": 2, "gpus_per_node": 4, "gpu": "rtx3090", "intra": "pcie", "inter_gbit_s": 10},
}

# Of recipes that the planner does not choose: why they are as they are.
WHY: Final[dict[str, str]] = {
    "budget_3090_lora": "a whole copy on each GPU runs any script as it is, also on one GPU. For speed take that plan.",
    "qlora_2x24gb": "stages leave 11 GB of each GPU for longer rows; whole copies leave 1.6 GB, less than memory is predicted within.",
    "qlora_2xt4": "stages leave 9 GB of each GPU for longer rows. For speed at 1024 tokens take that plan.",
    "llama2_7b_4xa100": "blocks that are computed again leave room for rows four times as long. For speed at 2048 tokens take that plan.",
    "llama_70b_64xh100": "parts of the parameters leave 50 GB of each GPU for longer rows, and fit GPUs of 40 GB. For speed at 4096 "
    "tokens take that plan.",
    "ddp": "it shows whole copies, and a script that changes the optimizer runs as it is. Add zero: {stage: 1} for speed.",
}


@dataclass(frozen=True)
class Choice:
    """What the planner says of a recipe.

    Attributes:
        own: The recipe's layout.
        step_s: Predicted of it.
        fits: Whether it is predicted to fit.
        first: The planner's first layout; None if nothing fits that it searches.
        first_s: Predicted of that.
        words: Of the error, if nothing fits.
    """

    own: LayoutSpec
    step_s: float
    fits: bool
    first: LayoutSpec | None
    first_s: float = 0.0
    words: str = ""

    @property
    def is_chosen(self) -> bool:
        """Whether the recipe is the first plan, as fast as it, or the offload that would make the model fit."""
        if self.first is None:
            return self.own.offload_param != "none" and "offload_param=cpu" in self.words
        return self.fits and self.step_s <= self.first_s * (1 + TIE)


@cache
def choice(name: str) -> Choice:
    run, checked = run_of(name), checked_recipe(name)
    config = checked.config or HFParallelConfig()
    cluster = Cluster(**{"nodes": 1, **CLUSTERS[name]})
    model, length = config_of(run), run.work.length
    given: dict[str, Any] = {
        "param_dtype": "fp32" if run.precision == "autocast" else "auto",
        "adapters": run.adapters,
        "block_bits": run.bits,
    }
    layout = mapping_of(config, cluster.num_gpus, run.work.rows) | given
    own = layout_of(layout, cluster)
    found = predict(model, cluster, layout, seq_len=length)
    fits = found.total_bytes <= cluster.gpu_bytes
    try:
        first = plan(model, cluster, seq_len=length, global_batch=own.global_batch, layout=given, most=1)[0]
    except ConfigError as error:
        return Choice(own, found.step_s, fits, None, words=str(error))
    return Choice(own, found.step_s, fits, first.spec, first.estimate.step_s)


def described(spec: LayoutSpec) -> str:
    words = f"tp {spec.tp} x pp {spec.pp} x dp {spec.dp}, ZeRO {spec.zero}, {spec.micro_batch} rows a pass"
    again = {"none": "nothing computed again", "full": "blocks computed again"}.get(
        spec.recompute, "parts computed again"
    )
    return f"{words}, {spec.schedule}, {again}" if spec.pp > 1 else f"{words}, {again}"


def planned(name: str) -> list[str]:
    """The lines of the planner in a recipe's file."""
    found = choice(name)
    text = f"Predicted {found.step_s:.3g} s a step."
    if found.first is None:
        text += " Nothing fits but with parameters and optimizer in RAM, as here: `hf-parallel plan` says so."
    elif found.is_chosen:
        text += " It is what `hf-parallel plan` chooses for these machines, this model and batch, or as fast."
    else:
        text += f" The first of `hf-parallel plan` is {described(found.first)}: {found.first_s:.3g} s. This recipe is another: {WHY[name]}"
    return [f"#   {line}" for line in textwrap.wrap(text, 112, subsequent_indent="  ")]


def with_plan(name: str, text: str) -> str:
    """The text of a recipe with the lines of the planner written anew, after those about memory."""
    block = "# Planner, written by `make recipes-page`:\n" + "".join(f"{line}\n" for line in planned(name))
    text = re.sub(r"# Planner, written by `make recipes-page`:\n(?:#   .*\n)*", "", text)
    return re.sub(r"(# Memory, written by `make recipes-page`:\n(?:#   .*\n)*)", lambda found: found[1] + block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the heads of the recipes")
    writes = parser.parse_args().write
    for name in CLUSTERS:
        found = choice(name)
        kind = "is chosen" if found.is_chosen else "is not chosen"
        own = f"{described(found.own)}: {found.step_s:.3g} s, {'fits' if found.fits else 'does not fit'}"
        first = found.words
        if found.first is not None:
            first = f"{described(found.first)}: {found.first_s:.3g} s"
        sys.stdout.write(f"{name} {kind}\n  recipe: {own}\n  first plan: {first}\n")
        sys.stdout.flush()
        if writes:
            path = recipes_folder() / f"{name}.yaml"
            path.write_text(with_plan(name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
