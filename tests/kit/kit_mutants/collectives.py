"""Collectives with one mistake each; all else is the reference's."""

from __future__ import annotations

import ctypes
import functools
import time

import torch

from iris_core.testing.conformance import collective_jobs
from iris_core.types import Availability
from kit_mutants import wrong
from kit_mutants.reference import COMBINE, Done, Exchange, Push

# Wrong results, of (self, the right method, plan, inputs).
WrongOrder = wrong(Exchange, op="all_gather", result=lambda self, _, plan, inputs: torch.cat([*inputs[1:], inputs[0]]))
"""The inputs of the next ranks first."""
SwappedChunks = wrong(Exchange, op="all_to_all", result=lambda self, _, plan, inputs: inputs[plan.request.rank])
"""Everybody gets the chunks that it has sent itself."""
FirstChunk = wrong(
    Exchange, op="reduce_scatter",
    result=lambda self, _, plan, inputs: self.reduce(plan, inputs).tensor_split(len(inputs))[0],
)  # fmt: skip
NothingForNothing = wrong(
    Exchange, result=lambda self, result, plan, inputs: result(plan, inputs) * (inputs[0].numel() // inputs[0].numel())
)
"""No elements: a division by zero."""
LastFirst = wrong(Exchange, reduce=lambda self, reduce, plan, inputs: reduce(plan, inputs[::-1]))
"""Promises its bits, and adds up in another order."""
RootZero = wrong(
    Exchange, op="broadcast",
    result=lambda self, result, plan, inputs: result(plan, inputs) * (plan.request.options["root"] == 0),
)  # fmt: skip
"""Only rank 0 is heard."""


class HalfPrecision(Exchange):
    """Rounds after every addition."""

    def reduce(self, plan, inputs):
        if plan.request.options["reduction"] != "sum":
            return super().reduce(plan, inputs)
        return functools.reduce(COMBINE["sum"], inputs)


class RoundedTwice(Exchange):
    """Promises its bits, and rounds a sum before it is divided."""

    def reduce(self, plan, inputs):
        if plan.request.options["reduction"] != "avg":
            return super().reduce(plan, inputs)
        total = functools.reduce(COMBINE["sum"], [each.double() for each in inputs])
        return total.to(inputs[0].dtype) / len(inputs)


def finishing(change):
    """A collective that spoils its output at last: change(request, output, what it had before, result)."""

    def finish(self, right, plan, out, result):
        before = out.clone()
        right(plan, out, result)
        if out.numel():
            change(plan.request, out, before, result)

    return wrong(Exchange, finish=finish)


@finishing
def DroppedLast(request, out, before, result):
    out[(-1,) * out.dim()] = before[(-1,) * out.dim()]


@finishing
def OwnRounding(request, out, before, result):
    """One rank cuts off where the others round."""
    if request.rank == 1 and out.dtype is torch.bfloat16:
        exact = result.to(torch.float32).contiguous().view(torch.int32)
        out.copy_((exact & ~0xFFFF).view(torch.float32).reshape(out.shape))


@finishing
def OneTooFar(request, out, before, result):
    if out.is_contiguous():
        ctypes.memset(out.data_ptr() + out.numel() * out.itemsize, 0, out.itemsize)


def launching(before=lambda plan, out, inp: None, behind=lambda plan, out, inp: None, base=Exchange):
    """A collective that does something before or behind its work, and may have another handle."""

    def launch(self, right, plan, out, inp, stream=None):
        before(plan, out, inp)
        done = right(plan, out, inp)
        return behind(plan, out, inp) or done

    return wrong(base, launch=launch)


class _Undone(Done):
    def is_completed(self):
        return False


def _peek(plan, out, inp):
    context = plan.context
    if out.numel() and context.is_symmetric(out) and plan.request.group_size == context.num_ranks:
        context.as_remote(out, (context.cur_rank + 1) % context.num_ranks).sum()


def _take(plan, out, inp):
    plan.kept = [*getattr(plan, "kept", []), plan.context.empty(max(1, inp.numel()))]


def _keep_result(plan, out, inp):
    inp.copy_(out)


ScratchInput = launching(behind=_keep_result)
"""Keeps its result in the input."""
NeverDone = launching(behind=lambda plan, out, inp: _Undone())
Peeks = launching(behind=_peek)
"""Reads the next rank's output when that one may have gone on; all results are right."""
OwnFirst = launching(lambda plan, out, inp: out.zero_(), base=Push)
"""Clears its output before it reads its input."""
TakesMemory = launching(_take)
BorrowsMemory = launching(lambda plan, out, inp: plan.context.free(plan.context.empty(max(1, inp.numel()))))
"""Gives it back at once."""


class PlansPileUp(Exchange):
    kept = []  # noqa: RUF012 - what leaks on purpose

    def prepare(self, request, context):
        self.kept.append(context.empty(16))
        return super().prepare(request, context)


class Once(Exchange):
    """Its flags are up from the first call on."""

    def launch(self, plan, out, inp, stream=None):
        if not hasattr(plan, "inputs"):
            plan.inputs = plan.exchange_tensors(inp)
        self.finish(plan, out, self.result(plan, plan.inputs))
        return Done()


class NoEntry(Push):
    """Stores into outputs of ranks that have not called yet."""

    def meet(self, plan, out):
        if not hasattr(plan, "outputs"):
            plan.outputs = super().meet(plan, out)
        return plan.outputs


class NoExit(Push):
    """Is done when it has stored, although the others have not."""

    def meet(self, plan, out):
        outputs = super().meet(plan, out)
        if plan.request.rank == 0:
            time.sleep(0.05)
        return outputs

    def leave(self, plan):
        pass


class WholeWorld(launching(lambda plan, out, inp: plan.context.barrier())):
    """Waits for ranks that are no members."""

    def __init__(self, request):
        super().__init__(request)
        collective_jobs.STRANGER_WAITS_S = 3.0  # they do in vain


class OtherPeers(Push):
    """Takes ranks of the group for ranks of the world."""

    def meet(self, plan, out):
        heap = plan.context.heap
        offsets = plan.exchange(out.data_ptr() - heap.heap_bases[plan.context.cur_rank])
        return [heap.heap_bases[rank] + each for rank, each in enumerate(offsets)]


def answering(supports):
    return wrong(Exchange, supports=supports)


Raises = answering(
    lambda self, supports, request: supports(request) if getattr(torch, request.dtype).itemsize else None
)
SilentNo = answering(lambda self, supports, request: Availability(supports(request).ok))
Never = answering(lambda self, supports, request: Availability.no("not today"))
FreeOfCharge = wrong(Exchange, cost=lambda self, cost, request: 0.0)
CheaperByTheDozen = wrong(Exchange, cost=lambda self, cost, request: 1.0 / request.nbytes)


class YesMan(Exchange):
    """Does not look at the settings."""

    def supports(self, request):
        answer = super().supports(request)
        return Availability.yes() if request.op == self.op and request.options.get("config") else answer


class OtherNames(Exchange):
    def launch(self, plan, output, input, stream=None):
        return super().launch(plan, output, input, stream)
