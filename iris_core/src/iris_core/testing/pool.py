"""A persistent pool of rank processes.

Starting a process costs two seconds of work (importing torch and triton), so tests keep the processes and only make new
process groups.  One pool serves every world size up to its largest: a job of n ranks runs on the first n workers.
Where there are no GPUs, workers are forked from one server process that has these modules; a driver would not survive
that, so that elsewhere each worker imports them itself.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import mmap
import multiprocessing
import os
import pickle
import secrets
import sys
import tempfile
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from iris_core.errors import CollectiveTimeoutError, PeerLostError
from iris_core.world.failures import name_ranks
from iris_core.world.launch import RankError, failure, join_rank, rank_environment, success

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess


_LAST_WORDS_S = 5.0  # how long the others may tell what happened after the first failure
_END_S = 10.0  # how long a process may take to end; after a kill, the driver takes its GPU's work away meanwhile


class RankPool:
    """Processes that run jobs as ranks of one world.

    Args:
        warm: modules that every worker imports at start.
        timeout_s: bound of one job in seconds.
        environ: variables of the workers beside those of this process.
        torch_distributed: initialise torch.distributed in the ranks as well, for jobs that use it: gloo, and NCCL
            where there are GPUs.  These listen on TCP, without asking who connects.

    Example:
        >>> from iris_core.testing import RankPool
        >>> from iris_core.testing.jobs import rank_and_world
        >>> with RankPool() as pool:
        ...     pool.run(rank_and_world, 2)
        [(0, 2), (1, 2)]
    """

    def __init__(
        self,
        *,
        warm: Sequence[str] = ("torch",),
        timeout_s: float = 120.0,
        environ: Mapping[str, str] | None = None,
        torch_distributed: bool = False,
    ) -> None:
        self._torch_distributed = torch_distributed
        self._warm = tuple(warm)
        self._timeout_s = timeout_s
        self._environ = dict(environ or {})
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="iris-pool-")
        self._worlds = 0
        self._size = 0  # of the world that the workers are in now

    def run(self, fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `fn(*args)` on `num_ranks` ranks.

        Args:
            fn: function that can be pickled by name.
            num_ranks: number of ranks.
            *args: arguments, the same on every rank.
            timeout_s: bound of this job; the pool's by default.

        Returns:
            One result per rank.

        Raises:
            RankError: a rank raised.  The pool stays usable: workers that do not come back, and those that computed on
                a GPU, which an error may have spoilt for the rest of the process, are replaced.
            PeerLostError: a worker died.
            CollectiveTimeoutError: the job took too long; the message names it and the ranks that were still running.
        """
        while len(self._workers) < num_ranks:
            self._workers.append(self._start(len(self._workers)))
        if self._size != num_ranks:
            self._worlds += 1
            self._size = num_ranks
        folder = os.path.join(self._folder.name, f"world-{self._worlds}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        workers = self._workers[:num_ranks]
        for rank, worker in enumerate(workers):
            worker.pipe.send((folder, rank, num_ranks, fn, args))
        try:
            return self._collect(workers, getattr(fn, "__name__", str(fn)), timeout_s or self._timeout_s)
        except BaseException:
            # ranks of a failed job may be anywhere inside it: start afresh
            self._restart(num_ranks)
            raise

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, rank: int) -> _Worker:
        return _Worker(rank, self._warm, self._environ, self._torch_distributed)

    def _restart(self, num_ranks: int) -> None:
        """Keep workers that finished the job and can go on; replace the others."""
        for i, worker in enumerate(self._workers[:num_ranks]):
            if worker.busy or worker.spoilt:
                worker.kill()
                self._workers[i] = self._start(i)
        self._size = 0  # a new world for the next job

    def _collect(self, workers: Sequence[_Worker], job: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failed: dict[int, tuple[tuple[bool, float], str]] = {}  # when, and the traceback
        died: list[int] = []
        for worker in workers:
            worker.busy = True
        deadline = time.monotonic() + timeout_s
        while waiting := {r: w for r, w in enumerate(workers) if w.busy and r not in died}:
            left = deadline - time.monotonic()
            ready = wait([w.pipe for w in waiting.values()], timeout=max(left, 0))
            if not ready:
                if failed or died:
                    break
                ranks = sorted(waiting)
                text = f"job {job}: {name_ranks(ranks)} of {len(workers)} still ran after {timeout_s:g} s"
                raise CollectiveTimeoutError(text, missing_ranks=ranks)
            for rank, worker in waiting.items():
                if worker.pipe not in ready:
                    continue
                try:
                    worker.spoilt, answer = worker.pipe.recv()
                    ok, when, value = pickle.loads(answer)
                except (EOFError, ConnectionError):
                    died.append(rank)
                    continue
                worker.busy = False
                if ok:
                    results[rank] = value
                else:
                    failed[rank] = when, value
            if failed or died:  # the others get a moment to notice by themselves
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        if died:
            text = "".join(f"\nrank {r} raised:\n{failed[r][1]}" for r in sorted(failed))
            raise PeerLostError(f"the processes of ranks {died} ended during job {job}{text}", ranks=died)
        if failed:
            rank = min(failed, key=lambda r: failed[r])  # the first one; the others may be its consequences
            raise RankError(rank, failed[rank][1])
        return [results[r] for r in range(len(workers))]


def _context(warm: Sequence[str]) -> ForkServerContext | SpawnContext:
    """How workers are started; the server is one for all pools of this process, and ends with it."""
    if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # these start no thread, and read no variable that may differ between workers
    context.set_forkserver_preload(["torch.distributed", "triton.language", "iris_core.api", *warm])
    return context


class _Worker:
    def __init__(self, rank: int, warm: tuple[str, ...], environ: Mapping[str, str], torch_distributed: bool) -> None:
        context = _context(warm)
        self.pipe, theirs = context.Pipe()
        variables = {**os.environ, **environ}
        # jobs may live in test modules, so sys.path goes with them
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, rank, warm, variables, list(sys.path), torch_distributed), daemon=True
        )
        self.process.start()
        theirs.close()
        self.busy = False
        self.spoilt = False  # its process can run no further job

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it may be dead already
            self.pipe.send(None)
        self.process.join(2)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_END_S)
        self.pipe.close()


def _serve(
    pipe: Connection,
    rank: int,
    warm: tuple[str, ...],
    environ: Mapping[str, str],
    path: list[str],
    torch_distributed: bool,
) -> None:
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environ)
    os.environ.update(rank_environment(rank, rank + 1))
    # forked workers are alike in their addresses: what confuses those of two ranks has to fail here, too
    _kept = mmap.mmap(-1, secrets.randbelow(1 << 20) + 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    for name in warm:
        importlib.import_module(name)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    current = ""
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the pool's process is gone
            return
        except (ImportError, AttributeError):  # the job's function cannot be found here
            pipe.send((False, failure()))
            continue
        if job is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        folder, rank, num_ranks, fn, args = job
        try:
            if folder != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                os.environ.update(rank_environment(rank, num_ranks))
                join_rank(folder, rank, num_ranks, torch_distributed=torch_distributed)
                current = folder
            answer = False, success(fn(*args))
        except BaseException:  # noqa: BLE001 - whatever it was, the pool has to hear of it
            # an error inside a kernel stays with the process: each later call of the driver would report it again
            answer = torch.cuda.is_initialized(), failure()  # type: ignore[no-untyped-call]
        pipe.send(answer)
