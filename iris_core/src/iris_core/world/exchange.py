"""Connections between the ranks of one host: frames of bytes, descriptors beside them, and ranks that are lost or late.

Each pair of ranks has one connection, a stream of a unix socket, for all worlds that both are in.  Frames say which
world's exchange they belong to, and which one of them, so ranks may use worlds in any order and from several threads:
one thread at a time receives, for all of them.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from iris_core.errors import CollectiveTimeoutError, HeapClosedError, IrisError, PeerLostError
from iris_core.world.failures import name_ranks

_HEADER = struct.Struct("<QQBHIQ")  # world, number, kind, then lengths: of the call, of the descriptors, of the payload
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253
_ROOM_NBYTES = 1 << 16
_ROOM_FDS = socket.CMSG_SPACE(253 * array.array("i").itemsize)
_LATER = (errno.EAGAIN, errno.ETOOMANYREFS)  # a full queue; too many descriptors in flight, until the peer takes some
_LEFT = 0  # kind of frame: this rank closes its world; with a payload if it gives up
_LOOK_S = 0.1  # a thread that polls does not notice that another one has something to send


class Frame(NamedTuple):
    """The part of one rank in an exchange."""

    kind: int  # of exchange, from 1
    call: bytes = b""  # the function that the program called
    payload: bytes = b""
    fds: Sequence[int] = ()  # a received frame owns them
    num_fds: int = 0  # how many were sent


class Link:
    """A connection to one peer, whose socket it owns; nothing here waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.pending: deque[tuple[bytes, Sequence[int]]] = deque()  # still to be sent, with descriptors
        self._in = bytearray()
        self._fds: list[int] = []
        self._arrived: defaultdict[int, deque[tuple[int, Frame]]] = defaultdict(deque)
        self.left = self.gave_up = False  # the peer has closed its world; after an error
        self.ended = False  # nothing more will come

    def fileno(self) -> int:
        return self._connection.fileno()

    def post(self, world: int, number: int, frame: Frame) -> None:
        """Send a frame, as far as the socket takes it; its descriptors must stay open until nothing is `pending`."""
        kind, call, payload, fds, _ = frame
        data = _HEADER.pack(world, number, kind, len(call), len(fds), len(payload)) + call + payload
        parts = [fds[at : at + _FDS_PER_MESSAGE] for at in range(0, len(fds), _FDS_PER_MESSAGE)] or [()]
        self.pending.extend((data[i : i + 1], part) for i, part in enumerate(parts[:-1]))
        self.pending.append((data[len(parts) - 1 :], parts[-1]))
        self.flush()

    def flush(self) -> None:
        """Send pending frames, as far as the socket takes them."""
        while self.pending:
            data, fds = self.pending[0]
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._connection.sendmsg([data], rights)
            except OSError as e:
                if e.errno in _LATER:
                    return
                if not fds or e.errno in (errno.EPIPE, errno.ECONNRESET):
                    self.pending.clear()  # the peer is gone; `receive` finds that out, after what it has sent before
                    return
                self.pending[0] = data, ()  # the peer gets the bytes, and finds out that descriptors are missing
                continue
            if sent < len(data):
                self.pending[0] = data[sent:], ()
            else:
                self.pending.popleft()

    def receive(self, *, everything: bool = False) -> None:
        """Take in what has arrived; with `everything` of a peer whose process has ended, to the end."""
        while not self.ended:
            try:
                # not socket.recv_fds, which ignores flags: a child that is started now would keep the memory
                data, extra, _, _ = self._connection.recvmsg(_ROOM_NBYTES, _ROOM_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, extra = b"", []
            for level, kind, raw in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._fds += array.array("i", raw[: len(raw) - len(raw) % array.array("i").itemsize])
            if data:
                self._in += data
                self._parse()
            else:
                self.ended = True
            if len(data) < _ROOM_NBYTES and not extra and not everything:
                return

    def _parse(self) -> None:
        while len(self._in) >= _HEADER.size:
            world, number, kind, len_call, num_fds, len_payload = _HEADER.unpack_from(self._in)
            middle = _HEADER.size + len_call
            end = middle + len_payload
            if len(self._in) < end:
                return
            call, payload = bytes(self._in[_HEADER.size : middle]), bytes(self._in[middle:end])
            del self._in[:end]
            if kind == _LEFT:
                self.left, self.gave_up = True, bool(payload)
            else:
                fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
                self._arrived[world].append((number, Frame(kind, call, payload, fds, num_fds)))

    def take(self, world: int, number: int) -> Frame | None:
        """Return the peer's frame of an exchange, None if it has not arrived; drop earlier ones."""
        frames = self._arrived.get(world)
        while frames and frames[0][0] <= number:
            at, frame = frames.popleft()
            if at == number:
                return frame
            close_all(frame.fds)
        return None

    def waits_in(self) -> list[str]:
        """Return the calls of frames that were not taken yet."""
        return [frame.call.decode() for frames in self._arrived.values() for _, frame in frames]

    def end(self) -> None:
        """Expect nothing more, and send nothing more."""
        self.pending.clear()
        self.ended = True

    def close(self) -> None:
        """Close the connection, and descriptors that were not taken."""
        self._connection.close()
        close_all([*self._fds, *(fd for frames in self._arrived.values() for _, frame in frames for fd in frame.fds)])
        self._arrived.clear()
        self._fds = []
        self.end()


class Exchanges:
    """The connections of one rank to its peers, with a descriptor of each peer's process.

    `opening` has made them: it turns the error of lost peers into that of the first ones, alike on all ranks.
    """

    def __init__(self, links: Mapping[int, Link], pidfds: Mapping[int, int], opening: Any) -> None:
        self._opening = opening
        self._links, self._pidfds = dict(links), dict(pidfds)
        self._closed, self._why = "", b""
        self._changed = threading.Condition(threading.Lock())
        self._polling = False
        self._dead: set[int] = set()
        self._poll = select.poll()
        self._by_fd = {link.fileno(): peer for peer, link in self._links.items()}
        self._by_fd |= {fd: peer for peer, fd in self._pidfds.items()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def gather(
        self, world: int, number: int, mine: Frame, peers: Sequence[int], timeout_s: float,
        look: Callable[[], None] | None = None,
    ) -> tuple[dict[int, Frame], list[int]]:  # fmt: skip
        """Send this rank's frame to peers; return theirs, and the ranks that were missing when the time was over.

        `look` is called again and again meanwhile, to raise what happened elsewhere.  Raises like `check_peers`.
        """
        found: dict[int, Frame] = {}
        missing = list(peers)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self.check_usable()
            for peer in peers:
                self._links[peer].post(world, number, mine)
            try:
                while True:
                    for peer in missing:
                        if peer not in found and (frame := self._links[peer].take(world, number)) is not None:
                            found[peer] = frame
                    missing = [peer for peer in missing if peer not in found or self._links[peer].pending]
                    if not missing:
                        return found, []
                    self._check(peers, missing)
                    if look is not None:
                        look()
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        return found, missing
                    self._receive(left_s)
            finally:
                if missing:  # then no frame keeps descriptors
                    close_all([fd for frame in found.values() for fd in frame.fds])

    def waits_in(self, peer: int) -> list[str]:
        """Return the calls in which a peer waits for this rank, as far as known."""
        with self._changed:
            return self._links[peer].waits_in() if peer in self._links else []

    def check_peers(self, peers: Sequence[int], *, failed: bool = False) -> None:
        """Raise PeerLostError if the process of one has ended, or has given up; see `World.check_peers`."""
        with self._changed:
            self.check_usable()
            if not self._polling:  # else that thread looks
                for fd, _ in self._poll.poll(0):
                    self._move(fd)
            if lost := [peer for peer in peers if peer in self._dead or self._links[peer].gave_up]:
                raise self.lost(lost)

    def give_up(self, rank: int, error: BaseException) -> None:
        """Publish why this rank is going to close its world; others may still need it."""
        if not self._closed:
            named = error if isinstance(error, PeerLostError | CollectiveTimeoutError) else None
            self._opening.first_error(named or gave_up(rank, "closed its world", error))
            self._why = b"error"

    def check_usable(self) -> None:
        """Raise HeapClosedError if this rank has closed its world, or this process was forked off the rank's."""
        if self._closed:
            raise HeapClosedError(self._closed)

    def close(self) -> None:
        """Notify the peers, and close the connections.  Idempotent."""
        with self._changed:
            if self._closed:
                return
            for link in self._links.values():
                if not link.pending and not link.ended:
                    link.post(0, 0, Frame(_LEFT, payload=self._why))
            self._hang_up("this world is closed")

    def _hang_up(self, why: str) -> None:
        self._closed = why
        for link in self._links.values():
            link.close()
        close_all(self._pidfds.values())
        self._links, self._pidfds, self._poll = {}, {}, select.poll()
        self._opening.leave()
        self._changed.notify_all()

    def refuse(self, why: str) -> None:
        """Drop the parent's connections in a forked process, without sending anything."""
        self._changed = threading.Condition(threading.Lock())  # another thread of the parent may have held it
        with self._changed:
            self._hang_up(why)

    def _check(self, peers: Sequence[int], missing: Sequence[int]) -> None:
        """Raise PeerLostError if this exchange cannot end: a peer may leave on purpose once it is not missing."""
        links = self._links
        gone = [peer for peer in peers if peer in self._dead and not links[peer].left]
        gone = gone or [peer for peer in missing if links[peer].left or links[peer].ended]
        if gone:
            raise self.lost(gone)

    def lost(self, ranks: Sequence[int]) -> IrisError:
        """Return the error of lost peers: all ranks name those that were lost first, or what came before."""
        its, it = ("its", "it") if len(ranks) == 1 else ("their", "them")
        for peer in self._links.keys() & ranks:  # a process that ends has closed its connections before
            (ending := select.poll()).register(self._pidfds[peer], select.POLLIN)
            if not self._links[peer].left and ending.poll(1000):
                self._dead.add(peer)
        what = "ended" if self._dead.issuperset(ranks) else f"closed {its} world, or ended,"
        text = f"{name_ranks(ranks)} {what} while others still needed {it}; look at the output of that process"
        error: IrisError = self._opening.first_error(PeerLostError(f"{text} for the first error", ranks=ranks))
        return error

    def _receive(self, timeout_s: float) -> None:
        """Wait until data has arrived, or a socket takes pending data."""
        if self._polling:
            self._changed.wait(timeout_s)
            self.check_usable()
            return
        for link in self._links.values():
            if not link.ended:
                self._poll.modify(link, select.POLLIN | (select.POLLOUT if link.pending else 0))
        self._polling = True
        self._changed.release()
        try:
            ready = self._poll.poll(1e3 * min(timeout_s, _LOOK_S))
        finally:
            self._changed.acquire()
            self._polling = False
            self._changed.notify_all()
        self.check_usable()
        for fd, _ in ready:
            self._move(fd)

    def _move(self, fd: int) -> None:
        """Receive and send what the kernel is ready for."""
        peer = self._by_fd[fd]
        link = self._links[peer]
        if fd == self._pidfds[peer]:
            self._poll.unregister(fd)
            self._dead.add(peer)
            if not link.ended:
                link.receive(everything=True)
                link.end()  # a process that was forked off it may hold the connection, too
                self._poll.unregister(link)
        if link.ended:
            return
        if link.pending:
            link.flush()
        link.receive()
        if link.ended:
            self._poll.unregister(link)


def gave_up(rank: int, what: str, error: BaseException) -> PeerLostError:
    """Return what other ranks raise when a rank does not go on after an error of its own."""
    why = f"{type(error).__name__}: {error}".removesuffix(": ")
    return PeerLostError(f"rank {rank} {what} after {why}", ranks=[rank])


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def limit_of_files() -> str:
    """Say how many descriptors this process may have; for messages."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the limit of open files of this process is {soft} (`ulimit -n`, at most {hard} here)"
