"""The ranks of one host: who they are, how they find each other, and how they talk.

Ranks talk over unix sockets alone.  They find each other in a folder that only their user can enter (`rendezvous`),
have one connection for each pair (`exchange`), over which all exchanges go (`group`).  What one rank refuses, all
refuse (`failures`).  `launch` starts ranks.

Importing this imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from iris_core.errors import IrisError, RankMismatchError, UnsupportedError
from iris_core.world import rendezvous
from iris_core.world.group import SingleWorld as SingleWorld
from iris_core.world.group import World as World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch.distributed as dist

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MORE_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class _Launched(NamedTuple):
    folder: str
    rank: int
    world_size: int
    pid: int


_launched: _Launched | None = None
_made: dict[str, int] = {}  # worlds of this process, by folder


class Arrival:
    """A rank whose process the others know, before it has connections with them.

    Args:
        where: they meet; None for a world of one.
    """

    def __init__(self, where: rendezvous.Rendezvous | None) -> None:
        self._where = where
        self._opening = None if where is None else rendezvous.Opening(where)

    def open(self, timeout_s: float) -> World:
        """Return the world.  Collective: every rank calls it.

        Args:
            timeout_s: bound of this and of every exchange in seconds.

        Raises:
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended; all ranks name the one that was first.
            UnsupportedError: the ranks are not on one host.
        """
        where, opening = self._where, self._opening
        if where is None or opening is None:
            return SingleWorld()
        self._opening = None
        return World(opening.run(timeout_s), range(where.world_size), where.rank, timeout_s, where.members)

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank does not come; nothing if it has."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.fail(error)


@contextlib.contextmanager
def arrive(group: dist.ProcessGroup | None, environ: Mapping[str, str] | None = None) -> Iterator[Arrival]:
    """Let the other ranks know this process; if the block raises before it has opened the world, they raise as well.

    Args:
        group: ranks of torch.distributed that share the heap; None for all.
        environ: the environment; os.environ by default.

    Raises:
        GroupError: this process is not a member of the group.
        RankMismatchError: torchrun's variables contradict each other.
        UnsupportedError: the ranks are not on one host.
    """
    arrival = Arrival(_find(group, environ))
    try:
        yield arrival
    except BaseException as e:
        arrival.fail(e)
        raise


def connect(group: dist.ProcessGroup | None, timeout_s: float, environ: Mapping[str, str] | None = None) -> World:
    """Find the world of this process; see `arrive` and `Arrival.open`.  Collective: every rank of the world calls it.

    Returns:
        The ranks of torch.distributed where that is initialised, those that `iris_core.run` has started, or torchrun;
        else a world of one.
    """
    with arrive(group, environ) as arrival:
        return arrival.open(timeout_s)


def launched_in(folder: str | None, rank: int = 0, world_size: int = 1) -> None:
    """Note which rank this process is, for a launcher that has made a folder for its ranks; None for no rank."""
    global _launched
    _launched = None if folder is None else _Launched(folder, rank, world_size, os.getpid())


def _find(group: dist.ProcessGroup | None, environ: Mapping[str, str] | None) -> rendezvous.Rendezvous | None:
    """Where the ranks meet; None for a world of one."""
    dist: Any = sys.modules.get("torch.distributed")  # where it was not imported, the program has not initialised it
    if dist is not None and dist.is_available() and dist.is_initialized():
        return rendezvous.find_by_torch(group)
    if group is not None:
        raise IrisError("group= was given, but torch.distributed is not initialised")
    if environ is None and _launched is not None and _launched.pid == os.getpid():
        folder, rank, world_size, _ = _launched
        return rendezvous.Rendezvous(folder, rank, world_size, _next(folder))
    environ = os.environ if environ is None else environ
    if any(name not in environ for name in TORCHRUN_VARIABLES):
        return None
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as e:
        raise RankMismatchError(f"a variable of torchrun is no number: {e}") from e
    if not 0 <= rank < world_size:
        raise RankMismatchError(f"the environment says RANK={environ['RANK']!r} and WORLD_SIZE={world_size}")
    if local_size < world_size:
        raise UnsupportedError(
            f"rank {rank}: torchrun has started {local_size} of the {world_size} ranks on this host "
            "(LOCAL_WORLD_SIZE), but ranks share a heap on one host only; use --nnodes=1"
        )
    parts = [environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["WORLD_SIZE"]]
    folder = rendezvous.named_folder(*parts, *(environ.get(name, "") for name in _MORE_VARIABLES))
    return rendezvous.Rendezvous(folder, rank, world_size, _next(folder), is_new=False)


def _next(folder: str) -> str:
    """Name of the next world that is made in a folder: the same on all ranks."""
    _made[folder] = _made.get(folder, 0) + 1
    return str(_made[folder])
