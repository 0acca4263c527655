"""Adapters (LoRA) on sharded linear layers: the tuner layer communicates once for the layer that it is on and for its own.

PEFT's forward of a tuner layer, `base_layer(x) + lora_B(lora_A(dropout(x))) * scaling`, runs on each rank's parts. On a column
its input enters for both; on a row both leave partial sums, which are added before the one all-reduce.

Dropout before an adapter draws, from the stream that all ranks have in common, a mask for the whole input, of which a rank
uses its own part: the masks are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.model.tensors import map_tensors
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import SharedCopy, copy_to_tp, reduce_from_tp
from hf_parallel.tensor_parallel.run.reads import own
from hf_parallel.tensor_parallel.run.sequence import leaves_partial
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds
from hf_parallel.tensor_parallel.run.sharded_forwards import LinearState, taken
from hf_parallel.tensor_parallel.shard_plan import TPPlan


@dataclass
class _DropoutState:
    """Settings of the dropout before an adapter, kept as `tp_dropout`; `spec` is the layout of its input, if that is a part."""

    seeds: PairSeeds
    spec: ShardSpec | None
    tp_size: int
    tp_rank: int


def install_adapters(
    model: nn.Module,
    plan: TPPlan,
    shared: SharedCopy,
    seeds: PairSeeds,
    tp_rank: int,
    holds: Callable[[str], bool],
) -> None:
    """Let tuner layers communicate for their base layers. In place; call when the linear layers are sharded.

    Args:
        model: The model.
        plan: Its plan.
        shared: Shared copy of the sharded layers.
        seeds: Seeds of the model's pairs.
        tp_rank: This rank.
        holds: Whether this stage holds the parameter of that name.
    """
    for name, layer in tuner_layers(model).items():
        if not any(holds(f"{name}.{key}") for key, _ in layer.named_parameters()):
            continue
        linear = plan.linears.get(f"{name}.base_layer")
        is_paired = linear is not None and linear.role in ("column", "latent", "row", "reduce")
        by_inputs = linear is not None and linear.role in ("row", "reduce")
        spec = linear.weight if linear is not None and by_inputs else None
        for dropout in getattr(layer, "lora_dropout", {}).values():
            put_over(dropout, "tp_dropout", _DropoutState(seeds, spec, plan.tp_size, tp_rank), _dropout_forward)
        if linear is not None and linear.role == "gather" and hasattr(layer, "get_delta_weight"):
            vars(layer)["tp_delta"] = linear.weight, plan.tp_size, tp_rank
            vars(layer)["tp_delta_inner"] = layer.get_delta_weight
            vars(layer)["get_delta_weight"] = MethodType(_part_of_delta, layer)
        if not is_paired:
            continue
        for part in layer.modules():
            state: LinearState | None = vars(part).get("tp_linear")
            if state is not None:
                state.bare = True
        put_over(layer, "tp_adapted", shared, _adapted_forward)


def _adapted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    shared: SharedCopy = self.tp_adapted
    state: LinearState = self.base_layer.tp_linear

    def enter(_: tuple[str | int, ...], x: Tensor) -> Tensor:
        partial = shared.partial_of(x)
        return shared(x) if partial is None else partial

    if state.role == "column" and state.entry:
        args, kwargs = map_tensors(enter, args), map_tensors(enter, kwargs)
    out: Tensor = self.tp_adapted_inner(*args, **kwargs)
    if state.role in ("row", "reduce") and not leaves_partial(self):
        bias = own(self.base_layer, "bias")
        out = reduce_from_tp(out, shared.group, widens=shared.widens)
        out = out if bias is None else out + bias  # after the sum: otherwise each rank would add the bias
    if state.role in ("latent", "reduce"):
        out = copy_to_tp(out, shared.group, widens=shared.widens)
    return taken(state, out, -1) if state.role == "reduce" else out


def _part_of_delta(self: Any, adapter: str) -> Tensor:
    """Part of what `merge_adapter` adds to a base weight that is a part, too: the adapter of a gathered layer is whole."""
    spec, tp_size, tp_rank = self.tp_delta
    part: Tensor = spec.shard(self.tp_delta_inner(adapter), tp_size, tp_rank)
    return part


def _dropout_forward(self: Any, x: Tensor) -> Any:
    state: _DropoutState = self.tp_dropout
    rate = getattr(self, "p", 0.0)  # no dropout is an nn.Identity
    if not self.training or not rate:
        return self.tp_dropout_inner(x)
    with state.seeds.in_common():
        if state.spec is None:
            return self.tp_dropout_inner(x)
        mask = F.dropout(x.new_ones(*x.shape[:-1], state.spec.full_size), rate)  # (..., in)
    index = state.spec.index(state.tp_size, state.tp_rank).to(x.device)
    return x * mask.index_select(-1, index)  # (..., in / tp)
