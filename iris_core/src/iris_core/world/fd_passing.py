"""One rank's connection to another one: frames of bytes, some of them with file descriptors.

A connection is a stream of a unix socket.  Nothing here waits: what the peer has no room for stays in a queue, and what
has arrived is kept per world until somebody asks for it.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER = struct.Struct("<QQBHIQ")  # world, number, kind, then how many: bytes of the place, descriptors, bytes
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253
_ROOM_NBYTES = 1 << 16
_ROOM_FDS = socket.CMSG_SPACE(253 * array.array("i").itemsize)
_LATER = (errno.EAGAIN, errno.ETOOMANYREFS)  # a full queue; too many descriptors in flight, until the peer takes some
_GONE = (errno.EPIPE, errno.ECONNRESET)

LEFT = 0
"""Kind of the last frame of a rank that closes its world."""

GIVEN_UP = 255
"""Kind of a frame that says that this rank waits no longer in the exchange of its last frame in a world."""


class Frame(NamedTuple):
    """What one rank brings to an exchange.

    Attributes:
        kind: of exchange.
        place: the function that was called, and where.
        payload: the bytes.
        fds: the descriptors, which belong to whoever takes the frame.
        num_fds: how many were sent.
    """

    kind: int
    place: bytes
    payload: bytes
    fds: list[int]
    num_fds: int


class Link:
    """A connection to one peer, which has proved who it is.

    Args:
        connection: the socket, which belongs to this object from now on.

    Attributes:
        left: whether the peer has closed its world.
        given_up: by world, the last exchange for which the peer has waited too long.
        ended: whether nothing more will come.
        stalled: whether the kernel takes no descriptors now, so that polling for room is no use.
        refused: why descriptors could not be sent, ...
        truncated: or not be received, since the last time that somebody has looked.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._in = bytearray()
        self._fds: list[int] = []
        self._arrived: dict[int, deque[tuple[int, Frame]]] = {}
        self.left = self.ended = self.stalled = self.truncated = False
        self.refused: OSError | None = None
        self.given_up: dict[int, int] = {}

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    @property
    def pending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def post(self, world: int, number: int, kind: int, place: bytes, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, as far as there is room; the descriptors must stay open until nothing is `pending`.

        Args:
            world: which world's exchange it is.
            number: which one of them.
            kind: of exchange.
            place: the function that was called, and where.
            payload: the bytes; one for each 200 descriptors at least.
            fds: descriptors to pass.
        """
        head = _HEADER.pack(world, number, kind, len(place), len(fds), len(payload)) + place
        if not fds:
            self._out.append((head + payload, ()))
        else:
            parts = [fds[start : start + _FDS_PER_MESSAGE] for start in range(0, len(fds), _FDS_PER_MESSAGE)]
            assert len(payload) >= len(parts)
            self._out.append((head + payload[: 1 - len(parts) or None], parts[0]))
            at = len(payload) - len(parts) + 1
            self._out.extend((payload[at + i : at + i + 1], part) for i, part in enumerate(parts[1:]))
        self.flush()

    def flush(self) -> None:
        """Send what is pending, as far as there is room."""
        self.stalled = False
        while self._out:
            data, fds = self._out[0]
            try:
                if fds:
                    sent = self._connection.sendmsg(
                        [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    )
                else:
                    sent = self._connection.send(data)
            except OSError as e:
                if e.errno in _LATER:
                    self.stalled = e.errno == errno.ETOOMANYREFS
                    return
                if fds and e.errno not in _GONE:  # the peer gets the bytes, and finds out that descriptors are missing
                    self.refused = e
                    self._out[0] = data, ()
                    continue
                self._out.clear()  # the peer is gone; `receive` finds that out, behind what it has sent before
                return
            if sent < len(data):
                self._out[0] = data[sent:], ()
            else:
                self._out.popleft()

    def receive(self, *, everything: bool = False) -> None:
        """Take in what has arrived; with `everything` of a peer whose process has ended, to the end."""
        while not self.ended:
            try:
                data, extra, flags, _ = self._connection.recvmsg(_ROOM_NBYTES, _ROOM_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, extra, flags = b"", [], 0
            self.truncated |= bool(flags & socket.MSG_CTRUNC)
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

    def end(self) -> None:
        """Expect nothing more, and send nothing more."""
        self._out.clear()
        self.ended = True

    def take(self, world: int, number: int) -> Frame | None:
        """Return what the peer has brought to an exchange; None if it is not there yet.

        What it has brought to earlier ones, which this rank has given up, is thrown away.
        """
        frames = self._arrived.get(world)
        while frames and frames[0][0] <= number:
            at, frame = frames.popleft()
            if at == number:
                return frame
            close_all(frame.fds)
        return None

    def waits_in(self) -> list[str]:
        """The places of frames that nobody has taken yet."""
        return [frame.place.decode() for frames in self._arrived.values() for _, frame in frames]

    def close(self) -> None:
        """Hang up, and close descriptors that nobody has taken."""
        self._connection.close()
        close_all(self._fds)
        close_all([fd for frames in self._arrived.values() for _, frame in frames for fd in frame.fds])
        self._arrived.clear()
        self._fds = []
        self._out.clear()
        self.ended = True

    def _parse(self) -> None:
        while len(self._in) >= _HEADER.size:
            world, number, kind, len_place, num_fds, len_payload = _HEADER.unpack_from(self._in)
            middle = _HEADER.size + len_place
            end = middle + len_payload
            if len(self._in) < end:
                return
            place, payload = bytes(self._in[_HEADER.size : middle]), bytes(self._in[middle:end])
            del self._in[:end]
            if kind == LEFT:
                self.left = True
                continue
            if kind == GIVEN_UP:
                self.given_up[world] = number
                continue
            fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
            frames = self._arrived.get(world)
            if frames is None:
                frames = self._arrived[world] = deque()
            frames.append((number, Frame(kind, place, payload, fds, num_fds)))


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the process at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = array.array("i", raw)
    return pid, uid


def limit_of_files() -> str:
    """Say how many descriptors this process may have; for messages."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the limit of open files of this process is {soft} (`ulimit -n`, at most {hard} here)"
