"""The tensor-parallel plan of one model, as data: what each module does, without any tensor or module in it.

A plan is made by `derive.plan_tensor_parallel` and carried out by `apply.apply_tensor_parallel`; in between it can be
printed, hashed, compared across ranks, and stored as JSON. All names are those of `named_modules` /
`named_parameters`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hf_parallel.tensor_parallel.layout import ShardSpec


Role = Literal["column", "row", "gather", "vocab_embedding", "vocab_head"]


@dataclass(frozen=True)
class LinearPlan:
    """One linear module whose weight is stored as a shard.

    Args:
        role: `column` keeps its output local, `row` sums partial outputs, `gather` is a column with gathered output.
            `vocab_embedding` looks up the tokens it has and sums; `vocab_head` is a gather whose output stays local
            in training with labels, where the loss works on parts of the vocabulary.
        transposed: Whether the weight is stored as [in, out] (Conv1D) instead of [out, in].
        weight: Layout of the weight.
        bias: Layout of the bias; none if there is no bias or every rank holds it whole (`row`).
    """

    role: Role
    transposed: bool
    weight: ShardSpec
    bias: ShardSpec | None


@dataclass(frozen=True)
class AttributeRewrite:
    """An integer attribute that counts something the ranks split, and its value on a rank.

    Args:
        module: Module that owns the attribute.
        attribute: Its name; `config.<key>` rewrites a private copy of the module's config.
        value: Value on every rank.
    """

    module: str
    attribute: str
    value: int


@dataclass(frozen=True)
class InputRule:
    """A tensor passed to the root of a pair that the ranks use in parts; its gradient is summed over them.

    Args:
        path: Where it is: position or keyword, then keys of nested tuples and dicts, for instance `["position_bias"]`.
        dim: Dim to slice, counted from the end (negative), or 0 for a batch-and-heads dim; none: used whole.
        heads: Number of heads of the full tensor.
    """

    path: tuple[str | int, ...]
    dim: int | None
    heads: int


@dataclass(frozen=True)
class PairPlan:
    """Column linears whose outputs meet in one row linear: two all-reduces, one forward and one backward.

    Args:
        root: The innermost module that contains all of them.
        columns: Names of the column linears.
        row: Name of the row linear.
        rewrites: Attributes that change.
        partial: Replicated parameters that each rank uses for its part only, so that their gradients are summed.
        sliced: Parameters and buffers with one entry per head, and their layouts.
        inputs: Inputs of `root` that are sliced, or learned and used in parts.
    """

    root: str
    columns: tuple[str, ...]
    row: str
    rewrites: tuple[AttributeRewrite, ...] = ()
    partial: tuple[str, ...] = ()
    sliced: dict[str, ShardSpec] = field(default_factory=dict)
    inputs: tuple[InputRule, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """Shares of a model's parameters, each in [0, 1]; they sum to 1. Vocabulary-parallel ends count as paired."""

    paired: float
    gathered: float
    replicated: float


@dataclass(frozen=True)
class TPPlan:
    """What every tensor-parallel rank does with the model.

    Args:
        tp_size: Number of ranks the plan is for.
        linears: Linear module -> role and layout; those not named stay replicated.
        pairs: The column -> row pairs.
        fallbacks: Module -> why it is not in a pair (it is then gathered or replicated).
        numel: Parameter -> number of elements of the full tensor.
        aliases: Stored-as-shard name -> other names of the same tensor (a module that sits at several places).
    """

    tp_size: int
    linears: dict[str, LinearPlan]
    pairs: tuple[PairPlan, ...]
    fallbacks: dict[str, str]
    numel: dict[str, int]
    aliases: dict[str, tuple[str, ...]]

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Layout of every parameter and buffer that is stored as a shard, by name; all others are replicated."""
        specs: dict[str, ShardSpec] = {}
        for name, linear in self.linears.items():
            specs[f"{name}.weight"] = linear.weight
            if linear.bias is not None:
                specs[f"{name}.bias"] = linear.bias
        for pair in self.pairs:
            specs.update(pair.sliced)
        for name, others in self.aliases.items():
            specs.update(dict.fromkeys(others, specs[name]))
        return specs

    def coverage(self) -> Coverage:
        """Shares of the parameters in pairs, in gathered linears, and replicated on every rank."""
        role_of: dict[str, str] = {}
        for name, linear in self.linears.items():
            role_of[f"{name}.weight"] = linear.role
            if linear.bias is not None:
                role_of[f"{name}.bias"] = linear.role
        sliced = {name for pair in self.pairs for name in pair.sliced}
        counts = {"paired": 0, "gathered": 0, "replicated": 0}
        for name, numel in self.numel.items():
            role = role_of.get(name)
            paired = role in ("column", "row", "vocab_embedding", "vocab_head") or name in sliced
            counts["paired" if paired else "gathered" if role == "gather" else "replicated"] += numel
        total = max(1, sum(counts.values()))
        return Coverage(**{kind: count / total for kind, count in counts.items()})

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
                }
                for name, linear in sorted(self.linears.items())
            },
            "pairs": [_pair_to_json(pair) for pair in self.pairs],
            "fallbacks": dict(sorted(self.fallbacks.items())),
            "numel": dict(sorted(self.numel.items())),
            "aliases": {name: list(others) for name, others in sorted(self.aliases.items())},
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
            )
            for name, item in data["linears"].items()
        }
        return cls(
            tp_size=data["tp_size"],
            linears=linears,
            pairs=tuple(_pair_from_json(pair) for pair in data["pairs"]),
            fallbacks=dict(data["fallbacks"]),
            numel=dict(data["numel"]),
            aliases={name: tuple(others) for name, others in data["aliases"].items()},
        )

    def fingerprint(self) -> str:
        """A short hash of the whole plan, equal on ranks that made the same plan."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pair_to_json(pair: PairPlan) -> dict[str, Any]:
    return {
        "root": pair.root,
        "columns": list(pair.columns),
        "row": pair.row,
        "rewrites": [asdict(rewrite) for rewrite in pair.rewrites],
        "partial": list(pair.partial),
        "sliced": {name: spec.to_json() for name, spec in sorted(pair.sliced.items())},
        "inputs": [{"path": list(rule.path), "dim": rule.dim, "heads": rule.heads} for rule in pair.inputs],
    }


def _pair_from_json(data: Mapping[str, Any]) -> PairPlan:
    return PairPlan(
        root=data["root"],
        columns=tuple(data["columns"]),
        row=data["row"],
        rewrites=tuple(AttributeRewrite(**rewrite) for rewrite in data["rewrites"]),
        partial=tuple(data["partial"]),
        sliced={name: ShardSpec.from_json(spec) for name, spec in data["sliced"].items()},
        inputs=tuple(InputRule(tuple(rule["path"]), rule["dim"], rule["heads"]) for rule in data["inputs"]),
    )
