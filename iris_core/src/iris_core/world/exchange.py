"""Exchanges between the ranks of one host: everybody's frame to everybody, and who is gone or late.

Each pair of ranks has one connection for all worlds that both are in.  Frames say which world's exchange they belong
to, and which one of them, so ranks may use worlds in any order and from several threads: one thread at a time takes in
what arrives, for all of them.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

from iris_core.errors import HeapClosedError, IrisError, PeerLostError
from iris_core.world.failures import name_ranks
from iris_core.world.fd_passing import GIVEN_UP, LEFT, Frame, Link, close_all
from iris_core.world.folder import Failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iris_core.world.folder import FirstFailure

_LOOK_S = 0.1  # a thread that polls does not hear that another one has something to send
_RETRY_S = 0.002  # how long to wait until the kernel may take descriptors again


class Mine(NamedTuple):
    """What this rank brings to an exchange.

    Attributes:
        world: the world's number, the same on all its members.
        number: which one of its exchanges.
        kind: of exchange.
        place: the function that was called, and where.
        payload: the bytes.
        fds: descriptors for each peer.
    """

    world: int
    number: int
    kind: int
    place: bytes
    payload: bytes
    fds: Sequence[int] = ()


class Exchanges:
    """The connections of one rank to its peers.

    Args:
        rank: this rank.
        links: by peer.
        pidfds: a descriptor of each peer's process.
        failure: which rank was the first to be gone.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], pidfds: Mapping[int, int], failure: FirstFailure) -> None:
        self._rank = rank
        self._failure = failure
        self._links = dict(links)
        self._pidfds = dict(pidfds)
        self._pid = os.getpid()
        self._closed = ""
        self._changed = threading.Condition(threading.Lock())
        self._polling = False
        self._dead: set[int] = set()
        self._writing: set[int] = set()  # peers that are polled for room
        self._poll = select.poll()
        self._by_fd = {link.fileno(): peer for peer, link in self._links.items()}
        self._by_fd |= {fd: peer for peer, fd in self._pidfds.items()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        _open.add(self)

    def gather(self, mine: Mine, peers: Sequence[int], timeout_s: float) -> tuple[dict[int, Frame], list[int]]:
        """Send this rank's frame to peers, and return theirs.

        Returns:
            Frames by rank, and the ranks that were missing when the time was over; then no frame has descriptors.

        Raises:
            PeerLostError: the process of a peer has ended, or it has closed its world.
            HeapClosedError: this rank has closed its world, or was forked off.
        """
        found: dict[int, Frame] = {}
        deadline = 0.0
        with self._changed:
            self.check_usable()
            for peer in peers:
                self._links[peer].post(*mine)
            try:
                while True:
                    self._take(mine, peers, found)
                    missing = [peer for peer in peers if peer not in found or self._links[peer].pending]
                    if not missing:
                        return found, []
                    self._check(peers, missing)
                    now = time.monotonic()
                    deadline = deadline or now + timeout_s
                    if now >= deadline:
                        for peer in peers:
                            self._links[peer].post(mine.world, mine.number, GIVEN_UP, b"", b"")
                        for frame in found.values():
                            close_all(frame.fds)
                        return found, missing
                    self._take_in(deadline - now)
            except BaseException:
                for frame in found.values():
                    close_all(frame.fds)
                raise

    def waits_in(self, peer: int) -> list[str]:
        """Where a peer waits for this rank, as far as known."""
        with self._changed:
            return self._links[peer].waits_in() if peer in self._links else []

    def gave_up(self, peer: int, world: int, number: int) -> bool:
        """Whether a peer has waited too long in an exchange."""
        with self._changed:
            if peer not in self._links:
                return False
            if not self._links[peer].ended:
                self._move(self._links[peer].fileno())  # it may have said so behind its frame
            return self._links[peer].given_up.get(world) == number

    def trouble(self, peers: Sequence[int]) -> tuple[OSError | None, list[int]]:
        """Return why descriptors could not be sent to some peer, and of which peers some could not be received; once.

        They are known after an exchange with descriptors.
        """
        refused, truncated = None, []
        for peer in peers:
            link = self._links[peer]
            refused, link.refused = refused or link.refused, None
            truncated += [peer] if link.truncated else []
            link.truncated = False
        return refused, truncated

    def check_peers(self, peers: Sequence[int]) -> None:
        """Raise PeerLostError if the process of one has ended."""
        self.check_usable()
        poll = select.poll()
        for peer in peers:
            poll.register(self._pidfds[peer], select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        if ended:
            lost = [peer for peer in peers if self._pidfds[peer] in ended]
            self._dead.update(lost)
            raise self._lost(lost)

    def check_usable(self) -> None:
        """Raise HeapClosedError if this rank has closed its world, or this process was forked off the rank's."""
        if self._closed:
            raise HeapClosedError(self._closed)

    def close(self) -> None:
        """Tell the peers, and hang up.  Idempotent."""
        with self._changed:
            if self._closed:
                return
            for link in self._links.values():
                if not link.pending and not link.ended:
                    link.post(0, 0, LEFT, b"", b"")
            self._hang_up("this world is closed")
        self._failure.close()

    def _hang_up(self, why: str) -> None:
        self._closed = why
        for link in self._links.values():
            link.close()
        close_all(list(self._pidfds.values()))
        self._links, self._pidfds, self._poll = {}, {}, select.poll()
        self._changed.notify_all()

    def after_fork(self) -> None:
        """In a process that was forked off: let go of the parent's connections, and say nothing to anybody."""
        self._changed = threading.Condition(threading.Lock())  # another thread of the parent may have held it
        with self._changed:
            self._hang_up(
                f"this process ({os.getpid()}) was forked off rank {self._rank} (process {self._pid}), whose context "
                "it cannot use: only that process can; start other processes with the method spawn, or without Iris"
            )
        self._failure.close()

    # -- steps --------------------------------------------------------------------------------------------------------
    def _take(self, mine: Mine, peers: Sequence[int], found: dict[int, Frame]) -> None:
        for peer in peers:
            if peer not in found:
                frame = self._links[peer].take(mine.world, mine.number)
                if frame is not None:
                    found[peer] = frame

    def _check(self, peers: Sequence[int], missing: Sequence[int]) -> None:
        """Raise PeerLostError if this exchange cannot end.  Who has left on purpose may be missed by nobody."""
        links = self._links
        gone = [peer for peer in peers if peer in self._dead and not links[peer].left]
        gone = gone or [peer for peer in missing if links[peer].left or links[peer].ended]
        if gone:
            raise self._lost(gone)

    def _lost(self, ranks: Sequence[int]) -> IrisError:
        """The error of a rank that has lost peers: all ranks name those that were lost first, or what came before."""
        its, it = ("its", "it") if len(ranks) == 1 else ("their", "them")
        what = "ended" if self._dead.issuperset(ranks) else f"closed {its} world, or ended,"
        text = f"{name_ranks(ranks)} {what} while others still needed {it}; look at the output of that process"
        mine = PeerLostError(f"{text} for the first error", ranks=ranks)
        return self._failure.note(Failed.of(mine)).error(self._rank)

    def _take_in(self, timeout_s: float) -> None:
        """Wait until something has arrived, or there is room for what is to be sent."""
        if self._polling:
            self._changed.wait(timeout_s)
            self.check_usable()
            return
        wait_s = min(timeout_s, _LOOK_S)
        for peer, link in self._links.items():
            writing = link.pending and not link.stalled and not link.ended
            if writing != (peer in self._writing) and not link.ended:
                self._poll.modify(link, select.POLLIN | (select.POLLOUT if writing else 0))
                self._writing ^= {peer}
            if link.stalled:
                wait_s = min(wait_s, _RETRY_S)
        self._polling = True
        self._changed.release()
        try:
            ready = self._poll.poll(1e3 * wait_s)
        finally:
            self._changed.acquire()
            self._polling = False
            self._changed.notify_all()
        self.check_usable()
        for fd, _ in ready:
            self._move(fd)
        for link in self._links.values():
            if link.stalled:
                link.flush()

    def _move(self, fd: int) -> None:
        peer = self._by_fd[fd]
        link = self._links[peer]
        if fd == self._pidfds[peer]:
            self._poll.unregister(fd)
            self._dead.add(peer)
            if not link.ended:
                link.receive(everything=True)
                if not link.ended:  # a process that was forked off it holds the connection, too
                    link.end()
                self._poll.unregister(link)
        if link.ended:
            return
        if link.pending:
            link.flush()
        link.receive()
        if link.ended:
            self._poll.unregister(link)


_open: weakref.WeakSet[Exchanges] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_open):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
