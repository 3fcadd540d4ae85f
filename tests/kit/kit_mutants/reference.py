"""Collectives that keep to the contract: the simplest ones that there are, on the host.

`Exchange` does every operation: the members send each other their inputs, and each computes its own result.  `Push` is
an all_gather that stores into the peers' outputs, as algorithms for GPUs do: it has to wait for the others before it
writes, and before it is done.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from iris_core.dispatch.requests import REDUCING
from iris_core.testing.conformance.collective_jobs import ARITHMETIC, BITWISE, COMBINE, DTYPES, OPS, content
from iris_core.types import Availability, DeviceType

_CHUNKS = ("reduce_scatter", "scatter")  # of what is made of the inputs, every rank gets one


class Done:
    def wait(self, timeout_s=None):
        pass

    def is_completed(self):
        return True


class Plan:
    """The members' means to talk."""

    def __init__(self, request, context):
        self.request = request
        self.context = context
        self._world = context._world.subworld(request.members).apart("kit")

    def exchange(self, mine):
        return [self._world.broadcast_object(mine, member) for member in range(self.request.group_size)]

    def exchange_tensors(self, mine):
        """Return every member's tensor on the CPU, or None; as bytes, for torch does not pickle all element types."""
        packed = None if mine is None else (tuple(mine.shape), content(mine))
        return [None if each is None else self._unpacked(*each) for each in self.exchange(packed)]

    def _unpacked(self, shape, data):
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return raw.view(getattr(torch, self.request.dtype)).reshape(shape)


class Exchange:
    """One operation, by way of the hosts.  A plugin makes it, of a class of its own that has an `info` and an `op`."""

    info = None
    op = "all_reduce"
    name = "exchange"
    deterministic = True

    def __init__(self, request):
        pass

    def supports(self, request):
        options = request.options
        if request.op != self.op:
            return Availability.no(f"it does {self.op}")
        if request.dtype not in DTYPES:
            return Availability.no(f"it knows no {request.dtype!r}")
        if options.get("layout", "torch") != "torch" or options.get("config"):
            return Availability.no("it has no layouts and no settings")
        if self.op in REDUCING:
            reduction = options.get("reduction", "sum")
            known = ("sum", *ARITHMETIC) + (BITWISE if "int" in request.dtype else ())
            if reduction not in known:
                return Availability.no(f"it does {', '.join(known)} and not {reduction!r} on {request.dtype}")
        return Availability.yes()

    def cost(self, request):
        return 1e-3 + request.nbytes * request.group_size / 1e8

    def prepare(self, request, context):
        return Plan(request, context)

    def launch(self, plan, out, inp, stream=None):
        inputs = plan.exchange_tensors(inp)
        if out is not None:
            self.finish(plan, out, self.result(plan, inputs))
        return Done()

    def finish(self, plan, out, result):
        out.copy_(result.to(out.dtype).reshape(out.shape))

    def result(self, plan, inputs):
        rank, size = plan.request.rank, plan.request.group_size
        if self.op == "all_to_all":
            return torch.cat([each.tensor_split(size)[rank] for each in inputs])
        if self.op in REDUCING:
            whole = self.reduce(plan, inputs)
        elif self.op in ("broadcast", "scatter"):
            whole = inputs[plan.request.options["root"]]
        else:
            whole = torch.cat(inputs)
        return whole.tensor_split(size)[rank] if self.op in _CHUNKS else whole

    def reduce(self, plan, inputs):
        """All inputs reduced in the order of the ranks, halves in single precision."""
        reduction = plan.request.options["reduction"]
        if inputs[0].dtype in (torch.float16, torch.bfloat16):
            inputs = [each.float() for each in inputs]
        total = functools.reduce(COMBINE[reduction], inputs)
        return total / len(inputs) if reduction == "avg" else total


class Push(Exchange):
    """all_gather: every rank stores its input into everybody's output."""

    op = "all_gather"
    name = "push"

    def supports(self, request):
        if request.target.type is not DeviceType.CPU:
            return Availability.no("it stores from the host")
        if not (request.direct_in and request.direct_out):
            return Availability.no("it needs contiguous tensors on the heap")
        return super().supports(request)

    def launch(self, plan, out, inp, stream=None):
        outputs = self.meet(plan, out)  # everybody has called, and this is where their outputs are
        data = content(inp)
        if data:
            for address in outputs:
                ctypes.memmove(address + plan.request.rank * len(data), data, len(data))
        self.leave(plan)
        return Done()

    def meet(self, plan, out):
        """Wait for the others; return the addresses of their outputs in this process."""
        heap = plan.context.heap
        offsets = plan.exchange(out.data_ptr() - heap.heap_bases[plan.context.cur_rank])
        return [heap.heap_bases[member] + each for member, each in zip(plan.request.members, offsets, strict=True)]

    def leave(self, plan):
        plan.exchange(None)


for _op in OPS:
    _name = _op.replace("_", " ").title().replace(" ", "")
    globals()[_name] = type(_name, (Exchange,), {"op": _op})
