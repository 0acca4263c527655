"""The links between the ranks of a run: fast ones between neighbours, those inside a node, the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


# From the fastest to the slowest.
FAST: Final = "fast links"
NODE: Final = "links inside a node"
NETWORK: Final = "network"


@dataclass(frozen=True)
class Links:
    """Nodes of equally many ranks, which are numbered node after node.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Ranks of each.
        fast: Neighbours that are joined by links faster than the others of their node; divides `ranks_per_node`, and is equal to
            it where all are alike.
    """

    nodes: int
    ranks_per_node: int
    fast: int

    @property
    def differ(self) -> bool:
        """Whether some ranks are joined by slower links than others."""
        return self.nodes > 1 or self.fast < self.ranks_per_node

    def between(self, one: int, other: int) -> str:
        """The kind of link between two ranks."""
        if one // self.ranks_per_node != other // self.ranks_per_node:
            return NETWORK
        if self.fast == self.ranks_per_node:
            return NODE
        return FAST if one // self.fast == other // self.fast else NODE

    def end_of(self, rank: int, kind: str) -> int:
        """The number of the link of a kind that a rank sends over; ranks that share one have the same.

        All ranks of a node share its link to the network, and neighbours on fast links share one to the rest of their node.
        """
        if kind == NETWORK:
            return rank // self.ranks_per_node
        return rank // self.fast if kind == NODE and self.fast < self.ranks_per_node else rank

    def describe(self) -> str:
        """The links in words."""
        fast = f", fast links join {self.fast}" if self.fast < self.ranks_per_node else ""
        local = self.ranks_per_node
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {local} rank{'s' if local > 1 else ''}{fast}"
