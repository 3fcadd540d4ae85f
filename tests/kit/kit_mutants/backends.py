"""Backends with one mistake each; all else is the Triton backend's."""

import contextlib
import dataclasses

import torch

from iris_core.device.context_words import encode
from iris_core.errors import IrisError
from iris_triton.backend import TritonBackend
from iris_triton.testing.cases import compile_cases
from kit_mutants import device


class SwappedWords(TritonBackend):
    """World size before rank."""

    def make_context(self, spec):
        words = encode(spec)
        return torch.tensor([words[1], words[0], *words[2:]], dtype=torch.int64)


class NoTimeout(TritonBackend):
    """The bound of the waits does not reach the kernels."""

    def make_context(self, spec):
        return super().make_context(dataclasses.replace(spec, timeout_ns=0))


class Credulous(TritonBackend):
    """Encodes what cannot be."""

    def make_context(self, spec):
        words = super().make_context(dataclasses.replace(spec, rank=0, heap_bases=(4096,) * spec.world_size))
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


class NoCases(TritonBackend):
    def compile_cases(self):
        return []


class _OneCase(TritonBackend):
    def compile_cases(self):
        return [self.changed(next(case for case in compile_cases() if case.name == "initialize"))]


class VainHope(_OneCase):
    """Expects what the assembly does not have."""

    def changed(self, case):
        return dataclasses.replace(case, expect=dict.fromkeys(case.expect, (r"no\.such\.instruction",)))


class _OtherFunctions(TritonBackend):
    changes = {}  # noqa: RUF012 - constant

    def device_api(self):
        return {**super().device_api(), **self.changes}


class NoSignal(_OtherFunctions):
    def device_api(self):
        return {name: function for name, function in super().device_api().items() if name != "signal"}


class SwappedRanks(_OtherFunctions):
    """load with the remote rank first, and a value that has to be given."""

    changes = {"load": device.load_swapped, "wait": device.wait_demanding}  # noqa: RUF012


class SwappedMethod(_OtherFunctions):
    changes = {"DeviceContext": device.OtherContext}  # noqa: RUF012


class ShortPut(_OtherFunctions):
    changes = {"put": device.short_put}  # noqa: RUF012


class ShortStore(_OtherFunctions):
    changes = {"store": device.short_store}  # noqa: RUF012


class LocalStore(_OtherFunctions):
    changes = {"store": device.local_store}  # noqa: RUF012


class NoBarrier(_OtherFunctions):
    changes = {"barrier": device.no_barrier}  # noqa: RUF012


class NoWait(_OtherFunctions):
    changes = {"wait": device.no_wait}  # noqa: RUF012


class NoSignalSent(_OtherFunctions):
    changes = {"signal": device.no_signal}  # noqa: RUF012


# -- what a backend may have besides ----------------------------------------------------------------------------------
OPTIONAL = {
    "secret-waits": ["world_wait_that_gives_up[host]"],
    "open-barrier": ["world_device_barrier_of_the_host[host]"],
    "self-satisfied": ["world_self_test_notices[host]"],
    "half-tested": ["world_self_test_passes[host]"],
    "hypochondriac": ["world_self_test_passes[host]"],
    "secretive": ["world_self_test_passes[host]"],
    "drunken-clock": ["world_clocks_are_compared[host]"],
}
"""By mutant, whose class is called alike: the tests that are about its mistake."""


class SecretWaits(TritonBackend):
    """Waits end, and say so nowhere."""

    def make_context(self, spec):
        return super().make_context(dataclasses.replace(spec, status_ptr=0))


class OpenBarrier(TritonBackend):
    """Waits for nobody."""

    def device_barrier(self, slot, sem, stream=None):
        pass


class SelfSatisfied(TritonBackend):
    """Finds everything in order, whatever it finds."""

    def self_test(self, context, begin):
        with contextlib.suppress(IrisError):
            for check in super().self_test(context, begin):
                yield dataclasses.replace(check, problem="")


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


class Secretive(TritonBackend):
    """Does not say what it is about to do."""

    def self_test(self, context, begin):
        return super().self_test(context, lambda op, peer: None)


class DrunkenClock(TritonBackend):
    """Each comparison comes to something else."""

    def compare_clocks(self, context):
        offset = super().compare_clocks(context)
        self._seen = getattr(self, "_seen", 0) + 1
        return dataclasses.replace(offset, ahead=offset.ahead + self._seen * int(self.ticks_per_second))


class DeafTracing(TritonBackend):
    def set_trace(self, context, words, buffers):
        pass


class OwnWords(TritonBackend):
    """Calls a parameter otherwise than the core does."""

    def self_test(self, context, announce):
        return super().self_test(context, announce)


# -- the families of device.py ----------------------------------------------------------------------------------------
class Mute(_OtherFunctions):
    changes = device.MUTE


class Near(_OtherFunctions):
    changes = device.NEAR


class Blind(_OtherFunctions):
    changes = device.BLIND


class Returns(_OtherFunctions):
    changes = device.RETURNS


class Torn(_OtherFunctions):
    changes = device.TORN


class MuteMethods(_OtherFunctions):
    changes = {"DeviceContext": device.MuteContext}  # noqa: RUF012
