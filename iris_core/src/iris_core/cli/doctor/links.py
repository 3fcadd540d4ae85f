"""What connects two GPUs: the terms that the sources of such facts share.

GPUs are matched by PCI bus id, because CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give them other numbers than the
tools use.
"""

from __future__ import annotations

import re
from typing import Any, TypedDict

NVLINK, XGMI, PCIE, UNKNOWN = "nvlink", "xgmi", "pcie", "unknown"

PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe paths by the names of `nvidia-smi topo -m`: one switch, several, a host bridge, a NUMA node, between sockets."""


class Link(TypedDict):
    """How one GPU is connected to another one.

    `link` is "nvlink", "xgmi", one of PATHS, "pcie" where the path is not known, or "unknown".  `link_count` is the
    number of NVLinks, None if not known or not NVLink; `atomics` whether the driver reports atomics on the peer's
    memory, None if it was not asked.
    """

    link: str
    link_count: int | None
    atomics: bool | None


Links = dict[tuple[int, int], Link]


class Unavailable(Exception):
    """A source cannot be asked; the text says why."""


def label(link: Link) -> str:
    """Return a link as the matrix shows it: "NV18", "XGMI", "SYS", "?"."""
    if link["link"] == NVLINK:
        return f"NV{link['link_count'] or ''}"
    return "?" if link["link"] == UNKNOWN else link["link"].upper()


def bus_id(gpu: dict[str, Any]) -> str:
    """Return a GPU's PCI bus id.

    Raises:
        Unavailable: this torch does not tell it.
    """
    if gpu["pci_bus_id"] is None:
        raise Unavailable("this torch does not tell the GPUs' PCI bus ids")
    return str(gpu["pci_bus_id"])


def same_device(one: str, other: str) -> bool:
    """Whether two PCI bus ids are equal; domains are written with four digits or eight.  Other texts equal nothing."""

    def parts(text: str) -> list[int]:
        return [int(part, 16) for part in re.split(r"[:.]", text)]

    try:
        return parts(one) == parts(other)
    except ValueError:
        return False
