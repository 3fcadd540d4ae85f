"""Runs a backend's self-test on ranks of this host and records what comes of it.

    python -m iris_core.cli.doctor.worker FOLDER ARGUMENT      (the doctor starts it)

Every rank writes a file of its own, so that a rank which crashes or hangs still says where it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iris_core.cli.doctor.process import Recorder
from iris_core.diagnosis import PairCheck
from iris_core.errors import IrisError, PeerLostError
from iris_core.world.launch import RankError, end_with_parent

HEAP_SIZE = "64MiB"

RUN_FILE = "run.jsonl"
"""What became of the ranks as a whole: {"rank", "error"} where one failed."""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.jsonl"


def main(folder: str, argument: str) -> int:
    """Start the ranks; 0 if all of them came to the end, 1 otherwise."""
    import iris_core
    from iris_core.cli.doctor.worker import on_rank  # under its real name, by which new processes find it

    job = json.loads(argument)
    try:
        iris_core.run(on_rank, job["ranks"], job, folder)
    except IrisError as error:
        rank = error.rank if isinstance(error, RankError) else None
        if isinstance(error, PeerLostError) and error.ranks:  # its process crashed
            rank = error.ranks[0]
        Recorder(Path(folder) / RUN_FILE).write(rank=rank, error=str(error))
        return 1
    return 0


def on_rank(job: dict[str, Any], folder: str) -> None:
    """Run the self-test on one rank.

    Args:
        job: `backend`, `allocator`, `device` and `ranks`.
        folder: where the records go.
    """
    from iris_core import Iris

    recorder = Recorder(Path(folder) / rank_file(int(os.environ["RANK"])))

    def begin(op: str, peer: int | None) -> None:
        recorder.write(begin=op, peer=peer)

    try:
        begin("open", None)
        with Iris(HEAP_SIZE, backend=job["backend"], allocator=job["allocator"], device=job["device"]) as ctx:
            recorder.write(device=ctx.device)
            self_test = getattr(ctx.backend, "self_test", None)
            if self_test is None:
                recorder.write(unsupported=True)
                return
            start = time.perf_counter()
            for check in self_test(ctx, begin):
                if not isinstance(check, PairCheck):
                    raise TypeError(f"the backend's self-test gave {check!r}, not a PairCheck")
                recorder.write(check=asdict(check))
            recorder.write(seconds=time.perf_counter() - start)
            begin("close", None)
        recorder.write(done=True)
    except BaseException as error:
        recorder.write(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    end_with_parent()  # the doctor's bound does not hold where somebody has ended the doctor
    sys.exit(main(*sys.argv[1:]))
