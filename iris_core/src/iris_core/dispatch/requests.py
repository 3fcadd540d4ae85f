"""Calls of collectives: what may be asked for, and its description as a `CollectiveRequest`.

A wrong call is refused here, before anything is launched or said to other ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_core.ccl.reduce_op import ReduceOp, check_reducible
from iris_core.errors import ArgumentError, DeviceError, LayoutError
from iris_core.types import CollectiveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from iris_core.ccl.config import Config
    from iris_core.types import DeviceTarget

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)
"""Operations that algorithms serve; a barrier is the backend's."""

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
POINT_TO_POINT = ("send", "recv")
TORCH, TILES, COLUMNS = "torch", "tiles", "columns"
LAYOUTS = {"reduce_scatter": (TORCH, TILES), "all_to_all": (TORCH, COLUMNS)}
"""Ways to divide tensors among ranks, by operation; the first is the default."""

ALIGNMENT_NBYTES = 16
"""Calls whose tensors begin at multiples of it are one kind, all others another: kernels are compiled for either."""

_OVERLAP_WORK = 10_000
"""Steps in which numpy may look for a common byte of two tensors; matrices take a few."""

_ALL_HAVE_INPUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather")
_ALL_HAVE_OUTPUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scatter")
_ALL_IN_PLACE = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the user made it.

    Attributes:
        op: the operation.
        out: output of this rank, or None.
        inp: input of this rank, or None.
        members: world ranks of the group, in its order.
        rank: this rank in the group.
        reduction: for those that reduce.
        root: rank in the group of the one rank that gives or gets everything.
        peer: rank in the group of the other side of a send or recv.
        layout: how a tensor is divided among the ranks.
        in_splits, out_splits: rows for, and from, each member (all_to_all with uneven parts).
        config: how to run.
    """

    op: str
    out: torch.Tensor | None
    inp: torch.Tensor | None
    members: tuple[int, ...]
    rank: int
    reduction: ReduceOp | None = None
    root: int | None = None
    peer: int | None = None
    layout: str = TORCH
    in_splits: tuple[int, ...] | None = None
    out_splits: tuple[int, ...] | None = None
    config: Config | None = None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def main(self) -> torch.Tensor:
        """The input; the output where there is no input."""
        tensor = self.out if self.inp is None else self.inp
        assert tensor is not None
        return tensor

    @property
    def in_place(self) -> bool:
        """Whether input and output begin at the same byte, or one is this rank's part of the other."""
        return _in_place(self)

    @property
    def is_empty(self) -> bool:
        """Whether no member moves anything, if all call alike; a message of nothing is a message, too."""
        return self.in_splits is None and self.peer is None and self.main.numel() == 0

    @property
    def receives(self) -> bool:
        """Whether something is written to the output: not on the root of a broadcast, whose tensor is both."""
        return self.out is not None and not (self.op == "broadcast" and self.rank == self.root)


def check(call: Call, device: torch.device) -> None:
    """Raise unless a call is possible.

    Args:
        call: what was asked for.
        device: of this context.

    Raises:
        TypeError: something is no tensor.
        DeviceError: a tensor is on another device.
        LayoutError: a tensor is not strided memory.
        UnsupportedError: elements of this type cannot be reduced.
        ArgumentError: (a ValueError) shapes, dtypes, splits or options do not fit.
    """
    for name, tensor in (("output", call.out), ("input", call.inp)):
        if tensor is None and call.rank == call.root and _has(call, name):
            raise ArgumentError(f"{call.op}: rank {call.members[call.rank]} is the root and must pass the {name}")
        if tensor is not None or _has(call, name):
            check_tensor(call.op, name, tensor, device)
    if call.layout not in LAYOUTS.get(call.op, (TORCH,)):
        raise ArgumentError(f"{call.op}: layout must be one of {', '.join(LAYOUTS[call.op])}, not {call.layout!r}")
    if call.out is not None and call.inp is not None and call.out.dtype != call.inp.dtype:
        raise ArgumentError(f"{call.op}: the output has dtype {call.out.dtype}, the input {call.inp.dtype}")
    if call.reduction is not None:
        check_reducible(call.op, call.reduction, call.main.dtype)
    _SHAPES[call.op](call)
    if call.receives:
        assert call.out is not None
        check_written(call.op, call.out)
    _check_overlap(call)


