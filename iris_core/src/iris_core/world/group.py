"""The ranks, and exchanges between them: all exchanges of the host side go through a `World`."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import io
import json
import operator
import os
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from iris_core import errors
from iris_core.logs import logger
from iris_core.types import Group, Segment
from iris_core.world import rendezvous
from iris_core.world.exchange import Exchanges, Frame, close_all, limit_of_files
from iris_core.world.failures import list_ranks, name_ranks, on_all_ranks
from iris_core.world.rendezvous import VARIABLE

if TYPE_CHECKING:
    import torch.distributed as dist


watcher: Any = None
"""The checker of kernels on the CPU, while it is on: exchanges order what the ranks do."""


_Kind = enum.IntEnum("_Kind", "INTEGERS OBJECTS BROADCAST BARRIER SEGMENTS CALLS ASKED")
"""Kinds of exchanges; integers go together only if all ranks have equally many, and what one asked with calls."""

_ROOT = struct.Struct("<I?")  # of a broadcast: the root, and whether an error follows
_PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""What may be named in a broadcast between nodes; older versions of numpy have no underscore there."""


class _Plain(pickle.Unpickler):
    """Makes data, and calls nothing else that is named there."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module.replace("numpy.core", "numpy._core"), ()):
            what = "numbers, text, containers and arrays"
            raise errors.UnsupportedError(f"between nodes, only {what} are sent, no {name}")
        return super().find_class(module, name)


class World:
    """The ranks that share one heap, by default one.  Every method is collective, unless it says otherwise.

    Collective methods raise:
        RankMismatchError: ranks are in different methods, or bring different numbers of integers; all of them raise.
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank's process has ended.
    """

    def __init__(
        self,
        exchanges: Exchanges | None = None,  # None in a world of one
        ranks: Sequence[int] = (0,),  # see below
        rank: int = 0,  # this rank among them
        timeout_s: float = 0.0,  # bound of every exchange
        members: Sequence[int] | None = None,  # their ranks in torch.distributed, where the ranks come from there
        parent: World | None = None,  # the world of all ranks, unless this is the one
        nodes: tuple[tuple[int, ...], ...] | None = None,  # the ranks of each node, of the world of all; None for one
        name: str = "",  # see `apart`
    ) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self.nodes: tuple[tuple[int, ...], ...] = parent.nodes if parent else nodes or (tuple(range(len(ranks))),)
        self.node = next(index for index, node in enumerate(self.nodes) if ranks[rank] in node)
        self._exchanges, self.timeout_s = exchanges, timeout_s
        self.ranks: tuple[int, ...] = tuple(ranks)  #: the members, by their ranks in the world that has the connections
        #: the ranks' numbers in torch.distributed; None where the ranks do not come from there
        self.torch_ranks: tuple[int, ...] | None = None if members is None else tuple(members)
        #: the ranks of this world that are on this rank's node: those whose memory it can map
        self.local_members = tuple(index for index, each in enumerate(ranks) if each in self.nodes[self.node])
        self.spans_nodes: bool = len(self.local_members) < len(ranks)  #: whether these ranks are on several nodes
        self._peers = sorted({*ranks} - {ranks[rank]})
        self._root = self if parent is None else parent
        self._subworlds: dict[tuple[int, ...], World] = {}
        self.name: str = name if parent is None else parent.name
        self._number, self._key, self._among = 0, 0, b""
        if parent is not None or name:
            packed = struct.pack(f"<{len(ranks)}I", *ranks) + self.name.encode()
            self._key = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
            self._among = f", among {name_ranks(ranks)}".encode()

    # -- exchanges ----------------------------------------------------------------------------------------------------
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather a fixed number of 64-bit integers from every rank."""
        layout = f"<{len(values)}q"
        return [struct.unpack(layout, row) for row in self._gather(_Kind.INTEGERS, struct.pack(layout, *values))]

    def all_gather_object(self, obj: Any) -> Any:
        """Return a list of what every rank brings: anything that JSON can hold; tuples come back as lists."""
        return [json.loads(row) for row in self._gather(_Kind.OBJECTS, json.dumps(obj).encode())]

    def compare_calls(self, obj: Any, timeout_s: float | None = None) -> Any:
        """Gather like `all_gather_object`, but with nothing else; this rank waits for `timeout_s` at most.

        Where that is not enough, the other ranks still get its object if they come to the same "operation" (a key of
        all objects); in other exchanges they pass it over.
        """
        kind = _Kind.CALLS if timeout_s is None else _Kind.ASKED
        return [json.loads(row) for row in self._gather(kind, json.dumps(obj).encode(), timeout_s)]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return rank `src`'s object, which can be pickled, on every rank.

        Between nodes, where no rank proves its identity, it is made of numbers, text, containers and numpy arrays.

        Raises:
            ValueError: no such rank.
            RankMismatchError: the ranks name different roots.
            IrisError: the object cannot be sent; on rank `src`, what pickle has raised.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(f"there is no rank {src} in a world of {self.world_size} (0 to {self.world_size - 1})")
        if self._exchanges is None:
            return obj
        data, error = b"", None
        load = (lambda data: _Plain(io.BytesIO(data)).load()) if self.spans_nodes else pickle.loads
        if self.rank == src:
            try:
                data = pickle.dumps(obj)
                if self.spans_nodes:
                    load(data)
            except Exception as e:  # noqa: BLE001 - runs the object's own code; raised below, once the others know
                error = e
        mine = _ROOT.pack(src, error is not None) + (data if error is None else str(error).encode())
        rows = self._gather(_Kind.BROADCAST, mine)
        roots = [_ROOT.unpack_from(row) for row in rows]
        if len({root for root, _ in roots}) > 1:
            named = "; ".join(f"{root} on rank {rank}" for rank, (root, _) in zip(self.ranks, roots, strict=True))
            raise errors.RankMismatchError(f"broadcast: the ranks name different roots: {named}")
        if error is not None:
            raise error
        data = rows[src][_ROOT.size :]
        if roots[src][1]:
            raise errors.IrisError(f"broadcast: rank {self.ranks[src]}'s object cannot be sent: {data.decode()}")
        return load(data)

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        self._gather(_Kind.BARRIER, b"")

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Gather every rank's segments; the descriptors received from peers belong to the caller.

        Those of ranks on other nodes are left out: descriptors do not get there.

        Raises:
            PeerAccessError: a rank could not send or receive its descriptors; raised on every rank.
        """
        if self.spans_nodes:
            return self._exchange_in_nodes(segments)
        mine = [each.fd for each in segments if each.fd is not None]
        facts = [(each.offset_bytes, each.nbytes, each.payload.hex(), each.fd is not None) for each in segments]
        frames = self._frames(_Kind.SEGMENTS, json.dumps(facts).encode(), mine)
        everyone = [json.loads(frame.payload) for frame in frames]

        def check() -> None:
            short = [rank for rank, each in zip(self.ranks, frames, strict=True) if len(each.fds) < each.num_fds]
            if short:
                raise errors.IrisError(f"not all descriptors of {name_ranks(short)} have come; {limit_of_files()}")

        try:
            if self._peers and any(has_fd for row in everyone for *_, has_fd in row):
                on_all_ranks(self, "could not exchange descriptors of memory", check, errors.PeerAccessError)
        except BaseException:
            close_all([fd for frame in frames for fd in frame.fds])
            raise
        left = [iter(mine if rank == self.rank else frame.fds) for rank, frame in enumerate(frames)]
        return [
            [
                Segment(offset, nbytes, bytes.fromhex(payload), next(fds) if has_fd else None)
                for offset, nbytes, payload, has_fd in row
            ]
            for row, fds in zip(everyone, left, strict=True)
        ]

    def _exchange_in_nodes(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        rows: list[list[Segment]] = [[] for _ in self.ranks]

        def step() -> None:
            for member, row in zip(self.local_members, self.local.exchange_segments(segments), strict=True):
                rows[member] = row

        try:
            on_all_ranks(self, "could not exchange descriptors of memory", step, errors.PeerAccessError, self.ranks)
        except BaseException:
            theirs = (row for member, row in enumerate(rows) if member != self.rank)
            close_all(each.fd for row in theirs for each in row if each.fd is not None)
            raise
        return rows

    def _gather(self, kind: _Kind, mine: bytes, timeout_s: float | None = None) -> list[bytes]:
        return [frame.payload for frame in self._frames(kind, mine, timeout_s=timeout_s)]

    def _frames(self, kind: _Kind, mine: bytes, fds: Sequence[int] = (), timeout_s: float | None = None) -> list[Frame]:
        """Exchange frames; this rank's own has no descriptors."""
        if self._exchanges is None:
            return [Frame(kind, b"", mine)]
        begun = None if watcher is None else watcher.before_exchange(self)
        sent = Frame(kind, _called() + self._among, mine, fds)
        wait_s = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        while True:
            self._number += 1
            found, missing = self._exchanges.gather(self._key, self._number, sent, self._peers, wait_s)
            if missing:
                raise self._late(sent, found, missing, wait_s)
            if not self._passes(sent, found):
                break
            close_all([fd for each in found.values() for fd in each.fds])
        found[self.ranks[self.rank]] = sent._replace(fds=())
        frames = [found[rank] for rank in self.ranks]
        sizes = {len(each.payload) for each in frames} if kind == _Kind.INTEGERS else {0}
        if len(sizes) == 1 and len({min(each.kind, _Kind.CALLS) for each in frames}) == 1:
            if begun is not None:
                watcher.after_exchange(begun)
            return frames
        close_all([fd for each in frames for fd in each.fds])
        calls = [each.call.decode() for each in frames]
        if len(set(calls)) == 1:
            calls = [f"{calls[0]}, {_Kind(each.kind).name.lower()} of {len(each.payload)} bytes" for each in frames]
        raise errors.RankMismatchError(
            "the ranks are in different calls that all of them take part in:\n"
            f"{list_ranks(calls, self.ranks)}\nIf one of them went on after an error, the others were still waiting "
            "for it; if a call lies inside `if rank == ...`, all ranks must make it."
        )

    @staticmethod
    def _passes(sent: Frame, found: dict[int, Frame]) -> bool:
        """Whether this exchange is none of this rank's: a peer has asked about another call, and did not wait."""
        kinds = {sent.kind, *(each.kind for each in found.values())}
        if sent.kind == _Kind.ASKED or _Kind.ASKED not in kinds:
            return False
        rows = [] if min(kinds) < _Kind.CALLS else [json.loads(each.payload) for each in (sent, *found.values())]
        return len({row["operation"] for row in rows}) != 1

    def _late(self, sent: Frame, found: dict[int, Frame], missing: list[int], wait_s: float) -> errors.IrisError:
        """Return the error of an exchange that timed out: missing ranks, and the calls in which others wait."""
        assert self._exchanges is not None
        me = self.ranks[self.rank]
        present = {rank: [frame.call.decode()] for rank, frame in found.items()} | {me: [sent.call.decode()]}
        lines = []
        for rank in self.ranks:
            calls = present.get(rank) or self._exchanges.waits_in(rank)
            lines += [f"\n  rank {rank} waits in {each}" for each in calls or [f"no exchange with rank {me}"]]
        return errors.CollectiveTimeoutError(
            f"rank {me}: {sent.call.decode()} did not complete within the timeout of {wait_s:g} s; "
            f"{name_ranks(missing)} did not arrive:{''.join(lines)}\n"
            "Either that rank failed, or it does not make the same calls, or IRIS_BARRIER_TIMEOUT is too short",
            missing_ranks=missing,
        )

    # -- groups of ranks ----------------------------------------------------------------------------------------------
    def members_of(self, group: Group) -> tuple[int, ...]:
        """Return the ranks of this world that form a group, in the group's order; all for None.  Not collective.

        A group may also be a list or tuple of ranks of this world, or a DeviceMesh of one dimension.

        Raises:
            GroupError: this rank is not a member; or a mesh has several dimensions.
            IrisError: a member is not a rank of this world.
        """
        if group is None:
            return tuple(range(self.world_size))
        if isinstance(group, Sequence) and not isinstance(group, str):
            members = tuple(operator.index(each) for each in group)
            self._check_members(members)
            return members
        import torch.distributed as dist

        found = process_group_of(group)
        if dist.get_rank(found) < 0:
            raise errors.GroupError(f"rank {self.rank} is not a member of the process group that was passed as group=")
        theirs = dist.get_process_group_ranks(found)
        mine = list(self.ranks if self.torch_ranks is None else self.torch_ranks)
        strangers = [rank for rank in theirs if rank not in mine]
        if strangers:
            raise errors.IrisError(
                f"the process group that was passed as group= has {name_ranks(strangers)} of torch.distributed, "
                "outside of the ranks that share this heap; make a group of ranks that do"
            )
        return tuple(mine.index(rank) for rank in theirs)

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return the world of some ranks of this one, in this order; not collective, and this world closes it."""
        if self._exchanges is not None:
            self._exchanges.check_usable()
        self._check_members(members)
        ranks = tuple(self.ranks[member] for member in members)
        root = self._root
        if ranks == root.ranks:
            return root
        found = root._subworlds.get(ranks)
        if found is None:
            theirs = None if self.torch_ranks is None else [self.torch_ranks[member] for member in members]
            found = World(self._exchanges, ranks, members.index(self.rank), self.timeout_s, theirs, root)
            root._subworlds[ranks] = found
        return found

    def apart(self, name: str) -> World:
        """Return a world of the same ranks whose exchanges are not those of this one; not collective.

        Ranks may be in both at the same time, in different threads.  This world closes it.
        """
        own = self._exchanges, self.ranks, self.rank, self.timeout_s, self.torch_ranks
        return World(*own, nodes=self.nodes, name=name)

    def shares_connections(self, other: World) -> bool:
        """Whether two worlds are of the same ranks, or of some of them."""
        return self._exchanges is other._exchanges

    def _check_members(self, members: tuple[int, ...]) -> None:
        size = self.world_size
        if any(not 0 <= member < size for member in members) or len(set(members)) < len(members):
            raise errors.IrisError(f"{members} are not different ranks of a world of {size} (0 to {size - 1})")
        if self.rank not in members:
            raise errors.GroupError(f"rank {self.rank} is not one of {name_ranks(members)}")

    # -- nodes --------------------------------------------------------------------------------------------------------
    @property
    def local(self) -> World:
        """The world of those of these ranks that are on this rank's node."""
        return self.subworld(self.local_members) if self.spans_nodes else self

    def check_reachable(self, rank: int, what: str, way_out: str = "ctx.ccl or torch.distributed") -> None:
        """Raise UnsupportedError if another rank's memory cannot be mapped here; `what` needs it."""
        if rank not in self.local_members:
            node = next(index for index, ranks in enumerate(self.nodes) if self.ranks[rank] in ranks)
            raise errors.UnsupportedError(
                f"{what}: rank {rank} is on node {node}, this rank on node {self.node}, and memory is mapped within a "
                f"node only; between nodes use {way_out}"
            )

    # -- peers --------------------------------------------------------------------------------------------------------
    def check_peers(self, *, failed: bool = False) -> None:
        """Raise PeerLostError if a peer's process has ended, or a peer has given up.  Not collective, and cheap.

        If a call between nodes has `failed`, look for nodes that are silent, too, for seconds.
        """
        if self._exchanges is not None:
            self._exchanges.check_peers(self._peers, failed=failed)

    def give_up(self, error: BaseException) -> None:
        """Let the other ranks know why this one is going to close its world without them.  Local."""
        if self._exchanges is not None:
            self._exchanges.give_up(self.ranks[self.rank], error)

    def close(self, error: BaseException | None = None) -> None:
        """Notify the peers, also of an error; close all these ranks' connections; no-op for a subworld.  Local."""
        if error is not None:
            self.give_up(error)
        if self._root is self and self._exchanges is not None:
            self._exchanges.close()

    def refuse(self, why: str) -> None:
        """Make every further use raise HeapClosedError, in a process that was forked off.  Local."""
        if self._exchanges is not None:
            self._exchanges.refuse(why)


