"""Calls of `ctx.ops`: what may be asked for, and its description as a `FusedRequest`.

A wrong call is refused here, before anything is launched or said to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_core.dispatch.requests import check_tensor, check_written, config_text, share_memory
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops.precision import torch_allows_tf32
from iris_core.types import DeviceType, FusedRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from iris_core.ops.config import FusedConfig
    from iris_core.types import DeviceTarget

OPS = ("matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")
"""Operations of `ctx.ops`."""

GATHERING = ("all_gather_matmul", "matmul_all_gather")
LAYOUTS = ("torch", "tiles")
PLAIN = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_FNUZ = "fnuz"
ROW_NBYTES = 16
"""Rows of what peers reach, and what kernels load widely, begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the user made it.

    Attributes:
        op: the operation.
        out, a, b: the matrices.
        bias: what is added to the result, or None.
        members: world ranks of the group, in its order.
        rank: this rank in the group.
        gather_dim: 0 if rows are gathered, 1 if columns are; None where nothing is gathered.
        layout: of the result of matmul_reduce_scatter.
        config: how to run.
        differentiates: torch would record the call for gradients.
    """

    op: str
    out: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    members: tuple[int, ...]
    rank: int
    gather_dim: int | None
    layout: str
    config: FusedConfig | None
    differentiates: bool

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no elements, on all members."""
        return self.out.numel() == 0


def check(call: Call, device: torch.device) -> None:
    """Raise unless a call is possible.

    Args:
        call: what was asked for.
        device: of this context.

    Raises:
        TypeError: something is no tensor.
        DeviceError: a tensor is on another device.
        LayoutError: a tensor is not strided memory.
        UnsupportedError: elements of this type are not multiplied.
        ArgumentError: (a ValueError) shapes, dtypes or options do not fit.
    """
    op = call.op
    named = (("output", call.out), ("A", call.a), ("B", call.b), ("bias", call.bias))
    for name, tensor in named:
        if tensor is not None or name != "bias":
            check_tensor(op, name, tensor, device)
    for name, tensor in named[:3]:
        assert tensor is not None
        if tensor.dim() != 2:
            raise ArgumentError(f"{op}: {name} must be a matrix, not of shape {tuple(tensor.shape)}")
    if op in GATHERING and call.gather_dim not in (0, 1):
        raise ArgumentError(f"{op}: gather_dim must be 0 (rows) or 1 (columns), not {call.gather_dim!r}")
    if call.layout not in LAYOUTS:
        raise ArgumentError(f"{op}: layout must be one of {', '.join(LAYOUTS)}, not {call.layout!r}")
    _check_dtypes(call)
    _SHAPES[op](call)
    if call.a.shape[1] == 0:
        raise ArgumentError(f"{op}: the inner dimension is 0; a product of nothing is not computed")
    _bias_along(call)
    check_written(op, call.out)
    check_apart(op, call.out, call.a, call.b, call.bias)
    if call.differentiates:
        raise ArgumentError(
            f"{op}: writes into its output, so torch cannot record it for gradients; use iris_core.nn, or call it "
            "under torch.no_grad()"
        )


