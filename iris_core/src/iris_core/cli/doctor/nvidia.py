"""Links between NVIDIA's GPUs, from NVML (package nvidia-ml-py) or from `nvidia-smi topo -m`."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
from typing import Any

from iris_core.cli.doctor.links import NVLINK, PATHS, UNKNOWN, Link, Links, Unavailable, bus_id, same_device

_TOOL_TIMEOUT_S = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def ask_nvml(gpus: list[dict[str, Any]]) -> tuple[Links, dict[str, Any]]:
    """Ask NVIDIA's management library.

    Raises:
        Unavailable: package or library is missing, or a GPU is not known to it.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error}") from error
    try:
        versions = {"nvidia_driver": nvml.nvmlSystemGetDriverVersion()}
        version = _or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        if version is not None:
            versions["cuda_of_driver"] = f"{version // 1000}.{version % 1000 // 10}"
        handles = [nvml.nvmlDeviceGetHandleByPciBusId(bus_id(gpu)) for gpu in gpus]
        for gpu, handle in zip(gpus, handles, strict=True):
            gpu.update(_state(nvml, handle))
        active = [_active_nvlinks(nvml, handle) for handle in handles]
        links: Links = {}
        for i, one in enumerate(handles):
            for j, other in enumerate(handles):
                if i != j:
                    pair = gpus[i]["index"], gpus[j]["index"]
                    links[pair] = _nvml_link(nvml, one, other, active[i], active[j], bus_id(gpus[j]))
        return links, versions
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from error
    finally:
        nvml.nvmlShutdown()


def _or_none(nvml: Any, function: Any, *args: Any) -> Any:
    """What NVML answers, or None: this driver or GPU does not know the question."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def _state(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    mode = _or_none(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    modes = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "default",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
    }
    return {
        "free_bytes": None if memory is None else int(memory.free),
        "compute_mode": None if mode is None else modes.get(mode, str(mode)),
        "fabric_state": _fabric_state(nvml, handle),
    }


def _fabric_state(nvml: Any, handle: Any) -> str | None:
    """Whether the GPU has joined its NVSwitch fabric; None where the library does not say."""
    if not hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):
        return None
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if _or_none(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
        return None
    return {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}.get(info.state)


def _active_nvlinks(nvml: Any, handle: Any) -> list[str | None]:
    """The far ends of a GPU's active NVLinks: PCI bus ids, None where a switch or nothing known is there."""
    ends: list[str | None] = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _or_none(nvml, nvml.nvmlDeviceGetNvLinkState, handle, number) == nvml.NVML_FEATURE_ENABLED:
            far = _or_none(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
            ends.append(None if far is None else _text(far.busId))
    return ends


def _nvml_link(
    nvml: Any, one: Any, other: Any, ends: list[str | None], other_ends: list[str | None], other_bus_id: str
) -> Link:
    def capable(index: int) -> bool | None:
        status = _or_none(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, index)
        return None if status is None else status == nvml.NVML_P2P_STATUS_OK

    atomics = capable(nvml.NVML_P2P_CAPS_INDEX_ATOMICS)
    direct = sum(end is not None and same_device(end, other_bus_id) for end in ends)
    if direct or capable(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        # Without a direct link it goes over switches, to which both GPUs send all their links.
        return {"link": NVLINK, "link_count": direct or min(len(ends), len(other_ends)) or None, "atomics": atomics}
    level = _or_none(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    levels = (
        nvml.NVML_TOPOLOGY_SINGLE,
        nvml.NVML_TOPOLOGY_MULTIPLE,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE,
        nvml.NVML_TOPOLOGY_NODE,
        nvml.NVML_TOPOLOGY_SYSTEM,
    )
    path = dict(zip(levels, PATHS, strict=True)).get(level, UNKNOWN)
    return {"link": path, "link_count": None, "atomics": atomics}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def ask_nvidia_smi(gpus: list[dict[str, Any]]) -> tuple[Links, dict[str, Any]]:
    """Read `nvidia-smi topo -m`, which tells links but no atomics.

    Raises:
        Unavailable: the tool is missing, fails, or prints something unknown.
    """
    listed = _tool("nvidia-smi", "--query-gpu=index,pci.bus_id,driver_version", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 2]
    numbers = {}  # the tool's number of a GPU -> torch's
    for gpu in gpus:
        for number, listed_id, _ in rows:
            if same_device(listed_id, bus_id(gpu)):
                numbers[f"GPU{number}"] = gpu["index"]
    links = _read_topology(_tool("nvidia-smi", "topo", "-m"), numbers)
    if len(links) != len(gpus) * (len(gpus) - 1):
        raise Unavailable("`nvidia-smi topo -m` does not show all GPUs")
    return links, {"nvidia_driver": rows[0][2]} if rows else {}


def _read_topology(text: str, numbers: dict[str, int]) -> Links:
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    columns: list[str] = []
    links: Links = {}
    for cells in lines:
        if not cells or not cells[0].startswith("GPU"):
            continue
        if not columns:  # the heading comes first, and has no name of its own
            columns = [cell for cell in cells if re.fullmatch(r"GPU\d+", cell)]
            continue
        for column, cell in zip(columns, cells[1:], strict=False):  # columns of other devices follow
            if cells[0] in numbers and column in numbers and column != cells[0]:
                links[numbers[cells[0]], numbers[column]] = _from_symbol(cell)
    return links


def _from_symbol(symbol: str) -> Link:
    if match := re.fullmatch(r"NV(\d+)", symbol):
        return {"link": NVLINK, "link_count": int(match[1]), "atomics": None}
    return {"link": symbol if symbol in PATHS else UNKNOWN, "link_count": None, "atomics": None}


def _tool(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not there") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(command)}` did not end within {_TOOL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
