"""Descriptions of the plugins of this distribution.  Imports nothing heavy."""

from __future__ import annotations

from iris_core.types import Capability, DeviceType, PluginInfo, PluginKind

GLUON_INFO = PluginInfo(
    name="gluon",
    kind=PluginKind.BACKEND,
    summary="Gluon kernels, on GPUs and (through the CPU executor) on CPUs",
    devices=frozenset({DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
)
