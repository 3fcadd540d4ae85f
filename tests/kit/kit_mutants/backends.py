"""Backends with one mistake each; all else is the Triton backend's."""

import dataclasses

import torch

from iris_core.device.context_words import encode
from iris_triton.backend import TritonBackend
from kit_mutants import device, wrong


def of_context(function):
    """Functions of (self, the right method, spec) that make context tensors."""
    return wrong(TritonBackend, make_context=function)


NoTimeout = of_context(lambda self, make, spec: make(dataclasses.replace(spec, timeout_ns=0)))
"""The bound of the waits does not reach the kernels."""
SecretWaits = of_context(lambda self, make, spec: make(dataclasses.replace(spec, status_ptr=0)))
"""Waits end, and say so nowhere."""


@of_context
def SwappedWords(self, make, spec):
    """World size before rank."""
    words = encode(spec)
    return torch.tensor([words[1], words[0], *words[2:]], dtype=torch.int64)


@of_context
def Credulous(self, make, spec):
    """Encodes what cannot be."""
    words = make(dataclasses.replace(spec, rank=0, heap_bases=(4096,) * spec.world_size))
    words[0] = spec.rank
    for rank, base in enumerate(spec.heap_bases):
        words[2 + rank] = base
    return words


class DetachOnce(TritonBackend):
    def attach(self, memory):
        super().attach(memory)
        self._attached = True

    def detach(self):
        if not self.__dict__.pop("_attached", False):
            raise RuntimeError("not attached")
        super().detach()


class RenamedParameter(TritonBackend):
    def make_context(self, context):
        return super().make_context(context)


NoCases = wrong(TritonBackend, compile_cases=lambda self, cases: [])


class VainHope(TritonBackend):
    """Expects what the assembly does not have."""

    def compile_cases(self):
        case = super().compile_cases()[0]
        return [dataclasses.replace(case, expect=dict.fromkeys(case.expect, (r"no\.such\.instruction",)))]


def offering(function):
    """Functions of (the device functions that are right, by name)."""
    return wrong(TritonBackend, device_api=lambda self, right: function(right()))


NoSignal = offering(lambda right: {name: each for name, each in right.items() if name != "signal"})
SwappedRanks = offering(lambda right: {**right, "load": device.load_swapped, "wait": device.wait_demanding})
"""load with the remote rank first, and a value that has to be given."""
SwappedMethod = offering(lambda right: {**right, "DeviceContext": device.OtherContext})
MuteMethods = offering(lambda right: {**right, "DeviceContext": device.MuteContext})


OpenBarrier = wrong(TritonBackend, device_barrier=lambda self, *_: None)
"""Waits for nobody."""
DeafTracing = wrong(TritonBackend, set_trace=lambda self, *_: None)
Secretive = wrong(TritonBackend, self_test=lambda self, test, context, begin: test(context, lambda op, peer: None))
"""Does not say what it is about to do."""


class HalfTested(TritonBackend):
    """Leaves out one pair."""

    def self_test(self, context, begin):
        for check in super().self_test(context, begin):
            if (check.op, check.rank, check.peer) != ("read", 1, 0):
                yield check


class Hypochondriac(TritonBackend):
    def self_test(self, context, begin):
        for check in super().self_test(context, begin):
            yield dataclasses.replace(check, problem="looks bad" if check.rank == 1 else check.problem)


class OwnWords(TritonBackend):
    """Calls a parameter otherwise than the core does."""

    def self_test(self, context, announce):
        return super().self_test(context, announce)


for _kind in device.WRONG:
    globals()[_kind.title()] = offering(lambda right, kind=_kind: {**right, **device.FUNCTIONS[kind]})
