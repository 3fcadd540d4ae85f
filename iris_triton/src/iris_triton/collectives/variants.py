"""More ways to do all_reduce: round a ring, and into one place.

The kernels are in `iris_triton.collectives.ring` and `iris_triton.collectives.accumulate`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.accumulate import LOCK_WORDS, accumulate
from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.sizes import MOST_PROGRAMS, VECTOR_NBYTES, blocks_for, layout_of, rounded_up
from iris_triton.collectives.pull import PER_CALL
from iris_triton.collectives.reductions import Reduction
from iris_triton.collectives.ring import WORDS, ring
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_HALVES = ("float16", "bfloat16")
_WORD = 8
_GPU_SLICES = 2  # of a tile, so that one is under way while another one is added up


def _layouts(request: CollectiveRequest) -> dict[str, Any]:
    """What kernels are told of the tensors."""
    inner = layout_of(request.shape, request.options["in_stride"])
    outer = layout_of(request.options["out_shape"], request.options["out_stride"])
    return {
        "in_sizes": inner.sizes,
        "in_strides": inner.strides,
        "out_sizes": outer.sizes,
        "out_strides": outer.strides,
        "IN_DIMS": inner.num_dims,
        "OUT_DIMS": outer.num_dims,
    }


class Ring(Reduction):
    """all_reduce round one ring or several; see `iris_triton.collectives.ring`.

    `Config.all_reduce_num_rings` is the number of rings.  `all_reduce_ring_slice_n` columns of a tile, of its
    block_size_m rows, are a slice: a tile goes over the wire as block_size_n / all_reduce_ring_slice_n messages one
    behind the other.
    """

    uses = (*Portable.uses, "all_reduce_num_rings", "all_reduce_ring_slice_n")

    def __init__(self) -> None:
        super().__init__("all_reduce", "ring")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options.get("config", {})
        rings, programs = config.get("all_reduce_num_rings", 1), config.get("comm_sms")
        if answer and programs is not None and programs < rings:
            return Availability.no(f"all_reduce_num_rings={rings} need as many programs, and comm_sms={programs}")
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: twice round the ring and a meeting; partial results are wide, results are not."""
        hops = 2 * (request.group_size - 1)
        once = request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=1 + hops, moved=once * (_wide_of(request).itemsize / _item(request) + 1))

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        config = request.options["config"]
        op, carrier = self.reduction(request)
        item, wide = _item(request), _wide_of(request).itemsize
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        rings = config.get("all_reduce_num_rings", 1)
        slices, block = self.slices(request, blocks.block)
        on_cpu = request.target.type is DeviceType.CPU
        most = min(config.get("comm_sms", max(rings, 1 if on_cpu else MOST_PROGRAMS)), team.max_programs)
        if most < rings:
            raise UnsupportedError(
                f"all_reduce: {rings} rings need as many programs, and there is room for {team.max_programs}: "
                "raise IRIS_SYSTEM_SIZE"
            )
        programs = max(rings, min(most, -(-shard // (slices * block))))
        fixed = block != blocks.block or "block_size_m" in config or "block_size_n" in config
        least = block if fixed else max(1, VECTOR_NBYTES // wide)
        mail = team.workspace("ring", programs * 2 * slices * block * wide, rings * slices * least * wide)
        room = mail.nbytes // (slices * wide)  # elements, if each mailbox had a slot for each slice of a tile only
        while block > least and room < rings * block:
            block //= 2
        programs = min(programs, room // block)
        arguments = self.common(request, team, op) | {
            "mail": mail.tensor,
            "words": team.region("ring words", WORDS * _WORD * team.max_programs).tensor.view(torch.int64),
            "steps": team.constant(ring_steps(team.size, rings)),
            "count": count,
            "shard": shard,
            "slots": min(2 * slices, slices * room // (programs * block)),
            "rings": rings,
            "SLICES": slices,
            "BLOCK": block,
            **_layouts(request),
        }
        return Plan(BoundKernel(ring, programs, arguments, PER_CALL, team.device, blocks.options), carrier)

    @staticmethod
    def slices(request: CollectiveRequest, block: int) -> tuple[int, int]:
        """Return slices of a tile, and elements of a slice, given how many a program would handle at a time."""
        config = request.options["config"]
        width = config.get("all_reduce_ring_slice_n")
        if width is not None:
            return config.get("block_size_n", 64) // width, config.get("block_size_m", 32) * width
        if "block_size_m" in config or "block_size_n" in config or request.target.type is DeviceType.CPU:
            return 1, block
        return _GPU_SLICES, block


def ring_steps(size: int, rings: int) -> list[int]:
    """Return how far each ring's next neighbour is: numbers prime to the size, in turn."""
    prime = [step for step in range(1, max(size, 2)) if math.gcd(step, size) == 1]
    return [prime[i % len(prime)] for i in range(rings)]


def _item(request: CollectiveRequest) -> int:
    return int(getattr(torch, request.dtype).itemsize)


def _wide_of(request: CollectiveRequest) -> torch.dtype:
    """In which type elements are added up."""
    own: torch.dtype = torch.uint8 if request.dtype == "bool" else getattr(torch, request.dtype)
    return torch.float32 if request.dtype in _HALVES else own


class _Accumulate(Reduction):
    """all_reduce in accumulators at the elements' owners; see `iris_triton.collectives.accumulate`."""

    locked: bool
    slowness: float
    """Bytes over the links for each byte that is added, a way that is only guessed."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: contributions, results, and the meetings; a lock is drawn and given back for each peer."""
        once = request.nbytes * (request.group_size - 1) / request.group_size
        wide = self.accumulators(request).itemsize / _item(request)
        meetings = 3 + (not request.direct_out) + 2 * (request.group_size - 1) * self.locked
        copied = request.nbytes * (wide / request.group_size + (not request.direct_out))
        return self.model(request, meetings=meetings, moved=once * (self.slowness * wide + 1), copied=copied)

    @staticmethod
    def accumulators(request: CollectiveRequest) -> torch.dtype:
        """Return the type of the accumulators."""
        return _wide_of(request)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        op, carrier = self.reduction(request)
        item, wide = _item(request), self.accumulators(request)
        staged = not request.direct_out
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), 1)  # in vectors of the narrowest elements: all parts are aligned
        each = wide.itemsize + item * staged
        region = team.workspace("accumulators", shard * each, VECTOR_NBYTES * each)
        capacity = min(shard, region.nbytes // each // VECTOR_NBYTES * VECTOR_NBYTES)
        locks = team.control
        if self.locked:
            locks = team.region("locks", LOCK_WORDS * _WORD * team.max_programs)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        arguments = self.common(request, team, op) | {
            "sums": region.tensor[: capacity * wide.itemsize].view(wide),
            "results": region.tensor[capacity * wide.itemsize :] if staged else region.tensor,
            "locks": locks.tensor.view(torch.int64),
            "count": count,
            "shard": shard,
            "capacity": capacity,
            "LOCKED": self.locked,
            "STAGED": staged,
            "BLOCK": blocks.block,
            **_layouts(request),
        }
        return Plan(BoundKernel(accumulate, blocks.programs, arguments, PER_CALL, team.device, blocks.options), carrier)


class Atomic(_Accumulate):
    """all_reduce by atomics in the owners' memory.

    The order in which the members' elements are added may differ from run to run, and so may the last bits of floats;
    within a run they are the same on all members.
    """

    locked = False
    slowness = 2.0

    def __init__(self) -> None:
        super().__init__("all_reduce", "atomic")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        reduction = request.options.get("reduction")
        if answer and reduction == "product" and request.dtype != "bool":
            return Availability.no("there are no atomic products")
        if answer and reduction in ("min", "max") and "float" in request.dtype:
            return Availability.no("atomic minima and maxima of floats would lose NaNs")
        return answer

    @staticmethod
    def accumulators(request: CollectiveRequest) -> torch.dtype:
        """Return the type of the accumulators: atomics have at least 32 bits."""
        return torch.int32 if _item(request) < 4 and "float" not in request.dtype else _wide_of(request)


class Spinlock(_Accumulate):
    """all_reduce by adding to sums in the owners' memory, one member at a time; as `Atomic`, for every reduction.

    The order in which the members' elements are added may differ from run to run, and so may the last bits of floats;
    within a run they are the same on all members.
    """

    locked = True
    slowness = 3.0

    def __init__(self) -> None:
        super().__init__("all_reduce", "spinlock")
