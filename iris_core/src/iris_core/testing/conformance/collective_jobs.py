"""Jobs that the suite of collectives runs on ranks: they make calls, and note every forbidden side effect.

Expected results are plain torch's on one process, reductions in float64.  Shapes are torch's: an all_gather
concatenates the inputs along the first dimension, and tensors are divided among ranks along the first dimension.  A
rooted operation has its input, or its output, on the root alone.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from iris_core.dispatch import COLLECTIVES, requests
from iris_core.dispatch.requests import ALL_HAVE_INPUT, ALL_HAVE_OUTPUT, ALL_IN_PLACE, BITWISE_OPS, REDUCING, ROOTED
from iris_core.providers.parts import PARTED_IN, PARTED_OUT, Side, dense, part_of
from iris_core.testing.conformance.plugin_jobs import create, installed
from iris_core.testing.conformance.stack_jobs import Setup
from iris_core.types import REDUCIBLE, CollectiveRequest, DeviceTarget, PluginKind, ReduceOp

OPS = COLLECTIVES
REPLICATED = ("all_reduce", "all_gather", "broadcast")  # every rank gets the same
SHAPES = ((0,), (1,), (5,), (7, 33), (1003,), (40_001,))
DTYPES = (*REDUCIBLE, "float8_e4m3fn", "complex64")
BITWISE = tuple(op.name.lower() for op in BITWISE_OPS)
ARITHMETIC = tuple(op.name.lower() for op in ReduceOp if op not in (ReduceOp.SUM, *BITWISE_OPS))  # SUM is usual
PLACES = ("heap", "ordinary", "skewed", "strided")
"""Where tensors lie: on the heap; in ordinary memory; on the heap at another offset on each rank, aligned to an element
only; on the heap with a gap after each element."""

PROMISES = ("results", "agreement", "input", "surroundings", "work", "memory", "bits")
STRANGER_WAITS_S = 15.0
_WORK_TIMEOUT_S = 20.0
_SLOW_S = 0.1
_LEAD_NBYTES = 256  # before and after each tensor
_POISON = 0xA5

Outcome = dict[str, str]  # what is wrong, by promise; without those that are not given


@dataclass(frozen=True)
class Case:
    """One call of a collective."""

    op: str
    dtype: str = "float32"
    reduction: str = "sum"  # if it reduces
    shape: tuple[int, ...] = (1003,)  # of a chunk; some operations have one for each rank
    place: str = "heap"  # one of PLACES
    root: int = 0  # in the group
    in_place: bool = False
    members: tuple[int, ...] = ()  # ranks of the world that take part; empty: all
    exact: ClassVar[bool] = False  # whether it reduces small integers, whose results are the same in any order

    def has(self, rank: int) -> tuple[bool, bool]:
        """Whether a rank of the group has an input, and an output."""
        is_root = rank == self.root
        return self.op in ALL_HAVE_INPUT or is_root, self.op in (*ALL_HAVE_OUTPUT, "broadcast") or is_root

    def sides(self, rank: int, size: int) -> list[Side]:
        """Shape and strides of a rank's input and output in a group of this size, and whether they are on the heap."""
        step, on_heap = 2 if self.place == "strided" else 1, self.place != "ordinary"
        shapes = [((size if self.op in ops else 1) * self.shape[0], *self.shape[1:]) for ops in (PARTED_IN, PARTED_OUT)]
        return [(shape, tuple(step * each for each in dense(shape)), on_heap) for shape in shapes]

    def expected(self, inputs: Sequence[torch.Tensor], wide: torch.dtype | None = None) -> Sequence[torch.Tensor]:
        """Return what each rank of the group gets for these inputs; reductions as `wide`, or else float64 or int64."""
        size = len(inputs)
        if self.op in REDUCING:
            wide = wide or (torch.float64 if inputs[0].is_floating_point() else torch.int64)
            whole = functools.reduce(COMBINE[self.reduction], [each.to(wide) for each in inputs])
            whole = whole / size if self.reduction == "avg" else whole
        elif self.op == "all_to_all":
            whole = torch.cat([each.tensor_split(size)[rank] for rank in range(size) for each in inputs])
        else:
            whole = inputs[self.root] if self.op in ("broadcast", "scatter") else torch.cat(list(inputs))
        return whole.tensor_split(size) if self.op in PARTED_IN else [whole] * size

    def request(self, rank: int, members: Sequence[int], target: DeviceTarget, **options: Any) -> CollectiveRequest:
        """Describe the call of a rank of the group as the core does; `members` are ranks of the world, in its order."""
        size = len(members)
        inp, out = (
            (shape, strides, on_heap and strides == dense(shape)) if is_there else None
            for (shape, strides, on_heap), is_there in zip(self.sides(rank, size), self.has(rank), strict=True)
        )
        options |= {"reduction": self.reduction} if self.op in REDUCING else {}
        options |= {"root": self.root} if self.op in ROOTED else {}
        of = CollectiveRequest(self.op, (), self.dtype, 0, rank, size, target, members=tuple(members))
        return part_of(of, self.op, inp, out, in_place=self.in_place, **options)


