"""A model's forward on this rank's part of each row, which to its caller is the forward on whole rows.

Every rank is called with the whole batch, keeps the tokens of its part, and returns the loss of the batch: the sum over the
ranks of what their tokens add to it. Logits are gathered: at once without labels and in evaluation, else when they are read.

Extents: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.generic import ModelOutput

from hf_parallel.compat.private_transformers import CACHES, IGNORED_LABEL
from hf_parallel.errors import UnsupportedError
from hf_parallel.head.labelled import LabelledOutput
from hf_parallel.model.samples import output_flags
from hf_parallel.ulysses.attention import Shared
from hf_parallel.ulysses.draws import own_draws
from hf_parallel.ulysses.exchange import gathered, summed
from hf_parallel.ulysses.noise import noise_of_whole_rows


# What a call may give and how it is shared: single tokens along the sequence, and what the mask is made of, whole.
TOKENS = frozenset({"input_ids", "inputs_embeds", "token_type_ids"})
OF_LOSS = frozenset({"labels", "shift_labels", "num_items_in_batch"})
KNOWN = TOKENS | OF_LOSS | {"position_ids", "attention_mask"}
GENERATING = frozenset({*CACHES, "logits_to_keep"})  # whose outputs are not those of all tokens
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})  # of the rows in one
OF_EXPERTS = frozenset({"aux_loss", "router_logits"})
RETURNED = frozenset({"loss", "logits", "hidden_states", "last_hidden_state", *CACHES})


@dataclass(frozen=True)
class Part:
    """This rank's tokens of each row.

    Args:
        length: Tokens of a row, S.
        start: The first of this rank.
        size: Number of tokens; the last ranks' are filled up.
    """

    length: int
    start: int
    size: int

    def of(self, x: Tensor, dim: int = 1, fill: float | None = None) -> Tensor:
        """This rank's part of a tensor along its sequence dim; filled up with its last token, or a number.

        A token of the row has finite gradients in any model, which one of zeros need not have.
        """
        held = x.narrow(dim, min(self.start, self.length), max(0, min(self.size, self.length - self.start)))
        missing = self.size - held.shape[dim]
        if not missing:
            return held.contiguous()  # models view it
        if fill is None:
            last = x.narrow(dim, self.length - 1, 1)
            return torch.cat([held, last.repeat_interleave(missing, dim)], dim)
        behind = [0] * (2 * (x.ndim - 1 - dim % x.ndim)) + [0, missing]
        return F.pad(held, behind, value=fill)


def share_forward(
    model: nn.Module, forward: Callable[..., Any], shared: Shared, *, hides_logits: bool = True
) -> Callable[..., Any]:
    """`forward` on parts of the sequence; `shared` is that of the model's attention.

    Args:
        model: The model.
        forward: Its genuine forward.
        shared: Facts for its attention.
        hides_logits: In training with labels, gather logits when they are read. False for a caller that reads none: they stay parts.

    Returns:
        A function with the signature of `forward`.
    """
    signature = inspect.signature(forward)
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())

    def takes(name: str) -> bool:
        return takes_all or name in signature.parameters

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(signature, args, kwargs)
        if not torch.is_grad_enabled() and (given.get("use_cache") or {*given} & GENERATING):
            return forward(**given)  # each rank computes whole rows
        refuse_odd_inputs(given, shared.group.size)
        part = _part_of(given, shared)
        trains = model.training and torch.is_grad_enabled()
        with (
            own_draws(model, shared.group.rank, trains=trains) as draws,
            noise_of_whole_rows(model, part.length, part.of, draws, shared.whole),
        ):
            shared.whole.begin(forward, {name: value for name, value in given.items() if name not in OF_LOSS})
            with shared.running(part.length), shared.whole.seen(part.of):
                local = _local_inputs(model, given, part, shared)
                output = forward(**{name: value for name, value in local.items() if name in given or takes(name)})
        output = _refuse_odd_output(output, shared.group.size)
        if shared.is_alone:
            return output
        if shared.is_mean and output.get("loss") is not None:
            output["loss"] = _weighted(output["loss"], local["labels"], given["labels"])
        if output.get("hidden_states") is not None:
            states = output["hidden_states"]
            output["hidden_states"] = tuple(gathered(x, shared.group, part.length) for x in states)
        if output.get("last_hidden_state") is not None:
            output["last_hidden_state"] = gathered(output["last_hidden_state"], shared.group, part.length)
        if output.get("loss") is not None:
            output["loss"] = summed(output["loss"], shared.group)
            if trains:
                return _with_hidden_logits(output, part, shared) if hides_logits else output
        if output.get("logits") is not None:
            output["logits"] = gathered(output["logits"], shared.group, part.length)
        return output

    return run


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None."""
    given = dict(signature.bind_partial(*args, **kwargs).arguments) if args else dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return {name: value for name, value in given.items() if value is not None}


