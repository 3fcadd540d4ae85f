"""Passing file descriptors between the ranks of one host, privately.

Every rank listens on an abstract socket with a random name.  Names and one-time tokens travel through the process
group, so only ranks know them; the listener also checks the peer's credentials (same user, a process id of this world).
A stranger who connects is dropped and disturbs nothing, and neither do many: abstract sockets have no permissions, so
anybody on the host may fill the queue of a listener, and a rank that finds a peer's queue full empties its own and
tries again.

Nobody waits inside a call: every rank sends, accepts and receives in turn, as far as it can.  What a rank cannot do
alone (out of descriptors, say) is agreed upon at the end, so that every rank raises the same error.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import os
import resource
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Protocol

from iris_core.agreement import name_ranks, raise_failure
from iris_core.errors import CollectiveTimeoutError, IrisError, PeerAccessError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_TOKEN_BYTES = 32
_HELLO = struct.Struct("<I")  # the sender's rank, followed by the receiver's token
_GREETING_BYTES = _HELLO.size + _TOKEN_BYTES
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253 for one message
_RETRY_S = 0.002  # how long to wait for a peer to make room
_SHARE = 0.8  # of the time; the rest is for the agreement, where a rank that has failed may be waiting since long
_WATCH_S = 0.2  # how often to look after the peers' processes
_BACKLOG = 128

_AGAIN = (errno.EAGAIN, errno.ETOOMANYREFS)  # a full queue; too many descriptors in flight, until peers take some
_GONE = (errno.ECONNREFUSED, errno.EPIPE, errno.ECONNRESET)
_FULL = (errno.EMFILE, errno.ENFILE)
_FAILED = "could not exchange descriptors of memory with the other ranks"


class _Ranks(Protocol):
    rank: int
    world_size: int

    @property
    def pids(self) -> list[int]: ...
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]: ...
    def all_gather_object(self, obj: Any) -> list[Any]: ...
    def check_peers(self) -> None: ...


class _HungUpError(IrisError):
    """A peer ended a connection before it was due."""


class FdChannel:
    """All-to-all exchange of descriptors.

    Args:
        world: the ranks; all of them on this host.
    """

    def __init__(self, world: _Ranks) -> None:
        self._world = world

    def exchange(self, fds: Sequence[int], counts: Sequence[int], timeout_s: float) -> list[list[int]]:
        """Send this rank's descriptors to every peer and receive theirs.

        Collective: every rank calls it.  If it fails on one rank, it raises on all, and no descriptor stays open.

        Args:
            fds: descriptors to send; they stay open and the caller's.
            counts: how many descriptors each rank sends.
            timeout_s: bound of the whole exchange in seconds.

        Returns:
            For every peer its descriptors as valid in this process, which belong to the caller; nothing for this
            rank itself.

        Raises:
            CollectiveTimeoutError: a rank did not get everything in time.
            PeerAccessError: a rank could not send or receive; the text says which, and why.
            PeerLostError: a peer's process ended.
        """
        with contextlib.ExitStack() as undo:
            # Sockets exist before ranks know each other's addresses, so nobody runs out of them while peers wait.
            error: Exception | None = None
            run: _Exchange | None = None
            try:
                run = undo.enter_context(_Exchange(self._world, fds, counts))
            except OSError as e:
                error = _explained(e, "could not open a socket")
            addresses = self._world.all_gather_object(None if run is None else run.address)
            self._agree(error, [address is not None for address in addresses])
            assert run is not None
            error = run.run(addresses, timeout_s)
            self._agree(error, [ok for (ok,) in self._world.all_gather_ints([_state(error)])])
            return run.take()

    def _agree(self, error: Exception | None, states: Sequence[int]) -> None:
        causes = [state != _FAULT for state in states]
        if all(causes):
            causes = [state == _FINE for state in states]
        raise_failure(self._world, error, causes, _FAILED, PeerAccessError)


_FAULT, _FINE, _CONSEQUENCE = 0, 1, 2


def _state(error: Exception | None) -> int:
    """What a rank reports: who waited in vain, or was hung up on, speaks only when nobody knows better."""
    if error is None:
        return _FINE
    return _CONSEQUENCE if isinstance(error, _HungUpError | CollectiveTimeoutError) else _FAULT


class _Exchange:
    """One rank's part of one exchange; as a context manager it closes the sockets, and what nobody took.

    Attributes:
        address: where this rank listens, and the token that a peer has to know.
    """

    def __init__(self, world: _Ranks, fds: Sequence[int], counts: Sequence[int]) -> None:
        self._world = world
        self._fds = list(fds)
        self._counts = counts
        self._received: dict[int, list[int]] = {world.rank: []}
        self._incoming: list[_Incoming] = []
        self._outgoing: list[_Outgoing] = []
        self._error: IrisError | None = None
        with contextlib.ExitStack() as undo:
            self._server = undo.enter_context(_socket())
            self._server.bind(b"\0iris-" + secrets.token_hex(16).encode())
            self._server.listen(max(_BACKLOG, world.world_size))
            self._unused = [undo.enter_context(_socket()) for _ in range(world.world_size - 1)]
            self.address = self._server.getsockname(), secrets.token_bytes(_TOKEN_BYTES)
            undo.pop_all()

    def run(self, addresses: Sequence[tuple[bytes, bytes]], timeout_s: float) -> IrisError | None:
        """Send and receive until both are done; return what went wrong.

        Raises:
            PeerLostError: a peer's process ended.
        """
        world = self._world
        greeting = _HELLO.pack(world.rank)
        for peer, (address, token) in enumerate(addresses):
            if peer != world.rank:
                self._outgoing.append(_Outgoing(peer, self._unused.pop(), address, greeting + token, self._fds))
        watch = time.monotonic() + _WATCH_S
        deadline = time.monotonic() + _SHARE * timeout_s
        while self._outgoing or not self._complete:
            moved = self._send() | self._receive()
            now = time.monotonic()
            if now >= deadline and (self._outgoing or not self._complete):
                self._fail(self._late(timeout_s))
                break
            if now >= watch:
                world.check_peers()
                watch = now + _WATCH_S
            if not moved:
                self._wait(_RETRY_S if self._outgoing else min(_WATCH_S, deadline - now))
        return self._error

    def take(self) -> list[list[int]]:
        """Return what was received, by rank; it belongs to the caller now."""
        received, self._received = self._received, {}
        return [received[rank] for rank in range(self._world.world_size)]

    @property
    def _complete(self) -> bool:
        """Whether there is nothing more to receive, or no use in it."""
        return self._error is not None or len(self._received) == self._world.world_size

    def _send(self) -> bool:
        """Send what peers have room for; whether there was any."""
        moved = False
        for each in list(self._outgoing):
            try:
                moved |= each.advance()
            except OSError as e:
                if e.errno not in _GONE:  # who is gone has told why, or its process has ended
                    self._fail(_explained(e, f"could not send to rank {each.peer}"))
                each.finished = True
            if each.finished:
                self._outgoing.remove(each)
                each.connection.close()
                moved = True
        return moved

    def _receive(self) -> bool:
        """Take what has arrived; whether there was any."""
        moved = False
        for _ in range(_BACKLOG):  # not for ever, however many strangers come
            if self._complete:
                break
            try:
                connection = self._server.accept()[0]
            except BlockingIOError:
                break
            except OSError as e:
                self._fail(_explained(e, "could not accept a connection"))
                break
            moved = True
            pid, uid = _credentials(connection)
            if uid == os.geteuid() and pid in self._world.pids:
                connection.setblocking(False)
                self._incoming.append(_Incoming(connection, pid))
            else:
                connection.close()  # a stranger: not worth waiting for its greeting
        for each in list(self._incoming):
            if self._complete:
                break
            try:
                moved |= self._advance(each)
            except IrisError as e:
                self._fail(e)
        return moved

    def _advance(self, each: _Incoming) -> bool:
        """Go on with one connection; whether something came."""
        moved = each.greet()
        known = each.peer is None or (
            hmac.compare_digest(each.token, self.address[1])
            and each.peer < self._world.world_size
            and each.peer not in self._received
            and each.pid == self._world.pids[each.peer]
        )
        if not known or (each.peer is None and each.hung_up):  # not who it says, or it says nothing
            self._incoming.remove(each)
            each.close()
        elif each.peer is not None:
            moved |= each.receive(self._counts[each.peer])
            if len(each.fds) == self._counts[each.peer]:
                self._received[each.peer], each.fds = each.fds, []
                self._incoming.remove(each)
                each.close()
        return moved

    def _wait(self, timeout_s: float) -> None:
        poll = select.poll()
        for connection in [] if self._complete else [self._server, *(each.connection for each in self._incoming)]:
            poll.register(connection, select.POLLIN)
        poll.poll(timeout_s * 1e3)

    def _fail(self, error: IrisError) -> None:
        """Receive no more: peers that are still sending notice at once.  They get what they wait for nevertheless."""
        self._error = self._error or error
        self._server.close()
        for each in self._incoming:
            each.close()
        self._incoming.clear()

    def _late(self, timeout_s: float) -> CollectiveTimeoutError:
        missing = [rank for rank in range(self._world.world_size) if rank not in self._received]
        parts = [f"no descriptors from {name_ranks(missing)}"] if missing else []
        parts += [f"rank {each.peer} takes none ({each.refusal})" for each in self._outgoing]
        return CollectiveTimeoutError(
            f"{'; '.join(parts)} in time (IRIS_BARRIER_TIMEOUT is {timeout_s:g} s)",
            missing_ranks=sorted({*missing, *(each.peer for each in self._outgoing)}),
        )

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *args: object) -> None:
        self._server.close()
        for connection in self._unused:
            connection.close()
        for sending in self._outgoing:
            sending.connection.close()
        for receiving in self._incoming:
            receiving.close()
        for fd in [fd for fds in self._received.values() for fd in fds]:
            os.close(fd)


class _Outgoing:
    """What is on its way to one peer.

    Attributes:
        finished: whether everything was sent.
        refusal: why it did not go on the last time.
    """

    def __init__(self, peer: int, connection: socket.socket, address: bytes, greeting: bytes, fds: list[int]) -> None:
        self.peer = peer
        self.connection = connection
        self.finished = False
        self.refusal = "not connected yet"
        self._address = address
        self._connected = False
        self._greeting = greeting
        self._parts = [fds[start : start + _FDS_PER_MESSAGE] for start in range(0, len(fds), _FDS_PER_MESSAGE)]

    def advance(self) -> bool:
        """Go on as far as the peer has room; whether anything was sent."""
        moved = False
        try:
            if not self._connected:
                self.connection.connect(self._address)
                self._connected = moved = True
            while self._greeting:
                self._greeting = self._greeting[self.connection.send(self._greeting) :]
                moved = True
            while self._parts:
                socket.send_fds(self.connection, [b"."], self._parts[0])
                del self._parts[0]
                moved = True
        except OSError as e:
            if e.errno not in _AGAIN:
                raise
            self.refusal = str(e.strerror)
            return moved
        self.finished = True
        return True


class _Incoming:
    """What has come over one connection.

    Attributes:
        pid: the process at the other end.
        peer: the rank that it says it is; None until it has said so.
        token: what it knows, then.
        fds: the descriptors so far, which belong to this object.
        hung_up: whether nothing more will come.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.peer: int | None = None
        self.token = b""
        self.fds: list[int] = []
        self.hung_up = False
        self._greeting = b""

    def greet(self) -> bool:
        """Read the greeting; whether something came."""
        before = len(self._greeting)
        while self.peer is None and not self.hung_up:
            try:
                part = self.connection.recv(_GREETING_BYTES - len(self._greeting))
            except BlockingIOError:
                break  # the rest comes later
            except OSError:  # reset
                part = b""
            self._greeting += part
            self.hung_up = not part
            if len(self._greeting) == _GREETING_BYTES:
                (self.peer,) = _HELLO.unpack_from(self._greeting)
                self.token = self._greeting[_HELLO.size :]
        return len(self._greeting) > before

    def receive(self, count: int) -> bool:
        """Read descriptors until there are `count`; whether something came.

        Raises:
            IrisError: not so many will come, or this process cannot take them.
        """
        moved = False
        while len(self.fds) < count:
            try:
                _, new, flags, _ = socket.recv_fds(self.connection, 1, _FDS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return moved
            except OSError:  # reset
                new, flags = [], 0
            self.fds += new
            moved = True
            if flags & socket.MSG_CTRUNC:
                raise IrisError(f"{len(self.fds)} of {count} descriptors of rank {self.peer} were let in: {_limit()}")
            if not new or len(self.fds) > count:
                raise _HungUpError(f"rank {self.peer} sent {len(self.fds)} of {count} descriptors")
        return moved

    def close(self) -> None:
        """Hang up, and close what was not taken."""
        self.connection.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _explained(e: OSError, what: str) -> IrisError:
    error = IrisError(f"{what}: {e.strerror}" + (f"; {_limit()}" if e.errno in _FULL else ""))
    error.__cause__ = e
    return error


def _limit() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the limit of open files of this process is {soft} (`ulimit -n`, at most {hard} here)"


def _credentials(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = array.array("i", raw)
    return pid, uid
