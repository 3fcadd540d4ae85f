"""Calls of collectives: their checks, and their description as a `CollectiveRequest`.

A wrong call is refused here, before anything is launched or sent to other ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from iris_core.dispatch import COLLECTIVES
from iris_core.dispatch.config import Config
from iris_core.errors import ArgumentError, DeviceError, LayoutError, UnsupportedError
from iris_core.types import REDUCIBLE, CollectiveRequest, DeviceTarget, FusedRequest, Group, NormRequest, ReduceOp

Request = CollectiveRequest | FusedRequest | NormRequest

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
POINT_TO_POINT = ("send", "recv")
OPS = (*COLLECTIVES, *POINT_TO_POINT)
"""Operations that algorithms serve; a barrier is the backend's."""

TORCH, TILES, COLUMNS = "torch", "tiles", "columns"
LAYOUTS = {"reduce_scatter": (TORCH, TILES), "all_to_all": (TORCH, COLUMNS)}
"""Ways to divide tensors among ranks, by operation; the first is the default."""

_SPLITS = "input_split_sizes", "output_split_sizes"
"""Tensors of a call of all_to_all whose split sizes the devices alone know, after the output and the input."""

ALIGNMENT_NBYTES = 16
"""Calls whose tensors begin at multiples of it are one kind, all others another: kernels are compiled for either."""

_OVERLAP_WORK = 10_000
"""Steps in which numpy may look for a common byte of two tensors; matrices take a few."""

