"""Descriptions of the plugins of this distribution.  Imports nothing heavy."""

from __future__ import annotations

from iris_core.types import Capability, DeviceType, PluginInfo, PluginKind

_REMOTE = frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})
_GPUS = frozenset({DeviceType.CUDA, DeviceType.HIP})

HOST_INFO = PluginInfo(
    name="host",
    kind=PluginKind.ALLOCATOR,
    summary="shared memory of the host (memfd), for ranks that compute on the CPU",
    devices=frozenset({DeviceType.CPU}),
    provides=_REMOTE | {Capability.DECOMMIT},
)

TORCH_INFO = PluginInfo(
    name="torch",
    kind=PluginKind.ALLOCATOR,
    summary="one block of torch's caching allocator, mapped into peers by IPC handles",
    devices=_GPUS,
    provides=_REMOTE,
    priority=10,
)

NCCL_INFO = PluginInfo(
    name="nccl",
    kind=PluginKind.ALLOCATOR,
    summary="a window of NCCL's, to which kernels of other nodes put and signal; emulated for ranks on the CPU",
    devices=frozenset({DeviceType.CPU, DeviceType.CUDA}),
    provides=_REMOTE | {Capability.NETWORK},
    priority=-10,
)

VMEM_INFO = PluginInfo(
    name="vmem",
    kind=PluginKind.ALLOCATOR,
    summary="virtual memory that is backed as it is used, grows, shrinks and shares memory with existing tensors",
    devices=_GPUS,
    provides=_REMOTE | {Capability.GROWTH, Capability.DECOMMIT, Capability.IMPORT_TENSOR, Capability.MULTICAST},
    priority=5,
)
