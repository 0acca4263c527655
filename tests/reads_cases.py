"""Numbers that user code takes of a model's weights, in every place where a Trainer runs code of users.

Each is a number of the whole model in one process. On a mesh it is that number, or a refusal on all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments


ENV = {"ACCELERATE_USE_CPU": "true"}
PLACES = ("callback", "on_log", "log", "training_step", "evaluate", "compute_loss", "compute_metrics")
BLOCK = "model.layers.0.mlp.up_proj.weight"
Reader = Callable[[Any, dict[str, Tensor]], float]


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().pow(2).sum()) for tensor in tensors))


def largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def over(tensors: Callable[[Any], Iterable[Tensor]], read: Callable[[list[Tensor]], Any]) -> Reader:
    return lambda model, kept: float(read(list(tensors(model))))


READS: dict[str, Callable[[list[Tensor]], Any]] = {
    "norm": norm_of,
    "item": lambda all_of: math.sqrt(sum(one.norm().item() ** 2 for one in all_of)),
    "linalg": lambda all_of: torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in all_of])),
    "mean": lambda all_of: sum(one.mean() for one in all_of),
    "std": lambda all_of: sum(one.detach().float().std() for one in all_of),
    "largest": largest,
    "nonzero": lambda all_of: sum(one.count_nonzero() for one in all_of),
    "finite": lambda all_of: all(bool(torch.isfinite(one).all()) for one in all_of) + sum(one.sum() for one in all_of),
    "numel": lambda all_of: sum(one.numel() for one in all_of),
    "shape": lambda all_of: sum(math.prod(one.shape) for one in all_of),
    "size": lambda all_of: sum(one.size(0) for one in all_of),
    "bytes": lambda all_of: sum(one.numel() * one.element_size() for one in all_of),
    "nbytes": lambda all_of: sum(one.nbytes for one in all_of),
    "cpu": lambda all_of: norm_of(one.detach().cpu() for one in all_of),
    "data": lambda all_of: norm_of(one.data for one in all_of),
    "double": lambda all_of: math.sqrt(sum(float((one.detach().double() ** 2).sum()) for one in all_of)),
    "clone": lambda all_of: norm_of([one.detach().clone() for one in all_of]),
    "half": lambda all_of: norm_of([one.detach().to(torch.bfloat16) for one in all_of]),
    "numpy": lambda all_of: math.sqrt(sum(float((one.detach().numpy() ** 2).sum()) for one in all_of)),
    "asarray": lambda all_of: math.sqrt(sum(float((np.asarray(one.detach()) ** 2).sum()) for one in all_of)),
    "tolist": lambda all_of: sum(sum(one.detach().flatten().tolist()) for one in all_of),
    "cat": lambda all_of: torch.cat([one.detach().flatten() for one in all_of]).norm(),
    "vector": lambda all_of: nn.utils.parameters_to_vector(all_of).norm(),
    "foreach": lambda all_of: torch.stack(torch._foreach_norm(all_of)).norm(),
    "total_norm": nn.utils.get_total_norm,
    "quantile": lambda all_of: sum(one.detach().float().quantile(0.9) for one in all_of),
    "histogram": lambda all_of: sum(float(torch.histc(one.detach(), 7, -0.01, 0.02)[3]) for one in all_of),
    "dot": lambda all_of: sum(torch.dot(one.detach().reshape(-1), one.detach().reshape(-1)) for one in all_of),
    "einsum": lambda all_of: sum(torch.einsum("...i,...i->", one.detach(), one.detach()) for one in all_of),
    "svd": lambda all_of: sum(torch.linalg.matrix_norm(one.detach(), 2) for one in all_of if one.ndim == 2),
    "distance": lambda all_of: sum(nn.functional.mse_loss(one.detach(), one.detach() * 0.5) for one in all_of),
    "rows": lambda all_of: sum(one.detach()[0].sum() for one in all_of),
}
LISTS: dict[str, Callable[[Any], Iterable[Tensor]]] = {
    "state": lambda model: model.state_dict().values(),
    "vars": lambda model: model.state_dict(keep_vars=True).values(),
    "copied": lambda model: copy.deepcopy(model.state_dict()).values(),
    "block": lambda model: model.model.layers[0].state_dict().values() if 0 in on_this_rank(model) else [],
    "parameters": lambda model: model.parameters(),
    "buffers": lambda model: [tensor for _, tensor in model.named_buffers()],
    "trained": lambda model: (p for p in model.parameters() if p.requires_grad),
    "modules": lambda model: [w for m in model.modules() if isinstance(w := getattr(m, "weight", None), Tensor)],
}


def on_this_rank(model: Any) -> set[int]:
    return set(range(len(model.model.layers)))


def from_start(model: Any, kept: dict[str, Tensor]) -> float:
    """How far the weights have moved."""
    return norm_of(tensor - kept[name] for name, tensor in model.state_dict().items())


ONE: dict[str, Reader] = {
    "get_parameter": lambda model, kept: float(model.get_parameter(BLOCK).norm()),
    "attribute": lambda model, kept: float(model.lm_head.weight.norm()),
    "attribute_data": lambda model, kept: float(model.lm_head.weight.data.norm()),
    "attribute_cpu": lambda model, kept: float(model.model.layers[0].mlp.up_proj.weight.detach().cpu().float().norm()),
    "attribute_numel": lambda model, kept: model.model.layers[0].mlp.up_proj.weight.numel(),
    "embeddings": lambda model, kept: float(model.get_input_embeddings().weight.norm()),
    "named": lambda model, kept: float(dict(model.named_parameters())[BLOCK].norm()),
    "by_name": lambda model, kept: float(model.state_dict()[BLOCK].norm()),
    "num_parameters": lambda model, kept: float(model.num_parameters()),
    "trainable": lambda model, kept: float(model.num_parameters(only_trainable=True)),
    "kept": lambda model, kept: norm_of(kept.values()),
    "kept_numel": lambda model, kept: float(sum(tensor.numel() for tensor in kept.values())),
    "from_start": from_start,
    "average": lambda model, kept: norm_of(
        tensor.mul(0.5).add(kept[name], alpha=0.5) for name, tensor in model.state_dict().items()
    ),
    "lerp": lambda model, kept: norm_of(kept[name].lerp(t, 0.3) for name, t in model.state_dict().items()),
}
READERS: dict[str, Reader] = {
    f"{of}_{name}": over(tensors, read) for of, tensors in LISTS.items() for name, read in READS.items()
} | ONE


def outcome(reader: Reader, model: Any, kept: dict[str, Tensor]) -> float | str:
    """A number, or the text of a refusal."""
    try:
        return float(reader(model, kept))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Reading:
    """Reads everything once at each place."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.found = list(names), {}  # type: tuple[list[str], dict[str, float | str]]
        self.kept: dict[str, Tensor] = {}
        self.model: Any = None
        self.accelerator: Any = None

    def at(self, place: str, now: bool = True) -> None:
        if now and not any(key.startswith(f"{place}-") for key in self.found):
            for name in self.names:
                self.found[f"{place}-{name}"] = outcome(READERS[name], self.model, self.kept)
            self.found[f"{place}-gathered"] = outcome(self.gathered, self.model, self.kept)

    def gathered(self, model: Any, kept: Any) -> float:
        """Of what a refusal says to take, on rank 0."""
        state = self.accelerator.get_state_dict(model)
        return norm_of(state.values()) + sum(tensor.numel() for tensor in state.values())


