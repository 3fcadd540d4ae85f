"""The nodes of a context: which ranks can map this rank's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.world.group import World


class NodeMembers:
    """Which ranks share a node; a mixin for a class that has a world."""

    _world: World

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the ranks are on."""
        return len(self._world.nodes)

    @property
    def node(self) -> int:
        """Index of this rank's node; nodes are in the order of their lowest ranks."""
        return self._world.node

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, in ascending order: those whose memory it can reach."""
        return self._world.nodes[self._world.node]

    @property
    def node_group(self) -> tuple[int, ...]:
        """The same, as `group=` takes it."""
        return self.node_ranks

    @property
    def rail_group(self) -> tuple[int, ...]:
        """The ranks that have this rank's place on their nodes, one of each node that has that many; for `group=`."""
        place = self.node_ranks.index(self._world.rank)
        return tuple(ranks[place] for ranks in self._world.nodes if place < len(ranks))

    def is_reachable(self, rank: int) -> bool:
        """Whether kernels of this rank can address another one's heap: it is on the same node.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self._world.world_size:
            raise ValueError(f"there is no rank {rank} in a world of {self._world.world_size}")
        return rank in self.node_ranks
