"""Exchanges with ranks of other nodes, through the store of torch.distributed: Iris opens no connection of its own.

A rank writes its frame under a key of its own, and looks for those of the others again and again.  It never waits
inside the store, whose client lets one thread in at a time, and removes a frame when all others have gone on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from iris_core.errors import PeerLostError
from iris_core.logs import logger
from iris_core.world.exchange import Exchanges, Frame, Link, close_all

_HEADER = struct.Struct("<BHI")  # kind, then the length of the call and the number of descriptors
_COUNT = struct.Struct("<I")
_PIECE_NBYTES = 4 << 20  # a value of torch's TCPStore has 8 MiB at most
_PAUSE_S = 0.0005, 0.01  # between two looks for frames: at first, at most
LOOK_S = 0.2  # between two looks for failures
_BEAT_S, _SILENT_S = 0.5, 2.0  # between two signs of life; without one for so long, a node is lost
FAILED = "failed"  # the key of a world's first failure


class SharedStore:
    """The keys of one world in a store of torch.distributed; PeerLostError if the process that has it is gone."""

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store, self._name, self._rank = store, name, rank

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, function)(*arguments)
        except RuntimeError as e:
            text = "the process that has the store of torch.distributed is gone"
            raise PeerLostError(f"rank {self._rank}: {text}: {str(e).splitlines()[0]}") from e

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._call("check", [f"{self._name}/{key}" for key in keys]))

    def get(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of keys that are there."""
        keys, found = list(keys), []
        for key, first in zip(keys, self._call("multi_get", [f"{self._name}/{key}" for key in keys]), strict=True):
            (more,) = _COUNT.unpack_from(first)
            rest = (self._call("get", f"{self._name}/{key}/{index}") for index in range(more))
            found.append(b"".join((first[_COUNT.size :], *rest)))
        return found

    def set(self, key: str, value: bytes) -> list[str]:
        """Set a key, to a value of any size; return all keys that it took."""
        pieces = [value[at : at + _PIECE_NBYTES] for at in range(_PIECE_NBYTES, len(value), _PIECE_NBYTES)]
        for index, piece in enumerate(pieces):
            self._call("set", f"{self._name}/{key}/{index}", piece)
        self._call("set", f"{self._name}/{key}", _COUNT.pack(len(pieces)) + value[:_PIECE_NBYTES])
        return [key, *(f"{key}/{index}" for index in range(len(pieces)))]

    def set_first(self, key: str, value: Mapping[str, Any]) -> Any:
        """Set a key unless it is there, and return its value."""
        return json.loads(self._call("compare_set", f"{self._name}/{key}", "", json.dumps(value)))

    def failure(self) -> Any:
        """Return the first failure of the world; None if there is none."""
        return json.loads(self._call("get", f"{self._name}/{FAILED}")) if self.has([FAILED]) else None

    def count(self, key: str) -> int:
        """Increment a counter, and return it."""
        return int(self._call("add", f"{self._name}/{key}", 1))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete_key", f"{self._name}/{key}")


