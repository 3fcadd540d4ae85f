"""What the suite of collectives runs on ranks: calls, and notes of everything that may not happen beside them."""

from __future__ import annotations

import gc
import hashlib
import os
import pathlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.testing.conformance.collective_cases import Case, source
from iris_core.types import CreateRequest, PluginKind

if TYPE_CHECKING:
    from collections.abc import Sequence

WORK_TIMEOUT_S = 20.0
STRANGER_WAITS_S = 15.0
_SLOW_S = 0.1
_LEAD_NBYTES = 256  # in front of each tensor, and behind it
_POISON = 0xA5


@dataclass(frozen=True)
class Setup:
    """Names of the plugins of a suite, as ranks need them; the device is "cpu" or "cuda"."""

    collective: str
    allocator: str
    backend: str
    device: str


@dataclass(frozen=True)
class Outcome:
    """State of a rank after one launch."""

    out: bytes | None  # its output, if it has one
    source_changed: bool
    neighbours_changed: bool  # something was written beside its tensors
    not_done: bool  # after waiting, the handle says that the work is not completed
    blocks: int  # that the launch has left on the heap
    peak_nbytes: int  # that the launch has taken of the heap, also for a while only

    @property
    def digest(self) -> str:
        """Short for `out`."""
        return hashlib.sha256(self.out or b"").hexdigest()


def call(setup: Setup, cases: Sequence[Case], num_turns: int) -> list[list[Outcome]]:
    """Call each case `num_turns` times with one plan and new data; returns the outcomes by case and turn.

    In every turn another rank is late, and whoever is done goes on at once: it writes the next input over the last one.
    """
    with _open(setup) as ctx:
        collective = _create(setup, ctx)
        return [_call(ctx, collective, case, num_turns) for case in cases]


def call_in_group(setup: Setup, case: Case, folder: str) -> tuple[list[Outcome], bool]:
    """Call a case in a group; the other ranks do nothing until the members are done.

    Returns:
        The outcomes (of a rank that is no member: none), and whether something has changed in the tensors of a rank
        that is no member.

    Raises:
        TimeoutError: the members are not done, and this rank is no member.
    """
    with _open(setup) as ctx:
        collective = _create(setup, ctx)
        if ctx.cur_rank in case.members:
            outcomes = _call(ctx, collective, case, num_turns=2)
            (pathlib.Path(folder) / str(ctx.cur_rank)).touch()
            ctx.barrier()
            return outcomes, False
        tensors = _Tensors(ctx, case, rank=0, size=len(case.members))
        before = tensors.everything()
        deadline = time.monotonic() + STRANGER_WAITS_S
        while len(os.listdir(folder)) < len(case.members):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {case.members} were not done after {STRANGER_WAITS_S:g} s without the others"
                )
            time.sleep(0.01)
        ctx.barrier()
        return [], tensors.everything() != before


def prepare_again(setup: Setup, case: Case, times: int) -> list[int]:
    """Prepare the same call again and again, use the plan once and drop it; returns the heap's blocks after each."""
    blocks = []
    with _open(setup) as ctx:
        collective = _create(setup, ctx)
        for _ in range(times):
            _call(ctx, collective, case, num_turns=1)
            gc.collect()
            for _ in range(3):  # what was dropped is free when all ranks have agreed
                ctx.barrier()
            blocks.append(ctx.stats().num_blocks)
    return blocks