def _called() -> bytes:
    """Return the name of the function of Iris that was called last from outside; of its own parts, what they call."""
    frame, name = sys._getframe(1), ""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("iris_"):
        is_part = "<locals>" in frame.f_code.co_qualname or frame.f_code.co_name.startswith("_")
        frame, name = frame.f_back, name if is_part and name else frame.f_code.co_name
    return f"{name or frame.f_code.co_name}()".encode("ascii", "backslashreplace")[:256]


# -- the world of this process ----------------------------------------------------------------------------------------
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MORE_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_launched: tuple[int, str, int, int] | None = None  # (process, folder, rank, world size), as the launcher has said
_made: Counter[str] = Counter()  # worlds of this process, by folder


class Arrival:
    """A rank whose process the others know, before it has connections with them; in a world of one, there are none."""

    def __init__(self, opening: rendezvous.Opening | None) -> None:
        self.opening = opening  # None once the world was opened

    def open(self, timeout_s: float) -> World:
        """Return the world; `timeout_s` bounds this and every exchange.  Collective: every rank calls it."""
        opening = self.opening
        if opening is None:
            return World()
        if opening.refused is not None:
            raise opening.refused
        self.opening = None
        exchanges = opening.run(timeout_s)
        ranks, members, nodes = range(opening.world_size), opening.members, opening.nodes
        return World(exchanges, ranks, opening.rank, timeout_s, members, nodes=nodes)