UNRECORDED = "writes into its output, which has no gradient; use torch.ops.iris, iris_core.nn or torch.no_grad()"
BITWISE_OPS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ALL_HAVE_INPUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather")
ALL_HAVE_OUTPUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scatter")
ALL_IN_PLACE = ("all_reduce", "all_gather", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Here:
    """This rank in its world, its device and its heap, for checking calls."""

    rank: int
    world_size: int
    target: DeviceTarget
    heap: tuple[int, int]  # where the rank's heap begins and ends
    processors: int = 1  # multiprocessors (SMs, CUs) of the smallest device of all ranks; on the CPU 1
    nodes: tuple[int, ...] = ()  # the node of each rank; empty where all are on one
    multicast: bool = False  # whether one address reaches the heaps of all ranks
    anywhere: bool = False  # whether tensors of members may lie differently

    def about(self, op: str, members: tuple[int, ...], operand: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        """Return what all requests of `ctx.ops` say: what they are, and where they come from."""
        of = {"rank": members.index(self.rank), "members": members, "nodes": self.nodes_of(members)}
        of |= {"op": op, "dtype": name_of(operand.dtype), "out_dtype": name_of(out.dtype)}
        return {**of, "target": self.target, "processors": self.processors}

    def nodes_of(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the node of each of some ranks; empty where the world is on one."""
        return tuple(self.nodes[member] for member in members) if self.nodes else ()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies wholly on the heap."""
        begin = tensor.data_ptr() or tensor.untyped_storage().data_ptr()  # of an empty tensor
        return self.heap[0] <= begin and begin + max(1, reach(tensor)) <= self.heap[1]


class AnyCall(NamedTuple):
    """A call as `ctx.ccl` or `ctx.ops` passes it on, unchecked; the meaning of `first` and `second` depends on `op`."""

    op: str
    tensors: tuple[Any, ...]  # the arguments of the launch; of a collective the output and the input
    group: Group
    config: Any
    first: Any = None
    second: Any = None


class CollectiveCall(AnyCall):
    """A call of `ctx.ccl`."""

    def describe(self, here: Here, members: tuple[int, ...]) -> CollectiveRequest:
        """Make the request; docs/collectives.md says what the options mean.  `check` says whether it is possible.

        TypeError, LayoutError or ArgumentError if an argument makes no sense.
        """
        op, (out, inp, *splits), _, config, first, second = self
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"{op}: config must be an iris_core.ccl.Config, not {type(config).__name__}")
        rank, options = members.index(here.rank), dict[str, Any]()
        if op in REDUCING:
            options["reduction"] = reduce_op(first).name.lower()
        if op in ROOTED:
            options["root"] = _index(op, members, second if op == "reduce" else first)
        if op in POINT_TO_POINT:  # between two ranks of the world, whatever group they are in
            if first == here.rank:
                raise ArgumentError(f"{op}: rank {first} is this rank; a message goes to another one")
            options["peer"] = members[_index(op, members, first)]
            members, rank = tuple(range(here.world_size)), here.rank
        if splits:
            options["device_splits"] = True
            for name, each in zip(_SPLITS, splits, strict=True):
                check_strided(op, f"{name} (int64 of {len(members)} numbers; both are tensors, or neither)", each)
        elif op == "all_to_all" and first is not None:
            taken, given = first
            options["in_splits"] = _split_sizes(given, inp, len(members))
            options["out_splits"] = _split_sizes(taken, out, len(members))
        is_root = rank == options.get("root")
        for name, tensor, needed in (
            ("output", out, op in (*ALL_HAVE_OUTPUT, "recv", "broadcast") or is_root),
            ("input", inp, op in (*ALL_HAVE_INPUT, "send") or is_root),
        ):
            if tensor is None and is_root and needed:
                raise ArgumentError(f"{op}: rank {members[rank]} is the root and must pass the {name}")
            if tensor is not None or needed:
                check_strided(op, name, tensor)
        main, tensors = out if inp is None else inp, [each for each in (out, inp) if each is not None]
        layout = second if op in LAYOUTS else TORCH
        options |= {
            "layout": layout,
            "in_place": _in_place(op, out, inp, rank, layout),
            "aligned": all(each.data_ptr() % ALIGNMENT_NBYTES == 0 for each in tensors),
            "uneven": bool(splits) or "in_splits" in options,
            "anywhere": here.anywhere,
            "config": {} if config is None else config.given(op),
        }
        options |= {"same_place": True} if config is not None and config.same_place else {}
        options |= {} if inp is None else {"in_stride": inp.stride()}
        options |= {} if out is None else {"out_shape": tuple(out.shape), "out_stride": out.stride()}
        direct = [each is not None and each.is_contiguous() and here.has(each) for each in (inp, out)]
        shape, dtype, nbytes = tuple(main.shape), name_of(main.dtype), main.numel() * main.element_size()
        of: tuple[Any, ...] = options, members, *direct, here.nodes_of(members)
        of += (here.multicast and len(members) == here.world_size,)
        return CollectiveRequest(op, shape, dtype, nbytes, rank, len(members), here.target, *of)

    def check(self, request: CollectiveRequest, here: Here) -> None:
        """Raise unless a call is possible: DeviceError, UnsupportedError or ArgumentError."""
        op, (out, inp, *splits) = self[:2]
        check_tensors(op, here, output=out, input=inp, **dict(zip(_SPLITS, splits, strict=False)))
        if splits:
            wanted = (request.group_size,), (torch.int64,)
            check_fits(op, {name: (each, *wanted) for name, each in zip(_SPLITS, splits, strict=True)})
            if share_memory(*splits):
                raise ArgumentError(f"{op}: {' and '.join(_SPLITS)} overlap; one is read, the other one written")
            if len(nodes_of(request)) > 1:
                raise UnsupportedError(f"{op}: between nodes the host must know the split sizes: give tensor.tolist()")
        layout, known = request.options["layout"], LAYOUTS.get(op, (TORCH,))
        if layout not in known:
            raise ArgumentError(f"{op}: layout must be one of {', '.join(known)}, not {layout!r}")
        if out is not None and inp is not None and out.dtype != inp.dtype:
            raise ArgumentError(f"{op}: the output has dtype {out.dtype}, the input {inp.dtype}")
        if op in REDUCING:
            check_reducible(op, ReduceOp[request.options["reduction"].upper()], inp.dtype)
        if out is not None and inp is not None:
            _check_shapes(request, out, inp)
        if out is not None and not (op == "broadcast" and request.rank == request.options["root"]):
            check_written(op, out)
        if out is None or inp is None or not share_memory(out, inp):
            return
        is_part = op in ("all_gather", "reduce_scatter", "gather", "scatter")
        if not request.options["in_place"] or op == "all_to_all" or not (is_part or out.stride() == inp.stride()):
            how = "the part must be this rank's, both contiguous" if is_part else "they must be the same elements"
            how = "it does not work in place" if op == "all_to_all" else f"in place {how}"
            raise ArgumentError(f"{op}: input and output overlap; {how}")


def is_empty(request: Request) -> bool:
    """Whether no member moves anything, if all call alike; a message of nothing is a message, too."""
    if isinstance(request, NormRequest):
        return request.rows == 0
    if isinstance(request, FusedRequest):
        return 0 in request.out_shape
    return request.nbytes == 0 and not request.options["uneven"] and request.op not in POINT_TO_POINT


def nodes_of(request: Request) -> tuple[int, ...]:
    """Return the nodes that the ranks are on that take part, in ascending order; none where the world is on one."""
    nodes = request.nodes
    if request.op in POINT_TO_POINT and nodes:
        nodes = nodes[request.rank], nodes[request.options["peer"]]
    return tuple(sorted(set(nodes)))


# -- arguments --------------------------------------------------------------------------------------------------------
def reduce_op(op: Any) -> ReduceOp:
    """Return the `ReduceOp` that an argument means: one, its number or name, one of torch.distributed, None for SUM."""
    if op is None:
        return ReduceOp.SUM
    kind = getattr(op, "op", op)  # torch's ReduceOp is an object around a member of its enumeration
    name = (kind if isinstance(kind, str) else str(getattr(kind, "name", ""))).upper()
    if name in ReduceOp.__members__:
        return ReduceOp[name]
    if not name and type(op) is int and op in tuple(ReduceOp):
        return ReduceOp(op)
    known = ", ".join(each.name for each in ReduceOp)
    raise ArgumentError(f"op={op!r} is no reduction; known are {known}, as ReduceOp or as torch.distributed.ReduceOp")


def check_reducible(what: str, op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise if no collective reduces elements of `dtype` with `op`; `what` names the call."""
    if name_of(dtype) not in REDUCIBLE:
        raise UnsupportedError(f"{what}: elements of {dtype} cannot be reduced; these can: {', '.join(REDUCIBLE)}")
    if op in BITWISE_OPS and dtype.is_floating_point:
        raise ArgumentError(f"{what}: {op.name} works on integers and bool, not on {dtype}")
    if op is ReduceOp.AVG and dtype is torch.bool:
        raise ArgumentError(f"{what}: AVG does not work on bool; use SUM or MAX for 'any', PRODUCT or MIN for 'all'")


def _index(op: str, members: tuple[int, ...], rank: Any) -> int:
    """Return a rank's index in the group."""
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"{op}: a root is a rank, not {rank!r}")
    rank = operator.index(rank)
    if rank not in members:
        raise ArgumentError(f"{op}: rank {rank} is not in the group of ranks {', '.join(map(str, members))}")
    return members.index(rank)


def _split_sizes(sizes: Sequence[int] | None, tensor: Any, size: int) -> tuple[int, ...]:
    """Return split sizes as a tuple: equal parts if only the other side gave any."""
    if sizes is None:
        return ((tensor.shape[0] if tensor.dim() else 0) // size,) * size
    return tuple(operator.index(n) for n in sizes)


def facts_of_splits(given: Any, taken: Any) -> tuple[Any, ...]:
    """Return what decides about tensors of split sizes, if they are such."""
    both = [each for each in (given, taken) if isinstance(each, torch.Tensor)]
    facts = [(each.shape, each.dtype, each.device, each.is_contiguous()) for each in both]
    return (*facts, len(both) == len(_SPLITS) and abs(given.data_ptr() - taken.data_ptr()) < reach(taken))


def check_strided(op: str, name: str, tensor: Any) -> None:
    """Raise unless something is a tensor in strided memory (TypeError, LayoutError)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: the {name} must be a torch tensor, not {type(tensor).__name__}")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"{op}: the {name} is a {type(tensor).__name__}; pass this rank's part, tensor.to_local()")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"{op}: the {name} has layout {tensor.layout}; only torch.strided tensors can be sent")


def check_tensors(op: str, here: Here, **tensors: torch.Tensor | None) -> None:
    """Raise unless kernels of this context can work on tensors: DeviceError, or ArgumentError for lazy ones.

    Those whose gradients torch would have to record are refused, too: as torch's own functions do with `out=`.
    """
    device = here.target.torch_device
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != torch.device(device):
            raise DeviceError(f"{op}: the {name} is on {tensor.device}, but this context works on {device}")
        if tensor.is_complex() and tensor.is_conj():
            raise ArgumentError(f"{op}: the {name} is a lazy conjugate: pass tensor.resolve_conj()")
        if tensor.is_neg():
            raise ArgumentError(f"{op}: the {name} is lazily negated: pass tensor.resolve_neg()")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{op}: {UNRECORDED}")


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of an element type."""
    return str(dtype).removeprefix("torch.")


def name_all(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes, for a message."""
    return " or ".join(map(name_of, dtypes))


def check_fits(op: str, wanted: Mapping[str, tuple[Any, Any, Any]], rows: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless tensors fit: `wanted` has by name the tensor, or None, its shape, and its dtypes.

    Of `rows`, the last dimension alone must be dense; others must be contiguous.
    """
    for name, (each, shape, dtypes) in wanted.items():
        if each is None:
            continue
        is_dense = each.stride()[-1:] in ((1,), ()) if name in rows else each.is_contiguous()
        if tuple(each.shape) != shape or each.dtype not in dtypes or not is_dense:
            how = "with dense rows" if name in rows else "contiguous"
            raise ArgumentError(
                f"{op}: {name} must be {shape}, {name_all(dtypes)}, {how}, not "
                f"{tuple(each.shape)}, {name_of(each.dtype)}{'' if is_dense else ', with gaps'}"
            )


# -- shapes -----------------------------------------------------------------------------------------------------------
def _check_shapes(request: CollectiveRequest, out: torch.Tensor, inp: torch.Tensor) -> None:
    op, size, layout = request.op, request.group_size, request.options["layout"]
    if parts := _whole_and_part(op, out, inp, layout):
        whole, part = parts
        large, small = ("output", "input") if whole is out else ("input", "output")
        stacked = (size, *part.shape)
        joined = (size * part.shape[0], *part.shape[1:]) if part.dim() else (size,)
        if tuple(whole.shape) not in (stacked, joined):
            rule = f"the {large} must be {joined} or {stacked}: one {small} for each of the {size} members"
            raise _shapes(op, out, inp, rule)
    elif layout == TILES:
        if out.dim() != 2 or out.shape != inp.shape:
            raise _shapes(op, out, inp, 'with layout="tiles" both must be matrices of the same shape')
    elif op == "all_to_all":
        _check_exchanged(request, out, inp)
    elif out.shape != inp.shape:
        raise _shapes(op, out, inp, "they must be equal")


def _check_exchanged(request: CollectiveRequest, out: torch.Tensor, inp: torch.Tensor) -> None:
    size, rank = request.group_size, request.rank
    given, taken = (request.options.get(name) for name in ("in_splits", "out_splits"))
    if request.options["layout"] == COLUMNS:
        if request.options["uneven"]:
            raise ArgumentError('all_to_all: layout="columns" has equal parts; split sizes need layout="torch"')
        if out.shape != inp.shape or out.dim() != 2 or out.shape[1] % size:
            rule = f'with layout="columns" both must be (M, N * {size}): one chunk of columns for each member'
            raise _shapes("all_to_all", out, inp, rule)
        return
    on_device = request.options.get("device_splits", False)
    if on_device and not math.prod(inp.shape[1:]):
        raise ArgumentError("all_to_all: rows without elements need split sizes that the host knows, not tensors")
    for tensor, split, name in ((inp, given, "input"), (out, taken, "output")):
        if on_device and tensor.dim():
            continue
        if split is None:
            if tensor.dim() == 0 or tensor.shape[0] % size:
                raise ArgumentError(
                    f"all_to_all: the first dimension of the {name}, of shape {tuple(tensor.shape)}, must be divisible "
                    f"by the {size} members of the group, or {name}_split_sizes say how it is divided"
                )
        elif len(split) != size or min(split, default=0) < 0 or tensor.dim() == 0 or sum(split) != tensor.shape[0]:
            raise ArgumentError(
                f"all_to_all: {name}_split_sizes={list(split)} must be {size} numbers that add up to the first "
                f"dimension of the {name}, of shape {tuple(tensor.shape)}"
            )
    if not request.options["uneven"]:
        if out.shape != inp.shape:
            raise _shapes("all_to_all", out, inp, "they must be equal")
    elif out.shape[1:] != inp.shape[1:]:
        raise _shapes("all_to_all", out, inp, "they may differ in the first dimension only")
    elif given is not None and taken is not None and given[rank] != taken[rank]:
        raise ArgumentError(
            f"all_to_all: this rank, number {rank} of the group, has {given[rank]} rows for itself "
            f"(input_split_sizes) and takes {taken[rank]} from itself (output_split_sizes)"
        )


def _shapes(op: str, out: torch.Tensor, inp: torch.Tensor, rule: str) -> ArgumentError:
    return ArgumentError(f"{op}: the output has shape {tuple(out.shape)}, the input {tuple(inp.shape)}: {rule}")


# -- memory -----------------------------------------------------------------------------------------------------------
def check_written(op: str, out: torch.Tensor) -> None:
    """Refuse an output that has several elements in one place."""
    end = 1
    for stride, size in sorted((t, s) for s, t in zip(out.shape, out.stride(), strict=True) if s > 1):
        if stride < end and not out.is_contiguous():
            raise ArgumentError(
                f"{op}: elements of the output, of shape {tuple(out.shape)} and strides {out.stride()}, share memory; "
                "pass a tensor that was not expanded"
            )
        end += stride * (size - 1)


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have a byte in common; elements of one may lie in the gaps of the other."""
    first, begin = one.data_ptr(), other.data_ptr()
    end, last = first + reach(one), begin + reach(other)
    if first >= last or begin >= end:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(_place_of(one), _place_of(other), max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # unknown, so better not


def _place_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Where a tensor lies, for numpy, which looks at the addresses and never at what is there: a GPU's will do."""
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    about = {"version": 3, "data": (tensor.data_ptr(), False), "typestr": f"|V{item}"}
    place: Any = SimpleNamespace(__array_interface__={**about, "shape": tuple(tensor.shape), "strides": strides})
    return np.asarray(place)


def _whole_and_part(op: str, out: Any, inp: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tensor that has a part for each member, and the one that is a part; None where there is no such."""
    if op in ("all_gather", "gather"):
        return out, inp
    return (inp, out) if op in ("reduce_scatter", "scatter") and layout == TORCH else None


def _in_place(op: str, out: torch.Tensor | None, inp: torch.Tensor | None, rank: int, layout: str) -> bool:
    """Whether input and output begin at the same byte, or one is this rank's part of the other."""
    if out is None or inp is None:
        return False
    parts = _whole_and_part(op, out, inp, layout)
    if parts is None:
        return out.data_ptr() == inp.data_ptr() and out.numel() > 0
    whole, part = parts
    if not (whole.is_contiguous() and part.is_contiguous() and part.numel()):
        return False
    return part.data_ptr() == whole.data_ptr() + rank * part.numel() * part.element_size()


# -- for members to compare -------------------------------------------------------------------------------------------
def shared_facts(request: Request) -> dict[str, str]:
    """Return the facts that must be equal on all members, by name, for comparing and for messages."""
    op, options, facts = request.op, request.options, dict[str, Any]()
    if isinstance(request, NormRequest):
        facts["rows"] = f"{request.rows} of {request.hidden}"
        facts["dtypes"] = f"{request.dtype} to {request.out_dtype}, the weight {request.weight_dtype}"
        facts |= {"eps": request.eps, "x on the heap": request.direct_in}
    elif isinstance(request, FusedRequest):
        facts["dtypes"] = f"{request.dtype} times {request.b_dtype or request.dtype} to {request.out_dtype}"
        facts["product"] = f"{request.m} x {request.k} times {request.k} x {request.n}"
        facts |= {"bias along": options["bias"], "scales": request.scales}
        facts["TF32 for float32"] = "allowed" if options["tf32"] else "no"
        where = "on the heap, with dense rows at multiples of 16 bytes"
        if op == "all_gather_matmul":
            facts[f"A {where}"] = request.reach_a
        elif op != "matmul_reduce_scatter":
            facts[f"the output {where}"] = request.reach_out
    else:
        facts |= {"dtype": request.dtype, "elements": _elements(request)}
        if options["layout"] != TORCH:  # the shape says which elements are whose
            facts["shape"] = request.shape
        if options["uneven"]:  # a rank may have nothing to give or to get, and such a tensor lies nowhere
            facts["split sizes"] = "on the devices" if "device_splits" in options else "given"
        elif not options.get("anywhere"):
            facts |= {"input on the heap and contiguous": request.direct_in} if op in ALL_HAVE_INPUT else {}
            facts |= {"output on the heap and contiguous": request.direct_out} if op in ALL_HAVE_OUTPUT else {}
            facts |= {"in place": options["in_place"]} if op in ALL_IN_PLACE else {}
    names = "reduction", "root", "gather_dim", "layout", "same_place"
    facts |= {name: options[name] for name in names if name in options}
    facts["config"] = config_text(options["config"])
    return {"operation": op, **{name: str(each) for name, each in facts.items()}}


def config_text(config: Mapping[str, Any]) -> str:
    """Fields of a config as text, in order of their names."""
    return ", ".join(f"{name}={value}" for name, value in sorted(config.items())) or "default"


def _elements(request: CollectiveRequest) -> int:
    """Return the number of elements that all members agree on: of a part, or of a row where parts differ."""
    op, options = request.op, request.options
    if options["uneven"]:
        return math.prod(request.shape[1:])
    divided = op in ("all_to_all", "reduce_scatter") or (op == "scatter" and request.rank == options["root"])
    return math.prod(request.shape) // (request.group_size if divided and options["layout"] != TILES else 1)
