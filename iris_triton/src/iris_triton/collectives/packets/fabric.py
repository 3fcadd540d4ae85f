"""What memory between GPUs does beyond what its model promises: facts that have to be measured, machine by machine.

Algorithms that lean on such a fact are refused until it was found on this kind of device, by
`python -m iris_triton.collectives.packets.probe`.  What was found is kept in a file for each kind of device: those that
come with this package, and those in the user's cache (`<IRIS_CACHE_DIR>/fabric`).
"""

from __future__ import annotations

import functools
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from iris_core.logs import logger

FORMAT = 1
SHIPPED = Path(__file__).parent / "facts"
"""Folder with what was found on devices that Iris was probed on."""


class Fact(StrEnum):
    """A fact about memory between GPUs of one kind."""

    WHOLE_LINES = "whole_lines"
    """128 bytes, aligned, that eight neighbouring threads store with one instruction arrive together at a peer."""


def read_facts(path: Path) -> frozenset[Fact]:
    """Return what a file says; nothing if it is none of this format."""
    try:
        content: Any = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, this version reads {FORMAT}")
        return frozenset(Fact(name) for name, found in content["facts"].items() if found["holds"] is True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s does not say what memory between GPUs does: %s: %s", path, type(error).__name__, error)
        return frozenset()


def file_name(device: str) -> str:
    """Name of the file for a kind of device, by torch's name of it."""
    return "".join(each if each.isalnum() else "_" for each in device) + ".json"


@functools.cache
def known_facts(device: str) -> frozenset[Fact]:
    """Return what was found for a kind of device.

    Args:
        device: torch's name of it, as `torch.cuda.get_device_name` tells it.
    """
    from iris_core.settings import load_settings

    folders = [Path(load_settings().cache_dir) / "fabric", SHIPPED]
    paths = (folder / file_name(device) for folder in folders)
    return next((read_facts(path) for path in paths if path.is_file()), frozenset())
