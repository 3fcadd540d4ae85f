"""A persistent pool of rank processes.

Starting a process costs two seconds of work (importing torch and triton), so tests keep the processes and only make new
process groups.  One pool serves every world size up to its largest: a job of n ranks runs on the first n workers.
Where there are no GPUs, workers are forked from one server process that has these modules; a driver would not survive
that, so that elsewhere each worker imports them itself.
"""

from __future__ import annotations

import glob
import importlib
import mmap
import multiprocessing
import os
import secrets
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext

from iris_core.world.launch import RankProcess, RankProcesses, serve

_GRACE_S = 5.0  # how long the others may send what happened after the first failure


class RankPool(RankProcesses):
    """Processes that run jobs as ranks of one world.

    Args:
        warm: modules that every worker imports at start.
        timeout_s: bound of one job in seconds.
        environ: variables of the workers beside those that this process has when the pool is made.
        torch_distributed: initialise torch.distributed in the ranks as well, for jobs that use it: gloo, and NCCL
            where there are GPUs.  These listen on TCP, without asking who connects.

    Example:
        >>> import os
        >>> from iris_core.testing import RankPool
        >>> with RankPool() as pool:
        ...     pool.run(os.getenv, 2, "RANK")
        ['0', '1']
    """

    def __init__(
        self,
        *,
        warm: Sequence[str] = ("torch",),
        timeout_s: float = 120.0,
        environ: Mapping[str, str] | None = None,
        torch_distributed: bool = False,
    ) -> None:
        variables = {**os.environ, **(environ or {})}  # not those of the test that a worker is started in
        arguments = _main, tuple(warm), variables, torch_distributed
        super().__init__(lambda _: RankProcess(_context(warm), *arguments, daemon=True), timeout_s, _GRACE_S)


def _context(warm: Sequence[str]) -> ForkServerContext | SpawnContext:
    """How workers are started; the server is one for all pools of this process, and ends with it."""
    if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # these start no thread, and read no variable that may differ between workers
    context.set_forkserver_preload(["torch.distributed", "triton.language", "iris_core.api", *warm])
    return context


def _main(pipe: Connection, warm: Sequence[str], environ: Mapping[str, str], torch_distributed: bool) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # forked workers are alike in their addresses: what confuses those of two ranks has to fail here, too
    _kept = mmap.mmap(-1, secrets.randbelow(1 << 20) + 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    for name in warm:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    serve(pipe, torch_distributed)
