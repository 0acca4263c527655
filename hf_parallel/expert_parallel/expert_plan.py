"""The plan for the experts of a model: their modules, and which experts each rank keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.shard_plan import AttributeRewrite, Routing


@dataclass(frozen=True)
class ExpertKind:
    """Modules that are alike but for sizes, one of which was verified.

    Args:
        kind: Name of the class of the module that is called with tokens.
        path: The module that owns the stacks, relative to it.
        routing: Arguments of a call that have the tokens; with the experts of the module that was verified.
        rewrites: Whether what counts the experts is set to those of a rank.
    """

    kind: str
    path: str
    routing: Routing
    rewrites: bool


@dataclass(frozen=True)
class ExpertModule:
    """A module of experts, and what each rank keeps of it.

    Args:
        root: Name of the module.
        routing: Arguments of a call that have the tokens.
        sliced: Parameter, relative to the root -> its shards.
        rewrites: Attributes that count experts.
    """

    root: str
    routing: Routing
    sliced: Mapping[str, ShardSpec]
    rewrites: tuple[AttributeRewrite, ...]


@dataclass(frozen=True)
class ExpertPlan:
    """All experts of a model.

    Args:
        ep_size: Ranks that share them.
        modules: The modules, in the model's order.
    """

    ep_size: int
    modules: tuple[ExpertModule, ...]

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Parameter of the model -> its shards."""
        return {f"{one.root}.{name}": spec for one in self.modules for name, spec in one.sliced.items()}

    def fingerprint(self) -> str:
        """Hash to compare over ranks."""
        return hashlib.sha256(json.dumps([asdict(one) for one in self.modules]).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """A line for the start of a run."""
        sizes = sorted({one.routing.experts for one in self.modules})
        each = " or ".join(str(size) for size in sizes)
        return f"experts: {each} of {len(self.modules)} modules over {self.ep_size} ranks, tokens travel to them"
