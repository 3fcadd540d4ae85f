"""Nodes: the ranks that can map each other's memory, those of one host.

IRIS_NODES divides the ranks of one host, to try on it what runs on several: "2x4" are two nodes of four ranks, "3+1"
one of three and one of one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from iris_core.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "IRIS_NODES"


def sizes_of(text: str) -> list[int]:
    """Return the numbers of ranks of nodes, as IRIS_NODES says; SettingsError if it says nothing of the kind."""
    if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
        return [int(found[2])] * int(found[1])
    if re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", text):
        return [int(part) for part in text.split("+")]
    raise SettingsError(f'{VARIABLE}={text!r} must be like "2x4", two nodes of four ranks, or "3+1"')


def divide(text: str, world_size: int) -> list[int]:
    """Return the node of each rank; all 0 where the text is empty.  SettingsError also if it means other ranks."""
    sizes = sizes_of(text) if text else [world_size]
    if sum(sizes) != world_size:
        raise SettingsError(f"{VARIABLE}={text!r} divides {sum(sizes)} ranks, but the world has {world_size}")
    return [node for node, size in enumerate(sizes) for _ in range(size)]


def group_by_node(hosts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, in the order of its lowest rank, from the host of each rank."""
    found: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))
