"""The programs of the conformance kit's stack suite in the language of this backend.

docs/conformance_kit.md says what they do.  The kernels get the functions under test from
`device_api()`, and check with plain loads and stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from iris_example_backend.kernels import Pointer, kernel, program_id

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


# -- every device function, as a function and as a method -------------------------------------------------------------
def _bound(ctx: Any, form: str, name: str) -> Callable[..., Any]:
    """A function under test, to be called as the method is: the caller and the heap bases are filled in."""
    api = ctx.backend.device_api()
    if form == "method":
        dev = api["DeviceContext"].initialize(_pointer(ctx.get_device_context()))
        return getattr(dev, name)  # type: ignore[no-any-return]
    function, me, bases = api[name], ctx.cur_rank, _pointer(ctx.get_heap_bases())
    if name in ("wait", "wait_any", "test", "load_acquire"):
        return function  # type: ignore[no-any-return]
    if name == "barrier":
        return lambda flags, *group, **bound: function(flags, me, ctx.num_ranks, bases, *group, **bound)
    if name == "copy":
        return lambda src, dst, there, far, **mask: function(src, dst, there, far, me, bases, **mask)
    return lambda *args, **options: function(*args[:-1], me, args[-1], bases, **options)  # the last one is the peer


def _pointer(tensor: torch.Tensor) -> Pointer:
    return Pointer(tensor.numpy().reshape(-1))


def _bound_of(form: str, timeout_s: float) -> dict[str, int]:
    """Methods take the bound of their waits from the context."""
    return {"timeout_ns": int(timeout_s * 1e9)} if form == "function" else {}


@kernel
def _move(call: Any, name: str, source: Any, target: Any, lanes: Any, other: int, peer: int, far: int) -> None:
    i = np.arange(source.array.size)
    mask = {} if lanes is None else {"mask": (lanes + i).load() != 0}
    fill = {} if lanes is None else {**mask, "other": other}
    if name == "load":
        (target + i).store(call(source + i, peer, **fill))
    elif name == "store":
        call(target + i, (source + i).load(), peer, **mask)
    elif name == "copy":
        call(source + i, target + i, peer, far, **fill)
    else:
        call(source + i, target + i, peer, **fill)


@kernel
def _change(call: Any, name: str, cells: Any, operands: Any, compares: Any, found: Any, lanes: Any, peer: int) -> None:
    i = np.arange(cells.array.size)
    order = {} if lanes is None else {"sem": "acq_rel", "scope": "sys"}
    if name == "atomic_cas":
        (found + i).store(call(cells + i, (compares + i).load(), (operands + i).load(), peer, **order))
    else:
        mask = None if lanes is None else (lanes + i).load() != 0
        (found + i).store(call(cells + i, (operands + i).load(), peer, mask=mask, **order), mask)


@kernel
def _contend(call: Any, name: str, cell: Any, operands: Any, compares: Any, found: Any) -> None:
    peer, j = program_id(0), program_id(1)
    expected = [(compares + j).load()] if name == "atomic_cas" else []
    old = call(cell, *expected, (operands + j).load(), peer)
    (found + peer * operands.array.size + j).store(old)


@kernel
def _send(
    call: Any, put: Any, wait: Any, name: str, op: str, source: Any, target: Any, found: Any, flag: Any, value: int,
    awaited: int, peer: int, bound: dict[str, int],
) -> None:  # fmt: skip
    i = np.arange(source.array.size)
    if name == "signal":
        put(source + i, target + i, peer)
        call(flag, value, peer, op=op)
    else:
        call(source + i, target + i, flag, value, peer, op=op)
    wait(flag, awaited, **bound)
    (found + i).store((target + i).load())


@kernel
def _await_flag(
    signal: Any, wait: Any, cmp: str, flag: Any, sent: int, value: int, found: Any, peer: int, bound: dict[str, int]
) -> None:
    signal(flag, sent, peer)
    found.store(wait(flag, value, cmp=cmp, **bound))


@kernel
def _look(
    call: Any, signal: Any, name: str, cmp: str, flags: Any, sent: int, value: int, found: Any, peer: int,
    bound: dict[str, int],
) -> None:  # fmt: skip
    i = np.arange(2)
    if name == "wait_any":
        signal(flags + 1, sent, peer)
        found.store(call(flags + i, value, cmp=cmp, **bound))
    elif name == "test":
        for each in i:
            (found + each).store(call(flags + each, value, cmp=cmp))
    else:
        (found + i).store(call(flags + i))


@kernel
def _meet(
    store: Any, barrier: Any, slots: Any, found: Any, flags: Any, value: int, me: int, group: tuple[int, ...],
    bound: dict[str, int],
) -> None:  # fmt: skip
    i = np.arange(slots.array.size)
    for peer in i:
        store(slots + me, value, int(peer))
    barrier(flags, *group, **bound)
    (found + i).store((slots + i).load())
    barrier(flags, *group, **bound)


# -- launching --------------------------------------------------------------------------------------------------------
def move(
    ctx: Any,
    form: str,
    name: str,
    source: torch.Tensor,
    target: torch.Tensor,
    lanes: torch.Tensor | None,
    other: int,
    peer: int,
    far: int,
) -> None:
    """load, store, get, put or copy."""
    _move[(1,)](_bound(ctx, form, name), name, source, target, lanes, other, peer, far)


def change(
    ctx: Any,
    form: str,
    name: str,
    cells: torch.Tensor,
    operands: torch.Tensor,
    compares: torch.Tensor,
    found: torch.Tensor,
    lanes: torch.Tensor | None,
    peer: int,
) -> None:
    """An atomic on a block."""
    _change[(1,)](_bound(ctx, form, name), name, cells, operands, compares, found, lanes, peer)


def contend(
    ctx: Any,
    form: str,
    name: str,
    cell: torch.Tensor,
    operands: torch.Tensor,
    compares: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """An atomic of many programs on one word."""
    grid = (ctx.num_ranks, operands.numel())
    _contend[grid](_bound(ctx, form, name), name, cell, operands, compares, found)


def send(
    ctx: Any,
    form: str,
    name: str,
    op: str,
    source: torch.Tensor,
    target: torch.Tensor,
    found: torch.Tensor,
    flag: torch.Tensor,
    value: int,
    awaited: int,
    timeout_s: float,
) -> None:
    """Put and signal, or put_signal, to the next rank; wait for the signal of the one before."""
    functions = (_bound(ctx, form, each) for each in (name, "put", "wait"))
    peer, bound = (ctx.cur_rank + 1) % ctx.num_ranks, _bound_of(form, timeout_s)
    _send[(1,)](*functions, name, op, source, target, found, flag, value, awaited, peer, bound)


def await_flag(
    ctx: Any, form: str, cmp: str, flag: torch.Tensor, sent: int, value: int, found: torch.Tensor, timeout_s: float
) -> None:
    """Signal the next rank, and wait for the signal of the one before."""
    functions = _bound(ctx, form, "signal"), _bound(ctx, form, "wait")
    peer, bound = (ctx.cur_rank + 1) % ctx.num_ranks, _bound_of(form, timeout_s)
    _await_flag[(1,)](*functions, cmp, flag, sent, value, found, peer, bound)


def look(
    ctx: Any,
    form: str,
    name: str,
    cmp: str,
    flags: torch.Tensor,
    sent: int,
    value: int,
    found: torch.Tensor,
    timeout_s: float,
) -> None:
    """wait_any, test or load_acquire."""
    functions = _bound(ctx, form, name), _bound(ctx, form, "signal")
    peer, bound = (ctx.cur_rank + 1) % ctx.num_ranks, _bound_of(form, timeout_s)
    _look[(1,)](*functions, name, cmp, flags, sent, value, found, peer, bound)


def meet(
    ctx: Any,
    form: str,
    slots: torch.Tensor,
    found: torch.Tensor,
    flags: torch.Tensor,
    value: int,
    group: tuple[int, int, int] | None,
    timeout_s: float,
) -> None:
    """Store to all, pass the barrier, note what is there, pass it again."""
    functions = _bound(ctx, form, "store"), _bound(ctx, form, "barrier")
    arguments = slots, found, flags, value, ctx.cur_rank, group or (), _bound_of(form, timeout_s)
    _meet[(1,)](*functions, *arguments)
