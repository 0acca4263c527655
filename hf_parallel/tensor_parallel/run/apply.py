"""Carry out a tensor-parallel plan in place: local parameters, and the forwards of sharded layers in place of the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import MethodType

import torch
from torch import nn

from hf_parallel.compat.private_peft import base_model, tuner_layers
from hf_parallel.compat.private_torch import own_buffers, own_parameters
from hf_parallel.errors import PlanError
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.adapters import install_adapters
from hf_parallel.tensor_parallel.run.expert_routing import install_routing
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import Deferral, SharedCopy, TPGroup
from hf_parallel.tensor_parallel.run.reads import install_reads, open_in
from hf_parallel.tensor_parallel.run.sequence import install_regions
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds, install_seeds
from hf_parallel.tensor_parallel.run.sharded_forwards import (
    EntryState,
    InputState,
    LinearState,
    NormState,
    PartialState,
    RowState,
    Use,
    column_forward,
    entry_forward,
    gather_forward,
    latent_forward,
    norm_forward,
    partial_forward,
    reduce_forward,
    row_forward,
    sum_forward,
    take_inputs,
    vocab_head_forward,
)
from hf_parallel.tensor_parallel.run.vocab import install_embedding, install_loss
from hf_parallel.tensor_parallel.run.whole_tensors import Scope
from hf_parallel.tensor_parallel.shard_plan import LinearPlan, PairPlan, TPPlan


def apply_tensor_parallel(
    model: nn.Module,
    plan: TPPlan,
    group: TPGroup,
    tp_rank: int,
    holds: Callable[[str], bool],
    *,
    deferral: Deferral | None = None,
    reduces_in_fp32: bool = False,
    defers_logits: bool = False,
) -> None:
    """Turn `model` into the part of it that `tp_rank` computes. In place; call after the model is cut into stages.

    Parameters keep their identity (`p.data` becomes the shard, an existing gradient is cut alike), so ties,
    optimizers and tables by id stay right; optimizer state that already exists does not and must be made again.
    `out_features` and the like keep the full sizes. All ranks of `group` must then run the same batches in lockstep.

    Copies: `copy.deepcopy` of the result is a working model that communicates over the same group.

    Random numbers: outside pairs all tp ranks must draw the same dropout masks, which holds when they are seeded
    equally and draw equally often (the Trainer seeds all ranks alike). Inside a pair each rank draws its own; whether
    a pair has dropout is decided now, from rates above zero.

    Args:
        model: The model, or a stage of it, the plan was made for.
        plan: From `plan_tensor_parallel`.
        group: The tensor-parallel group.
        tp_rank: This rank in `group`.
        holds: Whether this stage holds the parameter (or per-head buffer) of that name; the others are not touched.
        deferral: Puts off the weight gradients of sharded layers, for a schedule that splits backward passes.
        reduces_in_fp32: Whether half-precision partial sums are made and summed over the ranks in fp32.
        defers_logits: Whether a head that is sharded over the vocabulary leaves its logits unmade for the loss.

    Raises:
        PlanError: If the plan is for another number of ranks, was applied before, or does not fit the parameters.
    """
    if plan.tp_size == 1:
        return
    shared = SharedCopy(group, deferral, widens=reduces_in_fp32)
    held = {name: linear for name, linear in plan.linears.items() if holds(f"{name}.weight")}
    _refuse(model, plan, group, held)
    tied: set[int] = set()
    for name, linear in held.items():
        module = model.get_submodule(name)
        if linear.role != "latent" and id(own_parameters(module)["weight"]) not in tied:
            shard_parameter(module, "weight", linear.weight, plan.tp_size, tp_rank)
            tied.add(id(own_parameters(module)["weight"]))
        if linear.role == "vocab_embedding":
            install_embedding(module, shared, *linear.weight.ranges(plan.tp_size, tp_rank)[0])
            continue
        _apply_linear(module, linear, shared, plan.tp_size, tp_rank, has_bias=holds(f"{name}.bias"))
        if linear.role == "vocab_head":
            columns = _columns_of(linear, plan.tp_size, tp_rank)
            install_loss(base_model(model), module, shared, *columns, defers_logits=defers_logits)
    seeds = PairSeeds(plan.tp_size, tp_rank)
    install_adapters(model, plan, shared, seeds, tp_rank, holds)
    for pair in plan.pairs:
        if pair.row in held or (pair.row not in plan.linears and any(holds(name) for name in pair.sliced)):
            _apply_pair(model, pair, shared, tp_rank, is_linear=pair.row in held)
            install_seeds(model, pair, seeds, row_is_linear=pair.row in held)
    if plan.sequence is not None:
        install_regions(model, plan.sequence, shared, holds, seeds)
    _detect_reads(model, plan, shared, tp_rank, holds)


def _refuse(model: nn.Module, plan: TPPlan, group: TPGroup, held: Iterable[str]) -> None:
    """Refuse a plan for another number of ranks, and modules that are sharded already."""
    if plan.tp_size != group.size():
        raise PlanError(
            f"the plan is for tp_size={plan.tp_size}, the group has {group.size()} ranks. "
            f"Make a plan for {group.size()}."
        )
    for name in held:
        if vars(model.get_submodule(name)).keys() & {"tp_linear", "tp_embedding"}:
            raise PlanError(f"module {name} is already tensor parallel. Apply a plan once, to a fresh model.")


def _columns_of(head: LinearPlan, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """First column of this rank in the logits, and the number of columns of the rank with the most."""
    ranges = [head.weight.ranges(tp_size, rank)[0] for rank in range(tp_size)]
    return ranges[tp_rank][0], max(length for _, length in ranges)


def seen_in_parts(model: nn.Module, plan: TPPlan) -> dict[str, str]:
    """Modules whose inputs or outputs are parts, by name, and parts of what; of all stages.

    Where several pairs share a root (a block with its MLP's layers in itself), only layers, norms and owners of sliced
    tensors are known to be between the sharded layers.
    """
    heads = [name for name, linear in plan.linears.items() if linear.role == "vocab_head"]
    found = dict.fromkeys(heads, "part of the vocabulary")
    for pair in plan.pairs:
        owners = {name.rpartition(".")[0] for name in pair.sliced}
        named = {*pair.columns, pair.row, *pair.norms, *pair.entries, *owners} - {pair.root}
        prefix = f"{pair.root}."
        alone = not any(other is not pair and f"{other.root}.".startswith(prefix) for other in plan.pairs)
        if pair.root and alone:
            named |= {prefix + name for name, _ in model.get_submodule(pair.root).named_modules() if name}
        found |= dict.fromkeys(sorted(named), "channels")
    for block in plan.sequence.blocks if plan.sequence is not None else ():
        if not block.whole:
            names = [f"{block.name}.{name}".rstrip(".") for name, _ in model.get_submodule(block.name).named_modules()]
            found |= dict.fromkeys(names, "part of the sequence")
    return found


def _detect_reads(
    model: nn.Module, plan: TPPlan, shared: SharedCopy, tp_rank: int, holds: Callable[[str], bool]
) -> None:
    """Detect reads of sharded parameters outside of the modules that work on shards: roots of pairs, and embeddings."""
    scopes: dict[str, Scope] = {}
    for name, linear in plan.linears.items():
        if linear.role == "vocab_embedding" and holds(f"{name}.weight"):
            scopes[f"{name}.weight"] = Scope()
            open_in(model.get_submodule(name), scopes[f"{name}.weight"])
    roots: dict[str, Scope] = {}
    for pair in plan.pairs:
        if any(holds(name) for name in pair.sliced):
            scope = roots.get(pair.root)
            if scope is None:
                scope = roots[pair.root] = Scope(depth=0 if pair.root else 1)  # a model's own forward may be replaced
                if pair.root:
                    open_in(model.get_submodule(pair.root), scope)
            scopes.update(dict.fromkeys(pair.sliced, scope))
    specs = {name: spec for name, spec in plan.shard_specs().items() if holds(name)}
    for name, layer in tuner_layers(model).items():
        inside = [
            full for key, _ in layer.named_parameters() if (full := f"{name}.{key}") in specs.keys() - scopes.keys()
        ]
        if inside:  # PEFT's forward looks at dtypes of its parts
            scope = Scope()
            open_in(layer, scope)
            scopes |= dict.fromkeys(inside, scope)
    install_reads(model, specs, scopes, shared, tp_rank, reports=tp_rank == 0)


def _apply_linear(
    module: nn.Module, linear: LinearPlan, shared: SharedCopy, tp_size: int, tp_rank: int, *, has_bias: bool
) -> None:
    """Shard a layer's bias and replace its forward. A stage that holds a tied head's weight does not hold its bias."""
    if has_bias and linear.bias is not None and linear.role != "latent":
        shard_parameter(module, "bias", linear.bias, tp_size, tp_rank)
    vars(module)["tp_linear"] = LinearState(
        copy=shared,
        transposed=linear.transposed,
        weight_dim=linear.weight.dim,
        lengths=linear.weight.local_sections(tp_size, tp_rank),
        replicated=[not section.sharded for section in linear.weight.sections],
        gather_sizes=[linear.weight.local_size(tp_size, rank) for rank in range(tp_size)],
        entry=linear.entry,
        take=linear.take[tp_rank] if linear.take else None,
        role=linear.role,
    )
    forwards = {
        "column": column_forward,
        "row": row_forward,
        "gather": gather_forward,
        "latent": latent_forward,
        "reduce": reduce_forward,
        "vocab_head": vocab_head_forward,
    }
    vars(module)["forward"] = MethodType(forwards[linear.role], module)


def shard_parameter(module: nn.Module, key: str, spec: ShardSpec, tp_size: int, tp_rank: int) -> None:
    parameter = own_parameters(module)[key]
    if parameter is None:
        raise PlanError(f"the plan shards {key} of {type(module).__name__}, which has none. Plan this very model.")
    if parameter.shape[spec.dim] == spec.local_size(tp_size, tp_rank) != spec.full_size:
        return  # another module that owns it too has sharded it
    grad, parameter.grad = parameter.grad, None
    shard = spec.shard(parameter.data, tp_size, tp_rank)
    # While a graph of an earlier forward pass is alive (trial runs leave some in cycles, user code keeps others), torch takes gradients
    # of the whole shape. It forgets that when the type changes.
    parameter.data = shard.new_empty(0, dtype=torch.float32 if shard.dtype == torch.float64 else torch.float64)
    parameter.data = shard
    if grad is not None:
        parameter.grad = spec.shard(grad, tp_size, tp_rank)


def _apply_pair(model: nn.Module, pair: PairPlan, shared: SharedCopy, tp_rank: int, *, is_linear: bool) -> None:
    tp_size = shared.group.size()
    for rewrite in pair.rewrites:
        set_attribute(model.get_submodule(rewrite.module), rewrite.attribute, rewrite.values[tp_rank])
    _slice_tensors(model, pair, tp_size, tp_rank)
    root = model.get_submodule(pair.root)
    uses = _uses(model, pair, tp_size, tp_rank)
    if uses:
        if "tp_partial" not in vars(root):
            put_over(root, "tp_partial", PartialState(shared, {}), partial_forward)
        prefix = f"{pair.root}." if pair.root else ""
        vars(root)["tp_partial"].uses.update({name.removeprefix(prefix): use for name, use in uses.items()})
    for name, spec in pair.norms.items():
        sizes = [spec.local_size(tp_size, rank) for rank in range(tp_size)]
        state = NormState(shared, sizes, sum(sizes[:tp_rank]))
        put_over(model.get_submodule(name), "tp_norm", state, norm_forward)
    if pair.routing is not None:
        install_routing(model.get_submodule(pair.row), pair.routing, tp_size, tp_rank)
    for name in pair.entries:
        put_over(model.get_submodule(name), "tp_entry", EntryState(shared), entry_forward)
    if not is_linear:
        put_over(model.get_submodule(pair.row), "tp_row", RowState(shared), sum_forward)
    if pair.inputs:
        if "tp_inputs" not in vars(root):
            vars(root)["tp_inputs"] = InputState(shared, (), tp_rank)
            root.register_forward_pre_hook(take_inputs, with_kwargs=True)
        vars(root)["tp_inputs"].rules += pair.inputs


def _slice_tensors(model: nn.Module, pair: PairPlan, tp_size: int, tp_rank: int) -> None:
    for name, spec in pair.sliced.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if key in own_parameters(module):
            shard_parameter(module, key, spec, tp_size, tp_rank)
        else:
            own_buffers(module)[key] = spec.shard(model.get_buffer(name), tp_size, tp_rank)


def _uses(model: nn.Module, pair: PairPlan, tp_size: int, tp_rank: int) -> dict[str, Use]:
    """Parameters of the pair of which all ranks hold the same elements, and how each rank uses them."""
    uses = {name: Use() for name in pair.partial} | {name: Use(1.0 / tp_size) for name in pair.scaled}
    for name, spec in pair.sliced.items():
        whole = tuple(not section.sharded for section in spec.sections)
        if any(whole) and name.rpartition(".")[2] in own_parameters(model.get_submodule(name.rpartition(".")[0])):
            uses[name] = Use(1.0, spec.dim, tuple(spec.local_sections(tp_size, tp_rank)), whole)
    return uses


def set_attribute(module: nn.Module, attribute: str, value: int | tuple[int, ...]) -> None:
    """Set `attribute` of `module`; `config.<key>` sets a key of a config that only this module sees."""
    holder, _, key = attribute.rpartition(".")
    if not holder:
        old = getattr(module, key)
        setattr(module, key, list(value) if isinstance(old, list) and isinstance(value, tuple) else value)
        return
    private = copy.copy(getattr(module, holder))
    private.__dict__[key] = value
    setattr(module, holder, private)
