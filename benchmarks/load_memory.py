"""Memory of loading and saving in parts: the peak of every rank against its share of the model.

    python benchmarks/load_memory.py                  # a model of 1.1 GB, about two minutes on 2 cores
    python benchmarks/load_memory.py --layers 4       # a smaller one
    python benchmarks/load_memory.py --large          # load a Llama of 7B in bf16, of zeros; needs 16 GB

Counted: resident memory of each process, file pages included (`VmHWM`, reset before each phase), above what it had before
`from_pretrained`, until the model is prepared; and of the writer while `save_model` runs, above what it had before.
Allowed: 1.15 times the share and 150 MB to load; one file of at most 200 MB and 200 MB to save. "whole" is a model loaded the
plain way, for comparison. Seconds are those from `from_pretrained` to the prepared model: the plan, its check, the cut, and
reading. Writes build/reports/load-memory.json; exits with 1 if a rank is above what is allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rank_runner import run_ranks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402


MB = 10**6
LARGE = 0  # layers that stand for a model of 7B
LLAMA_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": {"pp_size": 2},
    "tp2": {"tp_size": 2},
    "pp2 x tp2": {"pp_size": 2, "tp_size": 2},
}
REPORT = ROOT / "build" / "reports" / "load-memory.json"


def build(folder: Path, layers: int) -> int:
    """Save a random Llama in files of at most 200 MB; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, num_hidden_layers=layers, **sizes))
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(p.nbytes for p in model.parameters())


def build_large(folder: Path) -> int:
    """Save a Llama of 7B in bf16, all zeros, in files of 2 GB that take no room on most disks; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA_7B, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        shapes = {name: list(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(folder)
    files: list[dict[str, Any]] = [{}]
    end = total = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if end + size > 2e9:
            files.append({})
            end = 0
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end, total = end + size, total + size
    places = {}
    for index, tensors in enumerate(files, 1):
        file = f"model-{index:05}-of-{len(files):05}.safetensors"
        header = json.dumps(tensors).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in tensors.values()))
        places |= dict.fromkeys(tensors, file)
    listed = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    return total


def status(key: str) -> int:
    """A line of this process's memory, in bytes: VmRSS, RssAnon, VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure_rank(
    rank: int, world_size: int, folder: str, out: str, layout: dict[str, int], parts: bool, saves: bool
) -> dict[str, Any]:
    import torch

    # What is imported and allocated once, whatever the model, is not the model's memory.
    prepare(f"{folder}-tiny", out, layout, parts).accelerator.hf_parallel.watchdog.stop()
    forget_peak()
    torch.distributed.barrier()
    before, private, begun = status("VmRSS"), status("RssAnon"), time.monotonic()
    trainer = prepare(folder, out, layout, parts)
    torch.distributed.barrier()
    seconds = time.monotonic() - begun
    peak, steady, private = status("VmHWM"), status("VmRSS"), status("RssAnon") - private
    forget_peak()
    if saves:
        trainer.save_model(out)
    saved = status("VmHWM")
    engine = trainer.accelerator.hf_parallel_engine
    trainer.accelerator.hf_parallel.watchdog.stop()
    held = [*engine.attachment.parameters.values(), *engine.attachment.buffers.values()]
    return {
        "rank": rank,
        "seconds": seconds,
        "share": sum(tensor.nbytes for tensor in held),
        "load_peak": peak - before,
        "load_steady": steady - before,
        "private": private,
        "save_peak": saved - steady,
    }


def prepare(folder: str, out: str, layout: dict[str, int], parts: bool) -> Any:
    """A Trainer whose model is loaded and cut."""
    import contextlib

    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_parallel import HFParallelCallback, sharded_loading

    with sharded_loading({}, **layout) if parts else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(out, report_to=[], use_cpu=True, disable_tqdm=True),
        callbacks=[HFParallelCallback({}, **layout)],
    )
    trainer.accelerator.attach_model(model)
    return trainer


def judge(found: dict[str, Any]) -> list[str]:
    """What a rank has too much of."""
    problems = []
    if found["load_peak"] > 1.15 * found["share"] + 150 * MB:
        problems.append("load")
    if found["save_peak"] > 400 * MB:
        problems.append("save")
    return problems


def run(layers: int, layouts: list[str], whole: bool) -> list[dict[str, Any]]:
    """Rows of the report: one a rank."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        size = run_ranks(build_rank, 1, str(folder), layers, tmp_path=Path(place), init_group=False, timeout=300)[0]
        for name in layouts:
            layout = LAYOUTS[name]
            world = layout.get("pp_size", 1) * layout.get("tp_size", 1)
            for parts in (True, False) if whole else (True,):
                arguments = (str(folder), str(Path(place) / "out"), layout, parts, layers != LARGE)
                env = {"ACCELERATE_USE_CPU": "true"}
                for found in run_ranks(measure_rank, world, *arguments, tmp_path=Path(place), timeout=500, env=env):
                    verdict = judge(found) if parts else []
                    rows.append({"layout": name, "loaded": "parts" if parts else "whole", "model": size, **found})
                    rows[-1]["above"] = verdict
    return rows


def build_rank(rank: int, world_size: int, folder: str, layers: int) -> int:
    import tiny

    tiny.llama().save_pretrained(f"{folder}-tiny")
    Path(folder).mkdir()
    return build(Path(folder), layers) if layers != LARGE else build_large(Path(folder))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"MB above what the process had; the model has {rows[0]['model'] / MB:.0f} MB")
    for column in ("layout", "loaded", "rank", "share", "peak, load", "allowed", "after load", "peak, save", "s", ""):
        table.add_column(column, justify="left" if column in ("layout", "loaded") else "right")
    for row in rows:
        numbers = [f"{row[key] / MB:.0f}" for key in ("share", "load_peak")]
        allowed = f"{(1.15 * row['share'] + 150 * MB) / MB:.0f}"
        after = [f"{row[key] / MB:.0f}" for key in ("load_steady", "save_peak")]
        verdict = "above" if row["above"] else ""
        seconds = f"{row['seconds']:.1f}"
        table.add_row(row["layout"], row["loaded"], str(row["rank"]), *numbers, allowed, *after, seconds, verdict)
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append")
    parser.add_argument("--no-whole", action="store_true", help="leave out the comparison with plain loading")
    parser.add_argument("--large", action="store_true", help="a model of 7B on two ranks")
    arguments = parser.parse_args()
    if arguments.large:
        rows = run(LARGE, arguments.layout or ["pp2", "tp2"], whole=False)
    else:
        rows = run(arguments.layers, arguments.layout or list(LAYOUTS), not arguments.no_whole)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(rows, indent=2) + "\n")
    show(rows)
    return int(any(row["above"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
