"""all_gather, all_to_all, broadcast, gather and scatter by pulling, the first two by pushing, too.

The kernels are in `iris_triton.collectives.pull` and `iris_triton.collectives.push`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.sizes import (
    MOST_PROGRAMS,
    Blocks,
    blocks_for,
    carrier_of,
    columns_first,
    layout_of,
    pieces,
)
from iris_triton.collectives.pull import PER_CALL, pull
from iris_triton.collectives.push import push_direct, push_staged
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

MOVES = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")
"""Operations that pulling serves."""

PUSHED = ("all_gather", "all_to_all")
"""Operations that pushing serves."""

FORMS = {"push": "members", "persistent": "tiles", "partitioned": "divided"}
"""Algorithms that push, and their forms as the kernels call them."""

_SHARED = ("all_gather", "broadcast", "gather")  # a rank has the same for every member that gets something
_PERSISTENT_SHARE = 1.17  # of the model: all links at the same time
_ANYWHERE = 1 << 62  # elements: nothing has to go in pieces


class Pull(Portable):
    """One operation by pulling."""

    def __init__(self, op: str) -> None:
        super().__init__(op, "pull")
        if op == "all_to_all":
            self.layouts = ("torch", "columns")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, and what comes over the links."""
        staged = not self._all_direct(request)
        return self.model(request, meetings=2, moved=_received_nbytes(request), copied=request.nbytes * staged)

    @staticmethod
    def _all_direct(request: CollectiveRequest) -> bool:
        """Whether it is sure that no member has to stage its input."""
        if request.op in ("broadcast", "scatter") or request.options["uneven"]:
            return False  # each rank, or the root, knows for itself only
        return request.direct_in and request.options["layout"] == "torch"

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Say which elements go where, and bind the kernel."""
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        table = None
        if request.options["uneven"]:
            parts, chunk = _Parts(), None
            table = _on_device(_table(request, carrier.parts), team.device)
        else:
            parts, chunk = _parts(request, carrier.parts)
        shared = request.op in _SHARED
        layouts = []
        for shape, stride in _sides(request):
            extended = carrier.extend(shape, stride)
            if request.options["layout"] == "columns":
                extended = columns_first(*extended, team.size)
            layouts.append(layout_of(*extended))
        inner, outer = layouts
        region, capacity = team.control, _ANYWHERE
        if not self._all_direct(request):
            region, capacity = pieces(team, chunk, item, 1 if shared else team.size)
        source = "none"
        if _has_input(request) and math.prod(request.shape) > 0:  # an empty tensor has no address
            source = "direct" if request.direct_in and request.options["layout"] == "torch" else "staged"
        blocks = blocks_for(request, team, None if chunk is None else chunk * team.size, item, reduces=False)
        arguments = {
            "control": team.control.tensor.view(torch.int64),
            "stage": region.tensor,
            "table": table,
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            **asdict(parts),
            "capacity": capacity,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "SIZE": team.size,
            "SOURCE": source,
            "SHARED": shared,
            "IN_DIMS": inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "BLOCK": blocks.block,
        }
        kernel = BoundKernel(pull, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier, memory=table)


def _on_device(numbers: Sequence[int], device: str) -> torch.Tensor:
    """Numbers as int64 on the device, without waiting for it."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device != "cpu")
    return tensor.to(device, non_blocking=True)


def _has_input(request: CollectiveRequest) -> bool:
    return request.op not in ("broadcast", "scatter") or request.rank == request.options["root"]


def _sides(request: CollectiveRequest) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(shape, strides) of the input and of the output; where a rank has only one, that one stands for both."""
    options = request.options
    has_input = _has_input(request)
    has_output = request.op != "gather" or request.rank == options["root"]
    out = (options["out_shape"], options["out_stride"]) if has_output else None
    inp = (request.shape, options["in_stride"]) if has_input else None
    first, second = inp or out, out or inp
    assert first is not None
    assert second is not None
    return first, second


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which elements of a tensor are for which member, where parts are equal; see `iris_triton.collectives.pull`."""

    in_step: int = 0
    given: int = 0
    out_step: int = 0
    taken: int = 0
    giver: int = -1


def _parts(request: CollectiveRequest, each: int) -> tuple[_Parts, int]:
    """Return the parts, and the number of elements of one, where an element is `each` of the kernel's."""
    size, rank, root = request.group_size, request.rank, request.options.get("root")
    total = math.prod(request.shape) * each
    is_root = rank == root
    if request.op == "all_gather":
        return _Parts(given=total, out_step=total, taken=total), total
    if request.op == "all_to_all":
        chunk = total // size
        return _Parts(in_step=chunk, given=chunk, out_step=chunk, taken=chunk), chunk
    if request.op == "gather":
        return _Parts(given=total, out_step=total, taken=total * is_root), total
    assert root is not None
    if request.op == "scatter":
        chunk = total // size if is_root else total
        return _Parts(in_step=chunk, given=chunk * is_root, taken=chunk, giver=root), chunk
    return _Parts(given=total * is_root, taken=total, giver=root), total


