"""Who the ranks are, and how they talk: every exchange of the host side goes through a `World`."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import operator
import os
import pickle
import struct
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

from iris_core.errors import (
    CollectiveTimeoutError,
    GroupError,
    IrisError,
    PeerAccessError,
    RankMismatchError,
)
from iris_core.types import Segment
from iris_core.world import torch_world
from iris_core.world.exchange import Exchanges, Mine
from iris_core.world.failures import name_ranks, raise_failure
from iris_core.world.fd_passing import Frame, close_all, limit_of_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist


class World(Protocol):
    """The ranks that share one heap.  Every method is collective, unless it says otherwise.

    Collective methods raise:
        RankMismatchError: ranks are in different methods, or bring different numbers of integers; all of them raise.
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank's process has ended.
    """

    rank: int
    world_size: int

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather a fixed number of 64-bit integers from every rank."""

    def all_gather_object(self, obj: Any) -> Any:
        """Return a list of what every rank brings: anything that JSON can hold; tuples come back as lists."""

    def compare_calls(self, obj: Any, timeout_s: float | None = None) -> Any:
        """Gather like `all_gather_object`, but with nothing else; this rank waits for so many seconds at most.

        Where that is not enough, the other ranks still get its object, if they come; if not, their next exchange says
        that this rank gave up.
        """

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return rank `src`'s object, which can be pickled, on every rank.

        Raises:
            ValueError: no such rank.
            RankMismatchError: the ranks name different roots.
            IrisError: the object cannot be pickled; on rank `src`, what pickle has raised.
        """

    def barrier(self) -> None:
        """Wait until every rank has arrived."""

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Gather every rank's segments; the descriptors received from peers belong to the caller.

        Raises:
            PeerAccessError: a rank could not send or receive its descriptors; raised on every rank.
        """

    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks of this world that form a group, in the group's order; all for None.  Not collective.

        A group may also be a list or tuple of ranks of this world.

        Raises:
            GroupError: this rank is not a member.
            IrisError: a member is not a rank of this world.
        """

    def subgroup(self, group: dist.ProcessGroup | Sequence[int] | None) -> World:
        """Return the world of a group's members; not collective, and this world closes it.

        Raises like `members_of`.
        """

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return the world of some ranks of this one, in this order; not collective, and this world closes it."""

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

    def all_gather_object(self, obj: Any) -> Any:
        """Return the object alone, as JSON keeps it."""
        return [json.loads(json.dumps(obj))]

    def compare_calls(self, obj: Any, timeout_s: float | None = None) -> Any:
        """Return the object alone, as JSON keeps it."""
        return self.all_gather_object(obj)

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
        """There is no peer."""

    def close(self) -> None:
        """Nothing to let go of."""


class _Kind(enum.IntEnum):
    """Kinds of exchanges; integers go together only if all ranks have equally many."""

    INTEGERS = 1
    OBJECTS = 2
    BROADCAST = 3
    BARRIER = 4
    DESCRIPTORS = 5
    CALLS = 6


_ROOT = struct.Struct("<i?")  # of a broadcast: its root, and whether that could pickle the object
_FAULT, _FINE, _CONSEQUENCE = 0, 1, 2


