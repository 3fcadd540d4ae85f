"""Who we are, and how ranks talk before there is a heap: the world, object and descriptor exchange.

`connect()` chooses the world: torch.distributed where it is initialised, initialised from torchrun's variables where
only those exist, and a world of one otherwise.  All exchanges of the host side go through a `World`; they run over a
gloo group of our own, so the user's group (NCCL, say) and its stream are never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import operator
import os
import pickle
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

from iris_core import frames, whereabouts
from iris_core.agreement import name_ranks
from iris_core.errors import (
    CollectiveTimeoutError,
    GroupError,
    IrisError,
    PeerLostError,
    RankMismatchError,
    UnsupportedError,
)
from iris_core.fdchannel import FdChannel
from iris_core.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    import torch.distributed as dist

    from iris_core.types import Segment

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class World(Protocol):
    """The ranks that share one heap.  Every method but the attributes and `check_peers` is collective.

    Ranks that are in different methods, or bring different numbers of integers, get a RankMismatchError, all of them.
    So may ranks that wait for each other in the worlds of different groups.
    """

    rank: int
    world_size: int

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather a fixed number of 64-bit integers from every rank."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather a picklable object from every rank."""

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return rank `src`'s object on every rank."""

    def barrier(self) -> None:
        """Wait until every rank has arrived."""

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Gather every rank's segments; the descriptors received from peers belong to the caller."""

    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks of this world that form a group, in the group's order; all for None.  Not collective.

        A group may also be a list or tuple of ranks of this world.

        Raises:
            IrisError: this rank, or a member, does not belong where it should.
        """

    def subgroup(self, group: dist.ProcessGroup | Sequence[int] | None) -> World:
        """Return the world of a group's members; this world closes it.

        Collective, the first time: every member of the group calls it, and nobody else.
        """

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return the world of some ranks of this one, in this order; this world closes it.

        Collective, the first time: every member calls it, and nobody else.
        """

    def check_peers(self) -> None:
        """Raise PeerLostError if a peer's process has ended.  Not collective."""

    def close(self) -> None:
        """Let go of everything; not collective."""


class SingleWorld:
    """A world of one rank: nothing to exchange."""

    rank = 0
    world_size = 1

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the values alone."""
        return [tuple(values)]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the object alone."""
        return [obj]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return the object."""
        _check_rank(src, 1)
        return obj

    def barrier(self) -> None:
        """Return at once."""

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Return the segments alone."""
        return [list(segments)]

    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the only rank."""
        if isinstance(group, list | tuple):
            return _members_of_list(group, 0, 1)
        if group is not None:
            raise IrisError("group= was given, but this world has one rank and torch.distributed was not initialised")
        return (0,)

    def subgroup(self, group: dist.ProcessGroup | Sequence[int] | None) -> World:
        """Return this world."""
        self.members_of(group)
        return self

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return this world."""
        _check_members(members, 0, 1)
        return self

    def check_peers(self) -> None:
        """Nobody to look after."""

    def close(self) -> None:
        """Nothing to let go of."""


