"""Tells the tensors of a block's step apart by the product or norm that makes or reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import Tensor, nn

from hf_parallel.memory.allocations import Block
from hf_parallel.memory.meter import of_any_block


class Known(NamedTuple):
    """Marks by which the tensors of a step are told apart.

    Attributes:
        shared: See `_shared_results`.
        between: See `_modules_between`.
        gathered: See `_gathered_results`.
        sent: See `_sent_results`.
        columns: See `_columns`.
        shapes: Shapes of parameters.
        stacks: Shapes of a block's stacks of experts.
        length: Tokens of the row.
    """

    shared: set[tuple[str, str]]
    between: dict[str, tuple[str, str]]
    gathered: set[tuple[str, str]]
    sent: set[tuple[str, str]]
    columns: dict[str, tuple[int, int]]
    shapes: set[tuple[int, ...]]
    stacks: set[tuple[int, ...]]
    length: int

    def is_routed(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is of the experts: a stack like their weights, or a row for each expert that a token goes to."""
        if not self.stacks or shape in self.shapes:
            return shape in self.stacks
        return len(shape) == len("th") and shape[0] > self.length and shape[0] % self.length == 0


def known_of(model: nn.Module, block: nn.Module, length: int, *, hidden: int) -> Known:
    """The marks of `block`, one of the blocks of `model`, for a row of `length` tokens and a residual stream of `hidden` elements."""
    name = next(name for name, one in model.named_modules() if one is block)

    def placed(path: str) -> str:
        return of_any_block(f"{name}.{path}")

    return Known(
        shared={(op, placed(path)) for op, path in _shared_results(block)},
        between={
            placed(path): (placed(parent), placed(last))
            for path, (parent, last) in _modules_between(block, hidden).items()
        },
        gathered={(op, placed(path)) for op, path in _gathered_results(block)},
        sent={(op, placed(path)) for op, path in _sent_results(block)},
        columns={placed(path): place for path, place in _columns(block).items()},
        shapes={tuple(parameter.shape) for parameter in model.parameters()},
        stacks={tuple(parameter.shape) for parameter in block.parameters() if parameter.ndim == len("ewh")},
        length=length,
    )


def made_between(made: Iterable[Block], between: dict[str, tuple[str, str]]) -> set[int]:
    """Ids of what the modules of `Known.between` make themselves, of the blocks `made` in a forward, in their order."""
    found, ends = set(), dict[str, str]()
    for block in made:
        module = module_of(block)
        if block.op in ("mm", "addmm"):
            ends |= [between[module]] if module in between else []
            ends = {parent: last for parent, last in ends.items() if last != module}
        elif module in ends:
            found.add(id(block))
    return found


def module_of(block: Block) -> str:
    """The module whose forward made it."""
    return block.where.split(" ")[0]


def _products(block: nn.Module) -> dict[str, list[str]]:
    """Parent module -> its products."""
    products: dict[str, list[str]] = {}
    for path, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            products.setdefault(path.rpartition(".")[0], []).append(path)
    return products


def _shared_results(block: nn.Module) -> set[tuple[str, str]]:
    """Operations and modules that make tensors of the width of the residual stream which tensor-parallel ranks share.

    Of the products of a module the last one has a whole result (attention's output) and a shared input, which may be cast
    or made contiguous; the others have shared results (queries, keys and values).
    """
    found = set()
    for parent, own in _products(block).items():
        found |= {(op, path) for op in ("mm", "addmm") for path in own[:-1]}
        copied = [own[-1], *([parent] if parent else [])]
        found |= {(op, path) for op in ("_to_copy", "clone") for path in copied}
    return found


def _modules_between(block: nn.Module, hidden: int) -> dict[str, tuple[str, str]]:
    """Products of modules that compute with shared results (scale queries, say) -> module, and its last product: what that makes is whole."""
    found: dict[str, tuple[str, str]] = {}
    for parent, own in _products(block).items():
        last = block.get_submodule(own[-1])
        width = cast("Tensor", last.weight).shape[0 if isinstance(last, nn.Linear) else -1]
        if parent and width == hidden:
            found |= dict.fromkeys(own[:-1], (parent, own[-1]))
    return found


def _columns(block: nn.Module) -> dict[str, tuple[int, int]]:
    """Products whose results tensor-parallel ranks share -> place among those of the module, from 1, and number of these."""
    found: dict[str, tuple[int, int]] = {}
    for own in _products(block).values():
        found |= {path: (place, len(own) - 1) for place, path in enumerate(own[:-1], 1)}
    return found


def _gathered_results(block: nn.Module) -> set[tuple[str, str]]:
    """Norms over all that a product beside them makes (queries or keys of all heads), which ranks gather, and that product.

    And norms over all that the last product reads. As operation and module; "" is any operation.
    """
    found = set()
    for parent, own in _products(block).items():
        last = block.get_submodule(own[-1])
        read = cast("Tensor", last.weight).shape[-1 if isinstance(last, nn.Linear) else 0]
        left = {path: len(cast("Tensor", block.get_submodule(path).weight)) for path in own[:-1]}
        for name, module in block.get_submodule(parent).named_children():
            weight = getattr(module, "weight", None)
            if not (parent and isinstance(weight, nn.Parameter) and weight.ndim == 1):
                continue
            made = next((path for path, width in left.items() if width == weight.shape[0]), None)
            if made is not None:
                left.pop(made)
                found |= {("", f"{parent}.{name}"), ("mm", made), ("addmm", made)}
            elif weight.shape[0] == read:
                found.add(("", f"{parent}.{name}"))
    return found


def _sent_results(block: nn.Module) -> set[tuple[str, str]]:
    """Operations and modules whose results ranks hand to each other: products whose parts they sum, and those of `_gathered_results`."""
    last = [own[-1] for own in _products(block).values() if len(own) > 1]
    gathered = {(op, path) for op, path in _gathered_results(block) if op}
    return gathered | {(op, path) for op in ("mm", "addmm") for path in last}
