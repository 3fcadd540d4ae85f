"""GPUs and what torch says of them.  Runs in the survey's process."""

from __future__ import annotations

import glob
import os
from typing import Any

from iris_core.diagnosis import Finding, Verdict

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def torch_and_driver(torch: Any) -> tuple[list[Finding], dict[str, Any]]:
    """Return findings about torch's build and whether it sees the GPUs, and the versions it knows.

    Args:
        torch: the module.
    """
    hip = getattr(torch.version, "hip", None)
    built = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    versions = {"torch": torch.__version__, "cuda_of_torch": torch.version.cuda, "hip_of_torch": hip}
    findings = [Finding("torch", Verdict.OK, f"{torch.__version__}, built for {built}")]
    if not torch.version.cuda and not hip:
        present = _device_files()
        text = "none: this torch is built for CPUs only; kernels run on the CPU"
        if present:
            text += f"\nbut there are {', '.join(present)}: install a torch for these GPUs to use them"
        findings.append(Finding("GPUs", Verdict.NOTE if present else Verdict.OK, text))
    elif not torch.cuda.is_available() or not torch.cuda.device_count():
        findings.append(_no_gpu(torch, built))
    else:
        versions["nccl"] = _nccl(torch)
    return findings, versions


def list_gpus(torch: Any) -> list[dict[str, Any]]:
    """Return every GPU that torch sees: index, name, memory_bytes, arch, compute_units, pci_bus_id, uuid.

    What this torch does not tell is None.  Opens no context on any device.
    """
    return [_gpu(torch, index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def describe_driver(versions: dict[str, Any]) -> Finding:
    """Return one line about the driver and what torch expects of it; what is not known is left out."""
    phrases = {
        "nvidia_driver": "NVIDIA {}",
        "cuda_of_driver": "CUDA {} at most",
        "cuda_of_torch": "torch is built for CUDA {}",
        "hip_of_torch": "torch is built for HIP {}",
        "nccl": "NCCL {}",
    }
    known = [phrase.format(versions[name]) for name, phrase in phrases.items() if versions.get(name)]
    verdict = Verdict.OK if versions.get("nvidia_driver") or versions.get("hip_of_torch") else Verdict.NOTE
    if verdict is Verdict.NOTE:
        known.insert(0, "its version is not known")
    return Finding("driver", verdict, ", ".join(known), {name: versions.get(name) for name in phrases})


def describe(gpus: list[dict[str, Any]]) -> list[Finding]:
    """Return one line per GPU."""
    findings = []
    for gpu in gpus:
        parts = [gpu["name"], _gib(gpu["memory_bytes"]), gpu["arch"], gpu["pci_bus_id"]]
        free = gpu.get("free_bytes")
        if free is not None:
            parts[1] += f" ({_gib(free)} free)"
        mode, fabric = gpu.get("compute_mode"), gpu.get("fabric_state")
        verdict, remarks = Verdict.OK, []
        if mode not in (None, "default"):
            verdict = Verdict.NOTE
            remarks.append(f"compute mode {mode!r} keeps ranks apart: nvidia-smi -i {gpu['index']} -c DEFAULT")
        if fabric in ("not started", "in progress"):
            verdict = Verdict.NOTE
            remarks.append(f"the NVSwitch fabric is {fabric}: see that nvidia-fabricmanager runs on the host")
        text = ", ".join(str(part) for part in parts if part)
        findings.append(Finding(f"GPU {gpu['index']}", verdict, "\n".join([text, *remarks])))
    return findings


def peer_access(torch: Any, gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for every ordered pair of GPUs whether the first can reach the second's memory, as `from`, `to`, `access`.

    `access` is None where the driver does not answer.
    """
    pairs = []
    for one in gpus:
        for other in gpus:
            if one is not other:
                access = _can_access(torch, one["index"], other["index"])
                pairs.append({"from": one["index"], "to": other["index"], "access": access})
    return pairs


def judge_access(pairs: list[dict[str, Any]], hip: bool) -> list[Finding]:
    """Say whether all GPUs reach each other; nothing where there is only one.

    Args:
        pairs: as `peer_access` returns them.
        hip: whether they are AMD's.
    """
    if not pairs:
        return []
    missing = [f"{pair['from']}->{pair['to']}" for pair in pairs if pair["access"] is False]
    unknown = [f"{pair['from']}->{pair['to']}" for pair in pairs if pair["access"] is None]
    if missing:
        text = (
            f"GPUs cannot reach each other's memory: {_some(missing)}. No heap can span them.\n"
            f"`{'rocm-smi --showtopoaccess' if hip else 'nvidia-smi topo -p2p r'}` shows the driver's view; IOMMU, ACS "
            "and VMs without peer-to-peer are common reasons.\n"
            f"Until then choose GPUs that reach each other with {'HIP' if hip else 'CUDA'}_VISIBLE_DEVICES"
        )
        return [Finding("peer access", Verdict.BROKEN, text)]
    if unknown:
        return [Finding("peer access", Verdict.NOTE, f"the driver does not say for {_some(unknown)}")]
    return [Finding("peer access", Verdict.OK, f"between all {len(pairs)} ordered pairs")]


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    if getattr(torch.version, "hip", None):
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    uuid = getattr(properties, "uuid", None)
    return {
        "index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "arch": arch,
        "compute_units": getattr(properties, "multi_processor_count", None),
        "pci_bus_id": _bus_id(properties),
        "uuid": None if uuid is None else str(uuid),
    }


def _bus_id(properties: Any) -> str | None:
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [number for number in place if number is not None]
    return "{:08x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == len(place) else None


def _can_access(torch: Any, one: int, other: int) -> bool | None:
    try:
        return bool(torch.cuda.can_device_access_peer(one, other))
    except RuntimeError:
        return None  # shown as unknown


def _no_gpu(torch: Any, built: str) -> Finding:
    try:
        torch.cuda.init()
        why = "it gives no reason"
    except Exception as error:  # noqa: BLE001 - whatever the driver raises is the reason
        why = " ".join(str(error).split())
    hidden = [f"{name}={os.environ[name]!r}" for name in _HIDING if os.environ.get(name, "0") in ("", "-1")]
    if hidden:
        return Finding("GPUs", Verdict.NOTE, f"none: {', '.join(hidden)} hides them; kernels run on the CPU")
    present = _device_files()
    if not present:
        return Finding("GPUs", Verdict.NOTE, f"none: torch, built for {built}, sees no GPU; kernels run on the CPU")
    text = f"torch is built for {built} and there are {', '.join(present)}, but it sees no GPU: {why}"
    if "802" in why or "not yet initialized" in why:
        text += "\nGPUs behind NVSwitch need a running nvidia-fabricmanager of the driver's version"
    return Finding("GPUs", Verdict.BROKEN, text)


def _device_files() -> list[str]:
    return sorted(glob.glob("/dev/nvidia[0-9]*")) or sorted(glob.glob("/dev/kfd"))


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # noqa: BLE001 - built without NCCL, or an older one that cannot be asked
        return None


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
