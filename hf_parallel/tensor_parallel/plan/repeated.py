"""The plan of a model with few blocks, repeated for all blocks that those stand for, and the way back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_parallel.tensor_parallel.plan.ties import aliases_of
from hf_parallel.tensor_parallel.shard_plan import TPPlan, in_order


@dataclass(frozen=True)
class Repetition:
    """Says which block of a small model stands for which blocks of a full one.

    Args:
        stacks: Names of the lists of blocks, the same in both.
        represented_by: Block of the full model -> the block of the same kind in the small one.
    """

    stacks: tuple[str, ...]
    represented_by: tuple[int, ...]


@dataclass(frozen=True)
class _Moves:
    """Targets to which the entries of each block are copied; blocks that are not named go nowhere."""

    stacks: tuple[str, ...]
    targets: Mapping[int, Sequence[int]]

    def named(self, block: int) -> re.Pattern[str]:
        """The name of a block, of whatever stack, inside a text."""
        stacks = "|".join(re.escape(stack) for stack in self.stacks)
        return re.compile(rf"(?<![\w.])({stacks})\.{block}(?!\w)")


def is_within_blocks(plan: TPPlan, stacks: Sequence[str]) -> bool:
    """Whether every pair lies in one block, or outside of all."""
    data = plan.to_json()
    return all(len(set(_blocks_named(pair, stacks))) <= 1 for pair in data["pairs"]) and not any(
        pair["root"] in stacks for pair in data["pairs"]
    )


def repeated(plan: TPPlan, blocks: Repetition, full: nn.Module) -> TPPlan:
    """The plan of the full model, each block of which gets the plan of the block that represents it."""
    targets: dict[int, list[int]] = {}
    for block, by in enumerate(blocks.represented_by):
        targets.setdefault(by, []).append(block)
    return _moved(plan, _Moves(blocks.stacks, targets), full)


def restricted(plan: TPPlan, stack: str, kept: Sequence[int], fewer: nn.Module) -> TPPlan:
    """The plan of a model that has only the blocks `kept` of a stack."""
    return _moved(plan, _Moves((stack,), {block: [place] for place, block in enumerate(kept)}), fewer)


def _moved(plan: TPPlan, moves: _Moves, model: nn.Module) -> TPPlan:
    data = plan.to_json()
    for section in ("linears", "fallbacks", "whole", "flops"):
        data[section] = dict(
            entry for name, value in data[section].items() for entry in _entries(name, [name, value], moves)
        )
    if data["sequence"] is not None:
        blocks = [copied for block in data["sequence"]["blocks"] for copied in _entries(block["name"], block, moves)]
        by_place = sorted(blocks, key=lambda block: next(_blocks_named(block["name"], moves.stacks), 0))
        data["sequence"]["blocks"] = by_place
    data["pairs"] = [copied for pair in data["pairs"] for copied in _entries(pair["row"], pair, moves)]
    data["numel"] = {name: parameter.numel() for name, parameter in model.named_parameters()}
    data["aliases"] = {}
    made = TPPlan.from_json(data)
    return replace(made, pairs=in_order(made.pairs), aliases=aliases_of(model, made.shard_specs()))


def _blocks_named(value: Any, stacks: Sequence[str]) -> Iterator[int]:
    either = "|".join(re.escape(stack) for stack in stacks)
    for found in re.finditer(rf"(?<![\w.])(?:{either})\.(\d+)(?!\w)", repr(value)):
        yield int(found.group(1))


def _entries(name: str, entry: Any, moves: _Moves) -> list[Any]:
    """The entry of a module for every block that it goes to."""
    block = next(_blocks_named(name, moves.stacks), None)
    if block is None:
        return [entry]
    pattern = moves.named(block)
    return [_renamed(entry, pattern, target) for target in moves.targets.get(block, ())]


def _renamed(value: Any, pattern: re.Pattern[str], block: int) -> Any:
    if isinstance(value, str):
        return pattern.sub(rf"\g<1>.{block}", value)
    if isinstance(value, list):
        return [_renamed(item, pattern, block) for item in value]
    if isinstance(value, dict):
        return {_renamed(key, pattern, block): _renamed(item, pattern, block) for key, item in value.items()}
    return value
