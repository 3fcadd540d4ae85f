"""Queries of `iris.hip` of AMD's Iris, for devices of any vendor and, where that makes sense, for the CPU.

A `device_id` is a GPU's number, None means the current one, and a GPU that is not there is a DeviceError.
"""

import torch

from iris_core.device.targets import device_targets, num_compute_units, num_gpus
from iris_core.errors import UnsupportedError
from iris_core.types import DeviceTarget, DeviceType

count_devices = num_gpus
_UNITS_PER_DIE = {"gfx942": 38, "gfx950": 32}  # in use, from AMD's documents (CDNA 3 and CDNA 4 architecture)


def set_device(gpu_id: int) -> None:
    """Make a GPU the current one."""
    _target(gpu_id)
    torch.cuda.set_device(gpu_id)


def get_device_id() -> int:
    """Return the current GPU's index; 0 on the CPU."""
    return torch.cuda.current_device() if count_devices() else 0


def get_cu_count(device_id: int | None = None) -> int:
    """Return the number of multiprocessors (compute units); on the CPU, of cores that this process may use."""
    return num_compute_units(_target(device_id))


def get_arch_string(device_id: int | None = None) -> str:
    """Return the architecture: "gfx942" on AMD, "sm_90" on NVIDIA, "cpu" without a GPU."""
    return _target(device_id).arch or "cpu"


def get_num_xcc(device_id: int | None = None) -> int:
    """Return the number of accelerator dies: 1 but for AMD's devices of several."""
    units = get_cu_count(device_id)  # a partition of a device has fewer dies
    return max(1, round(units / _UNITS_PER_DIE.get(get_arch_string(device_id), units)))


def get_wall_clock_rate(device_id: int | None = None) -> int:
    """Return the rate in kHz of the constant clock that kernels read (`iris_triton.language.asm.read_realtime`)."""
    _target(device_id)
    return 100_000 if torch.version.hip else 1_000_000


def get_rocm_version() -> tuple[int, int]:
    """Return ROCm's version as (major, minor); an UnsupportedError where torch was not built for ROCm."""
    if torch.version.hip is None:
        raise UnsupportedError(f"get_rocm_version: this torch is not for ROCm (CUDA: {torch.version.cuda})")
    major, minor, *_ = torch.version.hip.split(".")
    return int(major), int(minor)


def _target(device_id: int | None) -> DeviceTarget:
    """Return a GPU by its number, or the current one; the CPU if there is no GPU, and none was named."""
    if device_id in (None, 0) and not count_devices():
        return DeviceTarget(DeviceType.CPU)
    (found,) = device_targets(f"cuda:{get_device_id() if device_id is None else device_id}", 0)
    return found