class TorchWorld:
    """Ranks of a torch.distributed process group.

    Collective: every rank of `group` constructs it.

    Args:
        group: the process group whose ranks share the heap; None for the default group.
        timeout_s: bound of every exchange in seconds.
        owns_default_group: destroy the default process group on close, because `connect` made it.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, *, owns_default_group: bool = False) -> None:
        import torch.distributed as dist

        rank = dist.get_rank(group)
        if rank < 0:
            raise GroupError("this process is not a member of the process group that was passed as group=")
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        name = _next_name(dist.distributed_c10d._get_default_store(), "" if group is None else group.group_name, rank)
        self._whereabouts: Whereabouts | None = None
        with contextlib.suppress(OSError):  # without it, messages say less
            self._whereabouts = Whereabouts(rank)
        with contextlib.ExitStack() as undo:
            if self._whereabouts is not None:
                undo.callback(self._whereabouts.close)
            self._open(name, rank, members, timeout_s, None, range(len(members)))
        self._owns_default_group = owns_default_group

    def _open(
        self,
        name: str,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        parent: TorchWorld | None,
        ranks: Sequence[int],
    ) -> None:
        """Make the gloo group and get to know the members.

        By hand: new_group wants either everybody to take part, or that all have made equally many groups before.

        Args:
            name: of the world, the same on its members and no other world's.
            rank: this process in the world.
            members: its ranks in the default group.
            timeout_s: bound of every exchange in seconds.
            parent: the world that these ranks are some of; None if they are not.
            ranks: what the members are called in messages: their ranks in the parent.
        """
        import torch.distributed as dist

        self._dist = dist
        self._name = name
        self._timeout_s = timeout_s
        self._owns_default_group = False
        self.rank = rank
        self.world_size = len(members)
        self._members = list(members)
        self._subworlds: dict[tuple[int, ...], TorchWorld] = {}
        self._calls = 0
        self._pidfds: dict[int, int] = {}
        self._left_alone = False  # whether gloo may still be at work for us
        self._parent = parent
        self._ranks = tuple(ranks)
        self._slot: int | None = None
        if parent is not None:
            self._whereabouts = parent._whereabouts
            if parent._parent is None and parent._slot is not None:
                self._meet()
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = self._guard(
            "opening the world", lambda: dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        )
        self._channel: FdChannel | None = None
        # one machine: pids mean something to each other only on the same host and in the same pid namespace
        address = None if self._whereabouts is None else self._whereabouts.address
        count = self._calls
        homes = self.all_gather_object((_host_id(), os.getpid(), address, count))
        # A member that had given up waiting for the others here, and came again, has counted more than they.
        self._count_calls(max(calls for *_, calls in homes) - count)
        self._hosts = [host for host, *_ in homes]
        self.same_host = len(set(self._hosts)) == 1
        self._pids = [pid for _, pid, *_ in homes]
        try:
            if self.same_host:
                for rank, pid in enumerate(self._pids):
                    if rank != self.rank:
                        self._pidfds[rank] = _pidfd(rank, pid)
            if parent is None:
                self._watch([theirs for _, _, theirs, _ in homes])
        except BaseException:
            self._close_pidfds()  # nobody gets this world to close it
            raise

    def _watch(self, addresses: Sequence[whereabouts.Address | None]) -> None:
        """Know where the ranks are from now on, if all of them can.  Collective: every rank calls it."""
        known = [address for address in addresses if address is not None]
        own = self._whereabouts
        works = own is not None and self.same_host and len(known) == self.world_size and own.connect(known)
        slot = own.slot(self._ranks) if works and own is not None else None
        if all(yes for (yes,) in self.all_gather_ints([slot is not None])):
            self._slot = slot

    def _meet(self) -> None:
        """Wait until all members open this world.  gloo would wait as well, but nobody could look around meanwhile."""
        own, me, members = self._whereabouts, self._ranks[self.rank], self._ranks
        assert own is not None
        slot = own.slot(members)
        if slot is None:
            raise UnsupportedError(f"rank {me}: there are too many groups of ranks")
        self._slot, self._calls = slot, own.calls(me, members) + 1
        call = self._calls
        own.enter(slot, call, frames.place())
        now = time.monotonic()
        end, look, pause = now + self._timeout_s, now + whereabouts.FIRST_LOOK_S, 0.0002
        try:
            while own.missing(members, call):
                now = time.monotonic()
                if now >= end:
                    raise self._late("opening the world")
                if now >= look:
                    lost = [rank for rank in self._root.lost_peers() if rank in members]
                    if lost:
                        raise _lost(me, lost, "while this rank still needed")
                    self._look()
                    look = now + whereabouts.NEXT_LOOK_S
                time.sleep(pause)
                pause = min(1.5 * pause, 0.005)
            if gave_up := own.gave_up(members, call):
                raise self._left_by(gave_up)
        except BaseException:
            own.fail()
            raise

    # -- exchanges ----------------------------------------------------------------------------------------------------
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather a fixed number of 64-bit integers from every rank.

        Raises:
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        import torch

        number = len(values)
        rows = self._open_exchange("an exchange", frames.Kind.INTEGERS, number, values[: frames.ROOM])
        if number <= frames.ROOM:
            return [tuple(row[:number]) for row in rows]
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [tuple(row) for row in self._gather("an exchange", mine).tolist()]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather a picklable object from every rank.

        Raises:
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        rows = self._gather_bytes("an exchange", frames.Kind.OBJECTS, pickle.dumps(obj))
        return [pickle.loads(row) for row in rows]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return rank `src`'s object on every rank.

        Raises:
            ValueError: no such rank.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        _check_rank(src, self.world_size)
        mine = pickle.dumps(obj) if self.rank == src else b""
        rows = self._gather_bytes("a broadcast", frames.Kind.BROADCAST, mine)
        return pickle.loads(rows[src])

    def barrier(self) -> None:
        """Wait until every rank has arrived.

        Raises:
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        self._open_exchange("a barrier", frames.Kind.BARRIER, 0, ())

    def _gather_bytes(self, what: str, kind: frames.Kind, mine: bytes) -> list[bytes]:
        room = frames.ROOM_NBYTES
        inline = mine[:room].ljust(room, b"\0")
        words = [int.from_bytes(inline[at : at + 8], "little", signed=True) for at in range(0, room, 8)]
        rows, sizes = [], []
        for size, *theirs in self._open_exchange(what, kind, len(mine), words, sized=True):
            sizes.append(size)
            rows.append(b"".join(word.to_bytes(8, "little", signed=True) for word in theirs))
        if max(sizes) > room:
            rows = self._gather_padded(what, mine, max(sizes))
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _open_exchange(
        self, what: str, kind: frames.Kind, size: int, words: Sequence[int], *, sized: bool = False
    ) -> list[list[int]]:
        """Exchange the frames with which every exchange begins.

        Returns:
            The words of all ranks; with `sized` their sizes before them.

        Raises:
            RankMismatchError: the ranks are in different exchanges; on all of them.
        """
        import torch

        if self._slot is not None and self._whereabouts is not None:
            self._whereabouts.enter(self._slot, self._calls + 1, frames.place())
        mine = torch.zeros(frames.WORDS, dtype=torch.int64, device="cpu")
        mine[: 2 + len(words)] = torch.tensor([int(kind), size, *words], dtype=torch.int64, device="cpu")
        everyone = self._gather(what, mine).tolist()
        if frames.alike(everyone):
            return [row[1 if sized else 2 :] for row in everyone]
        gave_up = [self._ranks[index] for index, row in enumerate(everyone) if row[0] == frames.Kind.GIVEN_UP]
        if gave_up:
            raise self._left_by(gave_up)
        rows = self._gather_padded(what, frames.place(), frames.PLACE_NBYTES)
        places = [row.rstrip(b"\0").decode(errors="replace") for row in rows]
        raise frames.mismatch(dict(zip(self._ranks, places, strict=True)))

    def _gather_padded(self, what: str, mine: bytes, nbytes: int) -> list[bytes]:
        """Exchange bytes; all come back with this size."""
        import torch

        padded = torch.frombuffer(bytearray(mine.ljust(nbytes, b"\0")), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self._gather(what, padded)]

    def _gather(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.new_empty(self.world_size, *mine.shape)
        self._guard(what, lambda: self._await(mine, everyone))
        return everyone

    def _await(self, mine: torch.Tensor, everyone: torch.Tensor) -> None:
        """Gather tensors, and look where the others are while that takes long.

        Raises:
            RankMismatchError: it can never end.
        """
        work = self._group.allgather([list(everyone.unbind(0))], [mine])
        if self._slot is None:
            work.wait()
            return
        pause = whereabouts.FIRST_LOOK_S
        while True:
            try:
                work.wait(datetime.timedelta(seconds=pause))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what there is, unless it has only just ended
                    return
            pause = whereabouts.NEXT_LOOK_S
            try:
                self._look()
            except RankMismatchError:
                self._leave_alone()
                raise

    @property
    def _root(self) -> TorchWorld:
        """The world of the whole context."""
        return self if self._parent is None else self._parent._root

    def _look(self) -> None:
        """Raise RankMismatchError if this rank waits for others for ever; the same on all of them."""
        assert self._whereabouts is not None
        verdict = self._whereabouts.look()
        if verdict is not None:
            raise self._stuck(verdict)

    def _left_by(self, ranks: Sequence[int]) -> RankMismatchError:
        """The error of this rank, where others have given up the exchange to which it has come."""
        assert self._whereabouts is not None
        for verdict in self._whereabouts.verdicts_of(ranks):
            return self._stuck(verdict)  # they were quicker to notice
        return frames.too_late(self._ranks[self.rank], ranks, self._whereabouts.describe_verdict(ranks[0]))

    def _stuck(self, verdict: whereabouts.Verdict) -> RankMismatchError:
        """Give up what ranks wait for that are stuck, this one among them; returns the error for it."""
        root = self._root
        assert self._whereabouts is not None
        self._whereabouts.tell(verdict)
        for members, call in verdict.exchanges:
            if root.rank in members:
                world = root if members == root._ranks else root._subworlds.get(members)
                if world is not None and world._calls < call:
                    world._give_up()
                self._whereabouts.give_up(members, call)
        return frames.stuck(verdict.text)

    def _give_up(self) -> None:
        """Come to the next exchange, so that the ranks stay in step there, and those that come later hear of it."""
        import torch

        self._calls += 1
        mine = torch.zeros(frames.WORDS, dtype=torch.int64, device="cpu")
        mine[0] = int(frames.Kind.GIVEN_UP)
        everyone = mine.new_empty(self.world_size, *mine.shape)
        self._group.allgather([list(everyone.unbind(0))], [mine])
        self._leave_alone()

    def _leave_alone(self) -> None:
        """Wait no longer for what gloo does: it ends when the last member comes, or at the time-out."""
        if not self._left_alone:
            # the destructor of the group would wait for it as well, even at the end of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._left_alone = True

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Gather every rank's segments, passing descriptors between the processes.

        Raises:
            UnsupportedError: descriptors are to be passed between different hosts; raised on every rank.
            PeerAccessError: a rank could not send or receive its descriptors; raised on every rank.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        import dataclasses

        plain = [(dataclasses.replace(s, fd=None), s.fd is not None) for s in segments]
        everyone = self.all_gather_object(plain)
        if not any(has_fd for row in everyone for _, has_fd in row):
            return [[s for s, _ in row] for row in everyone]
        if not self.same_host:
            by_host: dict[str, list[int]] = {}
            for rank, host in enumerate(self._hosts):
                by_host.setdefault(host, []).append(rank)
            raise UnsupportedError(
                "this allocator shares memory by file descriptor, which works within one host and one container only, "
                "but the ranks run on several hosts, or in several pid or network namespaces: "
                f"{'; '.join(map(name_ranks, by_host.values()))}"
            )
        if self._channel is None:
            self._channel = FdChannel(self)
        counts = [sum(has_fd for _, has_fd in row) for row in everyone]
        received = self._channel.exchange([s.fd for s in segments if s.fd is not None], counts, self._timeout_s)
        out: list[list[Segment]] = []
        for rank, row in enumerate(everyone):
            if rank == self.rank:
                out.append(list(segments))
                continue
            fds = iter(received[rank])
            out.append([dataclasses.replace(s, fd=next(fds)) if has_fd else s for s, has_fd in row])
        return out

    # -- groups of ranks ----------------------------------------------------------------------------------------------
    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks of this world that form a group, in the group's order; all for None.

        Raises:
            IrisError: this rank is not a member, or a member is not a rank of this world.
        """
        if group is None:
            return tuple(range(self.world_size))
        if isinstance(group, list | tuple):
            return _members_of_list(group, self.rank, self.world_size)
        own: Any = group
        if self._dist.get_rank(own) < 0:
            raise GroupError(f"rank {self.rank} is not a member of the process group that was passed as group=")
        members = self._dist.get_process_group_ranks(own)
        strangers = [rank for rank in members if rank not in self._members]
        if strangers:
            raise IrisError(
                f"the process group that was passed as group= has {name_ranks(strangers)} of torch.distributed, which "
                "does not share this heap; make a group of ranks that do"
            )
        return tuple(self._members.index(rank) for rank in members)

    def subgroup(self, group: dist.ProcessGroup | Sequence[int] | None) -> World:
        """Return the world of a group's members; this world closes it.

        Collective, the first time: every member of the group calls it, and nobody else.

        Raises:
            IrisError: this rank is not a member, or a member is not a rank of this world.
            CollectiveTimeoutError: a member did not arrive in time.
            PeerLostError: a member's process has ended.
        """
        return self.subworld(self.members_of(group))

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return the world of some ranks of this one, in this order; this world closes it.

        Collective, the first time: every member calls it, and nobody else.

        Raises:
            IrisError: this rank is not a member, or a member is not a rank of this world.
            CollectiveTimeoutError: a member did not arrive in time.
            PeerLostError: a member's process has ended.
        """
        _check_members(members, self.rank, self.world_size)
        if members == tuple(range(self.world_size)):
            return self
        if members not in self._subworlds:
            world = TorchWorld.__new__(TorchWorld)
            name = f"{self._name}/ranks {','.join(map(str, members))}"  # of this world: made once, so nobody else's
            ranks = [self._ranks[member] for member in members]
            theirs = [self._members[member] for member in members]
            world._open(name, members.index(self.rank), theirs, self._timeout_s, self, ranks)
            self._subworlds[members] = world
        return self._subworlds[members]

    # -- peers --------------------------------------------------------------------------------------------------------
    @property
    def pids(self) -> list[int]:
        """Process id of every rank."""
        return list(self._pids)

    def lost_peers(self) -> list[int]:
        """Ranks whose process has ended, as far as this host can tell."""
        if not self._pidfds:
            return []
        poll = select.poll()
        ranks = {}
        for rank, fd in self._pidfds.items():
            poll.register(fd, select.POLLIN)
            ranks[fd] = rank
        return sorted(ranks[fd] for fd, _ in poll.poll(0))

    def check_peers(self) -> None:
        """Raise PeerLostError if a peer's process has ended."""
        lost = self.lost_peers()
        if lost:
            raise _lost(self._ranks[self.rank], [self._ranks[each] for each in lost], "while this rank still needed")

    def close(self) -> None:
        """Close descriptors; destroy the groups that were made here."""
        while self._subworlds:
            self._subworlds.popitem()[1].close()
        self._close_pidfds()
        self._slot = self._whereabouts = None  # descriptors, too
        self._group = None
        if self._owns_default_group and self._dist.is_initialized():
            self._dist.destroy_process_group()
        self._owns_default_group = False

    def _close_pidfds(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    def _guard(self, what: str, call: Any) -> Any:
        """Run one exchange; turn gloo's errors into ours, naming the ranks that are missing."""
        self._count_calls(1)
        start = time.monotonic()
        try:
            return call()
        except BaseException as e:
            if self._slot is not None and self._whereabouts is not None:
                self._whereabouts.fail()
            if isinstance(e, IrisError) or not isinstance(e, RuntimeError | ValueError):
                raise
            me = self._ranks[self.rank]
            if getattr(self, "_pidfds", None):
                # a peer's connection is reset a moment before its process is gone
                deadline = time.monotonic() + 1.0
                while not (lost := self.lost_peers()) and time.monotonic() < deadline:
                    time.sleep(0.02)
                if lost:
                    raise _lost(me, [self._ranks[each] for each in lost], f"during {what}") from e
            if time.monotonic() - start >= 0.9 * self._timeout_s or "timed out" in str(e).lower():
                raise self._late(what) from e
            raise PeerLostError(f"rank {me}: {what} failed because a peer is gone: {e}") from e

    def _count_calls(self, number: int) -> None:
        """Come to so many exchanges, and let the peers know."""
        self._calls += number
        if self._slot is not None and self._whereabouts is not None:
            self._whereabouts.arrive(self._slot, self._calls)

    def _late(self, what: str) -> CollectiveTimeoutError:
        """The error of an exchange that took too long."""
        if self._slot is not None and self._whereabouts is not None:
            missing = self._whereabouts.missing(self._ranks, self._calls)
            where = "".join(f"\n  {self._whereabouts.describe(rank)}" for rank in missing)
        else:
            missing, where = [self._ranks[index] for index in self._missing()], ""
        who = name_ranks(missing) if missing else "some rank"
        among = "" if self is self._root else f" of {name_ranks(self._ranks)}"
        reasons = "Either that rank failed, or it does not make the same calls, or IRIS_BARRIER_TIMEOUT is too short"
        return CollectiveTimeoutError(
            f"rank {self._ranks[self.rank]}: {what}{among} did not complete within {self._timeout_s:g} s; "
            f"{who} did not arrive{':' + where + chr(10) if where else '. '}{reasons}",
            missing_ranks=missing,
        )

    def _missing(self) -> list[int]:
        """After a time-out: who else reached this exchange?  Uses the store, which works when collectives do not."""
        store = self._dist.distributed_c10d._get_default_store()
        key = f"{self._name}/arrived/{self._calls}/"
        store.set(key + str(self.rank), "1")
        keys = [key + str(r) for r in range(self.world_size)]
        deadline = time.monotonic() + min(2.0, self._timeout_s)
        missing = list(range(self.world_size))
        while missing and time.monotonic() < deadline:
            time.sleep(0.05)
            missing = [r for r in missing if not store.check([keys[r]])]
        return missing


def _next_name(store: dist.distributed_c10d.Store, group_name: str, rank: int) -> str:
    """A name that all members of a group find without each other, for each of the worlds that they make of it."""
    name = f"iris/{group_name}"
    return f"{name}/{store.add(f'{name}/made by {rank}', 1)}"


def connect(group: dist.ProcessGroup | None, timeout_s: float, environ: Mapping[str, str] | None = None) -> World:
    """Find the world of this process.

    Collective: every rank of the world calls it.

    Args:
        group: ranks that share the heap; None for all.
        timeout_s: bound of every exchange in seconds.
        environ: the environment; os.environ by default.

    Returns:
        The torch.distributed world where that is initialised or torchrun's variables are set, else a world of one.

    Raises:
        CollectiveTimeoutError: the ranks did not find each other in time.
        RankMismatchError: torchrun's variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return SingleWorld()
    if dist.is_initialized():
        return TorchWorld(group, timeout_s)
    if group is not None:
        raise IrisError("group= was given, but torch.distributed is not initialised")
    present = [name for name in TORCHRUN_VARIABLES if name in environ]
    if len(present) < len(TORCHRUN_VARIABLES):
        return SingleWorld()
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        _check_rank(rank, world_size)
    except ValueError as e:
        raise RankMismatchError(
            f"the environment says RANK={environ['RANK']!r} and WORLD_SIZE={environ['WORLD_SIZE']!r}: {e}"
        ) from e
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as e:
        raise CollectiveTimeoutError(
            f"rank {rank} of {world_size} could not join the process group at "
            f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {e}"
        ) from e
    try:
        return TorchWorld(None, timeout_s, owns_default_group=True)
    except BaseException:
        dist.destroy_process_group()
        raise


def check_agreement(world: World, facts: Mapping[str, str]) -> None:
    """Compare what every rank was opened with.

    Collective: every rank calls it with the same keys.

    Args:
        world: the ranks.
        facts: what must be equal on all ranks ("heap_size": "1073741824", ...).

    Raises:
        RankMismatchError: something differs; the message shows it rank by rank.
    """
    everyone = world.all_gather_object(dict(facts))
    differing = [key for key in everyone[0] if len({row.get(key) for row in everyone}) > 1]
    differing += sorted({key for row in everyone for key in row} - set(everyone[0]))
    if not differing:
        return
    lines = []
    for key in differing:
        by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(everyone):
            by_value.setdefault(str(row.get(key, "absent")), []).append(rank)
        lines.append(f"  {key}: " + "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items()))
    raise RankMismatchError(
        "the ranks were not opened alike; all must have the same plugins, versions and sizes:\n" + "\n".join(lines)
    )


def _members_of_list(group: Sequence[Any], rank: int, world_size: int) -> tuple[int, ...]:
    """The members of a group that is given as a list of ranks of the world."""
    members = tuple(operator.index(each) for each in group)
    _check_members(members, rank, world_size, GroupError)
    return members


def _check_members(
    members: tuple[int, ...], rank: int, world_size: int, otherwise: type[IrisError] = IrisError
) -> None:
    strangers = [member for member in members if not 0 <= member < world_size]
    if strangers or len(set(members)) < len(members):
        raise IrisError(f"{members} are not different ranks of a world of {world_size} (0 to {world_size - 1})")
    if rank not in members:
        raise otherwise(f"rank {rank} is not one of {name_ranks(members)}")


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} in a world of {world_size} (0 to {world_size - 1})")


def _lost(rank: int, lost: Sequence[int], when: str) -> PeerLostError:
    if when.endswith("needed"):
        when += " it" if len(lost) == 1 else " them"
    return PeerLostError(
        f"rank {rank}: {name_ranks(lost)} ended {when}; look at the output of that process for the first error",
        ranks=lost,
    )


def _host_id() -> str:
    """Equal for two processes exactly if they can pass descriptors and see each other's process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as f:
        parts.append(f.read().strip())
    for name in ("pid", "net"):  # abstract sockets live in the network namespace
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return "|".join(parts)


def _pidfd(rank: int, pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as e:
        raise PeerLostError(f"rank {rank} (process {pid}) ended while the world was opened", ranks=[rank]) from e
