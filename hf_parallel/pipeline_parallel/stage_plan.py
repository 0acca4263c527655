"""Reads from one recorded forward how a model can be cut: the crossings of each cut, and the parameters of each stage.

A stage runs the model's own forward and skips the blocks it does not own, so it re-executes the code before and between
the blocks. Going backwards through the log from what a stage runs, an op outside the blocks that makes something needed
is simply run again (its inputs, parameters included, become needed); an op inside a block of an earlier stage that
makes something needed is a crossing: its tensor must be sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from hf_parallel.compat.private_torch import version_of
from hf_parallel.errors import PlanError
from hf_parallel.model.fewer import Kept
from hf_parallel.model.record import BlockTrace, Op, Record
from hf_parallel.model.stack import blocks_of
from hf_parallel.model.structure import Path, in_mutable, outline
from hf_parallel.pipeline_parallel.covered_inputs import CoveredInputs


# Every stage keeps parameters that no forward reads, up to this size: an unused tower of weights is larger.
LOOSE_ELEMENTS, LOOSE_COUNT = 1 << 16, 64


class Span(NamedTuple):
    """Blocks [lo, hi) of one stage; `is_last`: the tail and the loss too. lo == hi only on the last stage."""

    lo: int
    hi: int
    is_last: bool


def spans_of(bounds: Sequence[int]) -> list[Span]:
    """The stages of bounds [0, ..., num_blocks]; [..., L, L] ends with a stage that has the tail only."""
    ranges = list(itertools.pairwise(bounds))
    return [Span(lo, hi, index == len(ranges) - 1) for index, (lo, hi) in enumerate(ranges)]


@dataclasses.dataclass(frozen=True)
class CrossingKey:
    """Address of one tensor that is made in a block and needed by a later stage.

    `return`: at `path` of what block `block` returns. `argument`: at `path` of the (args, kwargs) it was handed, where
    the block stored it. `hook`: at `path` of the output of the `occurrence`-th call of `module` inside the block, where
    forward hooks read it.
    """

    kind: Literal["return", "argument", "hook"]
    block: int
    path: Path
    module: str = ""
    occurrence: int = 0


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Result of one backward walk: storages made inside earlier blocks, and parameter storages read."""

    crossings: dict[int, tuple[int, str]]  # storage -> (block, op that made it)
    needed: frozenset[int]  # storages of parameters and buffers that are really used
    touched: frozenset[int]  # those read by any code the stage executes, used or not
    early: frozenset[int]  # storages that are read before the stage's first block for what it sends or returns


