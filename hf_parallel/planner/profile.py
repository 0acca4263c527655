"""What a model costs per token, from its config alone: its products, parameters and what attention is like.

The model is built without weights; its modules tell the products. No code is for one architecture: names that configs
give to one and the same number are in a table.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hf_parallel.errors import ConfigError, PlanError
from hf_parallel.memory.heads import beyond_even
from hf_parallel.memory.moments import Recorded
from hf_parallel.memory.shape import positions_of
from hf_parallel.memory.terms import ModelShape, Precision, SavedBytes
from hf_parallel.memory.variant import Variant
from hf_parallel.memory.widths import numbers_beside, width_of
from hf_parallel.model.layer_configs import config_of_layer
from hf_parallel.settings.sections import ActivationCheckpointingConfig
from hf_parallel.settings.values import spelled
from hf_parallel.tensor_parallel.units import most_of


# How configs name the same number; the first that is there counts.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "active experts": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
        "expert_top_k",
    ),
    "query width": ("qk_head_dim", "head_dim", "attention_head_dim", "kv_channels"),
    "value width": ("v_head_dim",),
    "window": ("sliding_window", "window_size", "attention_chunk_size"),
    "dropout": (
        "resid_pdrop",
        "hidden_dropout",
        "residual_dropout",
        "hidden_dropout_prob",
        "resid_dropout",
        "dropout",
    ),
}
# Norms of what a block's last product gives.
AFTER_PRODUCTS: Final = ("post_feedforward", "post_mlp", "post_ffn")
WINDOWED: Final = ("sliding_attention", "chunked_attention", "local")
Cut = Literal["column", "row", "none"]


@dataclass(frozen=True)
class Product:
    """A matrix product that tokens pass.

    Attributes:
        inputs: Width of a token before it.
        outputs: Width after it.
        times: Weights of that shape that one token passes (experts that it is routed to).
        stored: Weights of that shape that there are.
        cut: How tensor parallelism shares it.
        is_attention: Whether it belongs to attention.
    """

    inputs: int
    outputs: int
    times: float = 1.0
    stored: int = 1
    cut: Cut = "column"
    is_attention: bool = False


@dataclass(frozen=True)
class BlockProfile:
    """A kind of block.

    Attributes:
        products: Products of one token.
        parameters: All of them.
        heads: Query heads, 0 without attention.
        kv_heads: Key-value heads.
        head_dim: Width of a query.
        value_dim: Width of a value.
        window: Tokens that a token attends to, None for all before it.
        has_rms: Whether norms are RMS norms.
        ends_in_norm: Whether a norm reads what the last product gives.
        numbers: See `ModelShape`.
    """

    products: tuple[Product, ...]
    parameters: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    has_rms: bool = True
    ends_in_norm: bool = False
    numbers: frozenset[int] = frozenset()

    @functools.cached_property
    def unread(self) -> Product | None:
        """The product whose result is the block's own but for a sum, so that no backward needs it; None if there is none."""
        rows = [one for one in self.products if one.cut == "row"]
        if self.ends_in_norm or not rows or any(one.stored > 1 for one in self.products):
            return None
        return next((one for one in reversed(rows) if not one.is_attention), rows[-1])

    @functools.cached_property
    def active(self) -> float:
        """Product weights that one token passes."""
        return sum(one.inputs * one.outputs * one.times for one in self.products)

    @functools.cached_property
    def width(self) -> float:
        """Width of the feed-forward part that one token passes, of all its experts."""
        return sum(p.inputs * p.times for p in self.products if p.cut == "row" and not p.is_attention)

    @functools.cached_property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a gate (SwiGLU and the like)."""
        wide = sum(p.outputs * p.times for p in self.products if p.cut == "column" and not p.is_attention)
        return wide > 1.5 * self.width

    @functools.cached_property
    def routed(self) -> float:
        """Copies of a token that go to experts."""
        return max((p.times for p in self.products if p.stored > 1), default=0.0)

    @functools.cached_property
    def expert_width(self) -> int:
        """Width of the feed-forward part of one expert; 0 without experts."""
        return min((p.inputs for p in self.products if p.stored > 1 and p.cut == "row"), default=0)

    @functools.cached_property
    def num_experts(self) -> int:
        """Number of experts, of which a token goes to some; 1 without experts."""
        return max((p.stored for p in self.products), default=1)

    @functools.cached_property
    def experts(self) -> float:
        """Parameters of all experts."""
        return sum(float(p.inputs * p.outputs * p.stored) for p in self.products if p.stored > 1)

    def held(self, ep: int, whole: int = 1) -> float:
        """Parameters of a rank that has one of `ep` parts of the experts; experts that `whole` tp ranks have count for each."""
        return self.parameters - self.experts * (1 - whole / ep)

    def beyond_even(self, tp: int) -> float:
        """Parameters that the tensor-parallel rank with most has beyond an even part of the block."""
        queries, keys = beyond_even(self.heads, self.kv_heads, tp, self.numbers)
        few = {self.kv_heads * self.head_dim, self.kv_heads * self.value_dim} if self.kv_heads < self.heads else set()
        heads = sum(
            one.inputs * one.outputs * (keys if one.cut == "column" and one.outputs in few else queries)
            for one in self.products
            if one.is_attention and one.cut != "none"
        )
        if self.num_experts > 1 or not self.width:
            return heads
        share = most_of(int(self.width), tp) / self.width - 1 / tp
        wide = sum(one.inputs * one.outputs for one in self.products if not one.is_attention and one.cut != "none")
        return heads + wide * share

    def pairs(self, seq_len: int) -> float:
        """Query-key pairs of one row and head."""
        if not self.heads:
            return 0.0
        if self.window is None or self.window >= seq_len:
            return seq_len * (seq_len + 1) / 2
        return self.window * (self.window + 1) / 2 + (seq_len - self.window) * self.window


NONE: Final = ActivationCheckpointingConfig()


class Source:
    """A config, of which steps are recorded when they are asked for, each once."""

    def __init__(self, config: Any) -> None:
        self._config = copy.deepcopy(config)
        self._found: dict[tuple[Precision, ActivationCheckpointingConfig, Variant], Recorded | None] = {}
        self._traced: dict[Precision, SavedBytes | None] = {}

    def recorded(
        self, precision: Precision, recompute: ActivationCheckpointingConfig, variant: Variant
    ) -> Recorded | None:
        """Memory of a step on a GPU; None if the model cannot be run on fake tensors.

        Args:
            precision: See `hf_parallel.memory.terms.Layout`.
            recompute: Recomputation in each block; for a model that cannot run with it, a step without it is recorded.
            variant: The way in which the step runs otherwise.
        """
        key, without = (precision, recompute, variant), (precision, NONE, variant)
        if without in self._found and self._found[without] is None:
            return None  # it would fail again, after as long
        if key not in self._found:
            from hf_parallel.activation_checkpointing.recorded import checkpoint_of  # brings torch
            from hf_parallel.memory.record import record_step

            checkpoint = checkpoint_of(recompute)
            found = record_step(self._config, precision, replace(variant, checkpoint=checkpoint))
            if found is None and checkpoint is not None:
                found = self.recorded(precision, NONE, variant)
            self._found[key] = found
        return self._found[key]

    def traced(self, precision: Precision) -> SavedBytes | None:
        """Bytes that autograd keeps of a block, of a model whose step cannot be recorded; None if it cannot be traced either."""
        if precision not in self._traced:
            from hf_parallel.memory.block import trace_block  # brings torch

            self._traced[precision] = trace_block(self._config, precision)
        return self._traced[precision]


@dataclass(frozen=True)
class ModelProfile:
    """Sizes of a model, as far as the planner needs them.

    Attributes:
        hidden: Width of the residual stream.
        vocab: Rows of the embedding.
        kinds: The kinds of blocks.
        layers: The kind of each block, in order.
        embedding: Parameters outside of the blocks and the head.
        positions: Part of them in tables that ranks of tensor parallelism have whole.
        head: Parameters of the head, also if they are the embedding's.
        tied: Whether the head's weight is the embedding's.
        has_dropout: Whether the residual stream has dropout.
        source: Where it is from, None if it was made by hand.
    """

    hidden: int
    vocab: int
    kinds: tuple[BlockProfile, ...]
    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    has_dropout: bool = False
    positions: int = 0
    source: Source | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def shape(self) -> ModelShape:
        """The numbers that memory depends on."""
        kind = self.kinds[self.layers[len(self.layers) // 2]]
        return ModelShape(
            parameters=self.parameters,
            layers=len(self.layers),
            hidden=self.hidden,
            intermediate=int(kind.width),
            vocab=self.vocab,
            heads=kind.heads,
            kv_heads=kind.kv_heads,
            head_dim=kind.head_dim,
            embedding=self.embedding,
            positions=self.positions,
            head=self.head,
            tied=self.tied,
            gated=kind.is_gated,
            numbers=kind.numbers,
            expert_width=int(kind.expert_width),
            largest=max(self.vocab * self.hidden, *(p.inputs * p.outputs for p in kind.products), 1),
        )

    @functools.cached_property
    def parameters(self) -> int:
        """All of them; tied ones count once."""
        blocks = sum(self.kinds[kind].parameters for kind in self.layers)
        return blocks + self.embedding + (0 if self.tied else self.head)

    @functools.cached_property
    def active(self) -> float:
        """Product weights that one token passes, the head's included."""
        return sum(self.kinds[kind].active for kind in self.layers) + self.vocab * self.hidden

    def flops(self, seq_len: int) -> float:
        """FLOPs of one token, forward and backward, with the whole attention square and nothing computed again."""
        attended = sum(self.kinds[kind].heads > 0 for kind in self.layers)
        return 6 * self.active + 12 * attended * self.hidden * seq_len


