"""The device backend "gluon": one object per rank, created by the plugin."""

from collections.abc import Mapping, Sequence
from typing import Any

from iris_core.protocols import FusedOperation, MemoryMap, NormOperation
from iris_core.types import CompileCase, Demo, PluginInfo
from iris_gluon.info import GLUON_INFO
from iris_triton.backend import TritonBackend


class GluonBackend(TritonBackend):
    """Kernels in Gluon; what the host launches by itself, and the context tensor, are those of the Triton backend."""

    @property
    def info(self) -> PluginInfo:
        return GLUON_INFO

    def attach(self, memory: MemoryMap) -> None:
        """Let the CPU executor know the heap and Gluon; on a GPU, let kernels have scratch memory."""
        import iris_gluon.interpreter  # noqa: F401
        from iris_gluon import _compat

        if not self._on_cpu:
            _compat.provide_scratch()
        super().attach(memory)

    def operations(self) -> Sequence[FusedOperation | NormOperation]:
        from iris_gluon.gemm import operations

        return [*super().operations(), *operations()]

    def device_api(self) -> Mapping[str, Any]:
        """Return the device functions by name, and the class IrisDeviceCtx, also as DeviceContext."""
        from iris_gluon.context import IrisDeviceCtx

        return {**super().device_api(), "DeviceContext": IrisDeviceCtx, "IrisDeviceCtx": IrisDeviceCtx}

    def compile_cases(self) -> Sequence[CompileCase]:
        from iris_triton.testing.cases import compile_cases
        from iris_triton.testing.languages import in_gluon

        return compile_cases(self.device_api(), in_gluon)

    def demos(self) -> Sequence[Demo]:
        from iris_gluon.demos import demos

        return demos()