def _table(request: CollectiveRequest, each: int) -> list[int]:
    """The table of `iris_triton.collectives.pull`, for parts that differ."""
    row = math.prod(request.shape[1:]) * each
    given, taken = ([row * n for n in request.options[f"{side}_splits"]] for side in ("in", "out"))
    return [*_begins(given), *given, *_begins(taken), *taken]


def _begins(numbers: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(numbers)][:-1]


def _received_nbytes(request: CollectiveRequest) -> int:
    """Bytes that come to one rank from the others, at most; the same on all members."""
    size = request.group_size
    if request.op in ("all_gather", "gather"):
        return request.nbytes * (size - 1)
    if request.op == "all_to_all":
        return request.nbytes * (size - 1) // size
    part = request.nbytes // size if request.op == "scatter" and _has_input(request) else request.nbytes
    return part * (size - 1)  # all of it leaves the root


class Push(Portable):
    """all_gather or all_to_all by pushing.

    Attributes:
        measured_only: of "partitioned", which is as fast as "persistent" and not for every number of programs.

    Args:
        op: the operation.
        name: the algorithm, one of `FORMS`.
    """

    def __init__(self, op: str, name: str) -> None:
        super().__init__(op, name)
        self.measured_only = name == "partitioned"
        self._form = FORMS[name]

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.options.get("uneven"):
            return Availability.no("it sends parts of equal size")
        programs, size = request.options.get("config", {}).get("comm_sms"), request.group_size
        if self._form == "divided" and programs is not None and programs % size:
            return Availability.no(
                f"it divides its programs among {size} members, and comm_sms={programs} is no multiple of {size}"
            )
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, what goes over the links, and an output that is copied out of the staging."""
        share = 1 if self.op == "all_gather" else 1 / request.group_size
        copied = 0.0 if request.direct_out else request.nbytes * share * request.group_size
        moved = request.nbytes * share * (request.group_size - 1)
        faster = _PERSISTENT_SHARE if self._form == "tiles" else 1
        return self.model(request, meetings=2, moved=moved, copied=copied, link_share=faster)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring; programs that are divided are a multiple of the members."""
        offered = super().tunings(request)
        if self._form != "divided":
            return offered
        size = request.group_size
        return [{name: n // size * size if name == "comm_sms" else n for name, n in each.items()} for each in offered]

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind one of the two kernels.  Collective: every member calls it."""
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        sharded = self.op == "all_to_all"
        count = math.prod(request.shape) * carrier.parts // (team.size if sharded else 1)
        inner = layout_of(*carrier.extend(request.shape, request.options["in_stride"]))
        blocks = blocks_for(request, team, count, item, reduces=False)
        if self._form == "divided":
            blocks = self._divided(request, team, count, blocks)
        arguments = {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "count": count,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "SIZE": team.size,
            "SHARDED": sharded,
            "FORM": self._form,
            "IN_DIMS": inner.num_dims,
            "BLOCK": blocks.block,
        }
        kernel = push_direct
        if not request.direct_out:
            kernel = push_staged
            region, capacity = pieces(team, count, item, team.size, name="pushed")
            outer = layout_of(*carrier.extend(request.options["out_shape"], request.options["out_stride"]))
            arguments |= {
                "stage": region.tensor,
                "capacity": capacity,
                "out_sizes": outer.sizes,
                "out_strides": outer.strides,
                "OUT_DIMS": outer.num_dims,
            }
        return Plan(BoundKernel(kernel, blocks.programs, arguments, PER_CALL, team.device, blocks.options), carrier)

    @staticmethod
    def _divided(request: CollectiveRequest, team: Team, count: int, blocks: Blocks) -> Blocks:
        """The same blocks for as many programs for each member as are of use."""
        size = team.size
        usual = blocks.programs if request.target.type is DeviceType.CPU else MOST_PROGRAMS
        most = min(request.options["config"].get("comm_sms", max(usual, size)), team.max_programs) // size
        if most == 0:
            raise UnsupportedError(
                f"{request.op}: 'partitioned' needs a program for each of {size} members, and there is room for "
                f"{team.max_programs} programs: raise IRIS_SYSTEM_SIZE"
            )
        return Blocks(size * max(1, min(most, -(-count // blocks.block))), blocks.block, blocks.options)
