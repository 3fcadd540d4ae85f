"""Scaling on paper: how long collectives and a training step take on several nodes, by a latency and a rate per level.

A level costs its latency and the bytes that one rank sends there over its rate (Hockney, The communication challenge
for MPP, 1994); the bytes are those of Thakur, Rabenseifner and Gropp, Optimization of collective communication
operations in MPICH, 2005.  `docs/scaling.md` states the assumptions, and shows the model beside published figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = 1 << 20, 16 << 20, 128 << 20, 1 << 30
CHUNKS = 4
"""Pieces in which both levels work at the same time."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links."""

    latency_s: float  # seconds of one exchange of almost nothing
    bytes_per_s: float  # what one rank sends in a second, while all do


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of equal GPUs, each with a network card of its own."""

    num_nodes: int
    gpus: int = 8  # of a node
    # links within a node; by default what this project measured on 2 x H200 (benchmarks/results/ccl-2.json)
    node: Level = field(default=Level(2e-6, 3.4e11))
    # links between GPUs of the same number; by default the rate that NCCL reached on 4 nodes of 8 x H100, 400 Gbit/s
    # per GPU (github.com/NVIDIA/nccl-tests/issues/309: 365.84 GB/s over 8 cards), and the latency of a step over the
    # network in NCCL's own model (tuning.cc, protocol LL of a tree)
    rail: Level = field(default=Level(5e-6, 365.84e9 / 8))

    def seconds(self, op: str, nbytes: float, *, flat: bool = False) -> float:
        """Return the seconds of a collective of all GPUs.

        Args:
            op: one of OPS.
            nbytes: the full buffer of one rank: what all_gather gives, what reduce_scatter and all_to_all take.
            flat: as rings over all GPUs; else level by level, in chunks.  all_to_all is direct messages in both.
        """
        gpus, nodes = self.gpus, self.num_nodes
        ranks, times = gpus * nodes, 2 if op == "all_reduce" else 1
        direct = op == "all_to_all"
        whole, steps = flat and not direct, int(nodes > 1) if direct else math.ceil(math.log2(nodes))
        latency_s = times * (self.node.latency_s * (gpus > 1) + steps * self.rail.latency_s)
        in_node = (ranks - 1) / ranks if whole else (gpus - 1) / (ranks if direct else gpus)
        node_s = times * nbytes * in_node / self.node.bytes_per_s
        on_rail = nbytes if direct else nbytes / gpus
        part = 0 if nodes == 1 else (ranks - 1) / ranks if whole else (nodes - 1) / nodes
        rail_s = times * on_rail * part / self.rail.bytes_per_s
        most, least = max(node_s, rail_s), min(node_s, rail_s)
        return latency_s + most + (0 if flat or direct else least / CHUNKS)

    def bus_bytes_per_s(self, op: str, nbytes: float, *, flat: bool = False) -> float:
        """Return the rate as nccl-tests state it: bytes over time, times what an ideal ring sends of each; 0 alone."""
        ranks = self.gpus * self.num_nodes
        factor = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
        return factor and factor * nbytes / self.seconds(op, nbytes, flat=flat)

    def step_seconds(self, compute_s: float, params: float, layers: int, *, flat: bool = False) -> float:
        """Return the seconds of a training step of FSDP2 over all GPUs, each with the same work at any number of nodes.

        Parameters are gathered twice as 16-bit floats, and gradients are reduced as float32: layer by layer, beside the
        computation, but for one layer's.

        Args:
            compute_s: seconds of the computation of a step.
            params: number of parameters.
            layers: layers of equal size.
            flat: as in `seconds`.
        """
        gather_s = self.seconds("all_gather", 2 * params / layers, flat=flat)
        scatter_s = self.seconds("reduce_scatter", 4 * params / layers, flat=flat)
        return max(compute_s, (layers - 1) * (2 * gather_s + scatter_s)) + gather_s + scatter_s
