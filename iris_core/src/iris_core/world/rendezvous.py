"""How ranks find each other: those of a host by files in a folder that only their user can enter.

A rank writes its process id there before anything else, so that the others notice when it dies, wherever it is by then.
Then it listens on a socket in the folder and writes a card: the socket's name and a token.  Of two ranks the higher one
connects; docs/architecture.md says what they check.  Connections of other processes are closed at once, so there is
never more than one of each rank to wait for.

Ranks of torch.distributed may be on several hosts, each with a folder of its own; its store says where a rank is.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import pwd
import secrets
import select
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core import errors
from iris_core.logs import logger
from iris_core.world.exchange import Exchanges, Frame, Link, credentials, gave_up, limit_of_files
from iris_core.world.failures import name_ranks
from iris_core.world.store_exchange import FAILED, LOOK_S, SharedStore, StoreExchanges

if TYPE_CHECKING:
    import torch.distributed as dist


VARIABLE = "IRIS_NODES"

_HELLO = 255  # kind of the first frame, which shows the token of the receiver's card
_PAUSE_S = 0.001, 0.02  # between two looks into the folder: at first, at most
_PF_EXITING = 4  # of a process's flags: its connections may be closed already
_KINDS = errors.PeerLostError, errors.CollectiveTimeoutError, errors.UnsupportedError, errors.IrisError
_ERRORS = {each.__name__: each for each in _KINDS}


# -- folders ----------------------------------------------------------------------------------------------------------
class Folder:
    """An open folder that belongs to this user, and that no other user can enter.

    Raises:
        IrisError: it belongs to another user, others can enter it, or it is no folder; the text names it and its owner.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                raise
            raise self._refused(os.stat(self.path, follow_symlinks=False)) from e
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self.fd)
            raise self._refused(found)

    def _refused(self, found: os.stat_result) -> errors.IrisError:
        owner = str(found.st_uid)
        with contextlib.suppress(KeyError):
            owner += f" ({pwd.getpwuid(found.st_uid).pw_name})"
        return errors.IrisError(
            f"{self.path} belongs to user {owner} and has mode {stat.filemode(found.st_mode)}; ranks use only a "
            f"folder of their own user, {os.geteuid()}, that no other user can enter. Remove it, or set "
            "XDG_RUNTIME_DIR or TMPDIR to a folder of this user"
        )

    def write(self, name: str, content: Mapping[str, Any], *, first: bool = False) -> Mapping[str, Any]:
        """Write a file atomically; if it is to be the `first` one, return the content of an earlier one instead."""
        temporary = f".{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        with open(fd, "w") as file:
            json.dump(content, file)
        if not first:
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            return content
        try:
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except FileExistsError:
            content = self.read(name) or content
        finally:
            os.unlink(temporary, dir_fd=self.fd)
        return content

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; None if there is none."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return dict(json.load(file))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def announce(self, rank: int, pid: int) -> None:
        """Write the process id of a rank, before anything else."""
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.write(f"pid.{rank}", {"pid": pid, "started": _started_at(pid), "at": at})

    def leave(self, rank: int) -> None:
        """Remove the process id of a rank; with that of the last process that lives, the folder."""
        self.remove(f"pid.{rank}")
        if not self.is_used():
            shutil.rmtree(self.path, ignore_errors=True)

    def is_used(self) -> bool:
        """Whether a process that has announced itself lives."""
        said = [self.read(name) for name in os.listdir(self.fd) if name.startswith("pid.")]
        return any(each is not None and _started_at(each["pid"]) == each["started"] for each in said)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def private_folder() -> str:
    """Make or find this user's folder for the files that ranks share; remove, once, what none has used for a day."""
    refused: Exception | None = None
    for place in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/dev/shm")):
        path = os.path.join(place, f"iris-{os.geteuid()}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            Folder(path).close()
            _remove_old(path)
            return path
        except (errors.IrisError, OSError) as e:
            if isinstance(e, errors.IrisError):
                logger.warning("%s", e)
            refused = e
    raise errors.IrisError(f"no folder for the rendezvous of ranks: {refused}")


@functools.cache  # once: hundreds of folders may be there
def _remove_old(base: str) -> None:
    for entry in os.scandir(base):
        with contextlib.suppress(OSError, errors.IrisError, ValueError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > 86400:
                with contextlib.closing(Folder(entry.path)) as old:
                    if not old.is_used():
                        shutil.rmtree(entry.path)


def named_folder(*parts: str) -> str:
    """Make or find the folder of all processes with the same parts."""
    digest = hashlib.sha256("\0".join((host_id(), *parts)).encode()).hexdigest()
    path = os.path.join(private_folder(), f"job-{digest[:24]}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    os.utime(path)
    return path


@functools.cache
def host_id() -> str:
    """Equal for two processes exactly if they see each other's process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "|".join(parts)


def _started_at(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None if it has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = line.rpartition(")")[2].split()
    return None if state in "ZX" or int(fields[5]) & _PF_EXITING else int(fields[18])


# -- nodes ------------------------------------------------------------------------------------------------------------
def divide(text: str, world_size: int) -> list[int]:
    """Return the node of each rank; all 0 where the text is empty.  SettingsError if it does not divide them."""
    from iris_core.settings import sizes_of  # pydantic is heavy

    sizes = sizes_of(text) if text else [world_size]
    if sum(sizes) != world_size:
        raise errors.SettingsError(f"{VARIABLE}={text!r} divides {sum(sizes)} ranks, but the world has {world_size}")
    return [node for node, size in enumerate(sizes) for _ in range(size)]


def group_by_node(hosts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, in the order of its lowest rank, from the host of each rank."""
    found: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))


# -- meeting there ----------------------------------------------------------------------------------------------------
def find_by_torch(group: dist.ProcessGroup | None) -> Opening:
    """Announce this process, by the store, to the ranks of a group of torch.distributed; to all ranks for None."""
    import torch.distributed as dist

    rank = dist.get_rank(group)
    if rank < 0:
        raise errors.GroupError("this process is not a member of the process group that was passed as group=")
    members = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    store, name = None if group is None else group.get_group_store(), "iris"
    if store is None:  # all ranks, or a group in Python that has none; a group's name may differ between its members
        store, name = dist.distributed_c10d._get_default_store(), f"iris/{group.group_name if group else ''}"
    host, refused = host_id(), None
    if asked := os.environ.get(VARIABLE):
        try:
            host += f"/node {divide(asked, dist.get_world_size())[dist.get_rank()]}"
        except errors.SettingsError as e:
            refused = e
    host = f"{hashlib.sha256(host.encode()).hexdigest()[:24]} {socket.gethostname()}"
    number = SharedStore(store, name, rank).count(f"made by {rank}")  # for each world that the members make
    shared = SharedStore(store, f"{name}/{number}", rank)
    folder = named_folder(shared.set_first(f"folder/{host}", {"key": secrets.token_hex(32)})["key"])
    return Opening(folder, rank, len(members), "1", True, members, shared, host, refused)


@dataclass(slots=True)
class _Peer:
    """A peer, as far as it is known."""

    pid: int = -1  # until it has announced itself
    pidfd: int | None = None
    card: dict[str, Any] | None = None  # where it listens
    link: Link | None = None
    proven: bool = False  # whether it has shown over this connection that it knows the token


@dataclass(eq=False)
class Opening:
    """One rank's way to connections with all others; they know its process from the beginning."""

    path: str  # of the folder
    rank: int
    world_size: int
    name: str  # of the world among those that are made there
    is_new: bool = True  # the folder was made for this job, so that all files there are the job's
    members: tuple[int, ...] | None = None  # the ranks in torch.distributed, where they come from there
    store: SharedStore | None = None  # of the world, likewise; then the folder is this world's alone, and goes with it
    host: str = ""  # equal for the ranks that can map each other's memory; its name comes after a space
    refused: errors.IrisError | None = None  # why this rank cannot take part

    def __post_init__(self) -> None:
        self._since = 0.0  # what happened before counts for nothing, in seconds since the machine was started
        if not self.is_new:
            self._since = (_started_at(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
        self._folder = Folder(self.path)
        self._pid = os.getpid()
        self._failed = f"failed.{self.name}"
        self._peers = {rank: _Peer() for rank in range(self.world_size) if rank != self.rank}
        self._store = self.store  # None where no rank is on another node
        self._next_look = 0.0
        # the ranks of each node; empty until all have said where they are
        self.nodes: tuple[tuple[int, ...], ...] = () if self.store else (tuple(range(self.world_size)),)
        self._hosts: list[str] = []  # of the nodes, their names
        self._token = secrets.token_bytes(32)
        self._socket_name = f"socket.{secrets.token_hex(8)}"
        self._card = f"card.{self.name}.{self.rank}"
        self._listener: socket.socket | None = None
        self._folder.announce(self.rank, self._pid)

    def run(self, timeout_s: float) -> Exchanges:
        """Return the connections with all other ranks; `timeout_s` bounds the way to them."""
        try:
            if self._store is not None:
                self._store.set(f"host/{self.rank}", self.host.encode())
            self._listen()
            self._connect_all(timeout_s)
        except BaseException as e:
            error = self.fail(e)
            if error is e:
                raise
            raise error from (None if isinstance(e, errors.IrisError) else e)
        finally:
            if self._listener is not None:
                self._listener.close()
        self._withdraw()
        links = {rank: peer.link for rank, peer in self._peers.items() if peer.link is not None}
        pidfds = {rank: peer.pidfd for rank, peer in self._peers.items() if peer.pidfd is not None}
        kind = Exchanges if self._store is None else StoreExchanges
        return kind(links, pidfds, self)

    def fail(self, error: BaseException) -> BaseException:
        """Release everything, and publish why this rank cannot go on; return the first error."""
        try:
            if isinstance(error, OSError) and not isinstance(error, errors.IrisError):
                more = f"; {limit_of_files()}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
                error = errors.IrisError(f"cannot open the world: {error}{more}")
            if isinstance(error, errors.IrisError):
                return self.first_error(error)
            self.first_error(gave_up(self.rank, "gave up opening its world", error))
            return error
        finally:
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.close()
                if peer.pidfd is not None:
                    os.close(peer.pidfd)
            self._withdraw()
            if all(peer.pid >= 0 for peer in self._peers.values()):  # else the folder is for those who come late
                self.leave()
            self._folder.close()

    def _withdraw(self) -> None:
        """Remove what others connect by."""
        for name in (self._card, self._socket_name):
            self._folder.remove(name)

    def leave(self) -> None:
        """Close the folder with the world; its files stay if this process was forked off."""
        if self.store is not None and self._folder.fd >= 0 and os.getpid() == self._pid:
            self._folder.leave(self.rank)
        self._folder.close()

    def first_error(self, error: errors.IrisError) -> errors.IrisError:
        """Publish an error to the other ranks, unless there is an earlier one; return the first one."""
        kind = next(name for name, each in _ERRORS.items() if isinstance(error, each))
        ranks = getattr(error, "ranks", ()) or getattr(error, "missing_ranks", ())
        me, at = self.rank, time.clock_gettime(time.CLOCK_BOOTTIME)
        mine: Mapping[str, Any] = {"kind": kind, "by": me, "ranks": list(ranks), "text": str(error), "at": at}
        with contextlib.suppress(OSError):  # the folder was emptied: then what this rank knows must do
            found = self._folder.read(self._failed)
            if found is not None and found["at"] < self._since:
                self._folder.write(self._failed, mine)
            mine = self._folder.write(self._failed, mine, first=True)
        return self.as_error(self._first_of_all_nodes(mine))

    def _first_of_all_nodes(self, said: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._store is not None:
            with contextlib.suppress(errors.PeerLostError):  # the store is gone: then what this node knows must do
                said = self._store.set_first(FAILED, said)
        return said

    def as_error(self, said: Mapping[str, Any]) -> errors.IrisError:
        """Make the error of a failure that was published."""
        me = self.rank
        named = {"PeerLostError": "ranks", "CollectiveTimeoutError": "missing_ranks"}.get(said["kind"])
        by = "" if named or said["by"] == me else f"rank {said['by']}: "
        text = f"rank {me}: {by}{said['text']}" + self._where(said["ranks"])
        return _ERRORS[said["kind"]](text, **({} if named is None else {named: said["ranks"]}))

    def _where(self, ranks: Sequence[int]) -> str:
        """Return the nodes of ranks, for a message; nothing if there is one."""
        found = []
        for number, (host, node) in enumerate(zip(self._hosts, self.nodes, strict=True) if self._hosts[1:] else ()):
            if its := [rank for rank in node if rank in ranks]:
                every = "all of" if len(its) == len(node) else name_ranks(its) + " of"
                found.append(f"{every} node {number} ({host})")
        return f" [{', '.join(found)}]" if found else ""

    # -- steps --------------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self._address(self._socket_name))
        self._listener.listen(128)
        self._folder.write(self._card, {"pid": self._pid, "socket": self._socket_name, "token": self._token.hex()})

    def _address(self, name: str) -> str:
        """Return a socket's path; through the descriptor, because paths of sockets have 107 bytes at most."""
        return f"/proc/self/fd/{self._folder.fd}/{name}"

    def _connect_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause, most = _PAUSE_S
        while not (self.nodes and all(peer.proven for peer in self._peers.values())):
            failed = self._folder.read(self._failed)
            if failed is not None and failed["at"] >= self._since:
                raise self.as_error(self._first_of_all_nodes(failed))
            if self._store is not None:
                self._look_into(self._store)
            for rank, peer in self._peers.items():
                if not peer.proven:
                    self._look_after(rank, peer)
            self._accept()
            self._look_for_the_dead()
            if time.monotonic() >= deadline:
                raise self._late(timeout_s)
            poll = select.poll()
            for each in (self._listener, *(peer.link for peer in self._peers.values() if not peer.proven)):
                if each is not None:
                    poll.register(each, select.POLLIN)
            poll.poll(1e3 * pause)
            pause = min(1.5 * pause, most)

    def _look_into(self, store: SharedStore) -> None:
        """Find out who is on this node, and raise what has happened on others."""
        hosts = [f"host/{rank}" for rank in range(self.world_size)]
        if not self.nodes and store.has(hosts):
            found = store.get(hosts)
            self.nodes = group_by_node(found)
            self._hosts = [found[ranks[0]].decode().partition(" ")[2] for ranks in self.nodes]
            mine = next(ranks for ranks in self.nodes if self.rank in ranks)
            self._peers = {rank: peer for rank, peer in self._peers.items() if rank in mine}
        now = time.monotonic()
        is_last_look = len(self.nodes) == 1
        if is_last_look or now >= self._next_look:
            self._next_look = now + LOOK_S
            if (failed := store.failure()) is not None:
                raise self.as_error(failed)
        if is_last_look:
            self._store = None

    def _look_after(self, rank: int, peer: _Peer) -> None:
        """Advance the connection with one peer as far as possible."""
        card = peer.card or self._folder.read(f"card.{self.name}.{rank}")
        said = None if card is not None and card["pid"] == peer.pid else self._folder.read(f"pid.{rank}")
        if said is not None and said["pid"] != peer.pid:
            self._watch(rank, peer, said)
        if card is None or peer.pidfd is None or card["pid"] != peer.pid:
            return  # not here yet, or of an earlier process
        peer.card = card
        if peer.link is None and rank < self.rank:
            self._connect(peer, card)
        if peer.link is not None:
            self._prove(peer, peer.link)

    def _watch(self, rank: int, peer: _Peer, said: Mapping[str, Any]) -> None:
        """Open a descriptor of a peer's process."""
        pid, pidfd = said["pid"], None
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
        # another process may have its number now
        alive = pidfd is not None and _started_at(pid) == said["started"]
        if alive:
            pidfd, peer.pid, peer.pidfd = peer.pidfd, pid, pidfd
        if pidfd is not None:
            os.close(pidfd)
        if not alive and said["at"] >= self._since:  # else of an earlier job that had the same name
            raise _lost(rank, pid)

    def _connect(self, peer: _Peer, card: Mapping[str, Any]) -> None:
        """Connect to a lower rank, and show its token."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._address(card["socket"]))
            if credentials(connection) != (card["pid"], os.geteuid()):
                raise ConnectionRefusedError
        except OSError:  # its queue is full, or it is gone
            connection.close()
            return
        self._greet(peer, connection, card)

    def _accept(self) -> None:
        """Take connections of higher ranks."""
        assert self._listener is not None
        for _ in range(128):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            pid, uid = credentials(connection)
            known = [peer for rank, peer in self._peers.items() if peer.pid == pid and rank > self.rank]
            if uid != os.geteuid() or not known or known[0].card is None or known[0].proven:
                connection.close()  # a stranger, or a rank that will ask again when it is known
                continue
            if known[0].link is not None:
                known[0].link.close()
            self._greet(known[0], connection, known[0].card)

    @staticmethod
    def _greet(peer: _Peer, connection: socket.socket, card: Mapping[str, Any]) -> None:
        peer.link = Link(connection)
        peer.link.post(0, 0, Frame(_HELLO, payload=bytes.fromhex(card["token"])))

    def _prove(self, peer: _Peer, link: Link) -> None:
        """Check that a peer has shown this rank's token; close the connection if not."""
        link.receive()
        hello = link.take(0, 0)
        if hello is not None:
            peer.proven = hello.kind == _HELLO and hmac.compare_digest(hello.payload, self._token)
        if not peer.proven and (hello is not None or link.ended):
            link.close()
            peer.link = None

    def _look_for_the_dead(self) -> None:
        watched = {peer.pidfd: rank for rank, peer in self._peers.items() if peer.pidfd is not None}
        poll = select.poll()
        for pidfd in watched:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            rank = watched[pidfd]
            peer = self._peers[rank]
            said = self._folder.read(f"pid.{rank}")
            if said is None or said["at"] >= self._since:
                raise _lost(rank, peer.pid)
            os.close(pidfd)
            peer.pid, peer.pidfd = -1, None  # of an earlier job, which has ended only now

    def _late(self, timeout_s: float) -> errors.CollectiveTimeoutError:
        missing = [rank for rank, peer in self._peers.items() if not peer.proven and peer.card is None]
        missing = missing or [rank for rank, peer in self._peers.items() if not peer.proven]
        if not self.nodes and self._store is not None:
            missing = [rank for rank in self._peers if not self._store.has([f"host/{rank}"])] or missing
        started = [rank for rank in missing if self._peers[rank].pidfd is not None]
        where = f" (of these, {name_ranks(started)} has started)" if started else ""
        return errors.CollectiveTimeoutError(
            f"opening the world of {self.world_size} ranks did not complete within the timeout of "
            f"{timeout_s:g} s; {name_ranks(missing)} did not arrive{where}. Either that rank failed, or it does not "
            "make the same calls, or it runs on another host, or IRIS_BARRIER_TIMEOUT is too short",
            missing_ranks=missing,
        )


def _lost(rank: int, pid: int) -> errors.PeerLostError:
    text = f"rank {rank} (process {pid}) ended while the world was opened; look at its output for the first error"
    return errors.PeerLostError(text, ranks=[rank])
