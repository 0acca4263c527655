"""Finds some blocks of a model that stand for all of them, so that trials take no longer on a deep model.

The model of fewer blocks is no other model: it has the very blocks, parameters and hooks of the whole one. Blocks may be
left out if they are of stock code, equal to one that is kept in all that is set on them, and if one forward of the whole
model and one of the model with fewer blocks run the same ops on the same data: block by block, before, between and after.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn
from transformers import PretrainedConfig

from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_torch import module_hooks, own_modules
from hf_parallel.compat.private_transformers import makes_inputs_trained
from hf_parallel.model.layer_configs import settings_of_layers
from hf_parallel.model.libraries import LIBRARIES, QUANTISES, STOCK, package_of
from hf_parallel.model.meta import inputs_on_meta, on_meta
from hf_parallel.model.record import Op, Record, record_forward
from hf_parallel.model.stack import blocks_of, kind_of
from hf_parallel.model.structure import outline
from hf_parallel.model.unchanged import unchanged


# Ops that read values: what runs next may depend on weights, and then one batch does not show what another will run.
READS_VALUES = ("_local_scalar_dense", "is_nonzero", "equal.default", "nonzero", "unique", "masked_select")

LEAST_SAVED = 3  # a model of more than a third of the blocks saves less than it costs to compare it

Kind: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True)
class Kept:
    """Blocks that show what all blocks of a stack do.

    Args:
        stack: Name of the list of blocks.
        blocks: Blocks that are kept, rising.
        shown_by: Block of the whole model -> place in `blocks` of one that it equals.
    """

    stack: str
    blocks: tuple[int, ...]
    shown_by: tuple[int, ...]


@dataclass(frozen=True)
class Fewer:
    """A model that shares some of its blocks, and all else, with a whole one.

    Args:
        model: The model.
        kept: Its blocks.
        record: Record of its forward.
    """

    model: nn.Module
    kept: Kept
    record: Record


def fewer_blocks(
    model: nn.Module,
    whole: Record,
    sample: Mapping[str, Any],
    groups: Sequence[range] | None = None,
    *,
    is_on_meta: bool = False,
) -> Fewer | None:
    """The model with the fewest blocks that show what the whole one does, None where it cannot be shown that they do.

    Args:
        model: The whole model.
        whole: Record of a forward of the whole model.
        sample: The batch that was recorded.
        groups: Ranges of blocks that each keep those that they need, and their last one; None: all blocks are one group.
        is_on_meta: Whether it was recorded on the `meta` device.
    """
    depth = len(blocks_of(model, whole.stack))
    groups = groups or [range(depth)]
    if not whole.has_scalars or LEAST_SAVED * sum(min(len(group), 2) for group in groups) > depth:
        return None
    kinds = kinds_of_blocks(model, whole)
    kept = () if kinds is None else tuple(sorted({block for group in groups for block in _needed(kinds, group)}))
    if kinds is None or LEAST_SAVED * len(kept) > depth:
        return None
    fewer = with_blocks(model, whole.stack, kept)
    inside, given = (on_meta(fewer), inputs_on_meta(sample)) if is_on_meta else (nullcontext(), sample)
    try:
        with unchanged(fewer), inside:
            record = record_forward(fewer, whole.stack, [whole.stack], fewer.forward, given, with_scalars=True)
    except Exception:  # noqa: BLE001 - code that counts its blocks may raise anything
        return None
    if not _same_forward(whole, record, kept):
        return None
    places = {kinds[block]: place for place, block in reversed(list(enumerate(kept)))}
    shown_by = tuple(kept.index(block) if block in kept else places[kinds[block]] for block in range(depth))
    return Fewer(fewer, Kept(whole.stack, kept, shown_by), record)


def may_need_fewer(model: nn.Module, stack: str) -> bool:
    """Whether a stack may have blocks to leave out: the first, the last and one between them are mostly kept."""
    return len(blocks_of(model, stack)) >= 3 * LEAST_SAVED


def _needed(kinds: Sequence[Kind], group: range) -> set[int]:
    """The first block of each kind in a group of blocks, and the last, which feeds none of them."""
    first = {kinds[block]: block for block in reversed(group)}
    return {*first.values(), *group[-1:]}


def with_blocks(model: nn.Module, stack: str, kept: Sequence[int]) -> nn.Module:
    """A model that runs only some of the blocks of `model`; it shares them, and all other modules and parameters.

    Its config has the entries of those blocks in lists that have an entry for each block.
    """
    chosen = blocks_of(model, stack)
    configs = _configs_with_blocks(model, len(chosen), kept)
    here = made = _shallow(model, configs)
    for name in stack.split("."):
        own_modules(here)[name] = _shallow(here.get_submodule(name), configs)
        here = here.get_submodule(name)
    own_modules(here).clear()
    own_modules(here).update({str(place): chosen[block] for place, block in enumerate(kept)})
    return made


def _shallow(module: nn.Module, configs: Mapping[int, PretrainedConfig]) -> nn.Module:
    """A module of the same parameters, buffers and children, in tables of its own."""
    made: nn.Module = object.__new__(type(module))
    vars(made).update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(module).items()})
    config = vars(made).get("config")
    if id(config) in configs:
        vars(made)["config"] = configs[id(config)]
    return made


def _configs_with_blocks(model: nn.Module, depth: int, kept: Sequence[int]) -> dict[int, PretrainedConfig]:
    """Id of the model's config, and of that of its text, -> a copy for fewer blocks."""
    config = vars(base_model(model)).get("config")
    if not isinstance(config, PretrainedConfig):
        return {}
    made = config_with_blocks(config, depth, kept)
    return {id(config.get_text_config()): made.get_text_config(), id(config): made}


