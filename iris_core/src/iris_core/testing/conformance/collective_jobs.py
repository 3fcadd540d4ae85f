"""Jobs that the suite of collectives runs on ranks: they make calls, and note every forbidden side effect."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pathlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.requests import REDUCING
from iris_core.testing.conformance.collective_cases import Case, judge, promised, source
from iris_core.testing.conformance.plugin_jobs import create
from iris_core.types import PluginKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROMISES = ("results", "input", "surroundings", "work", "memory", "bits")
STRANGER_WAITS_S = 15.0
_WORK_TIMEOUT_S = 20.0
_SLOW_S = 0.1
_LEAD_NBYTES = 256  # before and after each tensor
_POISON = 0xA5

Outcome = dict[str, str]
"""What is wrong, by promise; for "agreement" the digest of the output, if there is one."""


@dataclass(frozen=True)
class Setup:
    """Plugins of a suite and where they run, as ranks need them; the device is "cpu" or "cuda"."""

    collective: str
    allocator: str
    backend: str
    device: str
    ranks: int
    in_float32: bool  # half-precision numbers are added up in single precision
    check: tuple[str, ...] = ()  # what the checker looks for, see `Iris`


def call(setup: Setup, cases: Sequence[Case], num_turns: int) -> list[Outcome]:
    """Call each case `num_turns` times with one plan and new data.

    In every turn another rank is late, and whoever is done goes on at once: it writes the next input over the last one.
    """
    with _opened(setup) as (ctx, collective):
        return [_call(setup, ctx, collective, case, num_turns) for case in cases]


def call_in_group(setup: Setup, case: Case, folder: str) -> str:
    """Call a case twice in a group; the other ranks do nothing until the members are done.

    Returns:
        The problems, also with the tensors of a rank that is no member.
    """
    with _opened(setup) as (ctx, collective):
        if ctx.cur_rank in case.members:
            outcome = _call(setup, ctx, collective, case, num_turns=2)
            (pathlib.Path(folder) / str(ctx.cur_rank)).touch()
            ctx.barrier()
            return outcome["results"]
        tensors = _Tensors(ctx, case, rank=0, size=len(case.members))
        before = tensors.everything()
        deadline = time.monotonic() + STRANGER_WAITS_S
        while len(os.listdir(folder)) < len(case.members):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {case.members} were not done after {STRANGER_WAITS_S:g} s alone")
            time.sleep(0.01)
        ctx.barrier()
        if tensors.everything() != before:
            return f"something was written to the tensors of rank {ctx.cur_rank}, which is no member"
        return ""


def prepare_again(setup: Setup, case: Case, times: int) -> list[int]:
    """Prepare the same call again and again, use the plan once and drop it; returns the heap's blocks after each."""
    blocks = []
    with _opened(setup) as (ctx, collective):
        for _ in range(times):
            _call(setup, ctx, collective, case, num_turns=1)
            gc.collect()
            for _ in range(3):  # what was dropped is free when all ranks have agreed
                ctx.barrier()
            blocks.append(ctx.stats().num_blocks)
    return blocks