def cases(op: str, size: int) -> list[Case]:
    """Return every shape, dtype, reduction, root and place, and a call in place, all else being as usual."""
    found = [Case(op, shape=shape) for shape in SHAPES]
    found += [Case(op, dtype) for dtype in DTYPES if op not in REDUCING or dtype in set(REDUCIBLE) - {"bool"}]
    found += [Case(op, place=place) for place in PLACES[1:]]
    found += [Case(op, "int8", shape=(7, 33), place=place) for place in PLACES[1:]]
    found += [Case(op, in_place=True)] * (op in ALL_IN_PLACE)
    found += [Case(op, root=root) for root in range(1, size) if op in ROOTED]
    if op in REDUCING:
        found += [Case(op, dtype, each) for dtype in ("bfloat16", "float32") for each in ARITHMETIC]
        found += [Case(op, "int32", each) for each in ("product", "min", "max")]
        found += [Case(op, dtype, each) for dtype in ("uint8", "int64") for each in BITWISE]
    return list(dict.fromkeys(found))


def source(case: Case, rank: int, turn: int, size: int) -> torch.Tensor:
    """Return a rank's input (on the CPU, contiguous): different between ranks, turns and neighbours."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    shape, dtype = case.sides(rank, size)[0][0], getattr(torch, case.dtype)
    if case.op not in REDUCING:
        numbers = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return ((numbers & 1) if case.dtype == "bool" else numbers).view(dtype).reshape(shape)
    if dtype.is_floating_point and not case.exact:
        numbers = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        return (numbers * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)).to(dtype)
    low, high = (1, 3) if case.reduction == "product" and dtype.is_signed else (-4 * dtype.is_signed, 5)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def promised(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what each rank of the group gets from a `deterministic` algorithm, to the bit."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    return [each.to(dtype) for each in case.expected(inputs, wide)]


def judge(case: Case, rank: int, inputs: Sequence[torch.Tensor], found: torch.Tensor, *, in_float32: bool) -> str:
    """Say what is wrong with the output of a rank of the group; empty if nothing is.

    Sums and products of floats may be off by two roundings of the result, and one of each step in the precision that
    they are kept in: single precision for halves, if `in_float32`.
    """
    dtype, right, found = inputs[0].dtype, case.expected(inputs)[rank], found.cpu().contiguous()
    if case.op not in REDUCING or not dtype.is_floating_point or case.exact:  # bytes, for numbers may be NaN
        pairs = [
            each.contiguous().as_strided((each.numel(),), (1,)).view(torch.uint8) for each in (found, right.to(dtype))
        ]
        wrong = (pairs[0] != pairs[1]).view(found.numel(), dtype.itemsize).any(1)
    else:
        unit, is_exact = torch.finfo(dtype).eps, case.reduction in ("min", "max")
        step = min(unit, torch.finfo(torch.float32).eps) if in_float32 else unit
        sizes = case.expected([each.abs() for each in inputs])[rank]  # what rounding errors are proportional to
        allowed = 0 * right if is_exact else unit * right.abs() + len(inputs) * step * sizes
        wrong = ~((found.double() - right).abs() <= allowed).flatten()
    places = wrong.nonzero().flatten().tolist()
    return f"{len(places)} of {wrong.numel()} elements are wrong, the first at {places[0]}" if places else ""


COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


# -- on ranks ---------------------------------------------------------------------------------------------------------
def on_rank(setup: Setup, job: Callable[..., Any], *arguments: Any) -> Any:
    """Open a context, create the collective in it, and call job(setup, ctx, collective, *arguments)."""
    with setup.open() as ctx:
        create_for = ctx.target, ctx.heap_size, ctx.cur_rank, ctx.num_ranks
        return job(setup, ctx, create(*installed(PluginKind.COLLECTIVE, setup.tested), *create_for), *arguments)


def call(setup: Setup, ctx: Any, collective: Any, chosen: Sequence[Case]) -> list[Outcome]:
    """Call each case with one plan and new data, an everyday one in two turns of each rank, those in place twice.

    In every turn another rank is late, and whoever is done goes on at once: it writes the next input over the last one.
    """
    turns = {Case(collective.op): 2 * ctx.num_ranks}
    return [_call(setup, ctx, collective, each, turns.get(each, 1 + each.in_place)) for each in chosen]


def call_in_group(setup: Setup, ctx: Any, collective: Any, case: Case, folder: str) -> str:
    """Call a case twice in a group while other ranks do nothing; return problems, also with the others' tensors."""
    if ctx.cur_rank in case.members:
        outcome = _call(setup, ctx, collective, case, num_turns=2)
        (pathlib.Path(folder) / str(ctx.cur_rank)).touch()
        ctx.barrier()
        return outcome["results"]
    tensors = Tensors(ctx, case, rank=0, size=len(case.members))
    deadline = time.monotonic() + STRANGER_WAITS_S
    while len(os.listdir(folder)) < len(case.members):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {case.members} were not done after {STRANGER_WAITS_S:g} s alone")
        time.sleep(0.01)
    ctx.barrier()
    problem = f"something was written to the tensors of rank {ctx.cur_rank}, which is no member"
    return "" if tensors.are_whole(with_elements=True) else problem


