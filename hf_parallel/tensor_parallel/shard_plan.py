"""The tensor-parallel plan of one model, as data: what each module does, without any tensor or module in it.

A plan is made by `derive.plan_tensor_parallel` and carried out by `apply.apply_tensor_parallel`; in between it can be
printed, hashed, compared across ranks, and stored as JSON. All names are those of `named_modules` /
`named_parameters`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hf_parallel.tensor_parallel.layout import ShardSpec


Role = Literal["column", "row", "gather", "latent", "reduce", "vocab_embedding", "vocab_head"]
Ranges = tuple[tuple[int, int], ...]
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class LinearPlan:
    """One linear module with a part in tensor parallelism.

    Args:
        role: `column` keeps its output local, `row` sums partial outputs, `gather` is a column with gathered output,
            `latent` is whole on every rank and its output is used in parts, `reduce` sums partial outputs that are
            then used in parts again.
            `vocab_embedding` looks up the tokens it has and sums; `vocab_head` is a gather whose output stays local
            in training with labels, where the loss works on parts of the vocabulary.
        transposed: Whether the weight is stored as [in, out] (Conv1D) instead of [out, in].
        weight: Layout of the weight.
        bias: Layout of the bias; none if there is no bias or every rank holds it whole.
        entry: Whether the input of a column is replicated. False if the input is already used in parts (it comes from
            a `latent` or `reduce` linear), so that no sum of its gradient is due here.
        take: Outputs that each rank computes of a column that every rank stores whole: per rank, the (start, length)
            of ranges in order, repeats allowed; empty: all.
    """

    role: Role
    transposed: bool
    weight: ShardSpec
    bias: ShardSpec | None
    entry: bool = True
    take: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class AttributeRewrite:
    """An integer attribute that counts something the ranks split, and its values on the ranks.

    Args:
        module: Module that owns the attribute.
        attribute: Its name; `config.<key>` rewrites a private copy of the module's config.
        values: Value on each rank, an integer or a sequence of integers.
    """

    module: str
    attribute: str
    values: tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True)
class InputRule:
    """A tensor passed to the root of a pair that the ranks use in parts; its gradient is summed over them.

    Args:
        path: Place of the tensor: position or keyword, then keys of nested tuples and dicts, for instance `["position_bias"]`.
        dim: Dim to slice, counted from the end (negative), or 0 for a batch-and-heads dim; none: used whole.
        heads: Number of heads of the full tensor.
    """

    path: tuple[str | int, ...]
    dim: int | None
    heads: int


@dataclass(frozen=True)
class Routing:
    """Arguments from which a module of experts computes single (token, expert) choices.

    Args:
        hidden: Position or keyword of the hidden states f[... H].
        index: Position or keyword of the indices of the chosen experts i[N K].
        weights: Position or keyword of the experts' weights f[N K].
        experts: Number of experts of the full module; each rank has consecutive ones.
    """

    hidden: str | int
    index: str | int
    weights: str | int
    experts: int


@dataclass(frozen=True)
class PairPlan:
    """Linears whose outputs meet in one row: two all-reduces, one forward and one backward, plus what is listed here.

    Args:
        root: The innermost module that contains all of them.
        columns: Names of the linears before the row: column, latent and reduce ones.
        row: Name of the row linear, or of another module (experts) whose output is a partial sum.
        rewrites: Attributes that change.
        partial: Replicated parameters that each rank uses for its part only, so that their gradients are summed.
        sliced: Parameters and buffers of other modules that are stored as shards (per head, per channel, experts).
        inputs: Inputs of `root` that are sliced, or learned and used in parts.
        norms: Modules that mix all channels: each runs on its gathered input and keeps this rank's channels.
        entries: Modules that are no linears and whose inputs are replicated (experts).
        scaled: Parameters that every rank adds to its partial sum, divided by the number of ranks.
        routing: Inputs of `row` if it is a module of experts that are distributed whole; None: every expert is split.
    """

    root: str
    columns: tuple[str, ...]
    row: str
    rewrites: tuple[AttributeRewrite, ...] = ()
    partial: tuple[str, ...] = ()
    sliced: dict[str, ShardSpec] = field(default_factory=dict)
    inputs: tuple[InputRule, ...] = ()
    norms: dict[str, ShardSpec] = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    routing: Routing | None = None


@dataclass(frozen=True)
class Region:
    """A module of a block that runs on the whole sequence while the block around it runs on a part.

    Args:
        module: Its name, relative to the block.
        inputs: Places of the gathered tensors: position or keyword, then keys of nested tuples and dicts.
        exit: How its output becomes a part again: the rows `rows` reduce-scatter ("row"), the rows leave partial sums
            and the module's output is reduce-scattered ("sum"), or the whole output is narrowed ("split").
        outputs: Places of the tensors that leave it, by keys of nested tuples; of use unless `exit` is "row".
        rows: Rows inside it whose sum over the ranks is not made by themselves; relative to the block.
    """

    module: str
    inputs: tuple[Place, ...]
    exit: Literal["row", "sum", "split"]
    outputs: tuple[Place, ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockSequence:
    """One block of the stack in sequence parallelism.

    Args:
        name: The block.
        inputs: Places of its hidden states among its arguments.
        outputs: Places of its hidden states in what it returns.
        regions: Modules that run on the whole sequence; everything else runs on a part.
        partial: Parameters used on a part of the sequence, so that their gradients are summed; relative to the block.
        whole: Why the block runs on the whole sequence; empty if it does not.
    """

    name: str
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    regions: tuple[Region, ...] = ()
    partial: tuple[str, ...] = ()
    whole: str = ""


@dataclass(frozen=True)
class SequencePlan:
    """Between the sharded layers of the stack each rank has a part of the sequence.

    Args:
        stack: Name of the list of blocks.
        dim: Dim of the hidden states that is the sequence.
        width: Elements of the hidden states per token.
        blocks: The blocks that run, in order.
    """

    stack: str
    dim: int
    width: int
    blocks: tuple[BlockSequence, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SequencePlan:
        """The inverse of `to_json`."""
        return cls(
            data["stack"], data["dim"], data["width"], tuple(_block_from_json(block) for block in data["blocks"])
        )


def _block_from_json(data: Mapping[str, Any]) -> BlockSequence:
    regions = (
        Region(r["module"], _places(r["inputs"]), r["exit"], _places(r["outputs"]), tuple(r["rows"]))
        for r in data["regions"]
    )
    ends = _places(data["inputs"]), _places(data["outputs"])
    return BlockSequence(data["name"], *ends, tuple(regions), tuple(data["partial"]), data["whole"])


def _places(data: Sequence[Sequence[str | int]]) -> tuple[Place, ...]:
    return tuple(tuple(place) for place in data)


@dataclass(frozen=True)
class Coverage:
    """Shares of a model's parameters, each in [0, 1]; they sum to 1. Vocabulary-parallel ends count as paired."""

    paired: float
    gathered: float
    replicated: float


