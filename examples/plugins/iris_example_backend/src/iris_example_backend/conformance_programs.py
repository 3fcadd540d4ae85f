"""The programs of the conformance kit's stack suite in the language of this backend.

`iris_core.testing.conformance.stack.Programs` says what they do.  The kernels get the functions under test from
`device_api()`, and check with plain loads and stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from iris_example_backend.kernels import kernel, program_id

if TYPE_CHECKING:
    import torch

BLOCK = 256


@kernel
def _ring(
    api: Any, source: Any, target: Any, found: Any, flag: Any, value: int, me: int, peer: int, bases: Any, ns: int
) -> None:
    numel = source.array.size
    for start in range(0, numel, BLOCK):
        i = start + np.arange(BLOCK)
        api["put"](source + i, target + i, me, peer, bases, mask=i < numel)
    api["signal"](flag, value, me, peer, bases)
    api["wait"](flag, value, timeout_ns=ns)
    i = np.arange(numel)
    (found + i).store((target + i).load())


@kernel
def _all_to_all(api: Any, source: Any, target: Any, numel: int, me: int, bases: Any) -> None:
    peer, i = program_id(0), program_id(1) * BLOCK + np.arange(BLOCK)
    data = (source + peer * numel + i).load(i < numel)
    api["store"](target + me * numel + i, data, me, peer, bases, mask=i < numel)


@kernel
def _add(api: Any, counter: Any, me: int, bases: Any) -> None:
    api["atomic_add"](counter, me + 1, me, program_id(0), bases)


@kernel
def _meet(api: Any, slots: Any, found: Any, flags: Any, value: int, me: int, world: int, bases: Any, ns: int) -> None:
    for peer in range(world):
        api["store"](slots + me, value, me, peer, bases)
    api["barrier"](flags, me, world, bases, timeout_ns=ns)
    i = np.arange(world)
    (found + i).store((slots + i).load())
    api["barrier"](flags, me, world, bases, timeout_ns=ns)


def ring(
    ctx: Any,
    source: torch.Tensor,
    target: torch.Tensor,
    found: torch.Tensor,
    flag: torch.Tensor,
    value: int,
    timeout_s: float,
) -> None:
    """Put to the next rank, signal it, wait for the signal of the one before."""
    me, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    arguments = (source, target, found, flag, value, me, peer, ctx.get_heap_bases(), int(timeout_s * 1e9))
    _ring[(1,)](ctx.backend.device_api(), *arguments)


def all_to_all(ctx: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Store a row to every rank, a program per row and block."""
    numel = source.shape[1]
    grid = (ctx.num_ranks, -(-numel // BLOCK))
    _all_to_all[grid](ctx.backend.device_api(), source, target, numel, ctx.cur_rank, ctx.get_heap_bases())


def add(ctx: Any, counter: torch.Tensor, num_programs: int) -> None:
    """Add to a word of every rank, a program per rank and addition."""
    _add[(ctx.num_ranks, num_programs)](ctx.backend.device_api(), counter, ctx.cur_rank, ctx.get_heap_bases())


def meet(ctx: Any, slots: torch.Tensor, found: torch.Tensor, flags: torch.Tensor, value: int, timeout_s: float) -> None:
    """Store to all, pass the barrier, note what is there, pass it again."""
    arguments = (slots, found, flags, value, ctx.cur_rank, ctx.num_ranks, ctx.get_heap_bases(), int(timeout_s * 1e9))
    _meet[(1,)](ctx.backend.device_api(), *arguments)