def config_with_blocks(config: PretrainedConfig, depth: int, kept: Sequence[int]) -> PretrainedConfig:
    """A copy for a model that has the blocks `kept` of `depth`: lists with an entry for each block keep theirs."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth:
            vars(text)[name] = type(value)(value[block] for block in kept)
    # Not by attribute: some configs check all of themselves at every assignment.
    vars(text)[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    if own := settings_of_layers(config.get_text_config()):
        text.per_layer_config = {place: own[block] for place, block in enumerate(kept) if block in own}
    return made


def is_stock(model: nn.Module, *, quantised: bool = False) -> bool:
    """Whether all modules are of libraries, run the forward that those gave them, and nobody else listens to them.

    Args:
        model: The model.
        quantised: Whether layers with quantised weights may be among them.
    """
    packages = (*STOCK, *QUANTISES) if quantised else STOCK
    return all(_is_stock_module(module, packages) for module in model.modules())


def _is_stock_module(module: nn.Module, packages: Sequence[str]) -> bool:
    functions = [type(module).forward, *(v for v in vars(module).values() if isinstance(v, CALLABLE))]
    return (
        package_of(type(module).__module__) in packages
        and "forward" not in vars(module)
        and all(makes_inputs_trained(hook) for hooks in module_hooks(module) for hook in hooks.values())
        and all(package_of(_home(function)) in packages for function in functions)
    )


def has_users_code(model: nn.Module) -> bool:
    """Whether a module runs code, or is watched by some, that is of none of the libraries that people train with."""
    for module in model.modules():
        functions = [type(module).forward, *(hook for hooks in module_hooks(module) for hook in hooks.values())]
        functions += [vars(module)["forward"]] if "forward" in vars(module) else []
        if any(package_of(_home(function)) not in LIBRARIES for function in functions):
            return True
    return False


CALLABLE = (types.FunctionType, types.MethodType)


def _home(function: Any) -> str:
    """The module whose code runs; a decorated function may carry the name of another."""
    inner = getattr(function, "__func__", function)
    return str(getattr(inner, "__globals__", {}).get("__name__", getattr(inner, "__module__", "")))


def kinds_of_blocks(model: nn.Module, record: Record) -> list[Kind] | None:
    """Kind of each block, equal where settings and ops are the same; None where blocks cannot be compared."""
    blocks = blocks_of(model, record.stack)
    if sorted(record.blocks) != list(range(len(blocks))) or not is_stock(model, quantised=True):
        return None
    if any(2 * len(blocks) > op.epoch > 0 and any(name in op.name for name in READS_VALUES) for op in record.ops):
        return None
    ran = _outline(record)
    last = len(blocks) - 1  # after it comes the tail
    return [
        (_settings(block), ran.get(2 * j + 1), ran.get(2 * j + 2) if j < last else None)
        for j, block in enumerate(blocks)
    ]


def _settings(block: nn.Module) -> Kind:
    """Collect the settings of a block and its modules, by which blocks that run alike are told."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    attributes = [(p, name, v) for p, module in block.named_modules() for name, v in sorted(vars(module).items())]
    numbers = tuple((path, name, value) for path, name, value in attributes if isinstance(value, (float, bool)))
    configs = tuple((path, id(value)) for path, _, value in attributes if isinstance(value, PretrainedConfig))
    marks = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return kind_of(block), marks, numbers, configs


