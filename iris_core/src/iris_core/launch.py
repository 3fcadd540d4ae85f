"""Start a function on several ranks of this host, from an ordinary script or a notebook."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from iris_core.errors import IrisError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

R = TypeVar("R")
_GRACE_S = 1.0


class RankError(IrisError, RuntimeError):
    """A rank raised; the message has that rank's traceback.

    Attributes:
        rank: the first rank that raised.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text.rstrip()}")
        self.rank = rank


def run(fn: Callable[..., R], num_ranks: int, *args: Any, environ: Mapping[str, str] | None = None) -> list[R]:
    """Call `fn(*args)` on `num_ranks` new processes and return their results in the order of ranks.

    Inside `fn`, `Iris()` finds the other ranks.  When one rank raises, the others are ended.

    Args:
        fn: a function that can be pickled by name (defined at the top level of a module).
        num_ranks: number of ranks, at least 1.
        *args: its arguments, the same on every rank.
        environ: variables to set in the ranks beside those of this process.

    Returns:
        One result per rank.

    Raises:
        RankError: a rank raised; holds the traceback of the first one.
        PeerLostError: a rank's process ended without a result.

    Example:
        >>> import iris_core
        >>> from iris_core.testing.jobs import rank_and_world
        >>> iris_core.run(rank_and_world, 2)
        [(0, 2), (1, 2)]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="iris-run-") as folder:
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                variables = {**(environ or {}), **rank_environment(rank, num_ranks)}
                job = (theirs, variables, os.path.join(folder, "store"), rank, num_ranks, fn, args)
                process = context.Process(target=_main, args=job, name=f"iris rank {rank}")
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """Variables of one rank: as torchrun's where they describe the rank, one OpenMP thread unless the user chose."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # ranks share the cores; more threads only get in each other's way
    return variables


def end_with_parent() -> None:
    """Have the system end this process when the one that started it is gone, however it went."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def join_world(store: str, rank: int, num_ranks: int) -> None:
    """Initialise torch.distributed through a file that all ranks of this host can reach."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import (
        FileStore,
    )  # torch.distributed has it too, but does not say so to type checkers

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=FileStore(store, num_ranks), rank=rank, world_size=num_ranks)


def _main(
    pipe: Connection,
    variables: Mapping[str, str],
    store: str,
    rank: int,
    num_ranks: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(variables)
    end_with_parent()
    try:
        join_world(store, rank, num_ranks)
        answer = success(fn(*args))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to hear of it
        answer = failure()
    pipe.send_bytes(answer)  # before the group goes, so that the cause of a failure arrives before its consequences
    pipe.close()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def success(result: Any) -> bytes:
    """Pack a job's result for the parent process; a failure if it cannot be pickled."""
    try:
        return pickle.dumps((True, 0.0, result))
    except Exception:  # noqa: BLE001 - pickling runs the result's own code, which may raise anything
        return failure("the job's result cannot be sent back:\n")


def failure(prefix: str = "") -> bytes:
    """Pack the exception that is being handled, with its time: the first of several is the cause of the others."""
    return pickle.dumps((False, time.monotonic(), prefix + traceback.format_exc()))


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess]) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, tuple[float, IrisError]] = {}
    waiting = dict(enumerate(pipes))
    grace_ends = float("inf")  # after a failure, others may still tell the cause of it
    while waiting and time.monotonic() < grace_ends:
        for ready in wait(list(waiting.values()), timeout=None if not failed else _GRACE_S):
            rank = next(r for r, p in waiting.items() if p is ready)
            del waiting[rank]
            try:
                ok, when, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                lost = f"rank {rank} ended with exit code {code} before it had a result"
                failed[rank] = 0.0, PeerLostError(lost, ranks=[rank])  # nothing that was raised can have caused this
            else:
                if ok:
                    results[rank] = value
                else:
                    failed[rank] = when, RankError(rank, value)
        if failed and grace_ends == float("inf"):
            grace_ends = time.monotonic() + _GRACE_S
    if failed:
        _, error = min(failed.values(), key=lambda each: each[0])
        raise error
    return [results[r] for r in range(len(pipes))]
