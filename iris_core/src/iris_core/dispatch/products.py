"""Calls of `ctx.ops`: what may be asked for, and its description as a `FusedRequest`.

A wrong call is refused here, before anything is launched or said to other ranks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from iris_core.dispatch.config import FusedConfig
from iris_core.dispatch.requests import check_strided, check_tensor, check_written, config_text, name_of, share_memory
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.types import DeviceType, FusedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from iris_core.dispatch.requests import Here
    from iris_core.types import DeviceTarget

OPS = ("matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")
"""Operations of `ctx.ops`."""

GATHERING = ("all_gather_matmul", "matmul_all_gather")
LAYOUTS = ("torch", "tiles")
PLAIN = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_FNUZ = "fnuz"
_TF32, _IEEE = "tf32", "ieee"
ROW_NBYTES = 16
"""Rows of what peers reach, and what kernels load widely, begin at multiples of it."""


class FusedCall(NamedTuple):
    """A call as `Operations` passes it on, not looked at."""

    op: str
    out: Any
    a: Any
    b: Any
    bias: Any
    group: dist.ProcessGroup | Sequence[int] | None
    config: FusedConfig | None
    gather_dim: int | None = None
    layout: str = "torch"

    @property
    def tensors(self) -> tuple[Any, Any, Any, Any]:
        """What is launched with."""
        return self.out, self.a, self.b, self.bias

    def describe(self, here: Here, members: tuple[int, ...]) -> FusedRequest:
        """Make the request; `check` says whether it is possible.

        Raises:
            TypeError, LayoutError, ArgumentError: an argument makes no sense.
        """
        op, out, a, b, bias, _, config, gather_dim, layout = self
        if config is not None and not isinstance(config, FusedConfig):
            raise TypeError(f"{op}: config must be an iris_core.ops.FusedConfig, not {type(config).__name__}")
        if isinstance(gather_dim, bool) or (op in GATHERING and gather_dim not in (0, 1)):
            raise ArgumentError(f"{op}: gather_dim must be 0 (rows) or 1 (columns), not {gather_dim!r}")
        for name, tensor in (("output", out), ("A", a), ("B", b), ("bias", bias)):
            if tensor is not None or name != "bias":
                check_strided(op, name, tensor)
                if name != "bias" and tensor.dim() != 2:
                    raise ArgumentError(f"{op}: {name} must be a matrix, not of shape {tuple(tensor.shape)}")
        m = a.shape[0] * (len(members) if op == "all_gather_matmul" and gather_dim == 0 else 1)
        k, n = b.shape
        along = _bias_along(self)
        options: dict[str, Any] = {
            "layout": layout,
            "config": {} if config is None else config.given(op),
            "tf32": _allows_tf32(a, config, here.target),
            "bias": along,
        }
        if gather_dim is not None:
            options["gather_dim"] = gather_dim
        a_al, b_al, out_al, bias_al = (each is None or each.data_ptr() % ROW_NBYTES == 0 for each in (a, b, out, bias))
        return FusedRequest(
            op=op,
            m=m,
            n=n,
            k=k,
            dtype=name_of(a.dtype),
            out_dtype=name_of(out.dtype),
            nbytes=m * k * a.element_size() if op == "all_gather_matmul" else m * n * out.element_size(),
            rank=members.index(here.rank),
            members=members,
            target=here.target,
            a_stride=a.stride(),
            b_stride=b.stride(),
            out_stride=out.stride(),
            out_shape=(out.shape[0], out.shape[1]),
            bias_stride=None
            if along in ("none", _UNFIT)
            else (bias.stride(0), 0)
            if along == "rows"
            else (0, bias.stride(-1)),
            reach_a=is_reachable(a, here.is_symmetric),
            reach_out=is_reachable(out, here.is_symmetric),
            aligned=(a_al, b_al, out_al, bias_al),
            options=options,
            b_dtype=name_of(b.dtype),
            processors=here.processors,
        )

    def check(self, request: FusedRequest, here: Here) -> None:
        """Raise unless a call is possible.

        Raises:
            DeviceError: a tensor is on another device.
            UnsupportedError: elements of this type are not multiplied.
            ArgumentError: (a ValueError) shapes, dtypes or options do not fit, or torch would record gradients.
        """
        op, out, a, b, bias = self[:5]
        for name, tensor in (("output", out), ("A", a), ("B", b), ("bias", bias)):
            if tensor is not None:
                check_tensor(op, name, tensor, here)
        if self.layout not in LAYOUTS:
            raise ArgumentError(f"{op}: layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        _check_dtypes(op, request.out_dtype, request.dtype, request.b_dtype)
        if bias is not None and bias.dtype != out.dtype:
            raise ArgumentError(
                f"{op}: the bias has dtype {name_of(bias.dtype)}, the output {request.out_dtype}; they must be equal"
            )
        if problem := _misfit(self, request.group_size):
            shapes = (tuple(tensor.shape) for tensor in (a, b, out))
            raise ArgumentError("{}: A has shape {}, B {}, the output {}: {}".format(op, *shapes, problem))
        if a.shape[1] == 0:
            raise ArgumentError(f"{op}: the inner dimension is 0; a product of nothing is not computed")
        if request.options["bias"] == _UNFIT:
            raise ArgumentError(_bias_problem(self))
        check_written(op, out)
        check_apart(op, out, a, b, bias)
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (out, a, b, bias)):
            raise ArgumentError(
                f"{op}: writes into its output, so torch cannot record it for gradients; use iris_core.nn, or call it "
                "under torch.no_grad()"
            )


def is_empty(request: FusedRequest) -> bool:
    """Whether the result has no elements, on all members."""
    return 0 in request.out_shape


def check_apart(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ArgumentError if the output has an element in common with something that is read."""
    for name, tensor in (("A", a), ("B", b), ("bias", bias)):
        if tensor is not None and share_memory(out, tensor):
            raise ArgumentError(f"{op}: the output and {name} share memory; it does not work in place")


