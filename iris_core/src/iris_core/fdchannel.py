"""Passing file descriptors between the ranks of one host, privately.

Every rank listens on an abstract socket with a random name.  Names and one-time tokens travel through the process
group, so only ranks know them; the listener also checks the peer's credentials (same user, a process id of this world).
A stranger who connects is dropped and disturbs nothing.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Protocol

from iris_core.errors import CollectiveTimeoutError, IrisError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_TOKEN_BYTES = 32
_HELLO = struct.Struct("<I")  # the sender's rank, followed by the receiver's token
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253 for one message
_STRANGER_S = 2.0  # how long an unfinished greeting may take


class _Ranks(Protocol):
    rank: int
    world_size: int

    @property
    def pids(self) -> list[int]: ...
    def all_gather_object(self, obj: Any) -> list[Any]: ...
    def barrier(self) -> None: ...
    def check_peers(self) -> None: ...


class FdChannel:
    """All-to-all exchange of descriptors.

    Args:
        world: the ranks; all of them on this host.
    """

    def __init__(self, world: _Ranks) -> None:
        self._world = world

    def exchange(self, fds: Sequence[int], counts: Sequence[int], timeout_s: float) -> list[list[int]]:
        """Send this rank's descriptors to every peer and receive theirs.

        Collective: every rank calls it.

        Args:
            fds: descriptors to send; they stay open and the caller's.
            counts: how many descriptors each rank sends.
            timeout_s: bound of the whole exchange in seconds.

        Returns:
            For every peer its descriptors as valid in this process, which belong to the caller; nothing for this
            rank itself.

        Raises:
            CollectiveTimeoutError: a peer did not connect in time.
            PeerLostError: a peer's process ended.
            IrisError: a peer sent something else than promised.
        """
        world = self._world
        deadline = time.monotonic() + timeout_s
        token = secrets.token_bytes(_TOKEN_BYTES)
        received: dict[int, list[int]] = {world.rank: []}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, contextlib.ExitStack() as outgoing:
            server.bind(b"\0iris-" + secrets.token_hex(16).encode())
            server.listen(max(128, world.world_size))
            addresses = world.all_gather_object((server.getsockname(), token))
            try:
                # Connecting never blocks on the peer's accept: the kernel queues the connection with its data.
                for peer, (address, peer_token) in enumerate(addresses):
                    if peer != world.rank:
                        outgoing.enter_context(_send(address, world.rank, peer_token, fds, deadline))
                self._receive(server, token, counts, received, deadline)
                world.barrier()  # nobody leaves (and closes sockets in flight) before all have received
            except BaseException:
                for owned in received.values():
                    for fd in owned:
                        os.close(fd)
                raise
        return [received[r] for r in range(world.world_size)]

    def _receive(
        self,
        server: socket.socket,
        token: bytes,
        counts: Sequence[int],
        received: dict[int, list[int]],
        deadline: float,
    ) -> None:
        world = self._world
        while len(received) < world.world_size:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [r for r in range(world.world_size) if r not in received]
                raise CollectiveTimeoutError(
                    f"rank {world.rank}: no memory descriptors from ranks {missing}", missing_ranks=missing
                )
            if not select.select([server], [], [], min(left, 0.2))[0]:
                world.check_peers()
                continue
            connection, _ = server.accept()
            with connection:
                connection.settimeout(min(_STRANGER_S, max(left, 0.01)))
                pid, uid = _credentials(connection)
                if uid != os.getuid() or pid not in world.pids:
                    continue  # a stranger: not worth waiting for its greeting
                peer = self._greeting(connection, token)
                if peer is None or peer in received or pid != world.pids[peer]:
                    continue  # not who it says
                received[peer] = _receive_fds(connection, counts[peer], peer)

    def _greeting(self, connection: socket.socket, token: bytes) -> int | None:
        size = _HELLO.size + _TOKEN_BYTES
        data = b""
        try:
            while len(data) < size:
                part = connection.recv(size - len(data))
                if not part:
                    return None
                data += part
        except OSError:  # a stranger who says nothing, or hangs up
            return None
        (peer,) = _HELLO.unpack_from(data)
        known = hmac.compare_digest(data[_HELLO.size :], token) and peer < self._world.world_size
        return peer if known else None


def _send(address: bytes, rank: int, token: bytes, fds: Sequence[int], deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        connection.connect(address)
        connection.sendall(_HELLO.pack(rank) + token)
        for start in range(0, len(fds), _FDS_PER_MESSAGE):
            socket.send_fds(connection, [b"."], list(fds[start : start + _FDS_PER_MESSAGE]))
    except BaseException:
        connection.close()
        raise
    return connection


def _receive_fds(connection: socket.socket, count: int, peer: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < count:
            try:
                _, new, flags, _ = socket.recv_fds(connection, 1, _FDS_PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                new, flags = [], 0
            fds += new
            if not new or flags & socket.MSG_CTRUNC:
                raise IrisError(
                    f"rank {peer} sent {len(fds)} of {count} descriptors; if the limit of open files is reached, "
                    "raise `ulimit -n`"
                )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _credentials(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = array.array("i", raw)
    return pid, uid