def _weighted(loss: Tensor, mine: Tensor, labels: Tensor) -> Tensor:
    """Weight this rank's mean over labels i[B S/sp], so that those of all ranks add up to the mean over i[B S]."""
    count, total = (x.ne(IGNORED_LABEL).sum() for x in (mine, labels))
    none = torch.where(total > 0, 0.0, torch.nan)  # as a mean over none is
    return torch.where(count > 0, loss * (count / total), none)


def refuse_odd_inputs(given: Mapping[str, Any], size: int) -> None:
    """Refuse what is not known to be shared along the sequence.

    Raises:
        UnsupportedError: Names the argument.
    """
    odd = [name for name, value in given.items() if isinstance(value, Tensor) and name not in KNOWN]
    flags = ("output_attentions", "output_router_logits", *sorted(GENERATING))
    odd += [name for name in flags if name in given and not isinstance(given[name], Tensor) and given[name]]
    odd += ["return_dict=False"] if given.get("return_dict") is False else []
    if odd:
        packed = " (a collator that packs rows gives it: padding_free, packing)" if odd[0] in PACKED else ""
        raise UnsupportedError(
            f"the model's argument {odd[0]}{packed} with sp_size={size}: it is not known how it is shared along the sequence. Leave it "
            f"out (known are {', '.join(sorted(KNOWN))}), or set sp_size to 1."
        )
    length, mask = tokens_of(given).shape[1], given.get("attention_mask")
    goes_on = ["use_cache=True"] if given.get("use_cache") else []
    if mask is not None and mask.shape[-1] != length:
        goes_on.append(f"attention_mask of {mask.shape[-1]} tokens for {length}")
    if goes_on:
        raise UnsupportedError(
            f"{goes_on[0]} in a training forward with sp_size={size}: parts of rows keep no cache of keys and values, so a call cannot "
            "go on from an earlier one. Pass whole rows, or set sp_size to 1."
        )


def tokens_of(given: Mapping[str, Any]) -> Tensor:
    """The tokens i[B S] of a batch, or their embeddings f[B S H]."""
    tokens: Tensor = next(given[name] for name in ("input_ids", "inputs_embeds") if name in given)
    return tokens


def _part_of(given: Mapping[str, Any], shared: Shared) -> Part:
    length = tokens_of(given).shape[1]
    size = -(-length // shared.group.size)
    return Part(length, shared.group.rank * size, size)


def _local_inputs(model: nn.Module, given: Mapping[str, Any], part: Part, shared: Shared) -> dict[str, Any]:
    """Arguments for this rank: tokens and labels of its part, positions counted from the row's first token."""
    local = {name: part.of(value) if name in TOKENS else value for name, value in given.items()}
    local["use_cache"] = False
    tokens = tokens_of(given)
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(part.length, device=tokens.device)[None]  # (1, seq)
    elif "attention_mask" not in given and positions.ndim == 2:
        local |= _packed(tokens, positions, shared, keeps_cache=bool(dict(output_flags(model, given))["use_cache"]))
    is_past = _is_past_last(model, part.size * shared.group.size)
    if is_past and "attention_mask" not in given:  # or positions that stand still would be taken for documents
        local.setdefault("attention_mask", tokens.new_ones(tokens.shape[:2], dtype=torch.long))
    local["position_ids"] = _counted_on(positions, part, stands=is_past)
    shared.whole.positions = local["position_ids"], positions
    if "labels" in given:
        labels = given["labels"]
        shifted = given.get("shift_labels")
        shifted = F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL) if shifted is None else shifted
        local["labels"] = part.of(labels, fill=IGNORED_LABEL)
        local["shift_labels"] = part.of(shifted, fill=IGNORED_LABEL)
        if "num_items_in_batch" not in given:
            local["num_items_in_batch"] = shifted.ne(IGNORED_LABEL).sum()
    return local


