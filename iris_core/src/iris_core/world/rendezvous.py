"""How the ranks of one host find each other: files in a folder that only their user can enter.

A rank writes its process id there before anything else, so that the others notice when it dies, wherever it is by then.
Then it listens on a socket in the folder and writes a card: the socket's name and a token.  Of two ranks the higher one
connects.  Each looks at what the kernel says of the process at the other end, and both show the token of the other's
card.  Connections of other processes are closed at once, so there is never more than one of each rank to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import shutil
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.errors import CollectiveTimeoutError, IrisError, PeerLostError, UnsupportedError
from iris_core.world import folder
from iris_core.world.failures import name_ranks
from iris_core.world.fd_passing import Link, close_all, credentials, limit_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_GREETING = struct.Struct("<8sI32s32s")  # magic, the sender's rank, its token, the receiver's token
_MAGIC = b"iris\0\0\0\1"
_TOKEN_NBYTES = 32
_GREETING_S = 5.0
_PAUSE_S = 0.001, 0.02  # between two looks into the folder: at first, at most
ELSEWHERE = (
    "is on another host, or in another container, where it and the others cannot see each other's processes; ranks "
    "share a heap on one host only"
)
"""What is wrong with a rank there; for messages."""


@dataclass
class Rendezvous:
    """Where the ranks of a world find each other.

    Attributes:
        path: the folder.
        rank: this rank.
        world_size: number of ranks.
        name: of the world among those that are made there.
        is_new: whether the folder has been made for this job, so that all files there are the job's.
        remove: whether the folder is this world's alone, and goes with it.
        members: ranks of torch.distributed, where it has said who the ranks are.
        elsewhere: asks now and then whether some rank cannot come to the folder; raises then.
    """

    path: str
    rank: int
    world_size: int
    name: str
    is_new: bool = True
    remove: bool = False
    members: tuple[int, ...] | None = None
    elsewhere: Callable[[], None] = field(default=lambda: None)


class _Peer:
    """What is known of one peer.

    Attributes:
        pidfd: of its process; None until it has announced itself.
        pid: its process.
        card: where it listens; None until it does.
        link: the connection; None until both have proved who they are.
        asked: a connection that waits for the peer's answer.
    """

    def __init__(self) -> None:
        self.pidfd: int | None = None
        self.pid = -1
        self.card: dict[str, Any] | None = None
        self.link: Link | None = None
        self.asked: _Greeting | None = None

    def close(self) -> None:
        if self.asked is not None:
            self.asked.connection.close()
        if self.link is not None:
            self.link.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


class _Greeting:
    """A connection over which a greeting is to come."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.data = b""
        self.ends = time.monotonic() + _GREETING_S

    def read(self) -> tuple[int, bytes, bytes] | None:
        """The rank at the other end, its token and what it takes for ours; None if there is more to come.

        Raises:
            OSError: nothing sensible will come.
        """
        with contextlib.suppress(BlockingIOError):
            part = self.connection.recv(_GREETING.size - len(self.data))
            self.data += part
            if not part:
                raise ConnectionResetError
        if len(self.data) < _GREETING.size:
            if time.monotonic() > self.ends:
                raise TimeoutError
            return None
        magic, rank, theirs, ours = _GREETING.unpack(self.data)
        if magic != _MAGIC:
            raise ConnectionRefusedError
        return rank, theirs, ours


