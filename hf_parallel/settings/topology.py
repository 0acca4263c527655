"""The section of the config that says which links join the ranks, and how the axes of the mesh lie on them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from hf_parallel.errors import ConfigError
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.values import MAX_SIZE, Section, Size, number


AutoSize: TypeAlias = Annotated[Literal["auto"] | Size, BeforeValidator(number)]
AutoSeveral: TypeAlias = Annotated[Literal["auto"] | Annotated[int, Field(ge=2, le=MAX_SIZE)], BeforeValidator(number)]


def auto_or_keys(value: Any) -> Any:
    """`topology: auto` is a mapping that says nothing."""
    return {} if value == "auto" else value


class TopologyConfig(Section):
    """The links that join the ranks, and how the axes of the mesh lie on them."""

    nodes: Annotated[
        AutoSize,
        Field(description="nodes of the run, an integer of 1 or more, or 'auto' (the machines of the launch)"),
    ] = "auto"
    gpus_per_node: Annotated[
        AutoSize,
        Field(description="ranks of each node, an integer of 1 or more, or 'auto' (what the launcher started)"),
    ] = "auto"
    fast: Annotated[
        AutoSeveral,
        Field(
            description="neighbours that faster links join than the rest of their node (NVLink bridges), an integer of 2 or more that "
            "divides gpus_per_node, or 'auto' (all of a node are alike)"
        ),
    ] = "auto"
    dp_inside: Annotated[
        AutoSize,
        Field(
            description="replicas of a stage that are neighbours, a divisor of dp: 1 puts the stages of a replica next to each other, dp "
            "the replicas of a stage, or 'auto' (by bytes)"
        ),
    ] = "auto"
    reduction: Annotated[
        Literal["auto", "flat", "hierarchical"],
        Field(
            description="how gradients that are not compressed are summed: 'flat' (one ring), 'hierarchical' (inside each node, then "
            "between nodes) or 'auto' (hierarchical where nodes hold several replicas)"
        ),
    ] = "auto"

    def problems(self, tp_size: int, pp_size: int, *, planned: bool, sums: list[str]) -> Iterator[str]:
        """Find settings that contradict each other or have no effect, one line each.

        Args:
            tp_size: Ranks that share each layer.
            pp_size: Pipeline stages.
            planned: Whether the layout is planned when training starts.
            sums: Settings, as `key=value`, with which gradients are not summed as they are.
        """
        nodes, local, inside = self.nodes, self.gpus_per_node, self.dp_inside
        if nodes == 1 and local == 1:
            yield "topology.nodes=1 with topology.gpus_per_node=1: one process has no links to others. Remove topology."
        if local != "auto" and local % tp_size:
            yield _spans(f"topology.gpus_per_node={local}", local, tp_size)
        if self.fast != "auto" and local != "auto" and local % self.fast:
            yield _odd(self.fast, f"topology.gpus_per_node={local}", local)
        if inside != "auto" and planned:
            yield f"topology.dp_inside={inside} with layout=auto: the plan says the sizes. Remove topology.dp_inside."
        elif inside != "auto" and pp_size == 1:
            yield (
                f"topology.dp_inside={inside} with pp_size=1 has no effect: without stages replicas are neighbours. Remove "
                "topology.dp_inside."
            )
        if self.reduction != "auto":
            for setting in sums:
                yield (
                    f"topology.reduction={self.reduction} with {setting} has no effect: that decides how gradients travel. Remove "
                    "topology.reduction."
                )

    def check(self, world_size: int, tp_size: int, dp_size: int) -> None:
        """Refuse numbers that do not fit the processes of a run.

        Raises:
            ConfigError: With the key, the rule and a fix.
        """
        given = {f"topology.{name}": getattr(self, name) for name in ("nodes", "gpus_per_node")}
        given = {name: count for name, count in given.items() if count != "auto"}
        product, text = math.prod(given.values()), " * ".join(f"{name}={count}" for name, count in given.items())
        if (len(given) == 2 and product != world_size) or world_size % product:
            relation = f" = {product}, but" if len(given) == 2 else " does not divide"
            raise ConfigError(
                f"{text}{relation} num_processes={world_size}: nodes hold equally many ranks, and all of them. Correct topology, or "
                f"set num_processes to {product}{'' if len(given) == 2 else ' or a multiple of it'}."
            )
        if self.nodes != "auto" and (world_size // self.nodes) % tp_size:
            local = world_size // self.nodes
            raise ConfigError(_spans(f"topology.nodes={self.nodes} with num_processes={world_size}", local, tp_size))
        if self.dp_inside != "auto" and world_size > 1 and dp_size % self.dp_inside:
            raise ConfigError(
                f"topology.dp_inside={self.dp_inside} does not divide the {dp_size} replicas of num_processes={world_size}. Set it to "
                f"{math.gcd(self.dp_inside, dp_size)}, or to auto."
            )

    def check_sums(self, key: str, links: Links, shape: MeshShape) -> None:
        """Refuse sums inside nodes where no order of the axes puts several replicas of a part on each of several nodes.

        Args:
            key: The setting that asks for them.
            links: Links that join the ranks.
            shape: The mesh; its `dp_inside` is not read.

        Raises:
            ConfigError: With the key, the rule and a fix.
        """
        orders = shape.orders() if self.dp_inside == "auto" else [replace(shape, dp_inside=self.dp_inside)]
        if not any(one.copies_in_nodes(links.ranks_per_node) > 1 for one in orders):
            order = "" if self.dp_inside == "auto" else f" and topology.dp_inside={self.dp_inside}"
            raise ConfigError(
                f"{key}=hierarchical with {links.describe()}, {shape.num_copies} replica{'s' * (shape.num_copies > 1)}{order}: it needs "
                f"several nodes, each with as many replicas of a part as any other, and two or more. Set {key} to auto."
            )

    def links(self, world_size: int, ranks_per_node: int) -> Links:
        """The links of a run.

        Args:
            world_size: Ranks of the run.
            ranks_per_node: Ranks on each machine, as the launcher says.

        Raises:
            ConfigError: They contradict the settings.
        """
        if self.gpus_per_node != "auto":
            local = self.gpus_per_node
        else:
            local = ranks_per_node if self.nodes == "auto" else world_size // self.nodes
        if ranks_per_node < world_size and ranks_per_node % local:
            raise ConfigError(
                f"topology says {local} ranks on a node, but the launcher started {ranks_per_node} on each machine: a node does not span "
                f"machines. Set topology.gpus_per_node to {ranks_per_node}, or topology to auto."
            )
        if world_size % local:
            local = world_size
        fast = local if self.fast == "auto" else self.fast
        if local % fast:
            raise ConfigError(_odd(fast, f"{local} ranks on a node", local))
        return Links(world_size // local, local, fast)


def _odd(fast: int, what: str, local: int) -> str:
    fix = f"Set it to {math.gcd(fast, local)}" if math.gcd(fast, local) > 1 else "Remove it"
    return f"topology.fast={fast} does not divide {what}: every rank of a node has as many neighbours on fast links. {fix}."


def _spans(what: str, local: int, tp_size: int) -> str:
    best = max(size for size in range(1, min(local, tp_size) + 1) if local % size == 0)
    return (
        f"tp_size={tp_size} with {what}: a node has {local} rank{'s' * (local > 1)}, so a layer would be shared over the network, which every layer "
        f"waits for. Set tp_size to {best}, and pp_size to what it lacks."
    )