class _Tensors:
    """Input and output of a rank, with room around them in which nobody may write."""

    def __init__(self, ctx: Any, case: Case, rank: int, size: int) -> None:
        self._dtype = getattr(torch, case.dtype)
        self._raws: list[torch.Tensor] = []
        shapes = case.input_shape(size), case.output_shape(size)
        self.inp = self._make(ctx, case, shapes[0], rank)
        if case.in_place and case.op == "all_reduce":
            self.out = self.inp
        elif case.in_place and case.op == "reduce_scatter":
            self.out = self.inp.tensor_split(size)[rank]
        else:
            self.out = self._make(ctx, case, shapes[1], rank)
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
        raw = where.empty(nbytes, dtype=torch.uint8, device=ctx.device)
        raw.fill_(_POISON)
        self._raws.append(raw)
        inner: torch.Tensor = raw[lead : lead + item * numel].view(self._dtype)
        return inner.view(*shape[:-1], step * shape[-1])[..., ::step]

    def fill(self, data: torch.Tensor | None, *, in_place: bool) -> None:
        """Put an input where it belongs, and something else into the output."""
        if not in_place:
            others = torch.full((self.out.numel() * self._dtype.itemsize,), 1, dtype=torch.uint8)
            self.out.copy_(others.view(self._dtype).reshape(self.out.shape))
        if data is not None:
            self.inp.copy_(data)

    def everything(self) -> list[bytes]:
        """Contents with what is around them."""
        return [_content(raw) for raw in self._raws]

    def surroundings(self) -> list[bytes]:
        """What is around the tensors, and between their elements."""
        kept = []
        for raw in self._raws:
            copy = raw.clone()
            for tensor in (self.inp, self.out):
                begin = tensor.data_ptr() - raw.data_ptr()
                if tensor.numel() and 0 <= begin < raw.numel():
                    item = self._dtype.itemsize
                    step = tensor.stride(-1) * item
                    inside = copy[begin : begin + (tensor.numel() - 1) * step + item]
                    inside[torch.arange(inside.numel(), device=inside.device) % step < item] = 0
            kept.append(_content(copy))
        return kept

    def free(self, ctx: Any) -> None:
        """Give the allocations back; a symmetric call."""
        for raw in self._raws:
            if ctx.is_symmetric(raw):
                ctx.free(raw)


def _call(ctx: Any, collective: Any, case: Case, num_turns: int) -> list[Outcome]:
    """Call a case on a member.  Its tensors stay until the context is closed, except where all ranks are members."""
    members = case.members or tuple(range(ctx.num_ranks))
    rank, size = members.index(ctx.cur_rank), len(members)
    tensors = _Tensors(ctx, case, rank, size)
    out = tensors.out if case.has_output(rank) else None
    inp = tensors.inp if case.has_input(rank) else None
    plan = collective.prepare(case.request(rank, members, ctx.target), ctx)
    outcomes = []
    for turn in range(num_turns):
        if num_turns > 1 and turn % size == rank:
            time.sleep(_SLOW_S)
        data = source(case, rank, turn, size)
        tensors.fill(data if inp is not None else None, in_place=case.in_place)
        around, before = tensors.surroundings(), ctx.stats()
        work = collective.launch(plan, out, inp)
        if work is not None:
            work.wait(WORK_TIMEOUT_S)
        if ctx.device != "cpu":
            torch.cuda.current_stream().synchronize()
        after = ctx.stats()
        outcomes.append(
            Outcome(
                out=None if out is None else _content(out),
                source_changed=inp is not None and not case.in_place and _content(inp) != _content(data),
                neighbours_changed=tensors.surroundings() != around,
                not_done=work is not None and not work.is_completed(),
                blocks=after.num_blocks - before.num_blocks,
                peak_nbytes=after.peak - before.peak,
            )
        )
    if not case.members:
        ctx.barrier()
        tensors.free(ctx)
    return outcomes


def _open(setup: Setup) -> Any:
    from iris_core import Iris

    return Iris("64MiB", allocator=setup.allocator, backend=setup.backend, device=setup.device)


def _create(setup: Setup, ctx: Any) -> Any:
    from iris_core.registry import Registry

    registry = Registry()
    record = registry.resolve(PluginKind.COLLECTIVE, setup.collective)
    settings = registry.settings_class(record)()
    request = CreateRequest(ctx.target, ctx.cur_rank, ctx.num_ranks, ctx.heap_size, settings)
    return registry.create(record, request)


def _content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
