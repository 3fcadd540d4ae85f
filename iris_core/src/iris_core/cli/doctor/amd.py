"""Links between AMD's GPUs, from amdsmi.

Not run on AMD GPUs, because none was at hand; tested against a stand-in for the package.
"""

from __future__ import annotations

import importlib
from typing import Any

from iris_core.cli.doctor.links import PCIE, UNKNOWN, XGMI, Links, Unavailable, bus_id, same_device


def ask_amdsmi(gpus: list[dict[str, Any]]) -> tuple[Links, dict[str, Any]]:
    """Ask AMD's management library.

    Raises:
        Unavailable: the package is missing, or does not answer.
    """
    try:
        amdsmi = importlib.import_module("amdsmi")
    except ImportError:
        raise Unavailable("amdsmi is not installed; it comes with ROCm (share/amd_smi)") from None
    try:
        amdsmi.amdsmi_init()
        try:
            return _links(amdsmi, gpus), {}
        finally:
            amdsmi.amdsmi_shut_down()
    except Unavailable:
        raise
    except Exception as error:  # whatever this package raises, in all of its versions
        raise Unavailable(f"amdsmi: {type(error).__name__}: {error}") from error


def _links(amdsmi: Any, gpus: list[dict[str, Any]]) -> Links:
    # Older versions answer in numbers of the first of these enums, newer ones in those of the second.
    kinds = getattr(amdsmi, "AmdSmiIoLinkType", None) or amdsmi.AmdSmiLinkType
    handles = {amdsmi.amdsmi_get_gpu_device_bdf(each): each for each in amdsmi.amdsmi_get_processor_handles()}
    links: Links = {}
    for gpu in gpus:
        for peer in gpus:
            if gpu is not peer:
                one, other = _handle(handles, gpu), _handle(handles, peer)
                kind = kinds(amdsmi.amdsmi_topo_get_link_type(one, other)["type"]).name
                link = XGMI if "XGMI" in kind else PCIE if "PCI" in kind else UNKNOWN
                links[gpu["index"], peer["index"]] = {"link": link, "link_count": None, "atomics": None}
    return links


def _handle(handles: dict[str, Any], gpu: dict[str, Any]) -> Any:
    for name, handle in handles.items():
        if same_device(name, bus_id(gpu)):
            return handle
    raise Unavailable(f"amdsmi does not know the GPU at {bus_id(gpu)}")
