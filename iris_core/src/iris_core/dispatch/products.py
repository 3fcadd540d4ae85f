"""Calls of `ctx.ops`: their checks, and their description as a `FusedRequest` or a `NormRequest`.

A wrong call is refused here, before anything is launched or sent to other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from iris_core.dispatch import FP8, PLAIN, TF32, requests
from iris_core.dispatch.config import Config, FusedConfig
from iris_core.dispatch.requests import AnyCall, Here
from iris_core.errors import ArgumentError, LayoutError, UnsupportedError
from iris_core.types import DeviceType, FusedRequest, NormRequest

NORM = "all_reduce_rms_norm"
GATHERING = ("all_gather_matmul", "matmul_all_gather")
LAYOUTS = ("torch", "tiles")
_FNUZ = "fnuz"
SCALED = ("rows", "blocks")
SCALED_BLOCK = 128
"""Columns of A, and rows and columns of B, that have one scale where blocks are scaled."""
_OF_PRODUCT = "output", "A", "B", "bias", "a_scales", "b_scales"
_OF_NORM = "output", "residual", "x", "weight", "scales"
_OPTIONAL, _WRITTEN = {"bias", "a_scales", "b_scales", "scales"}, {"output", "residual", "scales"}
ROW_NBYTES = 16
"""Rows of what peers reach, and what kernels load widely, begin at multiples of it."""


class FusedCall(AnyCall):
    """A call of a product: the output, A, B, the bias and, if there are some, their scales; `gather_dim`, `layout`."""

    def describe(self, here: Here, members: tuple[int, ...]) -> FusedRequest:
        """Make the request; TypeError, LayoutError or ArgumentError if an argument makes no sense."""
        op, (out, a, b, bias, *scale_tensors), _, config, gather_dim, layout = self
        if config is not None and not isinstance(config, FusedConfig):
            raise TypeError(f"{op}: config must be an iris_core.ops.FusedConfig, not {type(config).__name__}")
        if isinstance(gather_dim, bool) or (op in GATHERING and gather_dim not in (0, 1)):
            raise ArgumentError(f"{op}: gather_dim must be 0 (rows) or 1 (columns), not {gather_dim!r}")
        for name, tensor in _named(self).items():
            requests.check_strided(op, name, tensor)
            if name not in _OPTIONAL and tensor.dim() != 2:
                raise ArgumentError(f"{op}: {name} must be a matrix, not of shape {tuple(tensor.shape)}")
        m = a.shape[0] * (len(members) if op == "all_gather_matmul" and gather_dim == 0 else 1)
        k, n = b.shape
        along, (scales, scale_strides) = _bias_along(op, out, a, b, bias), _scaled_by(op, a, b, *scale_tensors)
        down, right = (0, 0) if bias is None else (bias.stride(0), bias.stride(-1))
        options: dict[str, Any] = {"layout": layout, "config": {} if config is None else config.given(op)}
        is_float32 = a.dtype is torch.float32 and here.target.type is not DeviceType.CPU
        wish = None if config is None else config.allow_tf32
        options |= {"tf32": is_float32 and (torch_allows_tf32() if wish is None else wish), "bias": along}
        options |= {} if gather_dim is None else {"gather_dim": gather_dim}
        a_al, b_al, out_al, bias_al = (each is None or each.data_ptr() % ROW_NBYTES == 0 for each in (a, b, out, bias))
        of: dict[str, Any] = {"m": m, "n": n, "k": k, "scales": scales, "scale_strides": scale_strides}
        of |= {"a_stride": a.stride(), "b_stride": b.stride(), "out_stride": out.stride()}
        of |= {"reach_a": _is_reachable(a, here), "reach_out": _is_reachable(out, here)}
        return FusedRequest(
            nbytes=m * k * a.element_size() if op == "all_gather_matmul" else m * n * out.element_size(),
            out_shape=(out.shape[0], out.shape[1]),
            bias_stride={"none": None, "rows": (down, 0), "columns": (0, right)}[along],
            aligned=(a_al, b_al, out_al, bias_al),
            options=options,
            b_dtype=requests.name_of(b.dtype),
            **of,
            **here.about(op, members, a, out),
        )

    def check(self, request: FusedRequest, here: Here) -> None:
        """Raise unless a call is possible: DeviceError, UnsupportedError or ArgumentError."""
        op, (out, a, b, bias, *_), _, _, dim, layout = self
        requests.check_tensors(op, here, **_named(self))
        if layout not in LAYOUTS:
            raise ArgumentError(f"{op}: layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
        _check_dtypes(op, request.out_dtype, request.dtype, request.b_dtype)
        if bias is not None and bias.dtype != out.dtype:
            raise ArgumentError(
                f"{op}: the bias has dtype {requests.name_of(bias.dtype)}, the output {request.out_dtype}; they must "
                "be equal"
            )
        if problem := _misfit(self, request.group_size):
            if dim is not None and not _misfit(self._replace(first=1 - dim), request.group_size):
                problem += f"; they fit gather_dim={1 - dim}"
            shapes = (tuple(tensor.shape) for tensor in (a, b, out))
            raise ArgumentError("{}: A has shape {}, B {}, the output {}: {}".format(op, *shapes, problem))
        if a.shape[1] == 0:
            raise ArgumentError(f"{op}: the inner dimension is 0; a product of nothing is not computed")
        if request.scales != "none" and request.dtype not in FP8:
            raise ArgumentError(f"{op}: scales belong to 8-bit floats, and A has dtype {request.dtype}")
        if request.scales != "none" and dim == 1 and op == "all_gather_matmul":
            raise UnsupportedError(f"{op}: with gather_dim=1 no scales are taken; gather rows, with gather_dim=0")
        requests.check_written(op, out)
        check_apart(self)


class NormCall(AnyCall):
    """A call of `all_reduce_rms_norm`: the output, the residual, x, the weight and, or None, the scales; `eps`."""

    def describe(self, here: Here, members: tuple[int, ...]) -> NormRequest:
        """Make the request; TypeError, LayoutError or ArgumentError if an argument makes no sense."""
        op, (out, residual, x, weight, _), _, config, eps, _ = self
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"{op}: config must be an iris_core.ccl.Config, not {type(config).__name__}")
        for name, tensor in _named(self).items():
            requests.check_strided(op, name, tensor)
            if not tensor.is_contiguous():
                raise LayoutError(f"{op}: the {name}, of shape {tuple(tensor.shape)}, must be contiguous")
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ArgumentError(f"{op}: x has shape {tuple(x.shape)}, and no elements to take the mean of")
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps >= 0:
            raise ArgumentError(f"{op}: eps must be a number that is not negative, not {eps!r}")
        hidden = x.shape[-1]
        return NormRequest(
            rows=x.numel() // hidden,
            hidden=hidden,
            weight_dtype=requests.name_of(weight.dtype),
            eps=float(eps),
            nbytes=x.numel() * x.element_size(),
            direct_in=here.has(x),
            aligned=all(each.data_ptr() % ROW_NBYTES == 0 for each in (x, residual, out, weight)),
            options={"layout": "torch", "in_place": True, "config": {} if config is None else config.given(op)},
            **here.about(op, members, x, out),
        )

    def check(self, request: NormRequest, here: Here) -> None:
        """Raise unless a call is possible: DeviceError, UnsupportedError or ArgumentError."""
        op, (out, residual, x, weight, scales) = self.op, self.tensors
        requests.check_tensors(op, here, **_named(self))
        for dtype in (request.dtype, request.weight_dtype):
            if dtype not in PLAIN:
                raise UnsupportedError(f"{op}: {dtype} is not normalised; these are: {', '.join(PLAIN)}")
        rows, shape = tuple(x.shape[:-1]), tuple(x.shape)
        if scales is not None and scales.dim() == x.dim():
            rows = *rows, 1
        requests.check_fits(op, {
            "residual": (residual, shape, (x.dtype,)), "weight": (weight, shape[-1:], (weight.dtype,)),
            "output": (out, shape, (x.dtype, *(getattr(torch, name) for name in FP8))),
            "scales": (scales, rows, (torch.float32,)),
        })  # fmt: skip
        if (request.out_dtype in FP8) != (scales is not None):
            raise ArgumentError(f"{op}: an output of 8-bit floats takes scales, one for each row, and no other does")
        check_apart(self)


def call_of(op: str, tensors: tuple[Any, ...], how: tuple[Any, ...]) -> FusedCall | NormCall:
    """Return a call, of the arguments that `Operations` passes on."""
    return NormCall(op, tensors, *how) if op == NORM else FusedCall(op, tensors, *how)


def _named(call: FusedCall | NormCall) -> dict[str, torch.Tensor]:
    """Return the tensors by what messages call them, without optional ones that are not there."""
    named = zip(_OF_NORM if call.op == NORM else _OF_PRODUCT, call.tensors, strict=False)
    return {name: each for name, each in named if each is not None or name not in _OPTIONAL}


def overlap(places: Sequence[int], nbytes: Sequence[int]) -> bool:
    """Whether two ranges of memory have a byte in common."""
    end = 0
    for at, size in sorted(zip(places, nbytes, strict=True)):
        if at < end:
            return True
        end = at + size
    return False


def check_apart(call: FusedCall | NormCall) -> None:
    """Raise ArgumentError if a tensor that is written has an element in common with another one."""
    for (name, one), (other_name, other) in itertools.combinations(_named(call).items(), 2):
        if _WRITTEN & {name, other_name} and requests.share_memory(one, other):
            raise ArgumentError(f"{call.op}: the {name} and {other_name} share memory; it does not work in place")


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
    op, (out, (rows, inner), (height, columns)) = call.op, (tuple(each.shape) for each in call.tensors[:3])
    dim = call.first or 0
    if op == "all_gather_matmul":
        # what all A together are, and the output
        whole = (rows * size, inner) if dim == 0 else (rows, inner * size)
        if height == whole[1] and out == (whole[0], columns):
            return ""
        return (
            f"with gather_dim={dim} A of all {size} ranks is {whole}, so B must have {whole[1]} rows, "
            f"and the output must be {(whole[0], columns)}"
        )
    if inner != height:
        return "A must have as many columns as B has rows"
    wanted, why = (rows, columns), ""
    if op == "matmul_all_gather":
        wanted, why = ((rows * size, columns), (rows, columns * size))[dim], f"with gather_dim={dim} "
    elif call.second == "tiles":
        why = 'with layout="tiles" '
    elif op == "matmul_reduce_scatter":
        if rows % size:
            return f"the {size} ranks of the group must divide the {rows} rows of the product"
        wanted = rows // size, columns
    return "" if out == wanted else f"{why}the output must be {wanted}"


def _bias_along(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Return "rows" if each row has a bias of its own, "columns" or "none"; ArgumentError if it does not fit.

    One of a single element that fits both is one of rows: they may belong to different members.
    """
    if bias is None:
        return "none"
    rows, columns = (a.shape[0], b.shape[1]) if op == "matmul_all_gather" else tuple(out.shape)
    shape = tuple(bias.shape)
    if shape == (rows, 1) or shape in ((columns,), (1, columns)):
        return "rows" if shape == (rows, 1) else "columns"
    hint = "; a bias along the rows is passed as bias[:, None]" if shape == (rows,) else ""
    raise ArgumentError(
        f"{op}: the bias has shape {shape}; it must be ({columns},), (1, {columns}) or ({rows}, 1), as it is "
        f"added to {rows} rows of {columns}{hint}"
    )


