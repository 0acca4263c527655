"""Training on two real gloo ranks, through an unchanged accelerate loop, against the whole model in the same process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.models import batch, build, quiet


TOLERANCE = 1e-5
TEXT = {"input_ids", "attention_mask", "labels", "use_cache"}


def ranks_main(rank: int, world_size: int, name: str) -> dict[str, float]:
    """Two steps of an entry on this rank's stage.

    Returns:
        "loss", "norm", "weights": largest relative differences from the whole model (weights on rank 0 only);
        "missing": tensors that the gathered state lacks.
    """
    with quiet():
        return _train(name, world_size)


def _train(name: str, world_size: int) -> dict[str, float]:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    model = build(name)
    batches = [batch(name, model, 2, 8), batch(name, model, 4, 11, left=True)]
    # A router's auxiliary loss is no sum over microbatches: one microbatch is the whole batch.
    routed = bool(getattr(model.config.get_text_config(), "output_router_logits", False))
    expected = _whole(build(name), batches)
    # Text is tried unasked; a model that needs more is planned with a batch of its own.
    sample = batches[0] if set(batches[0]) - TEXT or len(batches[0]["labels"]) < len(batches[0]["input_ids"]) else None
    plugin = HFParallelPlugin({}, sample=sample, pp_size=world_size, num_microbatches=1 if routed or sample else 2)
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    history = []
    for inputs in batches:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(loss), float(norm)))
    state = accelerator.get_state_dict(model)
    accelerator.hf_parallel.watchdog.stop()
    return _differences(expected, (history, dict(state or {})))


Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # SGD: Adam's division would blow rounding up where a gradient is 0 but for noise.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _whole(model: Any, batches: list[dict[str, Any]]) -> Outcome:
    """Loss and gradient norm of every step, and the weights at the end."""
    optimizer = _optimizer(model)
    history = []
    for inputs in batches:
        loss = model(**inputs).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(loss), float(norm)))
    return history, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _differences(expected: Outcome, got: Outcome) -> dict[str, float]:
    """Largest relative differences; the weights are known on the main rank only."""
    pairs = list(zip(expected[0], got[0], strict=True))
    found = {
        "loss": max(abs(e[0] - g[0]) / abs(e[0]) for e, g in pairs),
        "norm": max(abs(e[1] - g[1]) / abs(e[1]) for e, g in pairs),
    }
    if got[1]:
        worst = max(
            float((expected[1][k].float() - t.float()).norm() / expected[1][k].float().norm().clamp(min=1e-12))
            for k, t in got[1].items()
            if k in expected[1] and t.numel()
        )
        saved = {t.data_ptr() for name, t in expected[1].items() if name in got[1]}  # tied: under one name or another
        missing = [name for name, t in expected[1].items() if t.data_ptr() not in saved]
        found |= {"weights": worst, "missing": float(len(missing))}
    return found