class StoreExchanges(Exchanges):
    """The exchanges of one rank in a world of several nodes: with its node by its connections, else by the store.

    The first rank of each node shows to the others, again and again, that it is there.
    """

    def __init__(self, links: Mapping[int, Link], pidfds: Mapping[int, int], opening: Any) -> None:
        super().__init__(links, pidfds, opening)
        self._store, self._rank, self._world_size = opening.store, opening.rank, opening.world_size
        self._node, self._far = frozenset(links), [node for node in opening.nodes if opening.rank not in node]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="iris beat", daemon=True)
        if self._far and self._rank == min({self._rank, *links}):
            self._thread.start()
        self._sent: defaultdict[int, deque[tuple[int, list[str]]]] = defaultdict(deque)  # by world: number, and keys
        self._seen: dict[tuple[int, int], int] = {}  # the latest frame of a world and peer
        self._failed: Any = None
        self._next_look = 0.0

    def gather(  # type: ignore[override]  # it looks by itself
        self, world: int, number: int, mine: Frame, peers: Sequence[int], timeout_s: float
    ) -> tuple[dict[int, Frame], list[int]]:
        begin = time.monotonic()
        near, far = [[peer for peer in peers if (peer in self._node) == is_near] for is_near in (True, False)]
        self.check_usable()
        if far:
            self._post(world, number, mine, far)
        published: list[bool] = []

        def look() -> None:
            self._look(peers)
            if far and not published and time.monotonic() >= begin + LOOK_S:
                published.append(self._publish_wait(mine.call.decode(), far))

        found: dict[int, Frame] = {}
        missing: list[int] = []
        late: Sequence[int] = far
        try:
            found, missing = super().gather(world, number, mine, near, timeout_s, look)
            late = self._collect(world, number, far, found, begin + timeout_s, look) if far else []
        finally:
            if published:
                with contextlib.suppress(PeerLostError):  # what is raised says so already
                    self._publish_wait("", ())
            if late and not missing:
                close_all([fd for frame in found.values() for fd in frame.fds])
        return found, sorted([*missing, *late])

    def _post(self, world: int, number: int, mine: Frame, far: Sequence[int]) -> None:
        """Write this rank's frame; remove those that no peer needs: each has come to a later exchange."""
        sent, reached = self._sent[world], min(self._seen.get((world, peer), 0) for peer in far)
        while sent and sent[0][0] < reached:
            self._store.remove(sent.popleft()[1])
        data = _HEADER.pack(mine.kind, len(mine.call), len(mine.fds)) + mine.call + mine.payload
        sent.append((number, self._store.set(f"{world:x}/{number}/{self._rank}", data)))

    def _collect(
        self, world: int, number: int, far: Sequence[int], found: dict[int, Frame], deadline: float,
        look: Callable[[], None],
    ) -> list[int]:  # fmt: skip
        """Add the frames of peers on other nodes to those found; return the ranks that were missing at the deadline."""
        keys = {peer: f"{world:x}/{number}/{peer}" for peer in far}
        pause, most = _PAUSE_S
        next_look = time.monotonic() + LOOK_S
        while keys and not self._store.has(keys.values()):
            now = time.monotonic()
            self.check_usable()
            if now < min(next_look, deadline):
                time.sleep(min(pause, deadline - now))
                pause = min(1.5 * pause, most)
                continue
            next_look = now + LOOK_S
            look()
            left = [peer for peer in keys if self._store.has([f"left/{peer}"])] if self._store.has(["left"]) else []
            if lost := [peer for peer in left if not self._store.has([keys[peer]])]:
                raise self.lost(lost)
            if now >= deadline:
                keys = {peer: key for peer, key in keys.items() if self._store.has([key])}
        for peer, data in zip(keys, self._store.get(keys.values()) if keys else (), strict=True):
            kind, length, num_fds = _HEADER.unpack_from(data)
            middle = _HEADER.size + length
            found[peer] = Frame(kind, data[_HEADER.size : middle], data[middle:], (), num_fds)
            self._seen[world, peer] = number
        return [peer for peer in far if peer not in keys]

    def _publish_wait(self, call: str, far: Sequence[int]) -> bool:
        """Let ranks of other nodes know in which call this one waits for them."""
        return bool(self._store.set(f"waits/{self._rank}", json.dumps([call, list(far)]).encode()))

    def waits_in(self, peer: int) -> list[str]:
        if peer in self._node or not self._store.has([f"waits/{peer}"]):
            return super().waits_in(peer)
        call, ranks = json.loads(self._store.get([f"waits/{peer}"])[0])
        return [call] if self._rank in ranks else []

    def check_peers(self, peers: Sequence[int], *, failed: bool = False) -> None:
        """Raise PeerLostError if the process of one is known to have ended, or after a failure its node is silent."""
        super().check_peers([peer for peer in peers if peer in self._node])
        self._look(peers)
        nodes = [node for node in self._far if failed and not set(peers).isdisjoint(node)]
        before = [self._beats(node) for node in nodes]
        until = time.monotonic() + _SILENT_S
        while nodes and time.monotonic() < until:
            time.sleep(LOOK_S)
            self._look(peers)  # another rank may know it, and end, perhaps with the store
        silent = [node for node, beats in zip(nodes, before, strict=True) if self._beats(node) == beats]
        if lost := [peer for node in silent for peer in node if peer in peers]:
            raise self.lost(lost)

    def _beat(self) -> None:
        """Show that this node is there, until the world is closed or the store is gone."""
        beats = itertools.count(1)
        with contextlib.suppress(PeerLostError):
            while not self._stopped.wait(_BEAT_S):
                self._store.set(f"beat/{self._rank}", str(next(beats)).encode())

    def _beats(self, node: Sequence[int]) -> list[bytes]:
        key = f"beat/{node[0]}"
        return self._store.get([key]) if self._store.has([key]) else []

    def _look(self, peers: Sequence[int]) -> None:
        """Raise the failure that was published first, unless it is that other ranks were lost."""
        now = time.monotonic()
        if self._failed is None and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._failed = self._store.failure()
        if self._failed is not None:
            error = self._opening.as_error(self._failed)
            if not (ranks := getattr(error, "ranks", ())) or not set(ranks).isdisjoint(peers):
                raise error

    def close(self) -> None:
        """Notify the peers, and close the connections; the last rank removes the world's keys.  Idempotent."""
        if self._closed:
            return
        super().close()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # it may be in a call of a store that is gone
        mine = [key for sent in list(self._sent.values()) for _, keys in sent for key in keys]
        try:
            self._store.set(f"left/{self._rank}", json.dumps(mine).encode())
            if self._store.count("left") == self._world_size:
                for rank in range(self._world_size):
                    keys, host = self._store.get([f"left/{rank}", f"host/{rank}"])
                    self._store.remove([*json.loads(keys), f"folder/{host.decode()}"])
                    self._store.remove(f"{name}/{rank}" for name in ("left", "waits", "host", "beat"))
                self._store.remove(["left", FAILED])
        except PeerLostError as e:
            logger.debug("the other nodes do not hear that this rank closes its world: %s", e)