def _scaled_by(op: str, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor | None) -> tuple[str, Any]:
    """Return what the scales belong to, and their strides, as a request has them; ArgumentError if they do not fit."""
    if not scales:
        return "none", ((0, 0), (0, 0))
    for name, each in zip(("a_scales", "b_scales"), scales, strict=True):
        if each is None:
            raise ArgumentError(f"{op}: {name} are missing; A and B both have scales, or neither has")
        if each.dtype is not torch.float32:
            raise ArgumentError(f"{op}: {name} must be float32, not {requests.name_of(each.dtype)}")
    (rows, inner), columns = a.shape, b.shape[1]
    deep, wide = -(-inner // SCALED_BLOCK), -(-columns // SCALED_BLOCK)
    of_a, of_b = (tuple(each.shape) for each in scales if each is not None)
    down, right = (each.stride() for each in scales if each is not None)
    if of_a in ((rows,), (rows, 1)) and of_b in ((columns,), (1, columns)):
        return SCALED[0], ((down[0], 0), (0, right[-1]))
    if (of_a, of_b) == ((rows, deep), (deep, wide)):
        return SCALED[1], (down, right)
    raise ArgumentError(
        f"{op}: a_scales have shape {of_a}, b_scales {of_b}; of rows they must be ({rows},) or ({rows}, 1), and "
        f"({columns},) or (1, {columns}); of blocks of {SCALED_BLOCK} {(rows, deep)} and {(deep, wide)}"
    )


def _is_reachable(matrix: torch.Tensor, here: Here) -> bool:
    """Whether peers can work on a matrix where it lies: on the heap, rows dense and at multiples of 16 bytes."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    aligned = matrix.data_ptr() % ROW_NBYTES == 0 and (rows <= 1 or down * matrix.element_size() % ROW_NBYTES == 0)
    return aligned and (columns <= 1 or right == 1) and here.has(matrix)


# -- TF32 -------------------------------------------------------------------------------------------------------------
def torch_allows_tf32() -> bool:
    """Whether torch's own products of float32 may be of TF32 on GPUs.

    torch has an old and a new way to set it; `fp32_precision` is what its products look at, whichever was used.
    """
    setting: Any = torch.backends.cuda.matmul  # typed without the attribute
    return bool(setting.fp32_precision == TF32)


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let torch multiply float32 as a call wants it, whatever its own setting is; the setting is put back.

    It is one of the whole process: another thread that launches a product in the meantime gets the same.
    """
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if (before == TF32) == tf32:
        yield
        return
    setting.fp32_precision = "none"  # then it is that of torch.backends.cuda, or of torch.backends
    inherited = setting.fp32_precision == before
    setting.fp32_precision = TF32 if tf32 else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = "none" if inherited else before
