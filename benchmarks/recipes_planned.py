"""Prints what the planner chooses for the machines, model and batch of each GPU recipe, beside the recipe's layout."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final


sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipes_page import RUNS, checked_recipe, config_of, run_of

from hf_parallel.errors import ConfigError
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec, layout_of
from hf_parallel.planner.predict import predict
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.planner.search import TIE, plan
from hf_parallel.settings.config import HFParallelConfig


CLUSTERS: Final[dict[str, dict[str, Any]]] = {
    "budget_3090": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 256},
    "budget_3090_7b": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 192},
    "budget_3090_lora": {"gpus_per_node": 2, "gpu": "rtx3090", "ram_gb": 64},
    "llama2_7b_4xa100": {"gpus_per_node": 4, "gpu": "a100_80"},
    "llama_70b_64xh100": {"nodes": 8, "gpus_per_node": 8, "gpu": "h100"},
    "gpt3_175b_1024gpu": {"nodes": 128, "gpus_per_node": 8, "gpu": "a100_80"},
    "ddp": {"gpus_per_node": 8, "gpu": "a100_40"},
    "ethernet_pp_powersgd": {"nodes": 2, "gpus_per_node": 4, "gpu": "rtx3090", "intra": "pcie", "inter_gbit_s": 10},
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
            return self.own.offload_param != "none" and "'offload_param': 'cpu'" in self.words
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


def said(spec: LayoutSpec) -> str:
    words = f"tp {spec.tp} x pp {spec.pp} x dp {spec.dp}, ZeRO {spec.zero}, {spec.micro_batch} rows a pass"
    return f"{words}, {spec.schedule}" if spec.pp > 1 else words


def main() -> None:
    for name in CLUSTERS:
        found = choice(name)
        kind = "is chosen" if found.is_chosen else "is not chosen"
        own = f"{said(found.own)}, recompute {found.own.recompute}: {found.step_s:.3g} s, {'fits' if found.fits else 'does not fit'}"
        first = found.words
        if found.first is not None:
            first = f"{said(found.first)}, recompute {found.first.recompute}: {found.first_s:.3g} s"
        sys.stdout.write(f"{name} {kind}\n  recipe: {own}\n  first plan: {first}\n")
        sys.stdout.flush()
    sys.stdout.write(f"not planned, quantised: {', '.join(sorted(RUNS.keys() - CLUSTERS.keys()))}\n")


if __name__ == "__main__":
    main()