def prepare_again(setup: Setup, ctx: Any, collective: Any, case: Case, times: int) -> list[int]:
    """Prepare the same call again and again, use the plan once and drop it; returns the heap's blocks after each."""
    blocks = []
    for _ in range(times):
        _call(setup, ctx, collective, case, num_turns=1)
        gc.collect()
        for _ in range(3):  # what was dropped is free when all ranks have agreed
            ctx.barrier()
        blocks.append(ctx.stats().num_blocks)
    return blocks


class Tensors:
    """Input and output of a rank, with guard bytes around them that must not change."""

    def __init__(self, ctx: Any, case: Case, rank: int, size: int) -> None:
        self.case, self.rank, self.size, self._ctx = case, rank, size, ctx
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes, and which of them are no element's
        self.inp, self.out = (self._make(side) for side in range(2))
        if case.in_place and case.op in PARTED_OUT:
            self.inp = self.out.view(size, *case.shape)[rank]
        elif case.in_place:
            self.out = self.inp.view(size, *case.shape)[rank] if case.op in PARTED_IN else self.inp

    @property
    def passed(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The output and the input, where the rank has them."""
        has_inp, has_out = self.case.has(self.rank)
        return self.out if has_out else None, self.inp if has_inp else None

    def _make(self, side: int) -> torch.Tensor:
        """Allocate one tensor; the same on every rank, except for its place inside the allocation."""
        case, dtype = self.case, getattr(torch, self.case.dtype)
        sides = [case.sides(rank, self.size)[side] for rank in range(self.size)]
        like = [torch.empty_strided(*each[:2], dtype=dtype, device="meta") for each in sides]
        nbytes = max(map(requests.reach, like)) + 2 * _LEAD_NBYTES + dtype.itemsize * (5 * self.size + 3)
        empty = self._ctx.empty if sides[0][2] else torch.empty
        raw = empty(nbytes, dtype=torch.uint8, device=self._ctx.device).fill_(_POISON)
        place = (*sides[self.rank][:2], _LEAD_NBYTES // dtype.itemsize + (5 * self.rank + 3) * (case.place == "skewed"))
        (beside := torch.ones_like(raw)).view(dtype).as_strided(*place).zero_()
        self._made.append((raw, beside.bool()))
        return raw.view(dtype).as_strided(*place)

    def fill(self, turn: int) -> list[torch.Tensor]:
        """Put new data into the input, something else into the output; return the inputs of all ranks."""
        inputs = [source(self.case, each, turn, self.size) for each in range(self.size)]
        self.out.fill_(1)
        self.inp.copy_(inputs[self.rank])
        return inputs

    def are_whole(self, *, with_elements: bool) -> bool:
        """Whether the bytes around the tensors and between their elements are as they were made, and these as well."""
        return all(bool((raw == _POISON)[beside | with_elements].all()) for raw, beside in self._made)

    def wrong(self, inputs: Sequence[torch.Tensor], *, in_float32: bool = True) -> Outcome:
        """Say what is wrong after a call with these inputs."""
        out, found = self.passed[0], Outcome()
        if not (self.inp is self.out or self.case.in_place or content(self.inp) == content(inputs[self.rank])):
            found["input"] = "its input has changed"
        if not self.are_whole(with_elements=False):
            found["surroundings"] = "memory beside its tensors has changed"
        if out is not None and (problem := judge(self.case, self.rank, inputs, out, in_float32=in_float32)):
            found["results"] = problem
        return found


def _call(setup: Setup, ctx: Any, collective: Any, case: Case, num_turns: int) -> Outcome:
    """Call a case on a member."""
    members = case.members or tuple(range(ctx.num_ranks))
    rank, size = members.index(ctx.cur_rank), len(members)
    tensors = Tensors(ctx, case, rank, size)
    out, inp = tensors.passed
    plan = collective.prepare(case.request(rank, members, ctx.target), ctx)
    is_exact = case.op in REDUCING and getattr(collective, "deterministic", False) is True
    given = {"bits": is_exact, "agreement": case.op in REPLICATED}
    wrong, digests = {each: "" for each in PROMISES if given.get(each, True)}, hashlib.sha256()
    what = f"{case}: rank {rank} of {size}: "
    for turn in range(num_turns):
        if min(num_turns, size) > 1 and turn % size == rank:
            time.sleep(_SLOW_S)
        inputs = tensors.fill(turn)
        before = ctx.stats()
        work = collective.launch(plan, out, inp)
        if work is not None:
            work.wait(_WORK_TIMEOUT_S)
            if not work.is_completed():
                wrong["work"] = what + "wait() returned, is_completed() is False"
        if ctx.device != "cpu":
            torch.cuda.current_stream().synchronize()
        after, found = ctx.stats(), tensors.wrong(inputs, in_float32=setup.in_float32)
        if (before.num_blocks, before.peak) != (after.num_blocks, after.peak):  # a launch leaves them as they are
            found["memory"] = f"the heap's blocks and peak have changed: {before} before, {after} after"
        if out is not None:
            digests.update(content(out))
            if "bits" in wrong and content(out) != content(promised(case, inputs)[rank]):
                found["bits"] = "not torch's bits in the group's order"
        wrong |= {promise: f"{what}call {turn}: {said}" for promise, said in found.items()}
    if not case.members and "agreement" in wrong and ctx.broadcast(digests.digest()) != digests.digest():
        wrong["agreement"] = what + "other bits than those of rank 0"
    return wrong


def content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return bytes(tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
