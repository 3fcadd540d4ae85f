"""Whether lines of 128 bytes arrive whole at a peer (`whole_lines`), which no model of memory promises.

Algorithms that rely on it are refused until it was found on this kind of device, by
`benchmarks/whole_lines.py`.  A file for each kind of device keeps what was found: some come with
this package, others are in the user's cache (`<IRIS_CACHE_DIR>/fabric`).
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from iris_core.logs import logger

FORMAT, FACT = 1, "whole_lines"
_SHIPPED = Path(__file__).parent / "facts"


def file_name(device: str) -> str:
    """Return the name of the file for a device model, by torch's name of it."""
    return "".join(each if each.isalnum() else "_" for each in device) + ".json"


def says_whole_lines(path: Path) -> bool:
    """Return whether a file says that lines are whole; False if it has another format."""
    try:
        content: Any = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, this version reads {FORMAT}")
        return content["facts"][FACT]["holds"] is True
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s does not say what memory between GPUs does: %s: %s", path, type(error).__name__, error)
        return False


@functools.cache
def has_whole_lines(device: str) -> bool:
    """Return whether lines were measured to be whole on a device model, by torch's name of it."""
    from iris_core.settings import load_settings

    paths = (folder / file_name(device) for folder in (Path(load_settings().cache_dir) / "fabric", _SHIPPED))
    return next((says_whole_lines(path) for path in paths if path.is_file()), False)


def lines_problem(device_index: int | None) -> str:
    """Return why this device is not known to have whole lines; empty if it is."""
    if not torch.cuda.is_available():
        return "no GPU is here"
    device = torch.cuda.get_device_name(device_index)
    if has_whole_lines(device):
        return ""
    return (
        f"it needs {FACT} of memory between GPUs, which was not probed on {device!r}: run "
        "benchmarks/whole_lines.py of Iris's sources with torchrun"
    )
