"""Sizes for portable algorithms: layouts, pieces, blocks, grids.

They depend only on values that are equal on all members; otherwise members would wait at different barriers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.dispatch.requests import COLUMNS
from iris_core.dispatch.team import Team
from iris_core.types import REDUCIBLE, CollectiveRequest, DeviceType

VECTOR_NBYTES = 16  # widest access of a thread; pieces begin at multiples of it
_CPU_BLOCK = 1 << 15  # elements: on the CPU an operation on a block costs the same for 1 and for 1000

MOST_PROGRAMS = 64  # programs of a launch on a GPU, if the config does not say how many
_GPU_WARPS = 8
_THREAD_NBYTES_MOVE, _THREAD_NBYTES_REDUCE = 64, 32  # a thread that reduces holds as much of every member

USED_CONFIG = ("comm_sms", "num_warps", "num_stages", "block_size_m", "block_size_n")  # of `blocks_for`


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and strides of a tensor, with dimensions merged where possible; `num_dims` is 0 if it is dense."""

    sizes: tuple[int, ...] = (1,)
    strides: tuple[int, ...] = (1,)
    num_dims: int = 0

    def has_runs(self, unit: int) -> bool:
        """Return whether it is dense, or has fewer than 2^31 elements, `unit` by `unit` beside each other."""
        if not self.num_dims:
            return True
        aligned = all(each % unit == 0 for each in (self.sizes[-1], *self.strides[:-1]))
        return aligned and self.strides[-1] == 1 and math.prod(self.sizes) < 1 << 31


def layout_of(shape: Sequence[int], stride: Sequence[int]) -> Layout:
    """Return the layout of a tensor, in the order of its elements."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * step:
            sizes[-1], strides[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            strides.append(step)
    if math.prod(shape) == 0 or not sizes or (len(sizes) == 1 and strides[0] == 1):
        return Layout()
    return Layout(tuple(sizes), tuple(strides), len(sizes))


def columns_first(shape: Sequence[int], stride: Sequence[int], number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a matrix, whatever its columns consist of, as `number` chunks of columns in turn."""
    rows, columns, *parts = shape
    down, right, *steps = stride
    width = columns // number
    return (number, rows, width, *parts), (width * right, down, right, *steps)


@dataclass(frozen=True, slots=True)
class Carrier:
    """Type as which a kernel moves elements: `parts` of a torch dtype for each."""

    dtype: torch.dtype
    parts: int = 1

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.parts > 1:
            return torch.view_as_real(tensor)
        return tensor if tensor.dtype is self.dtype else tensor.view(self.dtype)

    def extend(self, shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.parts == 1:
            return tuple(shape), tuple(stride)
        return (*shape, self.parts), (*(self.parts * step for step in stride), 1)


_OTHERS = "uint16 uint32 uint64 complex32 complex64 complex128"
_FP8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
MOVABLE = (*REDUCIBLE, *(name for name in f"{_OTHERS} {_FP8}".split() if hasattr(torch, name)))
"""torch's names of the element types that can be moved."""


def carrier_of(dtype: str) -> Carrier:
    """Return the carrier for elements of a type, by torch's name."""
    own: torch.dtype = getattr(torch, dtype)
    if own is torch.complex128:
        return Carrier(torch.float64, 2)
    return Carrier({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.itemsize])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Grid of a launch: programs, and the elements that each handles at a time (`block`, a power of two)."""

    programs: int
    block: int
    options: Mapping[str, Any]


def blocks_for(request: CollectiveRequest, team: Team, elements: int | None, item: int, *, reduces: bool) -> Blocks:
    """Choose the grid of a launch, where its config does not set it.

    Args:
        request, team: the call; the team's control region bounds the number of programs.
        elements, item: total elements of a rank, None if that differs between members; bytes of an element.
        reduces: whether a thread holds several elements for each result.
    """
    config = request.options["config"]
    on_cpu = request.target.type is DeviceType.CPU
    warps = config.get("num_warps", _GPU_WARPS)
    if "block_size_m" in config or "block_size_n" in config:
        block = config.get("block_size_m", 32) * config.get("block_size_n", 64)
    elif on_cpu:
        block = _CPU_BLOCK if elements is None else min(_CPU_BLOCK, max(1024, 1 << (elements - 1).bit_length()))
    else:
        block = (_THREAD_NBYTES_REDUCE if reduces else _THREAD_NBYTES_MOVE) * warps * request.target.warp_size // item
    most = config.get("comm_sms", 1 if on_cpu else MOST_PROGRAMS)
    most = min(most, team.max_programs)
    programs = most if elements is None else max(1, min(most, -(-elements // block)))
    options = {} if on_cpu else {"num_warps": warps, "num_stages": config.get("num_stages", 1)}
    return Blocks(programs, block, options)


def block_problem(config: Mapping[str, Any]) -> str:
    """Return why a config's tiles cannot be blocks; empty if they can."""
    block = config.get("block_size_m", 32) * config.get("block_size_n", 64)
    return "" if block & (block - 1) == 0 else f"block_size_m * block_size_n is {block}, which is no power of two"


def rounded_up(elements: int, item: int) -> int:
    """Round a number of elements up to whole vectors."""
    unit = max(1, VECTOR_NBYTES // item)
    return -(-elements // unit) * unit


def pieces(
    team: Team, elements: int | None, item: int, number: int, *, halves: int = 2, name: str = "staging",
    needed: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments `stage`, the staging region, and `capacity`, the elements of a piece.

    Collective: every member calls it with the same arguments.

    Args:
        team, name: owner of the region, and its name; each protocol has its own.
        elements, item: elements of the largest useful piece, None if that differs between members; bytes of one.
        number: pieces that are staged together.
        halves: number of buffers of these pieces in the region, if more than one round is needed.
        needed: False: nothing is staged, and everything is one piece.
    """
    if not needed:
        return {"stage": team.control.tensor, "capacity": 1 << 62}
    unit = max(1, VECTOR_NBYTES // item)
    least = halves * number * unit * item
    capacity = 0 if elements is None else rounded_up(max(elements, 1), item)
    region = team.workspace(name, number * capacity * item or None, least)
    if elements is None or region.nbytes < number * capacity * item:
        capacity = region.nbytes // (halves * number * item) // unit * unit
    return {"stage": region.tensor, "capacity": capacity}


def layout_arguments(request: CollectiveRequest, carrier: Carrier | None = None) -> dict[str, Any]:
    """Return the arguments for the layouts of the input and of the output; see `layouts_of`."""
    found: dict[str, Any] = {}
    for side, layout in zip(("in", "out"), layouts_of(request, carrier), strict=True):
        found |= {f"{side}_sizes": layout.sizes, f"{side}_strides": layout.strides}
        found[f"{side.upper()}_DIMS"] = layout.num_dims
    return found


def layouts_of(request: CollectiveRequest, carrier: Carrier | None = None) -> tuple[Layout, Layout]:
    """Return where elements of input and output lie, in the order in which they move; one stands for both if alone."""
    options = request.options
    sides = [(request.shape, options["in_stride"])] if "in_stride" in options else []
    sides += [(options["out_shape"], options["out_stride"])] if "out_shape" in options else []
    if carrier is not None:
        sides = [carrier.extend(*side) for side in sides]
    if options["layout"] == COLUMNS:
        sides = [columns_first(*side, request.group_size) for side in sides]
    return layout_of(*sides[0]), layout_of(*sides[-1])


def item_of(request: CollectiveRequest) -> int:
    """Return the size of an element in bytes."""
    return int(getattr(torch, request.dtype).itemsize)