class Looks(TrainerCallback):
    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.reading.model, self.reading.kept = model, copy.deepcopy(model.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reading.at("callback", state.global_step == 2)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reading.at("on_log", state.global_step == 2)


class Reads(Trainer):
    """Reads wherever a subclass has code of its own."""

    reading: Reading

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        self.reading.at("log", self.state.global_step == 2)
        super().log(logs, *args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        self.reading.at("training_step", self.state.global_step == 2)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.reading.at("evaluate", self.state.global_step == 2)
        return super().evaluate(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.reading.at("compute_loss", self.state.global_step == 2)
        return super().compute_loss(model, inputs, *args, **kwargs)


def trained(parallel: dict[str, Any] | None, folder: Path, names: list[str], rows: int = 8) -> dict[str, float | str]:
    """Three steps of a Trainer, and what was read meanwhile."""
    reading = Reading(names)

    def metrics(prediction: Any) -> dict[str, float]:
        reading.at("compute_metrics")
        return {}

    callbacks: list[Any] = [Looks(reading)]
    if parallel is not None:
        from hf_parallel import HFParallelCallback

        callbacks.append(HFParallelCallback({}, **parallel))
    torch.manual_seed(0)
    trainer = Reads(
        model=tiny.llama(),
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=rows,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            adam_epsilon=1e-5,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=2,
            dataloader_pin_memory=False,
        ),
        train_dataset=tiny.rows(64),
        eval_dataset=tiny.rows(8),
        data_collator=tiny.collate,
        compute_metrics=metrics,
        callbacks=callbacks,
    )
    trainer.reading, reading.accelerator = reading, trainer.accelerator
    trainer.train()
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    return reading.found


def main(rank: int, world_size: int, layouts: dict[str, Any], folder: str, names: list[str]) -> dict[str, Any]:
    return {
        layout: trained(
            parallel, Path(folder) / layout, names, 8 if parallel is None or model_parallel(parallel) else 4
        )
        for layout, parallel in layouts.items()
    }


def model_parallel(parallel: dict[str, Any]) -> bool:
    return parallel.get("pp_size", 1) * parallel.get("tp_size", 1) > 1
