"""Examining in a process of its own, with a bound: a crash or a hang is among the things to be found.

The child appends records, lines of JSON, to files of a folder as it goes, so what it had found before it crashed or
was ended is not lost, and the last record says where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
_STDERR_LINES = 3
_POLL_S = 0.02
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended.

    Attributes:
        problem: what was wrong about it, as a phrase behind the name of what was run; empty if nothing was.
        stderr: the last lines that it wrote to standard error.
        seconds: how long it ran.
    """

    problem: str
    stderr: str
    seconds: float


class Recorder:
    """Writes the records of one process.

    Args:
        path: file that records are appended to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def write(self, **fields: Any) -> None:
        """Append one record; it is in the file when this returns."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields, default=str) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none if it does not exist.  A last one that was not finished is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def environment_without_world() -> dict[str, str]:
    """This process's environment without what torchrun and others say of a world of ranks."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_WORLD_VARIABLES)}


def run_module(
    module: str, argument: Mapping[str, Any], folder: Path, timeout_s: float, environment: Mapping[str, str]
) -> Ending:
    """Run `python -m module FOLDER ARGUMENT` and end it, with all processes it has started, when its time is over.

    Args:
        module: the module.
        argument: what the module is to do; handed over as JSON.
        folder: where it writes its records; its standard error and its temporary files go there too, so that
            nothing stays behind of one that was ended.
        timeout_s: seconds that it may take.
        environment: its variables.
    """
    command = [sys.executable, "-m", module, str(folder), json.dumps(argument)]
    start = time.monotonic()
    # To a file: a process that cannot be killed would keep a pipe open, and reading it would wait for ever.
    with open(folder / "stderr", "wb") as stderr:
        child = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,  # one group of processes, to be ended together
        )
        ended = False
        try:
            ended = _wait(child.pid, timeout_s)
        finally:
            # Not reaped yet, so this number is still that of its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it is left to the system
                child.wait(_KILL_S)
        problem = _how(child.returncode) if ended else f"did not end within {timeout_s:g} s"
    lines = (folder / "stderr").read_text(errors="replace").strip().splitlines()
    return Ending(problem, "\n".join(lines[-_STDERR_LINES:]), time.monotonic() - start)


def _wait(pid: int, timeout_s: float) -> bool:
    """Wait for a child to end, without reaping it; False if its time is over."""
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):  # a signal without a name
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"was killed by signal {-status}"
    return f"ended with status {status}" if status else ""
