"""A model's own attention on the whole sequence and on some of the heads, by the registries of transformers.

A model asks a registry for its attention function and for that of its masks, by the name in its config. Ours exchange heads for
sequence, call what the name was before, and exchange back. Parameters with a number for each head (sinks) are read in parts.
Where the sequence is a ring, queries stay, and the mask is that of this rank's queries and all keys.

Extents: B batch, S sequence, H heads, K key-value heads, D width of a head.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hf_parallel.compat.private_torch import in_backward_pass
from hf_parallel.compat.private_transformers import attention_names, of_documents
from hf_parallel.errors import UnsupportedError
from hf_parallel.ulysses.blocks import EVENLY
from hf_parallel.ulysses.exchange import SequenceGroup, repeats_for, to_heads, to_sequence
from hf_parallel.ulysses.ring import Ring, is_causal
from hf_parallel.ulysses.whole import Enough, WholeRows


Attention: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]

KNOWN = ("eager", "sdpa")  # implementations whose masks are made of indices alone


@dataclass
class Shared:
    """State that all attention layers of a model share: the group, and facts about the rows.

    Args:
        group: The ranks that share the sequence.
        ring: Computes attention with keys that go round the ranks; None: heads and sequence change places.
        length: Tokens of the rows whose masks are made now; those of the ranks together may be more.
        packed: Position ids i[B S] and document number of each token i[B S], for a packed batch.
        no_documents: Why batches of packed documents are refused; "" if they are exact.
        mixes_documents: Whether the model itself lets packed documents see each other.
        whole: The modules that see whole rows.
        is_mean: Whether the model's own loss is the mean over its labels, whatever number of items it is given.
        is_alone: Whether this rank is to find out, without messages, if the model runs on its part; attention gives zeros.
        is_running: Whether the model runs forward on parts of rows; `length` is theirs. A backward pass may be of earlier ones.
    """

    group: SequenceGroup
    ring: Ring | None = None
    length: int = 0
    packed: tuple[Tensor, Tensor] | None = None
    no_documents: str = ""
    mixes_documents: bool = False
    whole: WholeRows = field(default_factory=WholeRows)
    is_mean: bool = False
    is_alone: bool = False
    is_running: bool = False
    _modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        """Names in the registries are of this one."""
        return self

    def forget(self) -> None:
        """Forget what was found out about a model."""
        self.whole.places.clear()
        self.whole.tables = ()
        self.is_mean = self.mixes_documents = False
        self.no_documents = ""

    @contextmanager
    def running(self, length: int) -> Iterator[None]:
        """Inside, the model runs on a part of rows that have so many tokens."""
        self.length, self.is_running = length, True
        try:
            yield
        finally:
            self.is_running, self.packed = False, None

    def note(self, model: nn.Module) -> None:
        """Note that the attention of this model is shared; other models made from its config have its name as well."""
        self._modules.update(model.modules())

    @property
    def has_parts(self) -> bool:
        """Whether what is given now are parts of rows: it may also be called for whole ones, outside of `running`."""
        return self.is_running or in_backward_pass()

    def has_parts_in(self, module: nn.Module) -> bool:
        """The same of an attention module; in a backward pass those of other models run again as well."""
        return self.is_running or (in_backward_pass() and module in self._modules)


def share_attention(model: nn.Module, shared: Shared) -> Callable[[], None]:
    """Let all attention of a model work on some heads of the whole sequence. In place; returns what undoes it.

    Raises:
        UnsupportedError: An implementation whose masks or packed documents are not made of indices.
    """
    names = attention_names(model)
    odd = sorted({str(name) for _, name in names} - {*KNOWN})
    if odd:
        raise UnsupportedError(
            f"attn_implementation={odd[0]!r} with sp_size={shared.group.size}: its masks are not known for a shared sequence. Load "
            "the model with attn_implementation='sdpa', or set sp_size to 1."
        )
    for _, name in names:
        key = _key(shared, name)
        AttentionInterface.register(key, _attention(name, shared))
        AttentionMaskInterface.register(key, _mask(name, shared))
    shared.note(model)
    undo = [_renamed(set_name, name, _key(shared, name)) for set_name, name in names]

    def restore() -> None:
        for back in undo:
            back()

    return restore


def _renamed(set_name: Callable[[str], None], before: str, name: str) -> Callable[[], None]:
    set_name(name)
    return lambda: set_name(before)


def _key(shared: Shared, name: str) -> str:
    """The name under which the implementation `name` of one model is registered."""
    return f"hf_parallel_ulysses_{id(shared):x}_{name}"


def _attention(name: str, shared: Shared) -> Attention:
    registered: Any = None if name == "eager" else AttentionInterface()[name]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> Any:
        if shared.whole.begins:
            raise Enough
        own = registered or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        if not shared.has_parts_in(module):
            return own(module, query, key, value, attention_mask, **named)
        if shared.is_alone:
            return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None
        length = _length(shared, module, query, attention_mask, named, adds_masks=registered is None)
        if shared.ring is not None:
            return shared.ring.attention(module, (query, key, value), attention_mask, named)
        return _exchanged(own, shared.group, module, (query, key, value), attention_mask, named, length)

    return attention


def _length(
    shared: Shared, module: nn.Module, query: Tensor, mask: Any, named: Mapping[str, Any], *, adds_masks: bool
) -> int:
    """Count the tokens of a row without those that fill it up, which none of the others may attend to.

    Raises:
        UnsupportedError: They are seen, and it cannot be told how many they are.
    """
    filled = query.shape[2] * shared.group.size
    if isinstance(mask, Tensor):
        return int(mask.shape[-1])
    hides_nothing = shared.ring is None and adds_masks  # eager attention
    if not hides_nothing and is_causal(module, named):
        return filled  # no token looks at what comes after it
    if shared.ring is None and shared.is_running:
        return shared.length
    if shared.ring is not None and (not shared.is_running or shared.length == filled):
        return filled
    fix = "Turn activation checkpointing off" if shared.ring is None else "Set sp_attention to ulysses"
    raise UnsupportedError(
        f"attention to later tokens (is_causal=False) without a mask, with sp_size={shared.group.size}: rows of {shared.length} "
        f"tokens are filled up to {filled}, and every token would see what fills them. {fix}, or set sp_size to 1."
    )


def _exchanged(
    own: Attention,
    group: SequenceGroup,
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    named: Mapping[str, Any],
    length: int,
) -> tuple[Tensor, None]:
    """Attention of this rank's heads, of so many tokens of a row; returns f[B S/sp H D] of all heads."""
    query, key, value = states  # (batch, heads or kv heads, seq / sp, width)
    heads, kv_heads = query.shape[1], key.shape[1]
    padded = -(-heads // group.size) * group.size
    repeats = repeats_for(kv_heads, group.size)
    if heads % (kv_heads * repeats) or padded > heads:
        repeats = heads // kv_heads
    sent = [query, *(state.repeat_interleave(repeats, dim=1) if repeats > 1 else state for state in (key, value))]
    if padded > heads:  # heads that attend evenly to all tokens and are dropped again
        sent = [F.pad(state, (0, 0, 0, 0, 0, padded - heads)) for state in sent]
    mine = range(group.rank * padded // group.size, (group.rank + 1) * padded // group.size)
    filled = query.shape[2] * group.size
    query, key, value = (x[:, :, :length] for x in to_heads(sent, group))  # (batch, heads / sp, seq, width)
    with _of_heads(module, heads, mine, repeats):
        parts = {name: _part(tensor, heads, mine) for name, tensor in named.items()}
        output, _ = own(
            module, query, key, value, _mask_part(mask, heads, mine), **parts
        )  # (batch, seq, heads / sp, D)
    if (
        length < filled
    ):  # not by zeros: beside a padding token's embedding of zeros they have no finite gradient in some models
        last = output[:, -1:].detach()
        output = torch.cat([output, last.expand(-1, filled - length, -1, -1)], dim=1)
    return to_sequence(output, group)[:, :, :heads].contiguous(), None


def _part(value: Any, heads: int, mine: range) -> Any:
    """This rank's part of what has one number for each head."""
    if not isinstance(value, Tensor) or value.ndim != 1 or len(value) != heads:
        return value
    return F.pad(value, (0, max(0, mine.stop - heads)))[mine.start : mine.stop]


def _mask_part(mask: Tensor | None, heads: int, mine: range) -> Tensor | None:
    """A mask i[B H S S] of single heads is cut; one for all heads stays."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != heads or heads == 1:
        return mask
    return F.pad(mask, (0, 0, 0, 0, 0, max(0, mine.stop - heads)))[:, mine.start : mine.stop]


@contextmanager
def _of_heads(module: nn.Module, heads: int, mine: range, repeats: int) -> Iterator[None]:
    """Inside, an attention module has this rank's numbers of each head, and as many queries for a key as there are now."""
    shown: dict[str, Any] = {
        name: _part(parameter, heads, mine)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 1 and len(parameter) == heads
    }
    groups = vars(module).get("num_key_value_groups")
    if repeats > 1 and isinstance(groups, int):
        shown["num_key_value_groups"] = max(1, groups // repeats)
    before = {name: vars(module)[name] for name in shown if name in vars(module)}
    vars(module).update(shown)
    try:
        yield
    finally:
        for name in shown:
            del vars(module)[name]
        vars(module).update(before)


def _mask(name: str, shared: Shared) -> Callable[..., Any]:
    own = AttentionMaskInterface()[name]

    def mask(q_length: int, kv_length: int, mask_function: Callable[..., Any], **named: Any) -> Any:
        if shared.whole.begins:
            return None
        if not shared.has_parts:
            return own(q_length=q_length, kv_length=kv_length, mask_function=mask_function, **named)
        given = named.get("attention_mask")
        if isinstance(given, Tensor) and given.ndim == 2 and given.shape[-1] != shared.length:
            named["attention_mask"] = (
                None  # ones for this rank's tokens, of a model that makes a mask where none is given
            )
        if shared.packed is not None:
            positions, documents = shared.packed
            mask_function = of_documents(mask_function, positions, documents)
            named["allow_is_causal_skip"] = False
        if shared.ring is not None:
            return _mask_of_rows(name, shared, mask_function, named)
        return own(q_length=shared.length, kv_length=shared.length, mask_function=mask_function, **named)

    return mask


def _mask_of_rows(
    name: str, shared: Shared, mask_function: Callable[..., Any], named: dict[str, Any]
) -> Tensor | None:
    """The mask of this rank's queries and all keys, b or i[B 1 S/sp S], S filled up; None where it is causal, or hides nothing.

    Eager attention adds the lowest number to what a query does not see, so that one that sees nothing attends evenly to all.

    Whether there is one is asked of whole rows, so that all ranks say the same.
    """
    length, size = shared.length, shared.group.size
    each = -(-length // size)
    given, window = named.get("attention_mask"), named.get("local_size")
    skips = named.pop("allow_is_causal_skip", True)
    if skips and (window is None or length < window) and (given is None or bool(given.all())):
        return None
    if each * size > length:
        named["allow_is_bidirectional_skip"] = False  # what fills up a row is hidden

    def of_last(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return mask_function(batch, head, query.clamp(max=length - 1), key)

    first = {"q_offset": shared.group.rank * each, "kv_offset": 0, "allow_is_causal_skip": False}
    own = AttentionMaskInterface()["sdpa"]
    mask: Tensor | None = own(q_length=each, kv_length=length, mask_function=of_last, **(named | first))
    if mask is None:
        return None
    if name == "eager":
        mask = torch.where(mask.any(-1, keepdim=True), mask.to(torch.uint8), EVENLY)
    return F.pad(mask, (0, each * size - length))
