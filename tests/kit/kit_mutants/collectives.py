"""Collectives with one mistake each; all else is the reference's."""

from __future__ import annotations

import ctypes
import functools
import time

import torch

from iris_core.testing.conformance import collective_jobs
from iris_core.types import Availability
from kit_mutants.reference import COMBINE, Done, Exchange, Push


# -- wrong results ----------------------------------------------------------------------------------------------------
class WrongOrder(Exchange):
    """The inputs of the next ranks first."""

    op = "all_gather"

    def result(self, plan, inputs):
        return torch.cat([*inputs[1:], inputs[0]])


class SwappedChunks(Exchange):
    """Everybody gets the chunks that it has sent itself."""

    op = "all_to_all"

    def result(self, plan, inputs):
        return inputs[plan.request.rank]


class FirstChunk(Exchange):
    op = "reduce_scatter"

    def result(self, plan, inputs):
        return self.reduce(plan, inputs).tensor_split(len(inputs))[0]


class RootZero(Exchange):
    """Whoever the root is, only rank 0 is heard."""

    op = "broadcast"

    def launch(self, plan, out, inp, stream=None):
        inputs = plan.exchange_tensors(inp)
        if inputs[0] is not None:
            self.finish(plan, out, inputs[0])
        return Done()


class DroppedLast(Exchange):
    def finish(self, plan, out, result):
        before = out.clone()
        super().finish(plan, out, result)
        if out.numel():
            out[(-1,) * out.dim()] = before[(-1,) * out.dim()]


class NothingForNothing(Exchange):
    """No elements: a division by zero."""

    def result(self, plan, inputs):
        return super().result(plan, inputs) * (inputs[0].numel() // inputs[0].numel())


class HalfPrecision(Exchange):
    """Rounds after every addition."""

    def reduce(self, plan, inputs):
        if plan.request.options["reduction"] != "sum":
            return super().reduce(plan, inputs)
        return functools.reduce(COMBINE["sum"], inputs)


class LastFirst(Exchange):
    """Promises its bits, and adds up in another order."""

    def reduce(self, plan, inputs):
        return super().reduce(plan, inputs[::-1])


class RoundedTwice(Exchange):
    """Promises its bits, and rounds a sum before it is divided."""

    def reduce(self, plan, inputs):
        if plan.request.options["reduction"] != "avg":
            return super().reduce(plan, inputs)
        total = functools.reduce(COMBINE["sum"], [each.double() for each in inputs])
        return total.to(inputs[0].dtype) / len(inputs)


class OwnRounding(Exchange):
    """One rank cuts off where the others round."""

    def finish(self, plan, out, result):
        super().finish(plan, out, result)
        if plan.request.rank == 1 and out.dtype is torch.bfloat16:
            exact = result.to(torch.float32).contiguous().view(torch.int32)
            out.copy_((exact & ~0xFFFF).view(torch.float32).reshape(out.shape))


# -- what else may not happen -----------------------------------------------------------------------------------------
class OneTooFar(Exchange):
    def finish(self, plan, out, result):
        super().finish(plan, out, result)
        if out.numel() and out.is_contiguous():
            ctypes.memset(out.data_ptr() + out.numel() * out.itemsize, 0, out.itemsize)


class ScratchInput(Exchange):
    """Keeps its result in the input."""

    def launch(self, plan, out, inp, stream=None):
        super().launch(plan, out, inp)
        inp.copy_(out)
        return Done()


class _Undone(Done):
    def is_completed(self):
        return False


class NeverDone(Exchange):
    def launch(self, plan, out, inp, stream=None):
        super().launch(plan, out, inp)
        return _Undone()


# -- call after call --------------------------------------------------------------------------------------------------
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


class Peeks(Exchange):
    """Reads the next rank's output when that one may have gone on; all results are right."""

    def launch(self, plan, out, inp, stream=None):
        done = super().launch(plan, out, inp)
        context = plan.context
        if out.numel() and context.is_symmetric(out) and plan.request.group_size == context.num_ranks:
            context.as_remote(out, (context.cur_rank + 1) % context.num_ranks).sum()
        return done


class OwnFirst(Push):
    """Clears its output before it reads its input."""

    def launch(self, plan, out, inp, stream=None):
        out.zero_()
        return super().launch(plan, out, inp)


# -- memory -----------------------------------------------------------------------------------------------------------
class TakesMemory(Exchange):
    def launch(self, plan, out, inp, stream=None):
        plan.kept = [*getattr(plan, "kept", []), plan.context.empty(max(1, inp.numel()))]
        return super().launch(plan, out, inp)


class BorrowsMemory(Exchange):
    """Gives it back at once."""

    def launch(self, plan, out, inp, stream=None):
        plan.context.free(plan.context.empty(max(1, inp.numel())))
        return super().launch(plan, out, inp)


class PlansPileUp(Exchange):
    kept = []  # noqa: RUF012 - what leaks on purpose

    def prepare(self, request, context):
        self.kept.append(context.empty(16))
        return super().prepare(request, context)


# -- groups -----------------------------------------------------------------------------------------------------------
class WholeWorld(Exchange):
    """Waits for ranks that are no members."""

    def __init__(self, request):
        super().__init__(request)
        collective_jobs.STRANGER_WAITS_S = 3.0  # they do in vain

    def launch(self, plan, out, inp, stream=None):
        plan.context.barrier()
        return super().launch(plan, out, inp)


class OtherPeers(Push):
    """Takes ranks of the group for ranks of the world."""

    def meet(self, plan, out):
        heap = plan.context.heap
        offsets = plan.exchange(out.data_ptr() - heap.heap_bases[plan.context.cur_rank])
        return [heap.heap_bases[rank] + each for rank, each in enumerate(offsets)]


# -- what they say ----------------------------------------------------------------------------------------------------
class Raises(Exchange):
    def supports(self, request):
        return super().supports(request) if getattr(torch, request.dtype).itemsize else None


class SilentNo(Exchange):
    def supports(self, request):
        return Availability(super().supports(request).ok)


class Never(Exchange):
    def supports(self, request):
        return Availability.no("not today")


class YesMan(Exchange):
    """Does not look at the settings."""

    def supports(self, request):
        answer = super().supports(request)
        return Availability.yes() if request.op == self.op and request.options.get("config") else answer


class FreeOfCharge(Exchange):
    def cost(self, request):
        return 0.0


class CheaperByTheDozen(Exchange):
    def cost(self, request):
        return 1.0 / request.nbytes


class OtherNames(Exchange):
    def launch(self, plan, output, input, stream=None):
        return super().launch(plan, output, input, stream)
