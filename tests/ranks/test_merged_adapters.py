"""Adapters that are merged while a model trains (ReLoRA, a look at the merged model) are merged on every rank, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_steps
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback


pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def merged_and_back(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def relora(model: Any) -> None:
    """Merges the adapters for good and begins new ones, whose second matrix is zero."""
    model.merge_adapter()
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            module.merged_adapters.clear()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.zero_()


def merged(model: Any) -> None:
    model.merge_adapter()


def unloaded(model: Any) -> None:
    model.merge_and_unload()


def added(model: Any) -> None:
    """In place, through what `data` gives."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data *= 0.5
            parameter.data += 1e-3


class AfterFirst(TrainerCallback):
    """Changes the model after the first step."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.change(model)


class Unloads(Trainer):
    """Saves the merged model, as scripts do when they have trained."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.accelerator.unwrap_model(self.model).merge_and_unload().save_pretrained(output_dir)


def after_first(change: Callable[[Any], None]) -> dict[str, Any]:
    return {"change": lambda trainer: trainer.add_callback(AfterFirst(change))}


def before(trainer: Any) -> None:
    trainer.model.merge_adapter()


CHANGES = (merged_and_back, relora, merged, unloaded, added)
user_steps.KINDS |= {change.__name__: (Trainer, after_first(change)) for change in CHANGES}
user_steps.KINDS |= {"saved_whole": (Unloads, {}), "merged_before": (Trainer, {"change": before})}


PP2, TP2, ZERO3 = {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}, {"zero": {"stage": 3}}
MERGED = "adapters that are merged into their layers (merge_adapter()), with pp_size=2"
UNLOAD = "merge_and_unload() of a model of which this rank has a part"
JOBS: user_steps.Jobs = {
    **{f"{kind}-{name}": (kind, layout, "", 0) for kind in ("merged_and_back", "relora", "added") for name, layout in (("pp2", PP2), ("tp2", TP2), ("zero3", ZERO3))},
    "merged-pp2": ("merged", PP2, MERGED, 1),
    "merged_before-pp2": ("merged_before", PP2, "unmerge_adapter()", 0),
    **{f"unloaded-{name}": ("unloaded", layout, UNLOAD, 1) for name, layout in (("pp2", PP2), ("tp2", TP2), ("zero3", ZERO3))},
    "saved_whole-pp2": ("saved_whole", PP2, UNLOAD, 3),
    # Adapters outside of the blocks: of an embedding, which the first stage has, and of a head, which is gathered with tp.
    **{f"{kind}-{name}-ends": (kind, layout, "", 0) for kind in ("merged_and_back", "relora") for name, layout in (("pp2", PP2), ("tp2", TP2))},
}  # fmt: skip


def model_of(job: str) -> str:
    return "llama_lora_head" if job.endswith("-ends") else "llama_lora"


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    folder = tmp_path_factory.mktemp("merged")
    ones = {
        (kind, model_of(job)): (kind, None, {"rows": 8, "model": model_of(job)})
        for job, (kind, _, error, _) in JOBS.items()
        if not error
    }
    twos = {
        job: (kind, layout, {"rows": user_steps.rows_on_two(layout), "model": model_of(job)})
        for job, (kind, layout, _, _) in JOBS.items()
    }
    return user_steps.launch_both(ones, twos, folder, many)


@pytest.mark.parametrize("job", JOBS)
def test_merged_adapters_are_right_or_refused(job: str, runs: user_steps.Runs) -> None:
    kind, _, error, steps = JOBS[job]
    mine = runs[1][job]
    if error:
        for rank in mine:
            assert error in str(rank["error"])
            assert rank["steps"] == steps
        return
    reference = runs[0][kind, model_of(job)][0]
    assert [rank["error"] for rank in mine] == [None, None]
    assert len(mine[0]["history"]) == len(reference["history"]) > 1
    for here, there in zip(mine[0]["history"], reference["history"], strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-5)
    tensors, expected = (
        load_file(Path(each["folder"]) / "adapter_model.safetensors") for each in (mine[0], reference)
    )
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((tensors[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name
