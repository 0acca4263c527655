"""One process that sees the rows of a batch in the parts that a layout makes of them.

A router's auxiliary loss is a product of means over the rows that it sees, no sum over rows: of replicas and microbatches it
is another number than of the whole batch, in stock data parallelism as well. So the reference of such a model computes it
for each part, and the sum over labels as ever.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_parallel.proof.job import Job


def sees_parts(model: nn.Module) -> bool:
    """Whether a model's loss has a router's auxiliary loss in it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    return bool(getattr(text, "output_router_logits", False))


def compute_in_parts(model: nn.Module, job: Job) -> int:
    """Run the forward of a model once for each microbatch of each replica of a layout; in place.

    The loss is that of stock data parallelism: auxiliary losses are averaged over the microbatches of a replica, by their rows,
    and added up over replicas, since the Trainer multiplies each replica's loss with their number. Returns how many parts a batch has.
    """
    forward = model.forward
    parts = functools.cache(lambda rows: parts_of(dataclasses.replace(job, rows=rows)))

    @functools.wraps(forward)
    def in_parts(*args: Any, num_items_in_batch: Any = None, **batch: Any) -> Any:
        labels = batch.get("labels")
        if num_items_in_batch is None or labels is None or len(labels) % job.replicas:
            given = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return forward(*args, **batch, **given)
        size = len(labels) // job.replicas  # the last batch of a script may be smaller
        outputs, loss = [], 0.0
        for start, rows in parts(size):
            weight = rows / size
            part = {name: _rows(value, start, rows) for name, value in batch.items()}
            output = forward(
                *args, **part, num_items_in_batch=num_items_in_batch * weight
            )  # (c / (N w) + a) w = c / N + a w
            loss = loss + output["loss"] * weight
            outputs.append(output)
        whole = outputs[-1]
        whole["loss"] = loss
        if whole.get("logits") is not None:
            whole["logits"] = torch.cat([output["logits"] for output in outputs])
        return whole

    vars(model)["forward"] = in_parts
    return len(parts_of(job))


def parts_of(job: Job) -> list[tuple[int, int]]:
    """First row and number of rows of each microbatch of each replica, in the batch of all replicas."""
    parts: list[tuple[int, int]] = []
    start = 0
    for _ in range(job.replicas):
        for index in range(job.microbatches):
            rows = job.rows // job.microbatches + (index < job.rows % job.microbatches)
            parts.append((start, rows))
            start += rows
    return parts


def _rows(value: Any, start: int, rows: int) -> Any:
    return value[start : start + rows] if isinstance(value, Tensor) and value.ndim else value


def merged(passed: Sequence[Mapping[str, Any]], parts: int) -> list[dict[str, Any]]:
    """Merge the notes of `parts` calls of a module, one after another, into those of one call; see `trace.Passed`."""
    groups: dict[tuple[str, str, int, int], list[Mapping[str, Any]]] = {}
    for each in passed:
        groups.setdefault((each["module"], each["kind"], each["part"], each["call"] // parts), []).append(each)
    found = []
    for (_, _, _, call), calls in groups.items():
        ordered = sorted(calls, key=lambda each: int(each["call"]))
        numbers = torch.cat([each["numbers"] for each in ordered])
        found.append({**calls[0], "call": call, "numbers": numbers})
    return found
