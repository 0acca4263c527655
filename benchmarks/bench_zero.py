"""What ZeRO holds and whether it trains the same: losses and bytes of every stage and engine in a stock Trainer.

    python benchmarks/bench_zero.py            # a minute
    python benchmarks/bench_zero.py --smoke    # three of the variants

CPU processes, gloo, fp32, AdamW, 2 accumulated batches a step. Losses are compared with two plain replicas. Bytes are
counted, not timed: of each rank's parameters, gradients and optimizer state, each storage once, between the two backward
passes of a step, where the stages differ; and of all live tensors, so that nothing is left out. They must be those of
`hf_parallel.memory`. What is offloaded would be in host memory beside a GPU; it is told apart by what owns it.

Writes build/reports/bench-zero.json; exits with 1 if a loss differs by more than `TOLERANCE`, or bytes by more than `SHARE`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import tiny  # noqa: E402
import torch  # noqa: E402
from rank_runner import run_ranks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import PrinterCallback  # noqa: E402

from hf_parallel import HFParallelCallback, HFParallelConfig  # noqa: E402
from hf_parallel.data_parallel.fsdp_parts import local_of  # noqa: E402
from hf_parallel.memory.estimate import host_states, parameters_of_ranks, states  # noqa: E402
from hf_parallel.memory.shape import shape_of_config  # noqa: E402
from hf_parallel.memory.terms import layout_of  # noqa: E402


TOLERANCE = 1e-5  # of a loss
SHARE = 0.05  # of the bytes that the formula says
STEPS, ROWS, ACCUMULATION = 4, 8, 2
OFFLOAD = {"offload_optimizer": "cpu", "offload_param": "cpu"}
KINDS = ("weights", "gradients", "optimizer state", "host")
Bytes = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A layout to measure; a new engine is one more line of `VARIANTS`.

    Args:
        name: For the table.
        world_size: Processes.
        zero: The `zero` section.
        tp_size: Ranks that share each layer.
    """

    name: str
    world_size: int
    zero: dict[str, Any]
    tp_size: int = 1

    @property
    def settings(self) -> HFParallelConfig:
        return HFParallelConfig(tp_size=self.tp_size, zero=self.zero)

    @property
    def drives_itself(self) -> bool:
        """Whether DeepSpeed owns the tensors, so that only their sum is known."""
        return self.settings.zero.engine == "deepspeed"


VARIANTS = (
    Variant("dp 2", 2, {}),
    Variant("native 1", 2, {"stage": 1}),
    Variant("native 2", 2, {"stage": 2}),
    Variant("native 1, offload", 2, {"stage": 1, "offload_optimizer": "cpu"}),
    Variant("fsdp2 2", 2, {"stage": 2, "engine": "fsdp2"}),
    Variant("fsdp2 3", 2, {"stage": 3}),
    Variant("fsdp2 3, offload", 2, {"stage": 3, **OFFLOAD}),
    Variant("fsdp2 3, copies 2 x 2", 4, {"stage": 3, "dp_shard_size": 2}),
    Variant("fsdp2 3, tp 2", 4, {"stage": 3}, tp_size=2),
    Variant("deepspeed 2", 2, {"engine": "deepspeed", "stage": 2}),
    Variant("deepspeed 3", 2, {"engine": "deepspeed", "stage": 3}),
)
SMOKE = ("dp 2", "native 2", "fsdp2 3, offload")


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab: int = 4000
    hidden: int = 256
    layers: int = 4

    def config(self) -> LlamaConfig:
        sizes = {"vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": 11 * self.hidden // 4}
        return LlamaConfig(**sizes, num_hidden_layers=self.layers, num_attention_heads=4, attn_implementation="eager")


# -- on a rank -------------------------------------------------------------------------------------------------------


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes, each storage once."""
    found = [t.untyped_storage() for t in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is no stand-in: a wrapper's tensors are counted by themselves."""
    try:
        return not isinstance(tensor, DTensor) and tensor.untyped_storage().data_ptr() >= 0
    except RuntimeError:
        return False


def live_bytes() -> int:
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # some objects of torch warn when they are looked at
        live = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and has_memory(item)]
    return sum(storages(live).values())


def held(trainer: Trainer, offloads_all: bool) -> Bytes:
    """Bytes of this rank by what owns them; what is offloaded is counted as host memory."""
    replicas = trainer.accelerator.hf_parallel_engine.gradients.replicas
    shards = replicas.zero.shards if replicas.zero is not None else []
    parameters = [local_of(p) for p in trainer.model.parameters()]
    found_gradients = [local_of(p.grad) for p in trainer.model.parameters() if p.grad is not None]
    gradients = [gradient for gradient in found_gradients if has_memory(gradient)]
    state = [
        local_of(v) for s in trainer.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim
    ]
    copies = [shard.master.data for shard in shards if shard.is_copy]
    landed = [shard.host_gradient for shard in shards if shard.host_gradient is not None]
    gradients += [
        shard.master.grad for shard in shards if shard.master.grad is not None and shard.host_gradient is None
    ]
    if offloads_all:
        groups = {"host": [*parameters, *gradients, *state]}
    elif landed:
        groups = {"weights": parameters, "gradients": gradients, "host": [*copies, *landed, *state]}
    else:
        groups = {"weights": parameters, "gradients": gradients, "optimizer state": [*copies, *state]}
    found = {kind: sum(storages(groups.get(kind, [])).values()) for kind in KINDS}
    return found | {"all of these": sum(storages(t for group in groups.values() for t in group).values())}


