"""The backend: one object per rank, what the core sees of the language."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from iris_core.device.context_words import encode
from iris_core.errors import UnsupportedError
from iris_example_backend._plugin import BACKEND_INFO
from iris_example_backend.heaps import AttachedHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from iris_core.api import Iris
    from iris_core.diagnosis import PairCheck
    from iris_core.protocols import MemoryMap
    from iris_core.types import BarrierSlot, CompileCase, ContextSpec, CreateRequest, Demo, PluginInfo


class ExampleBackend:
    """One rank's backend; satisfies `iris_core.protocols.DeviceBackend` and three of the optional protocols."""

    def __init__(self, request: CreateRequest) -> None:
        """Prepare the backend; nothing is opened before `attach`.

        Args:
            request: device and rank, and `ExampleSettings`.
        """
        self._directory = request.settings.directory  # type: ignore[attr-defined]  # of ExampleSettings
        self._timeout_ns = 0
        self._heap: AttachedHeap | None = None

    @property
    def info(self) -> PluginInfo:
        """The plugin's description."""
        return BACKEND_INFO

    # -- what every backend has ---------------------------------------------------------------------------------------
    def make_context(self, spec: ContextSpec) -> torch.Tensor:
        """Encode the context tensor: ranks and heap bases are where every backend has them."""
        self._timeout_ns = spec.timeout_ns
        return torch.tensor(encode(spec), dtype=torch.int64, device=spec.device)

    def attach(self, memory: MemoryMap) -> None:
        """Let the device functions know the heap."""
        self._heap = AttachedHeap(memory, self._timeout_ns, self._directory)

    def detach(self) -> None:
        """Take the heap away from them.  Idempotent, and harmless where `attach` was never reached."""
        heap, self._heap = self._heap, None
        if heap is not None:
            heap.detach()

    def device_api(self) -> Mapping[str, Any]:
        """The device functions by name, and the class that has them as methods."""
        from iris_example_backend import language
        from iris_example_backend.context import DeviceContext

        functions = {name: getattr(language, name) for name in language.__all__}
        return {**functions, "DeviceContext": DeviceContext}

    def compile_cases(self) -> Sequence[CompileCase]:
        """None: nothing is compiled, and there is no GPU to compile for."""
        return ()

    # -- what a backend may have besides ------------------------------------------------------------------------------
    def device_barrier(self, slot: BarrierSlot, sem: str, stream: Any = None) -> None:
        """Raise this rank's word on every member and wait for all of its own; `ctx.device_barrier()` calls it.

        "relaxed" gets what "release" gets.  A stream makes no difference either: a launch ends when its kernel does.
        """
        if self._heap is None:
            raise UnsupportedError("the backend is not attached to a heap")
        words = slot.words.numpy()
        epoch = int(words[slot.size]) + 1
        with self._heap.locked():
            for address in slot.targets.tolist():
                ctypes.c_int64.from_address(address).value = epoch
        self._heap.wait_until(
            lambda: bool((words[: slot.size] >= epoch).all()),
            lambda: f"barrier {epoch} of its group on the device, members are at {words[: slot.size].tolist()}",
        )
        words[slot.size] = epoch

    def demos(self) -> Sequence[Demo]:
        """The programs of `iris demo --backend example`."""
        from iris_core.types import Demo
        from iris_example_backend import ring_gemm

        return (Demo("ring-gemm", "matrix product whose right-hand side travels around a ring", ring_gemm.run),)

    def self_test(self, context: Iris, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
        """Test remote access between all ranks, for `iris doctor`."""
        from iris_example_backend.selftest import self_test

        return self_test(context, begin)
