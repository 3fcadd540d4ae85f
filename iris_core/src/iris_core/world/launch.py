"""Ranks as processes of this host: a function on several ranks, from an ordinary script or a notebook."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypeVar

from iris_core.errors import ArgumentError, CollectiveTimeoutError, IrisError, PeerLostError, UnsupportedError
from iris_core.world.failures import name_ranks
from iris_core.world.group import initialised_torch, launched_in
from iris_core.world.rendezvous import Folder, private_folder

R = TypeVar("R")
_GRACE_S = 1.0  # after a failure, others may still send the cause of it
_LEAVE_S = 5.0  # to end by itself
_END_S = 10.0  # after a kill the driver takes its GPU's work away, which lasts
_STACK_SIGNAL, _STACK_S = signal.SIGUSR2, 0.5
_PR_SET_PDEATHSIG = 1
_RANK_NBYTES = 160 << 20  # what a process has for itself with torch and Triton


class RankError(IrisError, RuntimeError):
    """A rank raised; the message has that rank's traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text.rstrip()}")
        self.rank = rank  #: the first rank that raised


def run(
    fn: Callable[..., R],
    num_ranks: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    torch_distributed: bool = False,
) -> list[R]:
    """Call `fn(*args)` on `num_ranks` new processes and return their results in the order of ranks.

    In `fn`, `Iris()` and torch's `init_process_group()` find all ranks; they end if one raises, or this process dies.

    Args:
        fn: a function, if possible of the top level of a module or script; see below.
        num_ranks: number of ranks, at least 1 and as many as the memory here can hold.
        *args: its arguments, the same on every rank.
        environ: variables to set in the ranks beside those of this process.
        torch_distributed: initialise torch.distributed in the ranks before `fn` is called, for programs that use it
            beside Iris: gloo, and NCCL where there are GPUs.  These listen on TCP, without asking who connects.

    New processes cannot import functions of a notebook's cell, of `python -c` or of the standard input, nor lambdas and
    closures: with these, as arguments too, ranks are forked off.

    Raises:
        ArgumentError: this machine cannot hold these ranks; or `environ` is no such mapping.
        RankError: a rank raised; holds the traceback of the first one.
        PeerLostError: a rank's process ended without a result.
        UnsupportedError: ranks have to be forked off, but this process uses CUDA, which does not survive that.

    Example:
        >>> import os, iris_core
        >>> iris_core.run(os.getenv, 2, "RANK")
        ['0', '1']
    """
    forked: Any = None
    if not _is_importable((fn, args)):
        name = getattr(fn, "__name__", str(fn))
        if _uses_cuda():
            raise UnsupportedError(
                f"{name} or an argument is none that a new process can import, and this one uses CUDA, so its ranks "
                "cannot be forked off: put it into a module and import it, or call run before CUDA is used"
            )
        forked = os.getpid(), (fn, args)

    with socket.socket() as free:  # of whose port torch's rank 0 can make its store
        free.bind(("", 0))
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), **(environ or {})}
    for name, value in variables.items():
        if not (isinstance(name, str) and isinstance(value, str) and name and "=" not in name):
            raise ArgumentError(f"environ: {name!r}: {value!r} are no name and text of a variable")

    def start(rank: int) -> RankProcess:
        context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
        return RankProcess(context, _main, variables, torch_distributed, forked, name=_BoundName(f"iris rank {rank}"))

    with RankProcesses(start, pickles=not forked) as processes:
        return processes.run(fn, num_ranks, *args)


def _is_importable(call: Any) -> bool:
    """Return whether new processes can unpickle a call; they import the main module, if it has a file."""
    try:
        pickled = pickle.dumps(call)
    except Exception:  # noqa: BLE001 - pickling runs the arguments' own code, which may raise anything
        return False
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return b"__main__" not in pickled if file is None else main.__spec__ is not None or os.path.exists(file)


