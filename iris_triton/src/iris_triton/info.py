"""Descriptions of the plugins of this distribution.  Imports nothing heavy."""

from iris_core.types import Capability, DeviceType, PluginInfo, PluginKind

TRITON_INFO = PluginInfo(
    name="triton",
    kind=PluginKind.BACKEND,
    summary="Triton kernels, on GPUs and (through the CPU executor) on CPUs",
    devices=frozenset({DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
    priority=10,
    demos=frozenset({"message-passing", "gemm-all-scatter"}),
)