class HostWorld:
    """Ranks of one host.

    Args:
        exchanges: the connections of this rank.
        ranks: the members, by their ranks in the world that has the connections.
        rank: this rank among them.
        timeout_s: bound of every exchange in seconds.
        members: their ranks in torch.distributed, where that has said who the ranks are.
        parent: the world of all ranks; None if this is the one.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        members: Sequence[int] | None = None,
        parent: HostWorld | None = None,
    ) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._exchanges, self._timeout_s, self._members = exchanges, timeout_s, members
        self._ranks = tuple(ranks)
        self._peers = sorted({*ranks} - {ranks[rank]})
        self._root = self if parent is None else parent
        self._subworlds: dict[tuple[int, ...], HostWorld] = {}
        self._number = 0
        self._key, self._among = 0, b""
        if parent is not None:
            packed = struct.pack(f"<{len(ranks)}I", *ranks)
            self._key = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
            self._among = f", among {name_ranks(ranks)}".encode()

    # -- exchanges ----------------------------------------------------------------------------------------------------
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather a fixed number of 64-bit integers from every rank."""
        layout = f"<{len(values)}q"
        return [struct.unpack(layout, row) for row in self._gather(_Kind.INTEGERS, struct.pack(layout, *values))]

    def all_gather_object(self, obj: Any) -> Any:
        """Return a list of what every rank brings: anything that JSON can hold."""
        return [json.loads(row) for row in self._gather(_Kind.OBJECTS, json.dumps(obj).encode())]

    def compare_calls(self, obj: Any, timeout_s: float | None = None) -> Any:
        """Gather like `all_gather_object`, but with nothing else; this rank waits for so many seconds at most."""
        wait_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        return [json.loads(row) for row in self._gather(_Kind.CALLS, json.dumps(obj).encode(), wait_s)]

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return rank `src`'s object, which can be pickled, on every rank."""
        _check_rank(src, self.world_size)
        data, problem = b"", None
        if self.rank == src:
            try:
                data = pickle.dumps(obj)
            except Exception as e:  # noqa: BLE001 - runs the object's own code; raised below, once the others know
                problem, data = e, str(e).encode()
        rows = self._gather(_Kind.BROADCAST, _ROOT.pack(src, problem is None) + data)
        roots = [_ROOT.unpack_from(row)[0] for row in rows]
        if len(set(roots)) > 1:
            named = "; ".join(f"{root} on rank {self._ranks[index]}" for index, root in enumerate(roots))
            raise RankMismatchError(f"broadcast: the ranks name different roots: {named}")
        if problem is not None:
            raise problem
        said = rows[src][_ROOT.size :]
        if not _ROOT.unpack_from(rows[src])[1]:
            raise IrisError(f"broadcast: rank {self._ranks[src]}'s object cannot be pickled: {said.decode()}")
        return pickle.loads(said)

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        self._gather(_Kind.BARRIER, b"")

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Gather every rank's segments, passing descriptors between the processes."""
        everyone = self.all_gather_object(
            [(each.offset_bytes, each.nbytes, each.payload.hex(), each.fd is not None) for each in segments]
        )
        received: list[list[int]] = [[]] * self.world_size
        if any(has_fd for row in everyone for *_, has_fd in row):
            received = self._pass_descriptors([each.fd for each in segments if each.fd is not None])
        out = []
        for row, fds in zip(everyone, received, strict=True):
            left = iter(fds)
            out.append(
                [
                    Segment(offset, nbytes, bytes.fromhex(payload), next(left, None) if has_fd else None)
                    for offset, nbytes, payload, has_fd in row
                ]
            )
        out[self.rank] = [dataclasses.replace(each) for each in segments]
        return out

    def _pass_descriptors(self, fds: Sequence[int]) -> list[list[int]]:
        """Send descriptors to every peer and receive theirs; on all ranks or on none."""
        frames = self._frames(_Kind.DESCRIPTORS, bytes(1 + len(fds) // 200), fds)
        refused, truncated = self._exchanges.trouble(self._peers)
        error: IrisError | None = None
        state = _FINE if all(len(each.fds) == each.num_fds for each in frames) else _CONSEQUENCE
        if refused is not None:
            error = IrisError(f"could not send them: {os.strerror(refused.errno or 0)}")
        elif truncated:
            error = IrisError(f"not all descriptors of {name_ranks(truncated)} were let in: {limit_of_files()}")
        try:
            states = [each for (each,) in self.all_gather_ints([_FAULT if error is not None else state])]
            outcomes = [each != _FAULT for each in states]
            if all(outcomes):
                outcomes = [each == _FINE for each in states]
            error = error or IrisError("not all descriptors have come")
            raise_failure(self, error, outcomes, "could not exchange descriptors of memory", PeerAccessError)
        except BaseException:
            for frame in frames:
                close_all(frame.fds)
            raise
        return [frame.fds for frame in frames]

    def _gather(self, kind: _Kind, mine: bytes, timeout_s: float | None = None) -> list[bytes]:
        if not self._peers:
            self._exchanges.check_usable()
            return [mine]
        return [frame.payload for frame in self._frames(kind, mine, timeout_s=timeout_s)]

    def _frames(self, kind: _Kind, mine: bytes, fds: Sequence[int] = (), timeout_s: float | None = None) -> list[Frame]:
        """Exchange frames; this rank's own has no descriptors.

        Raises:
            RankMismatchError: the ranks are in different exchanges; on all of them.
        """
        self._number += 1
        place = _place() + self._among
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        found, missing = self._exchanges.gather(
            Mine(self._key, self._number, kind, place, mine, fds), self._peers, wait_s
        )
        if missing:
            raise self._late(place, found, missing, wait_s)
        found[self._ranks[self.rank]] = Frame(kind, place, mine, [], 0)
        frames = [found[rank] for rank in self._ranks]
        sizes = {len(each.payload) for each in frames} if kind == _Kind.INTEGERS else {0}
        if len(sizes) > 1 or any(each.kind != kind for each in frames):
            for each in frames:
                close_all(each.fds)
            gone = [rank for rank in self._peers if self._exchanges.gave_up(rank, self._key, self._number)]
            if gone:
                raise CollectiveTimeoutError(
                    f"rank {self._ranks[self.rank]}: {place.decode()} cannot complete, because {name_ranks(gone)} gave "
                    f"up waiting in {found[gone[0]].place.decode()}, which is another call",
                    missing_ranks=gone,
                )
            raise self._mismatch(frames)
        return frames

    def _mismatch(self, frames: Sequence[Frame]) -> RankMismatchError:
        by_place: dict[str, list[int]] = {}
        for rank, frame in zip(self._ranks, frames, strict=True):
            by_place.setdefault(frame.place.decode(), []).append(rank)
        lines = "".join(f"\n  {name_ranks(ranks)}: {where}" for where, ranks in by_place.items())
        return RankMismatchError(
            f"the ranks are in different calls that all of them take part in:{lines}\nIf one of them went on after an "
            "error, the others were still waiting for it; if a call lies inside `if rank == ...`, all ranks must make "
            "it."
        )

    def _late(self, place: bytes, found: dict[int, Frame], missing: list[int], wait_s: float) -> CollectiveTimeoutError:
        """The error of an exchange that took too long: who is missing, and where the others are."""
        me = self._ranks[self.rank]
        present = {rank: [frame.place.decode()] for rank, frame in found.items()} | {me: [place.decode()]}
        lines = []
        for rank in self._ranks:
            places = present.get(rank) or self._exchanges.waits_in(rank)
            lines += [f"\n  rank {rank} waits in {each}" for each in places]
            if not places:
                lines.append(f"\n  rank {rank} waits in no exchange with rank {me}")
        return CollectiveTimeoutError(
            f"rank {me}: {place.decode()} did not complete within {wait_s:g} s; "
            f"{name_ranks(missing)} did not arrive:{''.join(lines)}\n"
            "Either that rank failed, or it does not make the same calls, or IRIS_BARRIER_TIMEOUT is too short",
            missing_ranks=missing,
        )

    # -- groups of ranks ----------------------------------------------------------------------------------------------
    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks of this world that form a group, in the group's order; all for None."""
        if group is None:
            return tuple(range(self.world_size))
        if isinstance(group, list | tuple):
            return _members_of_list(group, self.rank, self.world_size)
        theirs = torch_world.members_of(cast("dist.ProcessGroup", group))
        if theirs is None:
            raise GroupError(f"rank {self.rank} is not a member of the process group that was passed as group=")
        mine = list(self._ranks if self._members is None else self._members)
        strangers = [rank for rank in theirs if rank not in mine]
        if strangers:
            raise IrisError(
                f"the process group that was passed as group= has {name_ranks(strangers)} of torch.distributed, which "
                "does not share this heap; make a group of ranks that do"
            )
        return tuple(mine.index(rank) for rank in theirs)

    def subgroup(self, group: dist.ProcessGroup | Sequence[int] | None) -> World:
        """Return the world of a group's members; not collective, and this world closes it."""
        return self.subworld(self.members_of(group))

    def subworld(self, members: tuple[int, ...]) -> World:
        """Return the world of some ranks of this one, in this order; not collective, and this world closes it."""
        self._exchanges.check_usable()
        _check_members(members, self.rank, self.world_size)
        ranks = tuple(self._ranks[member] for member in members)
        root = self._root
        if ranks == root._ranks:
            return root
        found = root._subworlds.get(ranks)
        if found is None:
            theirs = None if self._members is None else [self._members[member] for member in members]
            found = HostWorld(self._exchanges, ranks, members.index(self.rank), self._timeout_s, theirs, root)
            root._subworlds[ranks] = found
        return found

    # -- peers --------------------------------------------------------------------------------------------------------
    def check_peers(self) -> None:
        """Raise PeerLostError if a peer's process has ended."""
        self._exchanges.check_peers(self._peers)

    def close(self) -> None:
        """Tell the peers and hang up, for all worlds of these ranks; of some of the ranks, do nothing."""
        if self._root is self:
            self._exchanges.close()


# -- helpers ----------------------------------------------------------------------------------------------------------
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


_PLACE_NBYTES = 256
_MOST_PLACES = 4096
_places: dict[tuple[str, int, str], bytes] = {}


def _place() -> bytes:
    """Say which function of Iris was called last from outside, and where; quick, because every exchange asks."""
    frame, inner = sys._getframe(1), None
    while frame.f_globals.get("__name__", "").startswith("iris_"):
        if frame.f_back is None:
            return frame.f_code.co_name.encode("ascii", "backslashreplace")[:_PLACE_NBYTES]
        frame, inner = frame.f_back, frame
    assert inner is not None
    key = frame.f_code.co_filename, frame.f_lineno, inner.f_code.co_name
    found = _places.get(key)
    if found is None:
        if len(_places) >= _MOST_PLACES:
            _places.clear()
        text = f"{inner.f_code.co_name}(), called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        found = _places[key] = text.encode("ascii", "backslashreplace")[:_PLACE_NBYTES]
    return found