class Scales(TrainerCallback):
    """Weighs a rank between the backward passes of the second step, when the optimizer has its state."""

    def __init__(self, before: int, variant: Variant) -> None:
        self.before, self.variant = before, variant
        self.trainer: Any = None
        self.found: Bytes = {}

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            offloads_all = self.variant.settings.zero.offload_param == "cpu"
            # First: the collector sees a gradient only when Python has looked at it.
            own = {} if self.variant.drives_itself else held(self.trainer, offloads_all)
            live = live_bytes() - self.before
            self.found = {"all of these": live} | own | {"live": live}


def rank_main(rank: int, world_size: int, variant: Variant, sizes: Sizes, folder: str) -> tuple[list[float], Bytes]:
    replicas = world_size // variant.tp_size
    data, before = tiny.rows(STEPS * ROWS * ACCUMULATION), live_bytes()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS // replicas,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        adam_epsilon=1e-5,  # rounding noise of gradients that are zero stays small
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    scales, parallel = Scales(before, variant), HFParallelCallback(variant.settings)
    trainer = scales.trainer = Trainer(
        model=LlamaForCausalLM(sizes.config()),
        args=arguments,
        train_dataset=data,
        data_collator=tiny.collate,
        callbacks=[parallel, scales],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if not variant.drives_itself:
        trainer.accelerator.hf_parallel.watchdog.stop()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], scales.found


# -- the verdict -----------------------------------------------------------------------------------------------------


def formula(variant: Variant, sizes: Sizes) -> Bytes:
    """Bytes of a rank as `hf_parallel.memory` counts them."""
    layout = layout_of(variant.settings, variant.world_size, variant.world_size, "fp32")
    [parameters] = parameters_of_ranks(shape_of_config(sizes.config()), layout)
    host = sum(host_states(parameters, layout).values()) / variant.world_size
    found = states(parameters, layout) | {"host": host}
    return found | {"all of these": sum(found.values())}


def off(measured: float, expected: float) -> float:
    """Relative difference."""
    return abs(measured - expected) / expected if expected else float(measured > 0)


def measure(variant: Variant, sizes: Sizes) -> dict[str, Any]:
    """Losses and bytes, those of the rank that is furthest from the formula."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"ACCELERATE_USE_CPU": "true"}
        if variant.drives_itself:  # no compiler is found, so no op is compiled for minutes
            env |= {"PATH": folder, "TORCH_EXTENSIONS_DIR": folder}
        ranks = run_ranks(
            rank_main, variant.world_size, variant, sizes, folder, tmp_path=Path(folder), timeout=300, env=env
        )
    expected = formula(variant, sizes)
    error, found = max(
        ((max(off(b[kind], expected[kind]) for kind in (*KINDS, "all of these") if kind in b), b) for _, b in ranks),
        key=lambda pair: pair[0],
    )
    hidden = max(off(b["live"], b["all of these"]) for _, b in ranks)
    return {
        "name": variant.name,
        "losses": ranks[0][0],
        "measured": {kind: size for kind, size in found.items() if kind != "live"},
        "formula": expected,
        "error": error,
        "hidden": hidden,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="MB of a rank between two backward passes, measured / by formula")
    columns = (*KINDS, "all of these")
    for heading in ("variant", *columns, "largest error", "other tensors", "loss difference", "verdict"):
        shown.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in rows:
        measured = {kind: f"{size / 1e6:.2f}" for kind, size in row["measured"].items()}
        cells = [f"{measured.get(kind, '-')} / {row['formula'][kind] / 1e6:.2f}" for kind in columns]
        figures = [f"{row['error']:.1%}", f"{row['hidden']:.1%}", f"{row['difference']:.1e}"]
        shown.add_row(row["name"], *cells, *figures, "PASS" if row["passed"] else "FAIL")
    return shown


def main() -> int:
    """Measure, print the table, write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description="Losses and bytes of every ZeRO stage and engine.")
    parser.add_argument("--smoke", action="store_true", help=f"only {', '.join(SMOKE)}")
    parser.add_argument("--variants", nargs="*", help="only these; the first is what losses are compared with")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "reports" / "bench-zero.json")
    arguments = parser.parse_args()
    sizes, rows = Sizes(), list[dict[str, Any]]()
    wanted = arguments.variants or (SMOKE if arguments.smoke else [variant.name for variant in VARIANTS])
    for variant in [variant for variant in VARIANTS if variant.name in wanted]:
        if variant.drives_itself and importlib.util.find_spec("deepspeed") is None:
            print(f"{variant.name}: DeepSpeed is not installed")
            continue
        rows.append(measure(variant, sizes))
        pairs = zip(rows[-1]["losses"], rows[0]["losses"], strict=True)
        rows[-1]["difference"] = max(abs(mine - plain) for mine, plain in pairs)
        agrees = rows[-1]["difference"] <= TOLERANCE
        rows[-1]["passed"] = agrees and max(rows[-1]["error"], rows[-1]["hidden"]) <= SHARE
    Console(width=200).print(table(rows))
    passed = all(row["passed"] for row in rows)
    report = {
        "tolerance": TOLERANCE,
        "share": SHARE,
        "sizes": dataclasses.asdict(sizes),
        "passed": passed,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