class PipelinePlan:
    """The possible cuts of a model, and what each piece needs; addresses only, no tensors.

    Attributes:
        stack: name of the module list that is cut.
        num_blocks: its length L.
        input_names: keyword arguments the plan was made with.
        inputs: the tensor inputs and output flags that it is for.
        blocks: per block that ran, the template of its return value and of its hooked calls.
        zero_outputs: modules outside the stack whose unneeded output can be zeros of a known shape.
        flops: forward matmul FLOPs of the sample by epoch (0 prologue, 2j+1 block j, 2L tail).
        num_tokens: tokens in the sample those FLOPs belong to.
        traffic: forward bytes of activations moved by ops without FLOPs, by epoch.
        saved: bytes of activations kept for the backward, by epoch.
        sample_tokens: tokens in the sample that `traffic` and `saved` belong to.
        discovered_on: "meta", or the device on which the tiny batch had to run.
        record: the forward that all this was read from.
        kept: blocks that show what all blocks do; None where that is not known.
    """

    def __init__(
        self, model: nn.Module, record: Record, sample: Mapping[str, Any], discovered_on: str = "meta"
    ) -> None:
        self.discovered_on = discovered_on
        self.record = record
        self.kept: Kept | None = None
        self.stack = record.stack
        self.num_blocks = len(blocks_of(model, record.stack))
        self.model_name = type(model).__name__
        self.input_names = frozenset(sample)
        self.inputs = CoveredInputs(model, sample)
        self._versions: dict[int, int] = {}
        self.blocks: dict[int, BlockTrace] = record.blocks
        self.zero_outputs = record.zero_outputs
        self.flops = record.flops
        self.traffic, self.saved = record.traffic, record.saved
        self.num_tokens = self.sample_tokens = count_tokens(sample)
        self._ops: list[Op] = record.ops
        self._outputs = record.outputs
        self._storage = record.parameters
        self._names_of: dict[int, list[str]] = {}
        for name, number in record.parameters.items():
            self._names_of.setdefault(number, []).append(name)
        self._aliases = _alias_groups(model)
        self._read = frozenset(n for op in record.ops for n in op.reads if n in self._names_of)
        self._loose = self._find_loose(model)
        self._worked_between = _epochs_between(record.ops)
        self._slices: dict[tuple[int, int | None], _Slice] = {}
        self._keys: dict[int, tuple[CrossingKey, ...] | str] = {}

    @property
    def ran(self) -> tuple[int, ...]:
        """The blocks that ran, rising: all of them, but for models that skip some on some inputs."""
        return tuple(sorted(self.blocks))

    @property
    def writes_parameters(self) -> bool:
        """Whether the forward changes values of parameters or buffers."""
        return any(not op.is_view and op.writes & self._names_of.keys() for op in self._ops)

    def note_versions(self, model: nn.Module) -> None:
        """Remember the state of the parameters of the model that the plan is for; it may be made on copies."""
        self._versions = {id(parameter): version_of(parameter) for parameter in model.parameters()}

    def written_since(self, model: nn.Module) -> bool:
        """Whether somebody wrote to parameters since `note_versions`: an evaluation of RWKV rescales them."""
        known = ((parameter, self._versions.get(id(parameter))) for parameter in model.parameters())
        return any(version not in (None, version_of(parameter)) for parameter, version in known)

    def crossings(self, boundary: int) -> tuple[CrossingKey, ...]:
        """Tensors that a stage must send at the cut before block `boundary`, in a fixed order.

        Args:
            boundary: 1 .. num_blocks; num_blocks is the cut between the last block and the tail.

        Raises:
            PlanError: A tensor that crosses has no address; lists the cuts that are possible.
        """
        if not 1 <= boundary <= self.num_blocks:
            raise PlanError(
                f"boundary={boundary} is not a cut of '{self.stack}': with {self.num_blocks} blocks a cut lies before "
                f"block 1 .. {self.num_blocks - 1}, or at {self.num_blocks}, before the tail."
            )
        keys = self._keys_at(boundary)
        if isinstance(keys, str):
            raise PlanError(
                f"cannot cut {self.model_name} before block {boundary}: {keys}; allowed cuts: {self.allowed_cuts()}."
            )
        return keys

    def allowed_cuts(self) -> list[int]:
        """The boundaries 1 .. num_blocks at which everything that crosses has an address."""
        return [b for b in range(1, self.num_blocks + 1) if not isinstance(self._keys_at(b), str)]

    def last_block(self, span: Span) -> int | None:
        """The last block of a stage that ran, None if none did."""
        return max((j for j in self.blocks if span.lo <= j < span.hi), default=None)

    def joins(self, block: int) -> bool:
        """Whether `block` takes what the block that ran before it returned, with no code on it in between.

        Code between the two that computes from the prologue only (a slice of a position table) does not matter.
        """
        before = max((j for j in self.blocks if j < block), default=None)
        return before is not None and block in self.blocks and 2 * before + 2 not in self._worked_between

    def readers(self, span: Span) -> frozenset[str]:
        """Names (all aliases) of parameters and buffers outside the stack that a stage uses."""
        return frozenset(n for n in self._names(self._slice(span).needed) if not self._in_stack(n))

    def holds(self, span: Span, name: str) -> bool:
        """Whether a stage needs this parameter or buffer, under any of its names."""
        if self.is_loose(name):
            return True
        needed = self._slice(span).needed
        for alias in self._aliases.get(name, (name,)):
            block = self.block_of(alias)
            if (block is not None and span.lo <= block < span.hi) or self._storage.get(alias) in needed:
                return True
        return False

    def touches(self, span: Span, name: str) -> bool:
        """Whether code that the stage executes reads the parameter, even if nothing it sends or returns depends on it."""
        touched = self._slice(span).touched
        return any(self._storage.get(alias) in touched for alias in self._aliases.get(name, (name,)))

    def looks_up_for_nothing(self, span: Span, module: str) -> bool:
        """Whether a stage calls a table or projection before its first block and has no use for what that returns."""
        storage = self._storage.get(f"{module}.weight")
        return module in self.record.early and span.lo > 0 and storage not in self._slice(span).early

    def is_read(self, name: str) -> bool:
        """Whether anything in the whole forward reads the parameter."""
        return any(self._storage.get(alias) in self._read for alias in self._aliases.get(name, (name,)))

    def is_loose(self, name: str) -> bool:
        """Whether no forward reads this small parameter: a loss may (a temperature), and a loss runs on every rank."""
        return any(alias in self._loose for alias in self._aliases.get(name, (name,)))

    def _find_loose(self, model: nn.Module) -> frozenset[str]:
        kinds: tuple[set[str], set[str]] = (set(), set())  # frozen, trained: a frozen tower has many
        for name, parameter in model.named_parameters():
            inside = any(self._in_stack(alias) for alias in self._aliases.get(name, (name,)))
            if parameter.numel() <= LOOSE_ELEMENTS and not inside and not self.is_read(name):
                kinds[parameter.requires_grad].add(name)
        return frozenset(name for names in kinds if len(names) <= LOOSE_COUNT for name in names)

    def block_of(self, name: str) -> int | None:
        """Index of the block a parameter name lies in, None outside the stack."""
        if not self._in_stack(name):
            return None
        return int(name[len(self.stack) + 1 :].split(".", 1)[0])

    def also_covers(self, other: PipelinePlan) -> str | None:
        """Add the inputs of a plan made from another sample; returns why not if that plan needs another cut."""
        if other.addresses() != self.addresses():
            return "other tensors cross between the blocks"
        for mine, theirs in zip(self._readers_by_block(), other._readers_by_block(), strict=True):
            if not theirs <= mine:  # reading less is harmless: a weight without a gradient
                return f"{sorted(theirs - mine)} is read too"
        self.inputs.covered |= other.inputs.covered
        # A module whose output has another shape rule with other inputs keeps its weights, frozen.
        self.zero_outputs = dict(self.zero_outputs.items() & other.zero_outputs.items())
        return None

    def addresses(self) -> tuple[object, ...]:
        """Tensors that cross at every boundary and how they are put back, in a form that does not depend on the sample."""
        return (
            *(self.stack, self.num_blocks, self.ran),
            *(repr(self._keys_at(b)) for b in range(1, self.num_blocks + 1)),
            *sorted(group for group in set(self._aliases.values()) if len(group) > 1),
            *(_outline(trace) for _, trace in sorted(self.blocks.items())),
        )

    def _readers_by_block(self) -> list[frozenset[str]]:
        """Readers of a stage of each block alone, then of the tail."""
        spans = [Span(j, j + 1, False) for j in range(self.num_blocks)]
        return [self.readers(span) for span in [*spans, Span(self.num_blocks, self.num_blocks, True)]]

    def fingerprint(self) -> str:
        """Hash of all addresses: equal on two ranks only if they would cut, send and hold the same."""
        covered = sorted(sorted(names) for names in self.inputs.covered)
        readers = [sorted(names) for names in self._readers_by_block()]
        zeros = sorted(self.zero_outputs.items())
        parts = (
            *self.addresses(),
            readers,
            sorted(self._loose),
            zeros,
            sorted(self.input_names),
            covered,
            self.inputs.flags,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _in_stack(self, name: str) -> bool:
        return name.startswith(self.stack + ".")

    def _names(self, storages: frozenset[int]) -> Iterator[str]:
        for storage in storages:
            yield from self._names_of[storage]

    def _start(self, boundary: int) -> int:
        """The boundary with skipped blocks before it left out: one after the last block before it that ran."""
        return max((j + 1 for j in self.blocks if j < boundary), default=0)

    def _slice(self, span: Span) -> _Slice:
        lo, hi = self._start(span.lo), None if span.is_last else self._start(span.hi)
        if (lo, hi) not in self._slices:
            self._slices[lo, hi] = self._walk(lo, hi)
        return self._slices[lo, hi]

    def _walk(self, lo: int, hi: int | None) -> _Slice:
        """Backwards from everything that runs in blocks [lo, hi), or to the end of the forward when hi is None."""
        end = 2 * self.num_blocks + 1 if hi is None else 2 * hi
        needed: set[int] = set(self._outputs) if hi is None else set()
        used: set[int] = set()
        touched: set[int] = set()
        early: set[int] = set()
        crossings: dict[int, tuple[int, str]] = {}
        for op in reversed(self._ops):
            if op.epoch >= end:
                continue
            outside = op.epoch % 2 == 0
            if outside or op.epoch >= 2 * lo:
                touched |= op.reads
            if op.epoch >= 2 * lo or (outside and op.writes & needed):
                needed |= op.reads
                used |= op.reads
                early |= op.reads if op.epoch < 2 * lo else set()
            elif not outside and not op.is_view:
                for storage in op.writes & needed:
                    if storage not in self._names_of:
                        crossings.setdefault(storage, ((op.epoch - 1) // 2, op.name))
        owned = self._names_of.keys()
        return _Slice(crossings, frozenset(used & owned), frozenset(touched & owned), frozenset(early & owned))

    def _keys_at(self, boundary: int) -> tuple[CrossingKey, ...] | str:
        """The crossing keys, or why there are none."""
        if boundary not in self._keys:
            self._keys[boundary] = self._find_keys(boundary)
        return self._keys[boundary]

    def _find_keys(self, boundary: int) -> tuple[CrossingKey, ...] | str:
        keys: list[CrossingKey] = []
        everything = self._walk(self._start(boundary), None)
        for storage, (block, op) in everything.crossings.items():
            found = _addresses(self.blocks[block], block, storage)
            if not found:
                return (
                    f"a tensor made in block {block} by {op} is used after the cut but is neither returned, stored in "
                    "an argument, nor an output of a hooked module"
                )
            keys += found
        return tuple(sorted(keys, key=lambda k: (k.block, KINDS.index(k.kind), repr(k))))


KINDS = ("return", "argument", "hook")


def _addresses(trace: BlockTrace, block: int, storage: int) -> list[CrossingKey]:
    """Every address, of the first kind that has one, of a storage after a block."""
    found = [CrossingKey("return", block, path) for path, n in trace.return_tensors if n == storage]
    if not found:
        found = [CrossingKey("argument", block, p) for p, n in trace.written if n == storage and in_mutable(p)]
    if not found:
        for call in trace.hooked:
            at = [path for path, n in call.tensors if n == storage]
            found += [CrossingKey("hook", block, path, call.module, call.occurrence) for path in at]
    if not found:  # written in place into a tensor that a shared container already held
        found = [CrossingKey("argument", block, p) for p, n in trace.arguments if n == storage and in_mutable(p)]
    return found


def _epochs_between(ops: Sequence[Op]) -> frozenset[int]:
    """Even epochs with an op, views included, on anything that was made in a block."""
    made: set[int] = set()
    found: set[int] = set()
    for op in ops:
        inside = op.epoch % 2 == 1
        if not inside and op.reads & made:
            found.add(op.epoch)
        if not op.is_view and (inside or op.reads & made):
            made |= op.writes
    return frozenset(found)


def _outline(trace: BlockTrace) -> tuple[object, ...]:
    """The templates of a block, without the numbers of one recording."""
    calls = tuple((call.module, call.occurrence, outline(call.output)) for call in trace.hooked)
    return (outline(trace.returned), calls)


def _alias_groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name -> all names of the same parameter or buffer object."""
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def count_tokens(sample: Mapping[str, Any]) -> int:
    """Tokens in the sample: the size of its token ids, or of the first (B, S, ...) tensor."""
    tensors = [sample.get("input_ids"), *sample.values()]
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return tensor.shape[0] * tensor.shape[1]
    return 1
