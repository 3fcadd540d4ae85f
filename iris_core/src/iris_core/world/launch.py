"""Start a function on several ranks of this host, from an ordinary script or a notebook."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeVar

from iris_core.errors import IrisError, PeerLostError
from iris_core.world.group import launched_in
from iris_core.world.rendezvous import Folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

R = TypeVar("R")
_GRACE_S = 1.0
_END_S = 5.0
_AT_ONCE = (False, 0.0)  # before anything that was raised
_PR_SET_PDEATHSIG = 1


class RankError(IrisError, RuntimeError):
    """A rank raised; the message has that rank's traceback.

    Attributes:
        rank: the first rank that raised.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text.rstrip()}")
        self.rank = rank


def run(
    fn: Callable[..., R],
    num_ranks: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    torch_distributed: bool = False,
) -> list[R]:
    """Call `fn(*args)` on `num_ranks` new processes and return their results in the order of ranks.

    Inside `fn`, `Iris()` finds the other ranks.  When one rank raises, the others are ended; when this process dies,
    all are.

    Args:
        fn: a function that can be pickled by name (defined at the top level of a module).
        num_ranks: number of ranks, at least 1.
        *args: its arguments, the same on every rank.
        environ: variables to set in the ranks beside those of this process.
        torch_distributed: initialise torch.distributed in the ranks before `fn` is called, for programs that use it
            beside Iris: gloo, and NCCL where there are GPUs.  These listen on TCP, without asking who connects.

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
        opened = Folder(folder)
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                variables = {**(environ or {}), **rank_environment(rank, num_ranks)}
                job = (folder, rank, num_ranks, theirs, variables, torch_distributed, _Late((fn, args)))
                process = context.Process(target=_main, args=job, name=_BoundName(f"iris rank {rank}"))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
                opened.announce(rank, process.pid or 0)  # if it dies before it can do that, the others know it, too
            return _collect(pipes, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(_END_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
            opened.close()


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables of one rank: torchrun's that describe it, one OpenMP thread unless the user chose."""
    variables = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    return variables


def join_rank(folder: str, rank: int, num_ranks: int, *, torch_distributed: bool) -> None:
    """Make this process a rank of a new world, whose folder only its launcher's ranks know."""
    with Folder(folder) as opened:
        opened.announce(rank, os.getpid())
    launched_in(folder, rank, num_ranks)
    if torch_distributed:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore  # of torch.distributed, unknown to type checkers there

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = FileStore(os.path.join(folder, "store"), num_ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


class _BoundName(str):
    """The name of a process that multiprocessing spawns, which ends with this process.

    To be started by a thread that outlives it: the system looks at the thread.  Of what is sent to the process, the
    name is unpickled first: before the main module of the program is imported, which may take long, and before sys.path
    is set, so this can only use the standard library.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        end = f"__import__('ctypes').CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGTERM:d})"
        end_now = f"__import__('os').getppid() == {os.getpid()} or __import__('os')._exit(1)"
        return eval, (f"({end}, {end_now}, {str(self)!r})[-1]",)


class _Late:
    """A value that is unpickled when it is asked for: that may import torch, which takes seconds."""

    def __init__(self, value: Any = None, data: bytes = b"") -> None:
        self._value, self._data = value, data

    def __reduce__(self) -> tuple[Any, ...]:
        data = io.BytesIO()
        ForkingPickler(data, pickle.HIGHEST_PROTOCOL).dump(self._value)
        return _Late, (None, data.getvalue())

    def get(self) -> Any:
        return pickle.loads(self._data)


def _main(
    folder: str,
    rank: int,
    num_ranks: int,
    pipe: Connection,
    variables: Mapping[str, str],
    torch_distributed: bool,
    job: _Late,
) -> None:
    os.environ.update(variables)
    try:
        join_rank(folder, rank, num_ranks, torch_distributed=torch_distributed)
        fn, args = job.get()
        answer = success(fn(*args))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to hear of it
        answer = failure()
    pipe.send_bytes(answer)  # before the group goes, so that the cause of a failure arrives before its consequences
    pipe.close()
    if torch_distributed:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def success(result: Any) -> bytes:
    """Pack a job's result for the parent process; a failure if it cannot be pickled."""
    try:
        return pickle.dumps((True, _AT_ONCE, result))
    except Exception:  # noqa: BLE001 - pickling runs the result's own code, which may raise anything
        return failure("the job's result cannot be sent back:\n")


def failure(prefix: str = "") -> bytes:
    """Pack the exception that is being handled, with its time: the first of several is the cause of the others.

    Except for lost peers: these errors are the consequence of another one, which may take longer to be known.
    """
    when = isinstance(sys.exception(), PeerLostError), time.monotonic()
    return pickle.dumps((False, when, prefix + traceback.format_exc()))


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess]) -> list[Any]:
    results: dict[int, Any] = {}
    failed: list[tuple[tuple[bool, float], IrisError]] = []
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    grace_ends = float("inf")  # after a failure, others may still tell the cause of it
    while waiting and time.monotonic() < grace_ends:
        for pipe in wait(list(waiting), timeout=_GRACE_S if failed else None):
            rank = waiting.pop(pipe)
            try:
                ok, when, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(_END_S)
                text = f"rank {rank} ended with exit code {processes[rank].exitcode} before it had a result"
                failed.append((_AT_ONCE, PeerLostError(text, ranks=[rank])))
            else:
                if ok:
                    results[rank] = value
                else:
                    failed.append((when, RankError(rank, value)))
        if failed and grace_ends == float("inf"):
            grace_ends = time.monotonic() + _GRACE_S
    if failed:
        raise min(failed, key=lambda each: each[0])[1]
    return [results[rank] for rank in range(len(pipes))]
