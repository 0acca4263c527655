"""Sharing the sequence of each row over ranks: tried on the whole model, then put into its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hf_parallel.compat.private_transformers import loss_shifts_labels
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.guards.gradients.hooks import refuse_hooks
from hf_parallel.model.probes import Probes
from hf_parallel.model.samples import signature_of, taken
from hf_parallel.model.unchanged import unchanged
from hf_parallel.pipeline_parallel.plan.loss_kind import judge_loss
from hf_parallel.settings.sequence_rules import method_of
from hf_parallel.ulysses.attention import Shared, share_attention
from hf_parallel.ulysses.exchange import SequenceGroup
from hf_parallel.ulysses.ring import Ring
from hf_parallel.ulysses.verify import verify_model


def shared_rows(setup: Setup) -> Shared | None:
    """Describe to the model the sequence that its ranks share; None with sp_size 1."""
    group, config = setup.mesh.sp_group, setup.config
    if group is None:
        return None
    sequence, heads = SequenceGroup(group, setup.recorder), _heads(setup.model)
    method = method_of(config.sp_attention, heads and max(1, heads // config.tp_size), sequence.size)
    return Shared(sequence, Ring(sequence) if method == "ring" else None)


def _heads(model: nn.Module) -> int | None:
    """Query heads of each block, where the config has one number."""
    heads = getattr(_text_config(model), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def check_rows(setup: Setup, shared: Shared | None, probes: Probes | None) -> None:
    """Compare the model on parts of each row with the whole one; collective over the ranks that share rows.

    Raises:
        PlanError: They differ; nothing was changed.
        UnsupportedError: A parameter has a hook, which would see the gradient of this rank's tokens.
    """
    if shared is None or probes is None:
        return
    refuse_hooks(setup.model.named_parameters(), setup.mesh.shape.sp_size)
    setup.watchdog.runs("compares the model on parts of each row with the whole one")
    judge_rows(setup.model, shared, probes)


def judge_rows(model: nn.Module, shared: Shared, probes: Probes) -> None:
    """Do what `check_rows` does, and find out whether rows of several documents are exact, which not all batches have."""
    if getattr(_text_config(model), "output_router_logits", False):
        raise PlanError(
            f"config.output_router_logits=True with sp_size={shared.group.size}: the loss that balances experts is no sum over tokens, "
            "so the parts of a row do not add up to it. Set config.output_router_logits to False, or sp_size to 1."
        )
    forms = Forms(model, probes.batch)
    samples = [*probes.check, *_without_mask(probes.batch)]
    with probes.running(), unchanged(model):
        if forms.narrow is not None:
            with suppress(
                PlanError
            ):  # on every rank; then it is for the real widths to say what is wrong, if anything is
                _judge(forms.narrow.model, shared, [*map(forms.narrow.batch, samples)])
                return
            shared.forget()
        _judge(forms.few, shared, samples)


def _judge(model: nn.Module, shared: Shared, samples: Sequence[Mapping[str, Any]]) -> None:
    """Try one form of the model; collective over the ranks that share rows.

    Raises:
        PlanError: It computes something else on parts of rows; on every rank.
    """
    verify_model(model, shared, samples, lambda tried: _averages(tried, samples[0]))
    documents = _documents(samples[0])
    _judge_documents(model, shared, None if documents is None else taken(signature_of(model), documents))


def _judge_documents(model: nn.Module, shared: Shared, batch: Mapping[str, Any] | None) -> None:
    """Find out whether rows of several documents are exact, told apart or seen by each other as the model itself does."""
    if batch is None:
        return
    for shared.mixes_documents in (False, True):
        try:
            verify_model(model, shared, [batch])
        except Exception as error:  # noqa: BLE001 - the model's own code may not take positions
            shared.no_documents = shared.no_documents or str(error)
        else:
            shared.no_documents = ""
            return
    shared.mixes_documents = False


def _averages(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a model's own loss is the mean over the labels as they are: each is that of the logits at its place."""
    return not loss_shifts_labels(model) and judge_loss(model, batch).kind == "mean"


def see_whole_rows(setup: Setup, shared: Shared | None) -> None:
    """Let modules that are given counted positions see whole rows. In place; comes before stages leave out modules."""
    if shared is not None:
        shared.whole.install(setup.model)


def share_rows(setup: Setup, shared: Shared | None) -> None:
    """Let the model's attention exchange heads for sequence, or keys go round. In place."""
    if shared is not None:
        share_attention(setup.model, shared)


def _without_mask(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch without a mask, which a model may make itself, and of a length that ranks share unequally."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or "attention_mask" not in batch or ids.shape[1] < 3:
        return []
    length = ids.shape[1] - 1 + ids.shape[1] % 2
    whole = {name: value for name, value in batch.items() if name != "attention_mask"}
    rows = {n: v for n, v in whole.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape}
    return [whole | {name: value[:, :length].contiguous() for name, value in rows.items()}]


def _documents(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rows of a batch as two documents each, without a mask; None for a batch without token ids."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.shape[1] < 4:
        return None
    first = ids.shape[1] // 2 - 1
    positions: Sequence[int] = [*range(first), *range(ids.shape[1] - first)]
    placed = torch.tensor(positions, device=ids.device).expand(ids.shape)
    return {"input_ids": ids, "labels": ids, "position_ids": placed, "use_cache": False}