def _packed(tokens: Tensor, positions: Tensor, shared: Shared, *, keeps_cache: bool) -> dict[str, Any]:
    """Several documents in a row: transformers finds them by their positions, of which this rank has a part."""
    whole = positions.expand(len(tokens), -1)
    documents = find_packed_sequence_indices(whole)
    if documents is None:
        return {}
    told = {"attention_mask": torch.ones_like(whole)}  # with a mask, nobody looks for documents in the part
    if shared.mixes_documents:
        return told
    if keeps_cache:
        raise UnsupportedError(
            f"position_ids that begin anew without attention_mask and with use_cache on (the config's default), with "
            f"sp_size={shared.group.size}: transformers lets these documents see each other with a cache, and keeps them apart "
            "without one, and parts of rows have none. Set model.config.use_cache to False, or pass an attention_mask of ones for "
            "documents that see each other."
        )
    if shared.no_documents:
        raise UnsupportedError(
            f"position_ids of several documents in a row with sp_size={shared.group.size}: {shared.no_documents} Pad rows instead of "
            "packing them (packing=False), or set sp_size to 1."
        )
    shared.packed = whole, documents
    return told


def last_position(model: nn.Module) -> int | None:
    """Number of positions that the model's config says it has; None if it does not say."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _is_past_last(model: nn.Module, length: int) -> bool:
    """Whether a filled up row has more positions than the model's tables have."""
    limit = last_position(model)
    return limit is not None and length > limit


def _counted_on(positions: Tensor, part: Part, *, stands: bool) -> Tensor:
    """Position ids i[... S] of a part; what fills up a row goes on counting, or stands at the last one."""
    missing = max(0, part.start + part.size - part.length)
    if missing:
        more = torch.arange(1, missing + 1, device=positions.device, dtype=positions.dtype)
        positions = torch.cat([positions, positions[..., -1:] + (0 * more if stands else more)], dim=-1)
    return positions[..., part.start : part.start + part.size]


def _refuse_odd_output(output: Any, size: int) -> ModelOutput:
    """Refuse outputs that are not known to be shared along the sequence, or to add up.

    Raises:
        UnsupportedError: Names one.
    """
    odd = sorted(set(output) - RETURNED) if isinstance(output, ModelOutput) else [type(output).__name__]
    if odd:
        of_experts = (
            "config.output_router_logits to False"
            if OF_EXPERTS & set(odd)
            else "no option that makes the model return it"
        )
        raise UnsupportedError(
            f"the model returns {odd[0]} with sp_size={size}: it is of this rank's tokens, and not known to add up over the ranks "
            f"(the loss that balances experts does not). Set {of_experts}, or sp_size to 1."
        )
    return output  # type: ignore[no-any-return]


def _with_hidden_logits(output: ModelOutput, part: Part, shared: Shared) -> ModelOutput:
    """Logits are gathered when somebody reads them."""

    def whole(x: Tensor) -> Tensor:
        return gathered(x, shared.group, part.length)

    if isinstance(output, LabelledOutput):  # parts of the vocabulary
        return output.then(whole)
    return LabelledOutput().hide(output, whole) if output.get("logits") is not None else output