class _Tensors:
    """Input and output of a rank, with guard bytes around them that must not change."""

    def __init__(self, ctx: Any, case: Case, rank: int, size: int) -> None:
        self._dtype = getattr(torch, case.dtype)
        self._made: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []
        self.inp = self._make(ctx, case, case.input_shape(size), rank)
        if case.in_place and case.op == "all_reduce":
            self.out = self.inp
        elif case.in_place and case.op == "reduce_scatter":
            self.out = self.inp.tensor_split(size)[rank]
        else:
            self.out = self._make(ctx, case, case.output_shape(size), rank)
            if case.in_place:  # all_gather
                self.inp = self.out.tensor_split(size)[rank]

    def _make(self, ctx: Any, case: Case, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        """Allocate one tensor; the same on every rank, except for its place inside the allocation."""
        item = self._dtype.itemsize
        step = 2 if case.place == "strided" else 1
        numel = step * torch.Size(shape).numel()
        lead = _LEAD_NBYTES + (item * (5 * rank + 3) if case.place == "skewed" else 0)
        nbytes = 2 * _LEAD_NBYTES + item * (numel + 5 * ctx.num_ranks + 3)
        where = torch if case.place == "ordinary" else ctx
        raw = where.empty(nbytes, dtype=torch.uint8, device=ctx.device).fill_(_POISON)

        def inside(raw: torch.Tensor) -> torch.Tensor:
            inner = raw[lead : lead + item * numel].view(self._dtype)
            return inner.view(*shape[:-1], step * shape[-1])[..., ::step]

        self._made.append((raw, inside))
        return inside(raw)

    def everything(self) -> list[bytes]:
        """Return the contents, with the guard bytes."""
        return [content(raw) for raw, _ in self._made]

    def are_surroundings_whole(self) -> bool:
        """Whether the bytes around the tensors, and between their elements, are as they were made."""
        for raw, inside in self._made:
            copy = raw.clone()
            elements = inside(copy).zero_()
            if int((copy == _POISON).sum()) != raw.numel() - elements.nbytes:
                return False
        return True

    def free(self, ctx: Any) -> None:
        """Give the allocations back; a symmetric call."""
        for raw, _ in self._made:
            if ctx.is_symmetric(raw):
                ctx.free(raw)


def _call(setup: Setup, ctx: Any, collective: Any, case: Case, num_turns: int) -> Outcome:
    """Call a case on a member.  Its tensors stay until the context is closed, except where all ranks are members."""
    members = case.members or tuple(range(ctx.num_ranks))
    rank, size = members.index(ctx.cur_rank), len(members)
    tensors = _Tensors(ctx, case, rank, size)
    out = tensors.out if case.has_output(rank) else None
    inp = tensors.inp if case.has_input(rank) else None
    plan = collective.prepare(case.request(rank, members, ctx.target), ctx)
    wrong = dict.fromkeys((*PROMISES, "agreement"), "")
    what = f"{case}: rank {rank} of {size}: "
    for turn in range(num_turns):
        if num_turns > 1 and turn % size == rank:
            time.sleep(_SLOW_S)
        data = source(case, rank, turn, size)
        if not case.in_place:  # something else than the result, or than the last one
            tensors.out.copy_(
                torch.ones(tensors.out.nbytes, dtype=torch.uint8).view(data.dtype).view(tensors.out.shape)
            )
        if inp is not None:
            inp.copy_(data)
        before = ctx.stats()
        work = collective.launch(plan, out, inp)
        if work is not None:
            work.wait(_WORK_TIMEOUT_S)
            if not work.is_completed():
                wrong["work"] = what + "wait() returned, is_completed() is False"
        if ctx.device != "cpu":
            torch.cuda.current_stream().synchronize()
        after = ctx.stats()
        if (after.num_blocks, after.peak) != (before.num_blocks, before.peak):
            wrong["memory"] = what + f"a launch has taken memory of the heap: {before} before, {after} after"
        if inp is not None and not case.in_place and content(inp) != content(data):
            wrong["input"] = what + "its input has changed"
        if not tensors.are_surroundings_whole():
            wrong["surroundings"] = what + "memory beside its tensors has changed"
        if out is not None:
            wrong["results"] = wrong["results"] or judge(case, rank, turn, size, out, in_float32=setup.in_float32)
            wrong["agreement"] += hashlib.sha256(content(out)).hexdigest()
            if promises_bits(collective):
                right = promised(case, [source(case, each, turn, size) for each in range(size)])[rank]
                if content(out) != content(right):
                    wrong["bits"] = what + f"call {turn} has other bits than torch in the group's order"
    if not case.members:
        ctx.barrier()
        tensors.free(ctx)
    return wrong


@contextlib.contextmanager
def _opened(setup: Setup) -> Iterator[tuple[Any, Any]]:
    """Open a context and create the collective in it."""
    from iris_core import Iris

    places: dict[str, Any] = {"allocator": setup.allocator, "backend": setup.backend, "device": setup.device}
    with Iris("64MiB", **places, check=setup.check or None) as ctx:
        create_for = ctx.target, ctx.heap_size, ctx.cur_rank, ctx.num_ranks
        yield ctx, create(PluginKind.COLLECTIVE, setup.collective, *create_for)


def promises_bits(collective: Any) -> bool:
    """Whether a collective says that it reduces in the group's order."""
    return collective.op in REDUCING and getattr(collective, "deterministic", False) is True


def content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