def _outline(record: Record) -> dict[int, Kind]:
    """Epoch -> its ops and what they read and write, named by where that comes from as seen from there."""
    names: dict[int, list[str]] = {}
    for name, storage in record.parameters.items():
        names.setdefault(storage, []).append(name)
    made: dict[int, tuple[int, int]] = {}  # storage -> epoch and place in it where it was met first
    count: dict[int, int] = {}
    found: dict[int, list[Any]] = {}
    for op in record.ops:
        for storage in sorted(op.reads) + sorted(op.writes):
            if storage not in names and storage not in made:
                count[op.epoch] = count.get(op.epoch, 0) + 1
                made[storage] = op.epoch, count[op.epoch]
        found.setdefault(op.epoch, []).append(_outline_of_op(op, names, made, record.stack))
    for block, trace in record.blocks.items():
        paths = [tuple(path for path, _ in each) for each in (trace.return_tensors, trace.written, trace.arguments)]
        hooked = tuple((call.module, call.occurrence, outline(call.output)) for call in trace.hooked)
        found.setdefault(2 * block + 1, []).append((outline(trace.returned), *map(repr, paths), hooked))
    return {epoch: tuple(entries) for epoch, entries in found.items()}


def _outline_of_op(op: Op, names: Mapping[int, list[str]], made: Mapping[int, tuple[int, int]], stack: str) -> Kind:
    def place(storage: int) -> tuple[Any, ...]:
        if storage in names:
            return tuple(sorted(_relative(name, stack, op.epoch) for name in names[storage]))
        epoch, number = made[storage]
        return (epoch and epoch - op.epoch, number, not epoch)

    return op.name, op.scalars, op.is_view, *(tuple(sorted(map(repr, map(place, s)))) for s in (op.reads, op.writes))


def _relative(name: str, stack: str, epoch: int) -> str:
    """The name of a parameter, that of one in a block as seen from an epoch."""
    if not name.startswith(f"{stack}."):
        return name
    block, _, rest = name[len(stack) + 1 :].partition(".")
    return f"{int(block) - (epoch - 1) // 2:+d} {rest}"


def same_ops(one: Record, other: Record) -> bool:
    """Whether two forwards ran the same ops on the same data, whatever numbers (sizes, scales) they were given."""
    outlines = (_outline(_without_numbers(record)) for record in (one, other))
    return sorted(one.blocks) == sorted(other.blocks) and operator.eq(*outlines)


def _without_numbers(record: Record) -> Record:
    return replace(record, ops=[replace(op, scalars="") for op in record.ops])


def _same_forward(whole: Record, fewer: Record, kept: Sequence[int]) -> bool:
    """Whether a forward with the blocks `kept` runs all that the whole one does, but for the blocks that are left out."""
    here, there = _outline(fewer), _outline(whole)
    depth = len(whole.blocks)
    epochs = [(0, 0), (2 * len(kept), 2 * depth)]
    epochs += [(2 * place + 1, 2 * block + 1) for place, block in enumerate(kept)]
    epochs += [(2 * place + 2, 2 * block + 2) for place, block in enumerate(kept) if block + 1 < depth]
    return len(fewer.blocks) == len(kept) and all(here.get(mine) == there.get(other) for mine, other in epochs)