class Opening:
    """One rank's way to connections with all others; they know its process from the beginning.

    Args:
        where: to find them.

    Raises:
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank's process has ended; all ranks name the one that was first.
        UnsupportedError: a rank runs on another host.
        IrisError: a rank could not open its part.
    """

    def __init__(self, where: Rendezvous) -> None:
        self._where = where
        self._since = 0.0 if where.is_new else folder.began()
        self._folder = folder.Folder(where.path)
        self.failure = folder.FirstFailure(self._folder, where.name, self._leave, self._since)
        self._peers = {rank: _Peer() for rank in range(where.world_size) if rank != where.rank}
        self._greetings: dict[int, _Greeting] = {}
        self._token = secrets.token_bytes(_TOKEN_NBYTES)
        self._socket_name = f"socket.{secrets.token_hex(8)}"
        self._card = f"card.{where.name}.{where.rank}"
        self._listener: socket.socket | None = None

        folder.announce(self._folder, where.rank)

    def run(self, timeout_s: float) -> tuple[dict[int, Link], dict[int, int]]:
        """Return the connections and a descriptor of each peer's process; the caller closes `failure` at the end.

        Args:
            timeout_s: bound in seconds.
        """
        try:
            self._listen()
            self._connect_all(timeout_s)
        except BaseException as e:
            error = self.fail(e)
            if error is e:
                raise
            raise error from (None if isinstance(e, IrisError) else e)
        finally:
            for greeting in self._greetings.values():
                greeting.connection.close()
            if self._listener is not None:
                self._listener.close()
        for name in (self._card, self._socket_name):
            self._folder.remove(name)
        links = {rank: peer.link for rank, peer in self._peers.items() if peer.link is not None}
        return links, {rank: peer.pidfd for rank, peer in self._peers.items() if peer.pidfd is not None}

    def fail(self, error: BaseException) -> BaseException:
        """Let go of everything, and let the others know why this rank cannot go on; returns what was first."""
        try:
            return self._first(error)
        finally:
            for peer in self._peers.values():
                peer.close()
            self._folder.close()

    def _first(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, IrisError):
            more = f"; {limit_of_files()}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            error = IrisError(f"cannot open the world: {error}{more}")
        if not isinstance(error, IrisError):
            return error
        first = self.failure.note(folder.Failed.of(error))
        return first.error(self._where.rank)

    def _leave(self) -> None:
        """Remove this rank's files, when its world is closed; the last one removes the folder."""
        if not self._where.remove:
            return
        self._folder.remove(f"pid.{self._where.rank}")
        left = os.listdir(self._folder.fd)
        if not any(name.startswith("pid.") for name in left):
            shutil.rmtree(self._folder.path, ignore_errors=True)

    # -- steps --------------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self._address(self._socket_name))
        self._listener.listen(128)
        content = {"pid": os.getpid(), "socket": self._socket_name, "token": self._token.hex()}
        self._folder.write(self._card, content)

    def _address(self, name: str) -> str:
        """A socket's path; through the descriptor, because paths of sockets have 107 bytes at most."""
        return f"/proc/self/fd/{self._folder.fd}/{name}"

    def _connect_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause, most = _PAUSE_S
        while any(peer.link is None for peer in self._peers.values()):
            failed = self.failure.read()
            if failed is not None:
                raise failed.error(self._where.rank)
            for rank, peer in self._peers.items():
                if peer.link is None:
                    self._look_after(rank, peer)
            self._accept()
            for key in list(self._greetings):
                self._answer(key)
            self._look_for_the_dead()
            self._where.elsewhere()
            if time.monotonic() >= deadline:
                raise self._late(timeout_s)
            self._wait(pause)
            pause = min(1.5 * pause, most)

    def _look_after(self, rank: int, peer: _Peer) -> None:
        """Go as far with one peer as one can."""
        card = peer.card or self._folder.read(f"card.{self._where.name}.{rank}")
        said = None if card is not None and card["pid"] == peer.pid else self._folder.read(f"pid.{rank}")
        if said is not None and said["pid"] != peer.pid:
            self._watch(rank, peer, said)
        if card is None or peer.pidfd is None or card["pid"] != peer.pid:
            return  # not here yet, or somebody's who was here before us
        peer.card = card
        if rank < self._where.rank:
            self._ask(rank, peer, card)

    def _watch(self, rank: int, peer: _Peer, said: Mapping[str, Any]) -> None:
        """Get hold of the process of a peer."""
        if said["host"] != folder.host_id():
            raise UnsupportedError(f"rank {rank} {ELSEWHERE}")
        pid, pidfd = said["pid"], None
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if folder.started_at(pid) != said["started"]:  # another process has its number now
                os.close(pidfd)
                pidfd = None
        if pidfd is None:
            if said["at"] >= self._since:
                raise _lost(rank, pid)
            return  # of an earlier job that had the same name
        if peer.pidfd is not None:
            os.close(peer.pidfd)
        peer.pid, peer.pidfd = pid, pidfd

    def _ask(self, rank: int, peer: _Peer, card: Mapping[str, Any]) -> None:
        """Connect to a lower rank, and wait for its answer."""
        if peer.asked is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(self._address(card["socket"]))
                if credentials(connection) != (card["pid"], os.geteuid()):
                    raise ConnectionRefusedError
                connection.send(
                    _GREETING.pack(_MAGIC, self._where.rank, self._token, bytes.fromhex(card["token"]))
                )  # which an empty queue has room for
            except OSError as e:
                connection.close()
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return  # its queue is full, or it is gone
            peer.asked = _Greeting(connection, card["pid"])
        try:
            answer = peer.asked.read()
        except OSError:
            peer.asked.connection.close()
            peer.asked = None
            return
        if answer is None:
            return
        connection, peer.asked = peer.asked.connection, None
        if answer[0] == rank and self._knows(peer, answer):
            peer.link = Link(connection)
        else:
            connection.close()

    def _accept(self) -> None:
        """Take connections, as far as processes of ranks have made them."""
        assert self._listener is not None
        for _ in range(128):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid, uid = credentials(connection)
            if uid != os.geteuid() or pid not in (peer.pid for peer in self._peers.values()):
                connection.close()  # a stranger, or a rank that will ask again when it is known
                continue
            if pid in self._greetings:
                self._greetings[pid].connection.close()
            self._greetings[pid] = _Greeting(connection, pid)

    def _answer(self, pid: int) -> None:
        """Prove who this rank is to one that has proved who it is."""
        greeting = self._greetings[pid]
        try:
            said = greeting.read()
        except OSError:
            del self._greetings[pid]
            greeting.connection.close()
            return
        if said is None:
            return
        peer = self._peers.get(said[0])
        if peer is not None and peer.card is None:
            self._look_after(said[0], peer)
        del self._greetings[pid]
        if (
            peer is None
            or peer.card is None
            or peer.link is not None
            or peer.pid != pid
            or said[0] < self._where.rank
            or not self._knows(peer, said)
        ):
            greeting.connection.close()
            return
        assert peer.card is not None
        greeting.connection.send(
            _GREETING.pack(_MAGIC, self._where.rank, self._token, bytes.fromhex(peer.card["token"]))
        )
        peer.link = Link(greeting.connection)

    def _knows(self, peer: _Peer, said: tuple[int, bytes, bytes]) -> bool:
        """Whether a greeting has the tokens of both cards."""
        assert peer.card is not None
        theirs = hmac.compare_digest(said[1], bytes.fromhex(peer.card["token"]))
        return theirs and hmac.compare_digest(said[2], self._token)

    def _look_for_the_dead(self) -> None:
        poll = select.poll()
        by_fd = {peer.pidfd: rank for rank, peer in self._peers.items() if peer.pidfd is not None}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            rank = by_fd[fd]
            said = self._folder.read(f"pid.{rank}")
            if said is None or said["at"] >= self._since:
                raise _lost(rank, self._peers[rank].pid)
            self._peers[rank].pidfd = None  # of an earlier job, which has ended only now
            self._peers[rank].pid = -1
            close_all([fd])

    def _wait(self, pause_s: float) -> None:
        poll = select.poll()
        waiting = [greeting.connection for greeting in self._greetings.values()]
        waiting += [peer.asked.connection for peer in self._peers.values() if peer.asked is not None]
        for connection in [self._listener, *waiting]:
            assert connection is not None
            poll.register(connection, select.POLLIN)
        poll.poll(1e3 * pause_s)

    def _late(self, timeout_s: float) -> CollectiveTimeoutError:
        missing = [rank for rank, peer in self._peers.items() if peer.link is None and peer.card is None]
        missing = missing or [rank for rank, peer in self._peers.items() if peer.link is None]
        started = [rank for rank in missing if self._peers[rank].pidfd is not None]
        where = f" (of these, {name_ranks(started)} has started)" if started else ""
        return CollectiveTimeoutError(
            f"opening the world of {self._where.world_size} ranks did not complete within {timeout_s:g} s; "
            f"{name_ranks(missing)} did not arrive{where}. Either that rank failed, or it does not make the same "
            "calls, or it runs on another host, or IRIS_BARRIER_TIMEOUT is too short",
            missing_ranks=missing,
        )


def _lost(rank: int, pid: int) -> PeerLostError:
    text = f"rank {rank} (process {pid}) ended while the world was opened; look at its output for the first error"
    return PeerLostError(text, ranks=[rank])