@contextlib.contextmanager
def arrive(group: dist.ProcessGroup | None) -> Iterator[Arrival]:
    """Announce this process to the other ranks; if the block raises before it has opened the world, they raise, too."""
    arrival = Arrival(_find(group))
    try:
        yield arrival
    except BaseException as e:
        if arrival.opening is not None:
            arrival.opening.fail(e)
        raise


def connect(group: dist.ProcessGroup | None, timeout_s: float) -> World:
    """Find and open the world of this process; see `arrive` and `Arrival.open`.  Collective."""
    with arrive(group) as arrival:
        return arrival.open(timeout_s)


def process_group_of(group: Any) -> Any:
    """Return a process group, or that of a mesh; GroupError for all else, and for a mesh of several dimensions."""
    import torch.distributed as dist

    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise errors.GroupError(f"group= is {group}, of {group.ndim} dimensions; pass one of them: mesh[name]")
        return group.get_group()
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
        return group
    raise errors.GroupError(f"group= is {group}; pass a process group here: dist.new_group(ranks)")


def initialised_torch() -> Any:
    """Return torch.distributed where the program has initialised it; None otherwise."""
    dist: Any = sys.modules.get("torch.distributed")  # if it was not imported, the program has not initialised it
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def launched_in(folder: str, rank: int, world_size: int) -> None:
    """Note which rank this process is, for a launcher that has made a folder for its ranks."""
    global _launched
    _launched = os.getpid(), folder, rank, world_size