def check_apart(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ArgumentError if the output has an element in common with something that is read."""
    for name, tensor in (("A", a), ("B", b), ("bias", bias)):
        if tensor is not None and share_memory(out, tensor):
            raise ArgumentError(f"{op}: the output and {name} share memory; it does not work in place")


def _check_dtypes(call: Call) -> None:
    op, (out, a, b) = call.op, (name_of(tensor.dtype) for tensor in (call.out, call.a, call.b))
    if a not in (*PLAIN, *FP8):
        raise UnsupportedError(f"{op}: matrices of {a} are not multiplied; these are: {', '.join((*PLAIN, *FP8))}")
    if a in FP8:
        if b not in FP8:
            raise ArgumentError(f"{op}: A has dtype {a}, so B must be of 8-bit floats, too, not {b}")
        if a.endswith(_FNUZ) != b.endswith(_FNUZ):
            raise UnsupportedError(
                f"{op}: A has dtype {a}, B {b}; no device multiplies 8-bit floats of the two families (with and without"
                f" {_FNUZ})"
            )
        if out not in PLAIN:
            raise ArgumentError(f"{op}: the product of 8-bit floats is {', '.join(PLAIN)}, not {out}")
    else:
        if b != a:
            raise ArgumentError(f"{op}: A has dtype {a}, B {b}; they must be equal")
        if out != a:
            raise ArgumentError(f"{op}: the output has dtype {out}, A and B have {a}; they must be equal")
    if call.bias is not None and call.bias.dtype != call.out.dtype:
        bias = name_of(call.bias.dtype)
        raise ArgumentError(f"{op}: the bias has dtype {bias}, the output {out}; they must be equal")


# -- shapes -----------------------------------------------------------------------------------------------------------
def _product(call: Call) -> tuple[int, int]:
    """Rows and columns of A @ B; A and B have the same inner dimension."""
    if call.a.shape[1] != call.b.shape[0]:
        raise _shapes(call, "A must have as many columns as B has rows")
    return call.a.shape[0], call.b.shape[1]


def _same(call: Call) -> None:
    wanted = _product(call)
    if tuple(call.out.shape) != wanted:
        raise _shapes(call, f"the output must be {wanted}")


def _gathered_before(call: Call) -> None:
    (rows, inner), size = call.a.shape, call.size
    by_rows = (rows * size, inner, (rows * size, call.b.shape[1]))
    by_columns = (rows, inner * size, (rows, call.b.shape[1]))
    forms = (by_rows, by_columns)

    def fits(dim: int) -> bool:
        return call.b.shape[0] == forms[dim][1] and tuple(call.out.shape) == forms[dim][2]

    dim = call.gather_dim
    assert dim is not None
    if not fits(dim):
        hint = f"; they fit gather_dim={1 - dim}" if fits(1 - dim) else ""
        raise _shapes(
            call,
            f"with gather_dim={dim} A of all {size} ranks is {forms[dim][:2]}, so B must have {forms[dim][1]} rows, "
            f"and the output must be {forms[dim][2]}{hint}",
        )


def _gathered_after(call: Call) -> None:
    rows, columns = _product(call)
    forms = ((rows * call.size, columns), (rows, columns * call.size))
    assert call.gather_dim is not None
    wanted = forms[call.gather_dim]
    if tuple(call.out.shape) != wanted:
        other = forms[1 - call.gather_dim]
        hint = f"; it fits gather_dim={1 - call.gather_dim}" if tuple(call.out.shape) == other else ""
        raise _shapes(call, f"with gather_dim={call.gather_dim} the output must be {wanted}{hint}")


def _scattered(call: Call) -> None:
    rows, columns = _product(call)
    if call.layout == "tiles":
        if tuple(call.out.shape) != (rows, columns):
            raise _shapes(call, f'with layout="tiles" the output must be {(rows, columns)}')
        return
    if rows % call.size:
        raise _shapes(call, f"the {call.size} ranks of the group must divide the {rows} rows of the product")
    if tuple(call.out.shape) != (rows // call.size, columns):
        raise _shapes(call, f"the output must be {(rows // call.size, columns)}, a part of the rows")


def _shapes(call: Call, rule: str) -> ArgumentError:
    out, a, b = (tuple(tensor.shape) for tensor in (call.out, call.a, call.b))
    return ArgumentError(f"{call.op}: A has shape {a}, B {b}, the output {out}: {rule}")


_SHAPES: dict[str, Callable[[Call], None]] = {
    "matmul_all_reduce": _same,
    "all_gather_matmul": _gathered_before,
    "matmul_all_gather": _gathered_after,
    "matmul_reduce_scatter": _scattered,
}


def _bias_along(call: Call) -> str:
    """What the bias lies along: "rows" if each row has its own, "columns" or "none".

    One of a single element that fits both is one of rows: they may belong to different members.
    """
    bias = call.bias
    if bias is None:
        return "none"
    if call.op == "matmul_all_gather":
        rows, columns = call.a.shape[0], call.b.shape[1]
    else:
        rows, columns = call.out.shape
    shape = tuple(bias.shape)
    if shape == (rows, 1):
        return "rows"
    if shape in ((columns,), (1, columns)):
        return "columns"
    hint = "; a bias along the rows is passed as bias[:, None]" if shape == (rows,) else ""
    raise ArgumentError(
        f"{call.op}: the bias has shape {shape}; it must be ({columns},), (1, {columns}) or ({rows}, 1), as it is "
        f"added to {rows} rows of {columns}{hint}"
    )


def _bias_stride(bias: torch.Tensor | None, along: str) -> tuple[int, int] | None:
    """How far a step down and a step to the right go in the bias."""
    if bias is None:
        return None
    return (bias.stride(0), 0) if along == "rows" else (0, bias.stride(-1))


# -- description ------------------------------------------------------------------------------------------------------
def name_of(dtype: torch.dtype) -> str:
    """torch's name of an element type."""
    return str(dtype).removeprefix("torch.")


def is_reachable(matrix: torch.Tensor, is_symmetric: Callable[[torch.Tensor], bool]) -> bool:
    """Whether peers can work on a matrix where it lies: on the heap, rows dense and at multiples of 16 bytes."""
    item = matrix.element_size()
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        return False
    if matrix.data_ptr() % ROW_NBYTES or (matrix.shape[0] > 1 and matrix.stride(0) * item % ROW_NBYTES):
        return False
    return is_symmetric(matrix)


def request_of(
    call: Call, target: DeviceTarget, is_symmetric: Callable[[torch.Tensor], bool], processors: int = 1
) -> FusedRequest:
    """Describe a checked call for choosing an algorithm.

    Args:
        call: the call.
        target: device of this rank.
        is_symmetric: whether a tensor lies wholly on the heap.
        processors: multiprocessors (SMs, CUs) of the device; on the CPU 1.
    """
    gathers_rows = call.op == "all_gather_matmul" and call.gather_dim == 0
    m = call.a.shape[0] * (call.size if gathers_rows else 1)
    k, n = call.b.shape
    moved = m * k * call.a.element_size() if call.op == "all_gather_matmul" else m * n * call.out.element_size()
    tensors = (call.a, call.b, call.out, call.bias)
    options: dict[str, Any] = {
        "layout": call.layout,
        "config": {} if call.config is None else call.config.given(),
        "tf32": _allows_tf32(call, target),
    }
    if call.gather_dim is not None:
        options["gather_dim"] = call.gather_dim
    options["bias"] = _bias_along(call)
    a_al, b_al, out_al, bias_al = (each is None or each.data_ptr() % ROW_NBYTES == 0 for each in tensors)
    return FusedRequest(
        op=call.op,
        m=m,
        n=n,
        k=k,
        dtype=name_of(call.a.dtype),
        out_dtype=name_of(call.out.dtype),
        nbytes=moved,
        rank=call.rank,
        members=call.members,
        target=target,
        a_stride=call.a.stride(),
        b_stride=call.b.stride(),
        out_stride=call.out.stride(),
        out_shape=(call.out.shape[0], call.out.shape[1]),
        bias_stride=_bias_stride(call.bias, options["bias"]),
        reach_a=is_reachable(call.a, is_symmetric),
        reach_out=is_reachable(call.out, is_symmetric),
        aligned=(a_al, b_al, out_al, bias_al),
        options=options,
        b_dtype=name_of(call.b.dtype),
        processors=processors,
    )


def _allows_tf32(call: Call, target: DeviceTarget) -> bool:
    """Whether the call's products of float32 may be of TF32; False for other elements, and on the CPU."""
    if target.type is DeviceType.CPU or name_of(call.a.dtype) != "float32":
        return False
    wish = None if call.config is None else call.config.allow_tf32
    return torch_allows_tf32() if wish is None else wish


def shared_facts(request: FusedRequest) -> dict[str, str]:
    """Return what must be equal on all members, by name, for comparing and for messages."""
    options = request.options
    facts = {
        "operation": request.op,
        "dtypes": f"{request.dtype} times {request.b_dtype or request.dtype} to {request.out_dtype}",
        "product": f"{request.m} x {request.k} times {request.k} x {request.n}",
        "bias along": options["bias"],
        "TF32 for float32": "allowed" if options["tf32"] else "no",
    }
    for name in ("gather_dim", "layout"):
        if name in options:
            facts[name] = str(options[name])
    facts["config"] = config_text(options["config"])
    where = "on the heap, with dense rows at multiples of 16 bytes"
    if request.op == "all_gather_matmul":
        facts[f"A {where}"] = str(request.reach_a)
    if request.op in ("matmul_all_gather", "matmul_all_reduce"):
        facts[f"the output {where}"] = str(request.reach_out)
    return facts