def _has(call: Call, side: str) -> bool:
    """Whether this rank must give an operation its output, or its input."""
    is_root = call.rank == call.root
    if side == "output":
        return call.op == "recv" or call.op in _ALL_HAVE_OUTPUT or call.op == "broadcast" or is_root
    return call.op == "send" or call.op in _ALL_HAVE_INPUT or is_root


def check_tensor(op: str, name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless something is a tensor that kernels of this context can work on.

    Args:
        op: the operation, for the message.
        name: what it is to the operation, likewise.
        tensor: what was passed.
        device: of this context.

    Raises:
        TypeError: it is no tensor.
        DeviceError: it is on another device.
        LayoutError: it is not strided memory.
        ArgumentError: (a ValueError) it is conjugated or negated lazily.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: the {name} must be a torch tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"{op}: the {name} has layout {tensor.layout}; only torch.strided tensors can be sent")
    if tensor.device != device:
        raise DeviceError(f"{op}: the {name} is on {tensor.device}, but this context works on {device}")
    if tensor.is_complex() and tensor.is_conj():
        raise ArgumentError(f"{op}: the {name} is a lazy conjugate: pass tensor.resolve_conj()")
    if tensor.is_neg():
        raise ArgumentError(f"{op}: the {name} is lazily negated: pass tensor.resolve_neg()")


# -- shapes -----------------------------------------------------------------------------------------------------------
def _same(call: Call) -> None:
    """Output and input are alike, where this rank has both."""
    if call.out is not None and call.inp is not None and call.out.shape != call.inp.shape:
        raise _shapes(call, "they must be equal")


def _one_to_many(call: Call) -> None:
    """The output holds one input of every member, along the first dimension or along one of its own."""
    if call.out is not None and call.inp is not None:
        _check_parts(call, call.out, call.inp, "output", "input")


def _many_to_one(call: Call) -> None:
    """The input holds one output for every member."""
    if call.layout == TILES:
        _tiles(call)
    elif call.out is not None and call.inp is not None:
        _check_parts(call, call.inp, call.out, "input", "output")


def _check_parts(call: Call, whole: torch.Tensor, part: torch.Tensor, large: str, small: str) -> None:
    stacked = (call.size, *part.shape)
    joined = (call.size * part.shape[0], *part.shape[1:]) if part.dim() else (call.size,)
    if tuple(whole.shape) not in (stacked, joined):
        raise _shapes(
            call, f"the {large} must be {joined} or {stacked}: one {small} for each of the {call.size} members"
        )


def _tiles(call: Call) -> None:
    out, inp = call.out, call.inp
    assert out is not None
    assert inp is not None
    if out.dim() != 2 or out.shape != inp.shape:
        raise _shapes(call, 'with layout="tiles" both must be matrices of the same shape')


