"""The device backend "triton": one object per rank, created by the plugin."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from iris_core import types
from iris_core.device.context_words import HEADER_WORDS, STATUS_WORDS, TRACE_WORD, TRACE_WORDS, encode
from iris_core.diagnosis import PairCheck
from iris_core.errors import CapabilityError
from iris_core.heap.heap import SymmetricHeap
from iris_core.protocols import CallCache, Collective, Context, FusedOperation, MemoryMap, NormOperation
from iris_core.types import DeviceType
from iris_core.world import World
from iris_triton import collectives, demos, device_barrier, gemm, interpreter, language, launcher
from iris_triton.info import TRITON_INFO
from iris_triton.language import gin
from iris_triton.language.address import HEAP_ALIGNMENT


class TritonBackend:
    """Kernels in Triton; on the CPU they run in the executor of `iris_triton.interpreter`."""

    def __init__(self, request: types.CreateRequest) -> None:
        """Prepare the backend of one rank; the request's settings are `TritonSettings`."""
        self._target = request.target
        self.settings: Any = request.settings
        self._known, self._traced = ExitStack(), ExitStack()  # memory that the CPU executor knows, and the checker
        self._spec: Any = None  # of `make_context`
        self._barriers: dict[tuple[int, str], Any] = {}

    @property
    def info(self) -> types.PluginInfo:
        return TRITON_INFO

    def make_context(self, spec: types.ContextSpec) -> torch.Tensor:
        """Encode the context tensor; a CapabilityError if heap bases are not aligned as address translation needs."""
        crooked = [f"rank {rank} at {base:#x}" for rank, base in enumerate(spec.heap_bases) if base % HEAP_ALIGNMENT]
        if crooked:
            raise CapabilityError(
                f"backend {self.info.name!r} needs heaps that begin at multiples of {HEAP_ALIGNMENT} bytes, but the "
                f"allocator placed {', '.join(crooked)}; choose another allocator"
            )
        if self._on_cpu and spec.status_ptr:
            self._allow(self._known, spec.status_ptr, STATUS_WORDS * 8, "status words")
            if spec.report_range[0]:
                self._allow(self._known, *spec.report_range, "reports")
        self._spec = spec
        return torch.tensor(encode(spec), dtype=torch.int64, device=spec.device)

    def attach(self, memory: MemoryMap) -> None:
        """Register the heap with the CPU executor; does nothing on a GPU."""
        if not self._on_cpu:
            return
        interpreter.enable()
        settings = self.settings
        interpreter.configure(bounds_check=settings.bounds_check, timeout_s=settings.cpu_timeout, hints=settings.hints)
        self._known.callback(interpreter.unregister_memory, interpreter.register_memory(memory))

    def detach(self) -> None:
        """Unregister the heap from the CPU executor, which stays enabled for other contexts.  Idempotent."""
        if self._on_cpu and self._spec is not None and self._spec.network:
            from iris_triton.interpreter.memory import network

            network.forget(self._spec.network[0])
        self._known.close()
        self._traced.close()

    def start_checker(
        self, checks: Sequence[str], path: str | None, timeline: bool, heap: SymmetricHeap, world: World,
        seed: int | str = 0
    ) -> None:  # fmt: skip
        """Start the checker of `iris_triton.checker`; `detach` ends it."""
        from iris_triton import checker

        self._known.callback(checker.start(checks, path, timeline, heap, world, seed))

    @staticmethod
    def _allow(until: ExitStack, address: int, nbytes: int, label: str) -> None:
        until.callback(interpreter.unregister_memory, interpreter.allow_region(address, nbytes, label))

    @property
    def ticks_per_second(self) -> float:
        return 1e8 if self._target.type is DeviceType.HIP else 1e9  # of `iris_triton.language.asm.read_realtime`

    def set_trace(self, context: torch.Tensor, words: Sequence[int], buffers: Sequence[torch.Tensor]) -> None:
        if self._on_cpu:
            self._traced.close()
            for number, each in enumerate(buffers):
                nbytes = each.numel() * each.element_size()
                self._allow(self._traced, each.data_ptr(), nbytes, f"tracing buffer {number}")
        trace = torch.tensor(tuple(words) or (0,) * TRACE_WORDS, dtype=torch.int64)
        begin = HEADER_WORDS + int(context[1]) + TRACE_WORD
        context[begin : begin + TRACE_WORDS].copy_(trace)

    def compare_clocks(self, context: Context) -> types.ClockOffset:
        from iris_triton.clocks import compare

        return compare(context)

    def call_cache(self, low: int, high: int, skips_float32: bool) -> CallCache | None:
        """Return a new cache in C; None on the CPU, whose calls take much longer, and where there is no compiler."""
        return None if self._on_cpu else launcher.call_cache(low, high, skips_float32)

    def device_barrier(self, slot: types.BarrierSlot, sem: str, stream: Any = None) -> None:
        bound = self._barriers.get((slot.size, sem))
        if bound is None:
            bound = self._barriers[slot.size, sem] = device_barrier.bind(slot.size, sem, self._spec)
        bound(stream, slot.words, slot.targets)

    def network_options(self, network: types.Network) -> Mapping[str, Any]:
        return {"extern_libs": gin.libraries(network)}

    def copy_between_nodes(
        self, network: types.Network, context: torch.Tensor, peer: int, source: int = 0, target: int = 0,
        nbytes: int = 0, *, gets: bool = False, signal: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        where = context, len(self._spec.heap_bases), peer, source, target, nbytes
        how = {"GETS": gets, "SIGNALS": signal is not None, "num_warps": 1, **self.network_options(network)}
        device_barrier.copy_between_nodes[(1,)](*where, *(signal or (0, 0)), **how)

    def signal(self, word: torch.Tensor, value: int, op: str) -> None:
        device_barrier.signal[(1,)](word, value, ADD=op == "add", num_warps=1)

    def signal_wait(self, word: torch.Tensor, value: int, cmp: str) -> None:
        spec = self._spec
        device_barrier.signal_wait[(1,)](word, value, spec.timeout_ns, spec.status_ptr, spec.rank, cmp, num_warps=1)

    def group_kernels(self, name: str, space: Any) -> Any:
        from iris_triton.collectives.experts import ExpertKernels
        from iris_triton.gemm.flash_decode import DecodeKernels
        from iris_triton.gemm.ring_attention import RingKernels

        return {"experts": ExpertKernels, "flash_decode": DecodeKernels, "ring_attention": RingKernels}[name](space)

    def collectives(self) -> Sequence[Collective]:
        return collectives.collectives(packets=not self._on_cpu)

    def tables(self) -> Sequence[Path]:
        return [collectives.TABLES]

    def operations(self) -> Sequence[FusedOperation | NormOperation]:
        return gemm.operations()

    def operation_tables(self) -> Sequence[Path]:
        return [gemm.TABLES]

    def device_api(self) -> Mapping[str, Any]:
        """Return the device functions by name (load, store, ...), and the class DeviceContext."""
        from iris_triton.context import DeviceContext

        functions = {name: getattr(language, name) for name in language.__all__}
        return {**functions, "DeviceContext": DeviceContext}

    def compile_cases(self) -> Sequence[types.CompileCase]:
        from iris_triton.testing.cases import compile_cases

        return compile_cases(self.device_api())

    def compile_only(self, case: types.CompileCase, target: str) -> str:
        from iris_triton.testing.compile_only import assembly, compile_for

        return assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))

    def demos(self) -> Sequence[types.Demo]:
        return demos.demos()

    def self_test(self, context: Context, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
        from iris_triton.testing.selftest import self_test

        return self_test(context, begin)

    @property
    def _on_cpu(self) -> bool:
        return self._target.type is DeviceType.CPU