def _find(group: dist.ProcessGroup | None) -> rendezvous.Opening | None:
    """Announce this process to the other ranks; None for a world of one."""
    if initialised_torch() is not None:
        return rendezvous.find_by_torch(process_group_of(group))
    if group is not None:
        raise errors.IrisError("group= was given, but torch.distributed is not initialised")
    way_out = "call torch.distributed.init_process_group() before Iris()"
    if _launched is not None and _launched[0] == os.getpid():
        _, folder, rank, world_size = _launched
        if os.environ.get(VARIABLE) and world_size > 1:
            raise errors.UnsupportedError(
                f"rank {rank}: {VARIABLE} divides ranks of torch.distributed: {way_out}, or have "
                "iris_core.run do it (torch_distributed=True)"
            )
        _made[folder] += 1
        return rendezvous.Opening(folder, rank, world_size, str(_made[folder]))
    environ = os.environ
    if missing := [name for name in _TORCHRUN_VARIABLES if name not in environ]:
        if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
            text = "a world of one rank, though WORLD_SIZE=%s: torchrun and iris_core.run set %s, too"
            logger.warning(text, environ["WORLD_SIZE"], " and ".join(missing))
        return None
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as e:
        raise errors.RankMismatchError(f"a variable of torchrun is no number: {e}") from e
    if not 0 <= rank < world_size:
        raise errors.RankMismatchError(f"the environment says RANK={environ['RANK']!r} and WORLD_SIZE={world_size}")
    if local_size < world_size or (environ.get(VARIABLE) and world_size > 1):
        why = f"{VARIABLE} divides ranks of torch.distributed"
        if local_size < world_size:
            why = f"torchrun has started {local_size} of the {world_size} ranks on this host (LOCAL_WORLD_SIZE)"
        raise errors.UnsupportedError(f"rank {rank}: {why}; where ranks are on several nodes, {way_out}")
    parts = [environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["WORLD_SIZE"]]
    folder = rendezvous.named_folder(*parts, *(environ.get(name, "") for name in _MORE_VARIABLES))
    _made[folder] += 1  # the same on all ranks
    return rendezvous.Opening(folder, rank, world_size, str(_made[folder]), is_new=False)