def _exchanged(call: Call) -> None:
    out, inp = call.out, call.inp
    assert out is not None
    assert inp is not None
    splits = (call.in_splits, call.out_splits)
    if call.layout == COLUMNS:
        if splits != (None, None):
            raise ArgumentError('all_to_all: layout="columns" has equal parts; split sizes need layout="torch"')
        if out.shape != inp.shape or out.dim() != 2 or out.shape[1] % call.size:
            raise _shapes(
                call, f'with layout="columns" both must be (M, N * {call.size}): one chunk of columns for each member'
            )
        return
    for tensor, split, name in ((inp, call.in_splits, "input"), (out, call.out_splits, "output")):
        if split is None:
            if tensor.dim() == 0 or tensor.shape[0] % call.size:
                raise ArgumentError(
                    f"all_to_all: the first dimension of the {name}, of shape {tuple(tensor.shape)}, must be divisible "
                    f"by the {call.size} members of the group, or {name}_split_sizes say how it is divided"
                )
        elif len(split) != call.size or min(split, default=0) < 0 or tensor.dim() == 0 or sum(split) != tensor.shape[0]:
            raise ArgumentError(
                f"all_to_all: {name}_split_sizes={list(split)} must be {call.size} numbers that add up to the first "
                f"dimension of the {name}, of shape {tuple(tensor.shape)}"
            )
    if splits == (None, None):
        _same(call)
    elif out.shape[1:] != inp.shape[1:]:
        raise _shapes(call, "they may differ in the first dimension only")
    elif call.in_splits is not None and call.out_splits is not None:
        given, taken = call.in_splits[call.rank], call.out_splits[call.rank]
        if given != taken:
            raise ArgumentError(
                f"all_to_all: this rank, number {call.rank} of the group, has {given} rows for itself "
                f"(input_split_sizes) and takes {taken} from itself (output_split_sizes)"
            )


def _shapes(call: Call, rule: str) -> ArgumentError:
    out, inp = call.out, call.inp
    assert out is not None
    assert inp is not None
    return ArgumentError(f"{call.op}: the output has shape {tuple(out.shape)}, the input {tuple(inp.shape)}: {rule}")


_SHAPES: dict[str, Callable[[Call], None]] = {
    "all_reduce": _same,
    "all_gather": _one_to_many,
    "reduce_scatter": _many_to_one,
    "all_to_all": _exchanged,
    "broadcast": _same,
    "reduce": _same,
    "gather": _one_to_many,
    "scatter": _many_to_one,
    "send": _same,
    "recv": _same,
}


# -- memory -----------------------------------------------------------------------------------------------------------
def check_written(op: str, out: torch.Tensor) -> None:
    """Refuse an output that has several elements in one place."""
    reach = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1
    ):
        if stride < reach and not out.is_contiguous():
            raise ArgumentError(
                f"{op}: elements of the output, of shape {tuple(out.shape)} and strides {out.stride()}, share memory; "
                "pass a tensor that was not expanded"
            )
        reach += stride * (size - 1)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte behind the last one."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    first, end = extent(tensor)
    return end - first


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have a byte in common; elements of one may lie in the gaps of the other."""
    (first, end), (begin, last) = extent(one), extent(other)
    if first >= last or begin >= end:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(np.asarray(_Place(one)), np.asarray(_Place(other)), max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # unknown, so better not


class _Place:
    """Where a tensor lies, for numpy, which looks at the addresses and never at what is there: a GPU's will do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"|V{item}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
        }


def _in_place(call: Call) -> bool:
    out, inp = call.out, call.inp
    if out is None or inp is None:
        return False
    if call.op in ("all_gather", "gather"):
        whole, part = out, inp
    elif call.op in ("reduce_scatter", "scatter") and call.layout == TORCH:
        whole, part = inp, out
    else:
        return out.data_ptr() == inp.data_ptr() and out.numel() > 0
    if not (whole.is_contiguous() and part.is_contiguous() and part.numel()):
        return False
    return part.data_ptr() == whole.data_ptr() + call.rank * part.numel() * part.element_size()


def _check_overlap(call: Call) -> None:
    out, inp = call.out, call.inp
    if out is None or inp is None or not share_memory(out, inp):
        return
    is_part = call.op in ("all_gather", "reduce_scatter", "gather", "scatter")
    if not call.in_place or call.op == "all_to_all" or not (is_part or out.stride() == inp.stride()):
        raise ArgumentError(
            f"{call.op}: input and output overlap; "
            + ("it does not work in place" if call.op == "all_to_all" else "in place they must be the same elements")
        )