def _check_dtypes(op: str, out: str, a: str, b: str) -> None:
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
    elif b != a:
        raise ArgumentError(f"{op}: A has dtype {a}, B {b}; they must be equal")
    elif out != a:
        raise ArgumentError(f"{op}: the output has dtype {out}, A and B have {a}; they must be equal")


def _misfit(call: FusedCall, size: int) -> str:
    """Why the shapes do not fit together; empty if they do."""
    out, (rows, inner), (height, columns) = tuple(call.out.shape), call.a.shape, call.b.shape
    dim = call.gather_dim or 0
    if call.op == "all_gather_matmul":
        # what all A together are, and the output
        forms = (((rows * size, inner), (rows * size, columns)), ((rows, inner * size), (rows, columns)))
        fits = [height == whole[1] and out == wanted for whole, wanted in forms]
        if fits[dim]:
            return ""
        (whole, wanted), hint = forms[dim], f"; they fit gather_dim={1 - dim}" if fits[1 - dim] else ""
        return (
            f"with gather_dim={dim} A of all {size} ranks is {whole}, so B must have {whole[1]} rows, "
            f"and the output must be {wanted}{hint}"
        )
    if inner != height:
        return "A must have as many columns as B has rows"
    if call.op == "matmul_all_gather":
        shapes = ((rows * size, columns), (rows, columns * size))
        hint = f"; it fits gather_dim={1 - dim}" if out == shapes[1 - dim] else ""
        return "" if out == shapes[dim] else f"with gather_dim={dim} the output must be {shapes[dim]}{hint}"
    if call.op == "matmul_all_reduce":
        return "" if out == (rows, columns) else f"the output must be {(rows, columns)}"
    if call.layout == "tiles":
        return "" if out == (rows, columns) else f'with layout="tiles" the output must be {(rows, columns)}'
    if rows % size:
        return f"the {size} ranks of the group must divide the {rows} rows of the product"
    part = rows // size, columns
    return "" if out == part else f"the output must be {part}, a part of the rows"


_UNFIT = "unfit"


def _bias_along(call: FusedCall) -> str:
    """What the bias lies along: "rows" if each row has its own, "columns" or "none".

    One of a single element that fits both is one of rows: they may belong to different members.
    """
    if call.bias is None:
        return "none"
    (rows, columns), shape = _bias_shapes(call)
    return "rows" if shape == (rows, 1) else "columns" if shape in ((columns,), (1, columns)) else _UNFIT


def _bias_shapes(call: FusedCall) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Rows and columns of that to which the bias is added, and its own shape."""
    to = (call.a.shape[0], call.b.shape[1]) if call.op == "matmul_all_gather" else tuple(call.out.shape)
    return to, tuple(call.bias.shape)


def _bias_problem(call: FusedCall) -> str:
    (rows, columns), shape = _bias_shapes(call)
    hint = "; a bias along the rows is passed as bias[:, None]" if shape == (rows,) else ""
    return (
        f"{call.op}: the bias has shape {shape}; it must be ({columns},), (1, {columns}) or ({rows}, 1), as it is "
        f"added to {rows} rows of {columns}{hint}"
    )


def is_reachable(matrix: torch.Tensor, is_symmetric: Callable[[torch.Tensor], bool]) -> bool:
    """Whether peers can work on a matrix where it lies: on the heap, rows dense and at multiples of 16 bytes."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    aligned = matrix.data_ptr() % ROW_NBYTES == 0 and (rows <= 1 or down * matrix.element_size() % ROW_NBYTES == 0)
    return aligned and (columns <= 1 or right == 1) and is_symmetric(matrix)


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
    facts |= {name: str(options[name]) for name in ("gather_dim", "layout") if name in options}
    facts["config"] = config_text(options["config"])
    where = "on the heap, with dense rows at multiples of 16 bytes"
    if request.op == "all_gather_matmul":
        facts[f"A {where}"] = str(request.reach_a)
    if request.op in ("matmul_all_gather", "matmul_all_reduce"):
        facts[f"the output {where}"] = str(request.reach_out)
    return facts


# -- TF32 -------------------------------------------------------------------------------------------------------------
def torch_allows_tf32() -> bool:
    """Whether torch's own products of float32 may be of TF32 (10 bits of mantissa) on GPUs.

    torch has an old and a new way to set it (`allow_tf32`, `set_float32_matmul_precision`; since 2.9
    `fp32_precision`).  `fp32_precision` is what its products look at, whichever way was used; reading the old
    attributes raises where the new one was set.
    """
    setting: Any = torch.backends.cuda.matmul  # typed without the attribute
    return bool(setting.fp32_precision == _TF32)


def _allows_tf32(a: torch.Tensor, config: FusedConfig | None, target: DeviceTarget) -> bool:
    """Whether the call's products of float32 may be of TF32; False for other elements, and on the CPU."""
    if target.type is DeviceType.CPU or a.dtype is not torch.float32:
        return False
    wish = None if config is None else config.allow_tf32
    return torch_allows_tf32() if wish is None else wish


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let torch multiply float32 as a call wants it, whatever its own setting is; the setting is put back.

    It is one of the whole process: another thread that launches a product in the meantime gets the same.
    """
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if (before == _TF32) == tf32:
        yield
        return
    setting.fp32_precision = "none"  # then it is that of torch.backends.cuda, or of torch.backends
    inherited = setting.fp32_precision == before
    setting.fp32_precision = _TF32 if tf32 else _IEEE
    try:
        yield
    finally:
        setting.fp32_precision = "none" if inherited else before
