"""`torch.ops.iris.*`: collectives, fused products and norms as operators of torch.

`torch.compile` keeps them in one graph (they have fake kernels), and autograd differentiates them: the gradient of each
is its dual, as if the sum of all ranks' losses were differentiated, and as collective: a tensor must require a gradient
on all members, or on none.  A group is a name: one that `name_of` makes, or that of a process group of backend "iris"
(`group.group_name`).

Example:
    >>> import torch
    >>> from iris_core import Iris
    >>> from iris_core.torch_backend import library
    >>> ctx = Iris("1MiB", device="cpu")
    >>> group = library.name_of(ctx)
    >>> torch.ops.iris.all_reduce(torch.ones(4), "sum", group)
    tensor([1., 1., 1., 1.])
    >>> ctx.close()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as c10d
from torch.amp.autocast_mode import _cast
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from iris_core.api import Iris
from iris_core.dispatch import PRODUCTS, products
from iris_core.errors import ArgumentError, HeapClosedError, UnsupportedError
from iris_core.nn.norm import norm_gradients
from iris_core.torch_backend.adapters import operations_of
from iris_core.types import Group, ReduceOp

_LIBRARY: Any = torch.library.Library("iris", "DEF")  # type: ignore[no-untyped-call]
_OPS = torch.ops.iris


class _Group(NamedTuple):
    context: Callable[[torch.device], Iris | None]
    members: tuple[int, ...]
    rank: int
    """This process, as `members` count."""

    @property
    def size(self) -> int:
        return len(self.members)

    def open(self, device: torch.device) -> Iris:
        """Return the context for tensors of a device."""
        if forward_ad._current_level >= 0:  # torch would drop the tangents, beneath an operator unseen
            raise UnsupportedError("torch.ops.iris has no forward-mode derivatives (jvp, jacfwd): use backward()")
        ctx = self.context(device)
        if ctx is None:
            raise HeapClosedError("the context of this group is gone")
        return ctx


_groups: dict[str, _Group] = {}


def name_of(ctx: Iris, group: Group = None) -> str:
    """Return the name by which operators know some ranks of a context; the same for the same ranks.

    Args:
        ctx: an open context.
        group: a process group of torch.distributed, a DeviceMesh, or a list of ranks of the context; None for all.
    """
    members = ctx.ops.members_of(group)
    name = f"{id(ctx)}:{','.join(map(str, members))}"
    if name not in _groups:
        known = weakref.ref(ctx, lambda _: _groups.pop(name, None))
        _groups[name] = _Group(lambda _: known(), members, ctx.cur_rank)
    return name


def _group(name: str) -> _Group:
    if (known := _groups.get(name)) is not None:
        return known
    try:
        group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        raise ArgumentError(
            f"group {name!r} is unknown: name_of(ctx, group) makes names of open contexts, process groups have theirs"
        ) from None
    return _Group(operations_of(group).context_in_order, tuple(range(group.size())), group.rank())


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"iris::{name}", fake, lib=_LIBRARY)
    torch.library.register_torch_dispatch(f"iris::{name}", DTensor, _refuse, lib=_LIBRARY)
    torch.fx.node.has_side_effect(getattr(_OPS, name).default)  # peers wait for it, also where its result is not used


def _refuse(kind: type, op: Any, *given: Any) -> None:
    raise TypeError(f"{op}: a tensor is a {kind.__name__}; pass this rank's part, tensor.to_local()")


def _differentiate(name: str, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"iris::{name}", backward, setup_context=save, lib=_LIBRARY)


# -- collectives ------------------------------------------------------------------------------------------------------
def _shape(op: str, x: torch.Tensor, size: int) -> tuple[int, ...]:
    if op in ("all_reduce", "broadcast", "reduce", "all_to_all"):
        return tuple(x.shape)
    if not x.dim():
        raise ArgumentError(f"iris::{op}: the input has no first dimension")
    if op == "all_gather":
        return (size * x.shape[0], *x.shape[1:])
    if isinstance(x.shape[0], int) and x.shape[0] % size:
        raise ArgumentError(f"iris::{op}: {x.shape[0]} rows cannot be divided among {size} ranks")
    return (x.shape[0] // size, *x.shape[1:])


def _collective(op: str) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    """How a collective writes into a tensor, and a function that makes one for its result."""

    def into(x: torch.Tensor, *how: Any, out: torch.Tensor) -> None:
        found = _group(how[-1])
        ccl, group = found.open(x.device).ccl._anywhere, found.members
        x = x.detach().contiguous()
        if op == "reduce":  # of use where all members must call it, also where a compiler drops what is not read
            if found.rank != how[0]:
                out.zero_()
            ccl.reduce(out, x, how[0], ReduceOp.SUM, group)
        elif op == "broadcast":
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            ccl.broadcast(out, how[0], group)
        else:
            getattr(ccl, op)(out, x, *how[:-1], group)

    def fake(x: torch.Tensor, *how: Any) -> torch.Tensor:
        return x.new_empty(_shape(op, x, _group(how[-1]).size))

    return into, fake


def _unrecorded(op: str, write: Callable[..., None]) -> Callable[..., None]:
    """Return `write`, which refuses a tensor whose gradient torch would have to record."""

    def refuse_or_write(*given: Any, **out: Any) -> None:
        if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in (*given, *out.values())):
            raise ArgumentError(f"iris::{op} records no gradient: call the op that returns a tensor, or detach")
        write(*given, **out)

    return refuse_or_write


def _define_both(op: str, arguments: str, into: Callable[..., None], fake: Callable[..., torch.Tensor]) -> None:
    """Define an operator that returns a new tensor, which `fake` makes, and the one that writes into `out`."""
    place = arguments.split(", ").index("str group")

    def run(*given: Any) -> torch.Tensor:
        try:
            out = fake(*given)
        except ArgumentError as error:
            found = _group(given[place])
            found.open(given[0].device).ops.refuse(op, error, found.members)
        into(*given, out=out)
        return out

    _define(f"{op}({arguments}) -> Tensor", run, fake)
    _define(
        f"{op}_out({arguments}, *, Tensor(a!) out) -> ()",
        _unrecorded(f"{op}_out", into),
        _unrecorded(f"{op}_out", lambda *_, out: None),
    )


_HOW = {"all_reduce": "str op, ", "reduce_scatter": "str op, ", "broadcast": "SymInt src, ", "reduce": "SymInt dst, "}
for _op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
    _define_both(_op, f"Tensor x, {_HOW.get(_op, '')}str group", *_collective(_op))
for _op in ("all_reduce", "broadcast"):
    _into, _ = _collective(_op)
    _define(
        f"{_op}_(Tensor(a!) x, {_HOW[_op]}str group) -> ()",
        _unrecorded(f"{_op}_", lambda x, *how, into=_into: into(x, *how, out=x.detach())),
        _unrecorded(f"{_op}_", lambda *_: None),
    )


def _save_how(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.how = inputs[1:]


def _of_sums(op: str, dual: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        kind, group = ctx.how[0].lower(), ctx.how[1]
        if kind not in ("sum", "avg"):
            raise UnsupportedError(f"iris::{op}: sums and averages have gradients, not {kind!r}: detach the input")
        return dual(grad.contiguous(), kind, group), None, None

    return backward


def _gather_gradient(grad: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    gathered = _OPS.all_gather(grad, group)
    return gathered / _group(group).size if kind == "avg" else gathered  # type: ignore[no-any-return]


_differentiate("all_reduce", _save_how, _of_sums("all_reduce", _OPS.all_reduce))
_differentiate("reduce_scatter", _save_how, _of_sums("reduce_scatter", _gather_gradient))
_differentiate(
    "all_gather", _save_how,
    lambda ctx, grad: (_OPS.reduce_scatter(grad.contiguous(), "sum", *ctx.how), None),
)  # fmt: skip
_differentiate("all_to_all", _save_how, lambda ctx, grad: (_OPS.all_to_all(grad.contiguous(), *ctx.how), None))
_differentiate("broadcast", _save_how, lambda ctx, grad: (_OPS.reduce(grad.contiguous(), *ctx.how), None, None))
_differentiate("reduce", _save_how, lambda ctx, grad: (_OPS.broadcast(grad.contiguous(), *ctx.how), None, None))


# -- fused products ---------------------------------------------------------------------------------------------------
def _product_shape(op: str, a: torch.Tensor, b: torch.Tensor, size: int, gather_dim: int) -> tuple[int, int]:
    if a.dim() != 2 or b.dim() != 2:
        raise ArgumentError(f"iris::{op}: a and b are matrices, not of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    rows, columns = a.shape[0], b.shape[1]
    if op in products.GATHERING and gather_dim == 0:
        rows = rows * size
    elif op == "matmul_all_gather":
        columns = columns * size
    elif op == "matmul_reduce_scatter":
        if isinstance(rows, int) and rows % size:
            raise ArgumentError(f"iris::{op}: {rows} rows cannot be divided among {size} ranks")
        rows = rows // size
    return rows, columns


def _product(op: str) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    """How a product writes into a matrix, and a function that makes one for its result."""

    def into(a: torch.Tensor, b: torch.Tensor, bias: Any, group: str, gather_dim: int = 0, *, out: Any) -> None:
        found = _group(group)
        more = {"gather_dim": gather_dim} if op in products.GATHERING else {}
        given = [each.detach() for each in (a, b, bias) if each is not None]
        getattr(found.open(a.device).ops._anywhere, op)(out, *given, group=found.members, **more)

    def fake(a: torch.Tensor, b: torch.Tensor, bias: Any, group: str, gather_dim: int = 0) -> torch.Tensor:
        return a.new_empty(_product_shape(op, a, b, _group(group).size, gather_dim))

    return into, fake


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, bias, ctx.group, *gather_dim = inputs
    ctx.along_rows = gather_dim != [1]
    ctx.save_for_backward(a, b, bias)


def _product_gradient(op: str) -> Callable[..., Any]:
    """Return the backward function: gradients of a plain product, after or before the dual collective."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        a, b, bias = ctx.saved_tensors
        group, along_rows = ctx.group, ctx.along_rows
        of_a, of_b, of_bias = ctx.needs_input_grad[:3]  # all take part in what follows: members may need different ones
        if op == "all_gather_matmul":
            inner = grad = grad.contiguous()
            gathered = _OPS.all_gather(a if along_rows else a.t(), group)
            a = gathered if along_rows else gathered.t()
            grad_a = _OPS.matmul_reduce_scatter(*((grad, b.t()) if along_rows else (b, grad.t())), None, group)
            grad_a = grad_a if along_rows else grad_a.t()
        else:
            if op == "matmul_all_reduce":
                inner = _OPS.all_reduce(grad, "sum", group)
            elif op == "matmul_reduce_scatter":
                inner = _OPS.all_gather(grad, group)
            elif along_rows:
                inner = grad = _OPS.reduce_scatter(grad, "sum", group)
            else:
                inner = grad = _OPS.reduce_scatter(grad.t(), "sum", group).t()
            grad_a = inner @ b.t() if of_a else None
        grad_b = a.t() @ inner if of_b else None
        grad_bias = grad.sum_to_size(bias.shape) if of_bias else None
        return grad_a, grad_b, grad_bias, None, *[None] * (op in products.GATHERING)

    return backward


