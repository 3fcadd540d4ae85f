"""Jobs that the suite of collectives runs on ranks: they make calls, and note every forbidden side effect."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.requests import REDUCING
from iris_core.providers.parts import PARTED_IN, PARTED_OUT
from iris_core.testing.conformance.collective_cases import REPLICATED, Case, judge, promised, source
from iris_core.testing.conformance.plugin_jobs import create, installed
from iris_core.types import PluginKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from iris_core.testing.conformance.stack_jobs import Setup

PROMISES = ("results", "agreement", "input", "surroundings", "work", "memory", "bits")
STRANGER_WAITS_S = 15.0
_WORK_TIMEOUT_S = 20.0
_SLOW_S = 0.1
_LEAD_NBYTES = 256  # before and after each tensor
_POISON = 0xA5

Outcome = dict[str, str]
"""What is wrong, by promise; without those that are not given."""


def call(setup: Setup, cases: Sequence[Case], num_turns: int) -> list[Outcome]:
    """Call each case `num_turns` times with one plan and new data; in place, twice at least.

    In every turn another rank is late, and whoever is done goes on at once: it writes the next input over the last one.
    """
    with _opened(setup) as (ctx, collective):
        return [_call(setup, ctx, collective, each, max(num_turns, 1 + each.in_place)) for each in cases]


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
        deadline = time.monotonic() + STRANGER_WAITS_S
        while len(os.listdir(folder)) < len(case.members):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {case.members} were not done after {STRANGER_WAITS_S:g} s alone")
            time.sleep(0.01)
        ctx.barrier()
        is_whole = tensors.are_whole(with_elements=True)
        return "" if is_whole else f"something was written to the tensors of rank {ctx.cur_rank}, which is no member"


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
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes, and which of them are no element's
        self.inp, self.out = (self._make(ctx, case, shape, rank) for shape in case.shapes(size))
        if case.in_place and case.op in PARTED_OUT:
            self.inp = self.out.tensor_split(size)[rank]
        elif case.in_place:
            self.out = self.inp.tensor_split(size)[rank] if case.op in PARTED_IN else self.inp

    def _make(self, ctx: Any, case: Case, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        """Allocate one tensor; the same on every rank, except for its place inside the allocation."""
        dtype = getattr(torch, case.dtype)
        item, step = dtype.itemsize, 2 if case.place == "strided" else 1
        numel = step * torch.Size(shape).numel()
        lead = _LEAD_NBYTES + (item * (5 * rank + 3) if case.place == "skewed" else 0)
        nbytes = 2 * _LEAD_NBYTES + item * (numel + 5 * ctx.num_ranks + 3)
        where = torch if case.place == "ordinary" else ctx
        raw = where.empty(nbytes, dtype=torch.uint8, device=ctx.device).fill_(_POISON)

        def inside(raw: torch.Tensor) -> torch.Tensor:
            inner = raw[lead : lead + item * numel].view(dtype)
            return inner.view(*shape[:-1], step * shape[-1])[..., ::step]

        inside(beside := torch.ones_like(raw)).zero_()
        self._made.append((raw, beside.bool()))
        return inside(raw)

    def are_whole(self, *, with_elements: bool) -> bool:
        """Whether the bytes around the tensors and between their elements are as they were made, and these as well."""
        return all(bool((raw == _POISON)[beside | with_elements].all()) for raw, beside in self._made)


def _call(setup: Setup, ctx: Any, collective: Any, case: Case, num_turns: int) -> Outcome:
    """Call a case on a member."""
    members = case.members or tuple(range(ctx.num_ranks))
    rank, size = members.index(ctx.cur_rank), len(members)
    tensors = _Tensors(ctx, case, rank, size)
    inp, out = (
        each if is_there else None for each, is_there in zip((tensors.inp, tensors.out), case.has(rank), strict=True)
    )
    plan = collective.prepare(case.request(rank, members, ctx.target), ctx)
    is_exact = case.op in REDUCING and getattr(collective, "deterministic", False) is True
    given = {"bits": is_exact, "agreement": case.op in REPLICATED}
    wrong, digests = {each: "" for each in PROMISES if given.get(each, True)}, hashlib.sha256()
    what = f"{case}: rank {rank} of {size}: "
    for turn in range(num_turns):
        if num_turns > 1 and turn % size == rank:
            time.sleep(_SLOW_S)
        inputs = [source(case, each, turn, size) for each in range(size)]
        if not case.in_place:  # something else than the result, or than the last one
            tensors.out.fill_(1)
        if inp is not None:
            inp.copy_(inputs[rank])
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
        if inp is not None and not case.in_place and content(inp) != content(inputs[rank]):
            wrong["input"] = what + "its input has changed"
        if not tensors.are_whole(with_elements=False):
            wrong["surroundings"] = what + "memory beside its tensors has changed"
        if out is not None:
            digests.update(content(out))
            if problem := judge(case, rank, inputs, out, in_float32=setup.in_float32):
                wrong["results"] = what + f"call {turn}: {problem}"
            if "bits" in wrong and content(out) != content(promised(case, inputs)[rank]):
                wrong["bits"] = what + f"call {turn} has other bits than torch in the group's order"
    if not case.members and "agreement" in wrong and ctx.broadcast(digests.digest()) != digests.digest():
        wrong["agreement"] = what + "other bits than those of rank 0"
    return wrong


@contextlib.contextmanager
def _opened(setup: Setup) -> Iterator[tuple[Any, Any]]:
    """Open a context and create the collective in it."""
    with setup.open() as ctx:
        create_for = ctx.target, ctx.heap_size, ctx.cur_rank, ctx.num_ranks
        yield ctx, create(*installed(PluginKind.COLLECTIVE, setup.tested), *create_for)


def content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
