"""Backends with one mistake each; all else is the Triton backend's."""

import dataclasses

import torch

from iris_core.device.context_words import encode
from iris_triton.backend import TritonBackend
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


class VainHope(TritonBackend):
    """Expects what the assembly does not have."""

    def compile_cases(self):
        case = super().compile_cases()[0]
        return [dataclasses.replace(case, expect=dict.fromkeys(case.expect, (r"no\.such\.instruction",)))]


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


# -- what a backend may have besides ----------------------------------------------------------------------------------
class SecretWaits(TritonBackend):
    """Waits end, and say so nowhere."""

    def make_context(self, spec):
        return super().make_context(dataclasses.replace(spec, status_ptr=0))


class OpenBarrier(TritonBackend):
    """Waits for nobody."""

    def device_barrier(self, slot, sem, stream=None):
        pass


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


class DeafTracing(TritonBackend):
    def set_trace(self, context, words, buffers):
        pass


class OwnWords(TritonBackend):
    """Calls a parameter otherwise than the core does."""

    def self_test(self, context, announce):
        return super().self_test(context, announce)


# -- the families of device.py ----------------------------------------------------------------------------------------
for _kind in ("mute", "near", "blind", "returns", "torn"):
    globals()[_kind.title()] = type(_kind.title(), (_OtherFunctions,), {"changes": device.functions(_kind)})


class MuteMethods(_OtherFunctions):
    changes = {"DeviceContext": device.MuteContext}  # noqa: RUF012