def profile_of(model: Any) -> ModelProfile:
    """The profile of a transformers config, a `config.json`, a folder with one, or of a `ModelProfile` itself.

    Profiles are kept for the process by the content of the config.

    Raises:
        ConfigError: There is no such config, or no causal language model for it.
    """
    if isinstance(model, ModelProfile):
        return model
    from hf_parallel.memory.shape import config_of  # brings torch

    config = config_of(str(model)) if isinstance(model, str) or hasattr(model, "__fspath__") else model
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ConfigError(
            f"model={spelled(model)}: expected a transformers config, or a path to one. Give AutoConfig.from_pretrained(...)."
        )
    text = json.dumps(to_dict(), sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()
    found = _kept().get(key)
    if found is None:
        found = _kept()[key] = _walk(config)
    return found


@functools.cache
def _kept() -> dict[str, ModelProfile]:
    return {}


def _walk(config: Any) -> ModelProfile:
    """Build the model without weights and read its modules."""
    from hf_parallel.memory.unread import build_on_meta
    from hf_parallel.model.stack import blocks_of, candidate_stacks, kind_of

    model, text = build_on_meta(config), config.get_text_config()
    try:
        blocks = blocks_of(model, candidate_stacks(model)[0])
    except PlanError as error:
        raise ConfigError(
            f"model type {spelled(config.model_type)}: time is predicted from a stack of at least 2 repeated blocks, and "
            f"{type(model).__name__} has none. Give the config of a model with more blocks, or set the layout yourself."
        ) from error
    kinds: dict[Any, int] = {}
    found: list[BlockProfile] = []
    layers = []
    for index, block in enumerate(blocks):
        key = kind_of(block), _layer_type(text, index)
        if key not in kinds:
            kinds[key] = len(found)
            found.append(_of_block(block, text, index))
        layers.append(kinds[key])
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    head = 0 if output is None else output.weight.numel()
    inside = sum(found[kind].parameters for kind in layers)
    outside = sum(p.numel() for p in model.parameters()) - inside - (0 if tied else head)
    dropout = _first(text, "dropout")
    return ModelProfile(
        hidden=embedding.shape[1] if output is None else output.weight.shape[1],
        vocab=embedding.shape[0],
        kinds=tuple(found),
        layers=tuple(layers),
        embedding=outside,
        head=head,
        tied=tied,
        has_dropout=isinstance(dropout, float) and dropout > 0,
        positions=positions_of(model),
        source=Source(config),
    )


def _first(config: Any, what: str) -> Any:
    values = (getattr(config, name, None) for name in NAMES[what])
    return next((value for value in values if value is not None), None)


def _layer_type(text: Any, index: int) -> str:
    types = getattr(text, "layer_types", None) or ()
    return str(types[index]) if index < len(types) else "full_attention"


def _of_block(block: Any, text: Any, index: int) -> BlockProfile:
    kind, text = _layer_type(text, index), config_of_layer(text, index)
    hidden = getattr(text, "hidden_size", None)
    if not isinstance(hidden, int):
        raise ConfigError(
            f"the config of {text.model_type!r} has hidden_size={spelled(hidden)}: time is predicted from an integer. Add it to "
            "the config."
        )
    heads = int(getattr(text, "num_attention_heads", 0) or 0) if "attention" in kind and "linear" not in kind else 0
    head_dim = _first(text, "query width") or hidden // max(1, heads)
    window = _first(text, "window") if kind in WINDOWED else None
    return BlockProfile(
        products=tuple(_products(block, text, hidden)),
        parameters=sum(p.numel() for p in block.parameters()),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        value_dim=int(_first(text, "value width") or head_dim),
        window=window if isinstance(window, int) else None,
        has_rms=any("rms" in type(module).__name__.lower() for module in block.modules()),
        ends_in_norm=any(name.startswith(AFTER_PRODUCTS) for name, _ in block.named_children()),
        numbers=numbers_beside(block, width_of(text, hidden)),
    )


def _products(block: Any, text: Any, hidden: int) -> Iterator[Product]:
    """Every weight of two dimensions as one product, every one of three as a stack of experts."""
    active = _first(text, "active experts")
    weights: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
    for path, module in block.named_modules():
        turned = type(module).__name__ == "Conv1D"  # (inputs, outputs), unlike nn.Linear
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim in (2, 3) and "bias" not in name:
                parent = path if parameter.ndim == 3 else path.rpartition(".")[0]
                weights.setdefault(parent, []).append((path, tuple(parameter.shape), turned))
    for parent, own in weights.items():
        for place, (path, shape, turned) in enumerate(own):
            inputs, outputs = _widths(shape, turned, hidden, last=place == len(own) - 1)
            times, stored = _experts(shape, active)
            row = outputs == hidden and (inputs != hidden or place == len(own) - 1)
            small = len(shape) == 2 and min(inputs, outputs) < hidden / 16  # routers, convolutions, low ranks
            cut: Cut = "none" if small else "row" if row else "column"
            yield Product(inputs, outputs, times, stored, cut, "att" in parent.lower() or "att" in path.lower())


def _widths(shape: tuple[int, ...], turned: bool, hidden: int, *, last: bool) -> tuple[int, int]:
    """Inputs and outputs of a weight; a stack of experts may hold them in either order."""
    first, second = shape[-2:]
    if len(shape) == 3:  # experts begin at the width of the residual stream and end there
        other = second if first == hidden else first
        return (other, hidden) if last else (hidden, other)
    return (first, second) if turned else (second, first)


def _experts(shape: tuple[int, ...], active: Any) -> tuple[float, int]:
    """Weights of this shape that one token passes, and how many there are."""
    count = int(active) if isinstance(active, int) else 1
    if len(shape) == 3:
        return float(min(count, shape[0])), shape[0]
    return 1.0, 1
