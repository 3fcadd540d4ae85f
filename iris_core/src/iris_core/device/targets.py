"""The devices of this process, as torch sees them: which of them a rank may use, and what they are.

Importing this module imports no torch: what looks for devices may be the first to need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

from iris_core.errors import DeviceError
from iris_core.types import DeviceTarget, DeviceType

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

_HERE: AbstractContextManager[Any] = contextlib.nullcontext()


def num_gpus() -> int:
    """Return how many GPUs torch sees; where no driver is there, torch is not imported for it."""
    if "torch" not in sys.modules and not any(map(os.path.exists, ("/dev/kfd", "/dev/dxg"))):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_targets(device: str | None, rank: int) -> list[DeviceTarget]:
    """Return the devices that a rank may use, the preferred one first."""
    cpu = DeviceTarget(DeviceType.CPU)
    if device == "cpu":
        return [cpu]
    count = num_gpus()
    if count == 0 and device is None:
        return [cpu]
    if count == 0 and device is not None and device.startswith("cuda"):
        raise DeviceError(f"device {device!r} was asked for, but torch sees no GPU here; device='cpu' always works")
    import torch

    if device is not None:
        try:
            wanted = torch.device(device)
        except RuntimeError as e:
            raise DeviceError(f"device {device!r} is no device of torch: say 'cpu', 'cuda' or 'cuda:1'") from e
        if wanted.type == "cpu":
            return [cpu]
        if wanted.type != "cuda":
            raise DeviceError(f"device {device!r} is not supported: say 'cpu', 'cuda' or 'cuda:1'")
    index = int(os.environ.get("LOCAL_RANK", rank)) % count
    if device is not None and wanted.index is not None:
        index = wanted.index
    if index >= count:
        raise DeviceError(f"device {device!r} was asked for, but there are only {count} GPUs here")
    properties = torch.cuda.get_device_properties(index)
    gpu = DeviceTarget(DeviceType.CUDA, index, f"sm_{properties.major}{properties.minor}", 32)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
        gpu = DeviceTarget(DeviceType.HIP, index, arch, int(getattr(properties, "warp_size", 64)))
    return [gpu] if device is not None else [gpu, cpu]


def same_device(device: torch.device, own: str) -> bool:
    """Whether a requested device is this context's own; without an index any device of the kind is."""
    import torch

    mine = torch.device(own)
    return device.type == mine.type and (device.index is None or device.index == (mine.index or 0))


def num_compute_units(target: DeviceTarget) -> int:
    """Return how many compute units (SMs, CUs) a device has; on the CPU, how many cores this process may use."""
    if target.type is DeviceType.CPU:
        return len(os.sched_getaffinity(0))
    import torch

    return int(torch.cuda.get_device_properties(target.index).multi_processor_count)


def on_device(target: DeviceTarget) -> AbstractContextManager[Any]:
    """Make a GPU the calling thread's current device inside a block; nothing where it is already, and on the CPU.

    A kernel is launched in the context of the thread's current device, which is device 0 in every new thread, and a
    capture is one of a stream of that device.
    """
    if target.type is DeviceType.CPU:
        return _HERE
    import torch

    current: int = torch._C._cuda_getDevice()
    return _HERE if current == target.index else torch.cuda.device(target.index)