# -- description ------------------------------------------------------------------------------------------------------
def request_of(call: Call, target: DeviceTarget, is_symmetric: Callable[[torch.Tensor], bool]) -> CollectiveRequest:
    """Describe a checked call for choosing an algorithm; docs/collectives.md says what the options mean.

    Args:
        call: the call.
        target: device of this rank.
        is_symmetric: whether a tensor lies wholly on the heap.
    """
    main = call.main
    options: dict[str, Any] = {
        "layout": call.layout,
        "in_place": call.in_place,
        "aligned": all(each is None or each.data_ptr() % ALIGNMENT_NBYTES == 0 for each in (call.out, call.inp)),
        "uneven": call.in_splits is not None,
        "config": {} if call.config is None else call.config.given(call.op),
    }
    if call.inp is not None:
        options["in_stride"] = call.inp.stride()
    if call.out is not None:
        options["out_shape"], options["out_stride"] = tuple(call.out.shape), call.out.stride()
    if call.reduction is not None:
        options["reduction"] = call.reduction.name.lower()
    if call.root is not None:
        options["root"] = call.root
    if call.peer is not None:
        options["peer"] = call.peer
    if call.in_splits is not None:
        options["in_splits"], options["out_splits"] = call.in_splits, call.out_splits
    return CollectiveRequest(
        op=call.op,
        shape=tuple(main.shape),
        dtype=str(main.dtype).removeprefix("torch."),
        nbytes=main.numel() * main.element_size(),
        rank=call.rank,
        group_size=call.size,
        target=target,
        options=options,
        members=call.members,
        direct_in=call.inp is not None and call.inp.is_contiguous() and is_symmetric(call.inp),
        direct_out=call.out is not None and call.out.is_contiguous() and is_symmetric(call.out),
    )


def shared_facts(request: CollectiveRequest) -> dict[str, str]:
    """Return what must be equal on all members, by name, for comparing and for messages."""
    options = request.options
    facts = {"operation": request.op, "dtype": request.dtype}
    facts["elements"] = str(_elements(request))
    for name in ("reduction", "root", "layout"):
        if name in options:
            facts[name] = str(options[name])
    if options["layout"] != TORCH:  # the shape says which elements are whose
        facts["shape"] = str(request.shape)
    facts["config"] = config_text(options["config"])
    if options["uneven"]:  # a rank may have nothing to give or to get, and such a tensor lies nowhere
        return {**facts, "split sizes": "given"}
    if request.op in _ALL_HAVE_INPUT:
        facts["input on the heap and contiguous"] = str(request.direct_in)
    if request.op in _ALL_HAVE_OUTPUT:
        facts["output on the heap and contiguous"] = str(request.direct_out)
    if request.op in _ALL_IN_PLACE:
        facts["in place"] = str(options["in_place"])
    return facts


def config_text(config: Mapping[str, Any]) -> str:
    """Fields of a config as text that is the same on all members that have the same."""
    return ", ".join(f"{name}={value}" for name, value in sorted(config.items())) or "default"


def _elements(request: CollectiveRequest) -> int:
    """Number of elements that all members agree on: of a part, or of a row where parts differ."""
    shape = request.shape
    total = 1
    for size in shape[1:] if request.options["uneven"] else shape:
        total *= size
    divided = request.op in ("all_to_all", "reduce_scatter") or (
        request.op == "scatter" and request.rank == request.options["root"]
    )
    if request.options["uneven"] or not divided or request.options["layout"] == TILES:
        return total
    return total // request.group_size


def split_sizes(sizes: Sequence[int] | None, tensor: Any, size: int, other: Any) -> tuple[int, ...] | None:
    """Return split sizes as a tuple: None if neither side has any, equal parts if only the other side has.

    Args:
        sizes: what the caller gave; nothing, or an empty list as torch has it, for equal parts.
        tensor: the tensor that they divide.
        size: number of members.
        other: the other side's split sizes.
    """
    if sizes is None and other is None:
        return None
    if sizes is None:
        rows = tensor.shape[0] if tensor.dim() else 0
        return (rows // size,) * size
    return tuple(operator.index(n) for n in sizes)