def _in_autocast(op: Callable[..., Any], device_type: str, *given: Any) -> Any:
    """Run a product with its matrices in the dtype of the autocast around it, as torch's own."""
    cast = _cast(given, device_type, torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        return op(*cast)


for _op in PRODUCTS:
    _dim = ", int gather_dim=0" * (_op in products.GATHERING)
    _define_both(_op, f"Tensor a, Tensor b, Tensor? bias, str group{_dim}", *_product(_op))
    _differentiate(_op, _save_factors, _product_gradient(_op))
    for _device in ("cpu", "cuda"):
        _LIBRARY.impl(_op, partial(_in_autocast, getattr(_OPS, _op), _device), f"Autocast{_device.upper()}")


# -- norms ------------------------------------------------------------------------------------------------------------
def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    found, (x, residual, weight) = _group(group), (each.detach() for each in (x, residual, weight))
    out, stream = x.new_empty(x.shape), residual.clone(memory_format=torch.contiguous_format)
    given = x.contiguous(), weight.contiguous(), eps
    found.open(x.device).ops._anywhere.all_reduce_rms_norm(out, stream, *given, group=found.members)
    return out, stream


def _norm_backward(ctx: Any, grad: torch.Tensor, grad_stream: torch.Tensor) -> tuple[Any, ...]:
    stream, weight = ctx.saved_tensors
    total, of_weight = norm_gradients(stream, weight, grad, grad_stream, ctx.eps)
    return _OPS.all_reduce(total, "sum", ctx.group), total, of_weight, None, None


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, weight, ctx.eps, ctx.group = inputs
    ctx.save_for_backward(output[1], weight)


_define(
    "all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str group) -> (Tensor, Tensor)",
    _norm,
    lambda x, residual, *_: (x.new_empty(x.shape), residual.new_empty(residual.shape)),
)
_differentiate("all_reduce_rms_norm", _save_norm, _norm_backward)