def check_num_ranks(num_ranks: int, name: str = "num_ranks", least: int = 1) -> None:
    """Raise ArgumentError if the memory of this machine, or of its container, cannot hold these ranks."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, where there are any; "max" is no limit
        with contextlib.suppress(OSError, ValueError):
            nbytes = min(nbytes, int(Path("/sys/fs/cgroup", file).read_text()))
    most = max(least, nbytes // _RANK_NBYTES)
    if not isinstance(num_ranks, SupportsIndex) or not least <= num_ranks <= most:
        why = f"a rank takes about {_RANK_NBYTES >> 20} MiB of memory, and there are {nbytes >> 20} MiB"
        raise ArgumentError(f"{name} must be a whole number from {least} to {most} here, not {num_ranks!r}: {why}")


class RankProcesses:
    """Processes that run jobs as ranks, kept between jobs: a job of n ranks runs on the first n."""

    def __init__(
        self,
        start: Callable[[int], RankProcess],  # starts the process of a rank
        timeout_s: float = float("inf"),  # bound of one job
        grace_s: float = _GRACE_S,  # how long the other ranks may take after the first failure
        pickles: bool = True,  # send what a job calls; else the processes have it
    ) -> None:
        self._start, self._timeout_s, self._grace_s, self._pickles = start, timeout_s, grace_s, pickles
        self._processes: dict[int, RankProcess] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=private_folder())
        with contextlib.closing(Folder(self._folder.name)) as ours:
            ours.announce(0, os.getpid())  # if a signal ends this process, a later one removes the folder
        self._worlds = self._size = 0  # worlds so far, and the size of the one that the processes are in now

    def run(self, fn: Callable[..., R], num_ranks: int, *args: Any, timeout_s: float | None = None) -> list[R]:
        """Call `fn(*args)` on `num_ranks` ranks, and return their results, as the function `run` does.

        Args:
            fn, num_ranks: as of that function; it takes the further arguments as well.
            timeout_s: bound of this job; that of all jobs by default.

        Raises, beside what that function does:
            RankError: a rank raised.  Processes that do not come back are replaced, and those that an error may have
                spoilt for the rest of the process: they have used a GPU, or have groups of torch.distributed.
            CollectiveTimeoutError: the job took too long; the message names it and the ranks that were still running,
                and says where.
        """
        check_num_ranks(num_ranks)
        for rank in range(num_ranks):
            if rank not in self._processes:
                self._processes[rank] = self._start(rank)
        if self._size != num_ranks:
            for each in self._processes.values():  # together: NCCL's groups wait for their members when they end
                each.send(())
            self._worlds += 1
            self._size = num_ranks
        folder = os.path.join(self._folder.name, f"world-{self._worlds}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        processes = [self._processes[rank] for rank in range(num_ranks)]
        try:
            with contextlib.closing(Folder(folder)) as opened:
                for rank, each in enumerate(processes):
                    opened.announce(rank, each.process.pid or 0)  # if it dies before it does so, the others know it
                    call = bytes(ForkingPickler.dumps((fn, args))) if self._pickles else b""
                    each.send((folder, rank, num_ranks, call))
            name = getattr(fn, "__name__", str(fn))
            return _collect(processes, name, timeout_s or self._timeout_s, self._grace_s, folder)
        except BaseException:
            for rank, each in enumerate(processes):  # ranks of a failed job may be anywhere inside it
                if each.busy or each.spoilt:
                    self._processes.pop(rank).kill()
            self._size = 0  # a new world for the next job
            raise

    def close(self) -> None:
        """End the processes."""
        for each in self._processes.values():
            each.send(None)
        for each in self._processes.values():
            each.process.join(_LEAVE_S)
            each.kill()
        self._processes.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RankProcess:
    """A process that calls `main` with its end of a pipe and `args`; `main` ends with `serve`."""

    def __init__(
        self,
        context: ForkContext | ForkServerContext | SpawnContext,
        main: Callable[..., None],
        *args: Any,
        name: str | None = None,
        daemon: bool = False,
    ) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), name=name, daemon=daemon)
        self.process.start()
        theirs.close()
        self.busy = False
        self.spoilt = False  # it can run no further job

    def send(self, job: tuple[str, int, int, bytes] | tuple[()] | None) -> None:
        """Give it a job; an empty one lets it leave its world, and None end.  If it is gone, waiting for it says so."""
        self.busy = bool(job)
        with contextlib.suppress(OSError):
            self.pipe.send(job)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_END_S)
        self.pipe.close()


def join_rank(folder: str, rank: int, num_ranks: int, *, torch_distributed: bool) -> None:
    """Make this process a rank of a new world, whose folder only its launcher's ranks know."""
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    launched_in(folder, rank, num_ranks)
    if torch_distributed:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore  # of torch.distributed, unknown to type checkers there

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = FileStore(os.path.join(folder, "store"), num_ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        store.add("joined", 1)
        while store.add("joined", 0) < num_ranks:  # gloo's other ranks fail to connect if this one ends now
            time.sleep(0.01)


class _BoundName(str):
    """The name of a process that the system ends with the thread that has started it.

    Of what is sent to the process it is unpickled first: before the program's main module is imported, and before
    sys.path is set, so this can only use the standard library.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"({_end_with(os.getpid())}, {str(self)!r})[-1]",)


def _end_with(launcher: int) -> str:
    """Return the expression that lets the system end a process with its launcher's thread."""
    end = f"__import__('ctypes').CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGTERM:d})"
    return f"({end}, __import__('os').getppid() == {launcher} or __import__('os')._exit(1))"


def _main(pipe: Connection, environ: Mapping[str, str], torch_distributed: bool, forked: Any) -> None:
    launcher, call = forked or (None, None)
    if launcher is not None:
        eval(_end_with(launcher))  # what a new process unpickles with its name
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the threads that it had are the launcher's
        if (inductor := sys.modules.get("torch._inductor.config")) is not None:
            inductor.compile_threads = 1  # type: ignore[attr-defined]  # its processes likewise
    os.environ.update(environ)
    serve(pipe, torch_distributed, call)


def serve(pipe: Connection, torch_distributed: bool, inherited: Any = None) -> None:
    """Run the jobs that come through a pipe, each as a rank of the world that it names, until there are no more.

    What they call is `inherited`, a function and its arguments, if this process has that from its launcher.
    """
    joined = ""
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the launcher is gone
            return
        if not job:
            if (dist := initialised_torch()) is not None:
                dist.destroy_process_group()
            if job is None:
                return
            continue
        folder, rank, num_ranks, call = job
        try:
            if folder != joined:
                stacks = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 - as long as this world lasts
                faulthandler.register(_STACK_SIGNAL, stacks)
                faulthandler.enable(stacks)  # of a rank that a fatal signal ends, too
                join_rank(folder, rank, num_ranks, torch_distributed=torch_distributed)
                joined = folder
            fn, args = inherited or pickle.loads(call)  # only now: that may import torch, which takes seconds
            answer = False, _success(fn(*args))
        except BaseException:  # noqa: BLE001 - whatever it was, the launcher has to hear of it
            # an error inside a kernel stays with the process: each later call of the driver would report it again; and
            # a call of torch that never ends stays with its group, which cannot be destroyed before
            answer = initialised_torch() is not None or _uses_cuda(), _failure()
        pipe.send(answer)


def _uses_cuda() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _success(result: Any) -> bytes:
    """Pack a job's result; a failure if it cannot be pickled."""
    try:
        return pickle.dumps((True, (), result))
    except Exception:  # noqa: BLE001 - pickling runs the result's own code, which may raise anything
        return _failure("the job's result cannot be sent back:\n")


def _failure(prefix: str = "") -> bytes:
    """Pack the exception that is being handled, with its time: the first of several is the cause of the others.

    Except for lost peers: these errors are the consequence of another one, which may take longer to be known.
    """
    when = isinstance(sys.exception(), PeerLostError), time.monotonic()
    return pickle.dumps((False, when, prefix + traceback.format_exc()))


def _collect(processes: Sequence[RankProcess], job: str, timeout_s: float, grace_s: float, folder: str) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, tuple[tuple[bool, float], str]] = {}  # when, and the traceback
    died: dict[int, str] = {}
    waiting: dict[Any, int] = {each.pipe: rank for rank, each in enumerate(processes)}
    deadline = time.monotonic() + timeout_s
    while waiting:
        left_s = max(deadline - time.monotonic(), 0)
        ready = wait(list(waiting), None if left_s == float("inf") else left_s)
        if not ready:
            break
        for pipe in ready:
            each = processes[rank := waiting.pop(pipe)]
            try:
                each.spoilt, answer = each.pipe.recv()
                ok, when, value = pickle.loads(answer)
            except (EOFError, ConnectionError):
                each.process.join(_LEAVE_S)
                died[rank] = f"rank {rank} ended with exit code {each.process.exitcode} before {job} had a result"
                if (each.process.exitcode or 0) < 0 and (stack := _written(folder, rank)):
                    died[rank] += f":\n{stack}"
                continue
            each.busy = False
            if ok:
                results[rank] = value
            else:
                failed[rank] = when, value
        if failed or died:
            deadline = min(deadline, time.monotonic() + grace_s)
    if died:
        raised = [f"rank {rank} raised:\n{text}" for rank, (_, text) in sorted(failed.items())]
        raise PeerLostError("\n".join([*died.values(), *raised]), ranks=sorted(died))
    if failed:
        rank = min(failed, key=lambda each: failed[each])
        raise RankError(rank, failed[rank][1])
    if waiting:
        late = sorted(waiting.values())
        text = f"job {job}: {name_ranks(late)} of {len(processes)} still ran after {timeout_s:g} s"
        stacks = (f"rank {rank}:\n{_stack(processes[rank], folder, rank)}" for rank in late)
        raise CollectiveTimeoutError("\n".join([text, *stacks]), missing_ranks=late)
    return [results[rank] for rank in range(len(processes))]


def _stack(process: RankProcess, folder: str, rank: int) -> str:
    """Return the stacks of a rank's threads, which the rank writes before it is killed."""
    with contextlib.suppress(OSError):
        os.kill(process.process.pid or 0, _STACK_SIGNAL)
        time.sleep(_STACK_S)
    return _written(folder, rank) or "no stack: it has not joined its world"


def _written(folder: str, rank: int) -> str:
    with contextlib.suppress(OSError), open(f"{folder}/stack-{rank}") as file:
        return file.read()
    return ""