@dataclass(frozen=True)
class TPPlan:
    """The tensor-parallel plan of a model: how each of its layers is sharded; the same on every rank.

    Args:
        tp_size: Number of ranks the plan is for.
        linears: Linear module -> role and layout; those not named stay replicated.
        pairs: The column -> row pairs.
        fallbacks: Module -> why it is not in a pair (it is then gathered or replicated).
        whole: Module -> why it is replicated by choice (routers, latent projections).
        flops: Module -> operations of the matrix products it runs itself, per token of the sample, forward.
        numel: Parameter -> number of elements of the full tensor.
        aliases: Stored-as-shard name -> other names of the same tensor (a module that sits at several places).
        sequence: Division of the sequence between the sharded layers; None: every rank has all of it.
    """

    tp_size: int
    linears: dict[str, LinearPlan]
    pairs: tuple[PairPlan, ...]
    fallbacks: dict[str, str]
    numel: dict[str, int]
    aliases: dict[str, tuple[str, ...]]
    whole: dict[str, str] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    sequence: SequencePlan | None = None

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Layout of every parameter and buffer that is stored as a shard, by name; all others are replicated."""
        specs: dict[str, ShardSpec] = {}
        for name, linear in self.linears.items():
            if linear.role == "latent":
                continue
            specs[_join(name, "weight")] = linear.weight
            if linear.bias is not None:
                specs[_join(name, "bias")] = linear.bias
        for pair in self.pairs:
            specs.update(pair.sliced)
        for name, others in self.aliases.items():
            specs.update(dict.fromkeys(others, specs[name]))
        return specs

    def coverage(self) -> Coverage:
        """Shares of the parameters in pairs, in gathered linears, and replicated on every rank."""
        gathered = {
            _join(name, key)
            for name, linear in self.linears.items()
            for key in ("weight", "bias")
            if linear.role == "gather"
        }
        specs = self.shard_specs()
        paired, gathers, total = 0.0, 0.0, 0
        for name, numel in self.numel.items():
            total += numel
            share = numel * specs[name].sharded_share if name in specs else 0.0
            if name in gathered:
                gathers += share
            else:
                paired += share
        total = max(1, total)
        return Coverage(paired / total, gathers / total, 1.0 - (paired + gathers) / total)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, with deterministic order."""
        return {
            "tp_size": self.tp_size,
            "linears": {
                name: {
                    "role": linear.role,
                    "transposed": linear.transposed,
                    "weight": linear.weight.to_json(),
                    "bias": None if linear.bias is None else linear.bias.to_json(),
                    "entry": linear.entry,
                    "take": [[list(part) for part in ranges] for ranges in linear.take],
                }
                for name, linear in sorted(self.linears.items())
            },
            "pairs": [_pair_to_json(pair) for pair in self.pairs],
            "fallbacks": dict(sorted(self.fallbacks.items())),
            "whole": dict(sorted(self.whole.items())),
            "flops": dict(sorted(self.flops.items())),
            "numel": dict(sorted(self.numel.items())),
            "aliases": {name: list(others) for name, others in sorted(self.aliases.items())},
            "sequence": None if self.sequence is None else self.sequence.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TPPlan:
        """The inverse of `to_json`."""
        linears = {
            name: LinearPlan(
                role=item["role"],
                transposed=item["transposed"],
                weight=ShardSpec.from_json(item["weight"]),
                bias=None if item["bias"] is None else ShardSpec.from_json(item["bias"]),
                entry=item["entry"],
                take=tuple(tuple((start, length) for start, length in ranges) for ranges in item["take"]),
            )
            for name, item in data["linears"].items()
        }
        return cls(
            tp_size=data["tp_size"],
            linears=linears,
            pairs=tuple(_pair_from_json(pair) for pair in data["pairs"]),
            fallbacks=dict(data["fallbacks"]),
            whole=dict(data["whole"]),
            flops=dict(data["flops"]),
            numel=dict(data["numel"]),
            aliases={name: tuple(others) for name, others in data["aliases"].items()},
            sequence=None if data["sequence"] is None else SequencePlan.from_json(data["sequence"]),
        )

    def fingerprint(self) -> str:
        """A short hash of the whole plan, equal on ranks that made the same plan."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_order(pairs: Iterable[PairPlan]) -> tuple[PairPlan, ...]:
    """The pairs by the name of their row, with numbers in names in their order."""

    def key(pair: PairPlan) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in pair.row.split(".")]

    return tuple(sorted(pairs, key=key))


def _pair_to_json(pair: PairPlan) -> dict[str, Any]:
    return {
        "root": pair.root,
        "columns": list(pair.columns),
        "row": pair.row,
        "rewrites": [
            {"module": rewrite.module, "attribute": rewrite.attribute, "values": _plain(rewrite.values)}
            for rewrite in pair.rewrites
        ],
        "partial": list(pair.partial),
        "sliced": {name: spec.to_json() for name, spec in sorted(pair.sliced.items())},
        "inputs": [{"path": list(rule.path), "dim": rule.dim, "heads": rule.heads} for rule in pair.inputs],
        "norms": {name: spec.to_json() for name, spec in sorted(pair.norms.items())},
        "entries": list(pair.entries),
        "scaled": list(pair.scaled),
        "routing": None if pair.routing is None else asdict(pair.routing),
    }


def _plain(values: tuple[int | tuple[int, ...], ...]) -> list[int | list[int]]:
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _join(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _pair_from_json(data: Mapping[str, Any]) -> PairPlan:
    return PairPlan(
        root=data["root"],
        columns=tuple(data["columns"]),
        row=data["row"],
        rewrites=tuple(
            AttributeRewrite(
                rewrite["module"],
                rewrite["attribute"],
                tuple(tuple(value) if isinstance(value, list) else value for value in rewrite["values"]),
            )
            for rewrite in data["rewrites"]
        ),
        partial=tuple(data["partial"]),
        sliced={name: ShardSpec.from_json(spec) for name, spec in data["sliced"].items()},
        inputs=tuple(InputRule(tuple(rule["path"]), rule["dim"], rule["heads"]) for rule in data["inputs"]),
        norms={name: ShardSpec.from_json(spec) for name, spec in data["norms"].items()},
        entries=tuple(data["entries"]),
        scaled=tuple(data["scaled"]),
        routing=None if data["routing"] is None else Routing(**data["routing"]),
    )
