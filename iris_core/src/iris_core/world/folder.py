"""Where the ranks of one host leave word for each other: folders that only their user can enter."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import pwd
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from iris_core.errors import CollectiveTimeoutError, IrisError, PeerLostError, UnsupportedError
from iris_core.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OLD_S = 86400.0
_ERRORS = {each.__name__: each for each in (PeerLostError, CollectiveTimeoutError, UnsupportedError, IrisError)}


class Folder:
    """An open folder that belongs to this user, and that nobody else can enter.

    Args:
        path: the folder.
        parent: a descriptor of the folder to which `path` is relative.

    Raises:
        IrisError: it belongs to another user, others can enter it, or it is no folder; the text names it and its owner.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], parent: int | None = None) -> None:
        self.path = os.fspath(path)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                raise
            found = os.stat(self.path, dir_fd=parent, follow_symlinks=False)
            raise self._refused(found) from e
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self.fd)
            raise self._refused(found)

    def _refused(self, found: os.stat_result) -> IrisError:
        owner = str(found.st_uid)
        with contextlib.suppress(KeyError):
            owner += f" ({pwd.getpwuid(found.st_uid).pw_name})"
        return IrisError(
            f"{self.path} belongs to user {owner} and has mode {stat.filemode(found.st_mode)}; ranks meet only in a "
            f"folder that belongs to their own user, {os.geteuid()}, and that nobody else can enter. Remove it, or set "
            "XDG_RUNTIME_DIR or TMPDIR to a folder of this user"
        )

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file, all of it at once."""
        os.rename(self._temporary(content), name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def write_first(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write a file unless there is one; returns what the file says."""
        temporary = self._temporary(content)
        try:
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except FileExistsError:
            content = self.read(name) or content
        finally:
            os.unlink(temporary, dir_fd=self.fd)
        return dict(content)

    def read(self, name: str) -> dict[str, Any] | None:
        """What a file says; None if there is none."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return dict(json.load(file))

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _temporary(self, content: Mapping[str, Any]) -> str:
        name = f".{secrets.token_hex(8)}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        with open(fd, "w") as file:
            json.dump(content, file)
        return name


class Failed(NamedTuple):
    """What the first rank that could not go on has left for the others."""

    kind: str
    ranks: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, error: IrisError) -> Failed:
        """What an error says."""
        kind = next(name for name, each in _ERRORS.items() if isinstance(error, each))
        ranks = getattr(error, "ranks", ()) or getattr(error, "missing_ranks", ())
        return cls(kind, tuple(ranks), str(error))

    def error(self, rank: int) -> IrisError:
        """The same error for this rank."""
        text = f"rank {rank}: {self.text}"
        if self.kind == "PeerLostError":
            return PeerLostError(text, ranks=self.ranks)
        if self.kind == "CollectiveTimeoutError":
            return CollectiveTimeoutError(text, missing_ranks=self.ranks)
        return _ERRORS[self.kind](text)


class FirstFailure:
    """The one file of a world that says why it failed first.

    Args:
        folder: where the ranks of the world have met.
        name: of the world there.
        leave: called once, at the end.
        since: what happened before counts for nothing (seconds of CLOCK_BOOTTIME).
    """

    def __init__(self, folder: Folder, name: str, leave: Callable[[], None], since: float = 0.0) -> None:
        self._folder, self._name = folder, f"failed.{name}"
        self._leave, self._since = leave, since
        self._pid = os.getpid()

    def note(self, failed: Failed) -> Failed:
        """Let the other ranks know what happened, unless one has known something before; returns what was first."""
        mine = {**failed._asdict(), "at": time.clock_gettime(time.CLOCK_BOOTTIME)}
        try:
            if self._folder.read(self._name) is not None and self.read() is None:
                self._folder.write(self._name, mine)
            return self._failed(self._folder.write_first(self._name, mine))
        except OSError:  # somebody has emptied the folder: then what this rank knows must do
            return self._failed(mine)

    def read(self) -> Failed | None:
        """What was first; None if nothing is known."""
        found = self._folder.read(self._name)
        return None if found is None or found["at"] < self._since else self._failed(found)

    @staticmethod
    def _failed(said: Mapping[str, Any]) -> Failed:
        return Failed(said["kind"], tuple(said["ranks"]), said["text"])

    def close(self) -> None:
        """Let go of the folder; its files stay for the others if this process was forked off."""
        if self._folder.fd >= 0 and os.getpid() == self._pid:
            self._leave()
        self._folder.close()


def announce(folder: Folder, rank: int, pid: int | None = None) -> None:
    """Write a rank's process id into the folder, before anything else; this process's by default."""
    pid = os.getpid() if pid is None else pid
    folder.write(
        f"pid.{rank}",
        {
            "pid": pid,
            "started": started_at(pid),
            "at": time.clock_gettime(time.CLOCK_BOOTTIME),
            "host": host_id(),
        },
    )


def private_folder() -> Folder:
    """Open the folder of this user for all that ranks leave for each other; made if there is none.

    Raises:
        IrisError: no folder is safe; the text says what is wrong with the last one.
    """
    refused: Exception | None = None
    for place in dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/dev/shm")):
        if not place:
            continue
        path = os.path.join(place, f"iris-{os.geteuid()}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            return Folder(path)
        except (IrisError, OSError) as e:
            if isinstance(e, IrisError):
                logger.warning("%s", e)
            refused = e
    raise refused if isinstance(refused, IrisError) else IrisError(f"ranks find no folder to meet in: {refused}")


def new_folder() -> str:
    """Make a folder for one world, and remove those that nobody has used for a day."""
    base = private_folder()
    try:
        for entry in os.scandir(base.path):
            with contextlib.suppress(OSError, IrisError, ValueError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_S and not _in_use(entry.path):
                    shutil.rmtree(entry.path)
        return tempfile.mkdtemp(prefix="world-", dir=base.path)
    finally:
        base.close()


def _in_use(path: str) -> bool:
    """Whether a process lives that has announced itself there."""
    folder = Folder(path)
    try:
        said = [folder.read(name) for name in os.listdir(folder.fd) if name.startswith("pid.")]
    finally:
        folder.close()
    return any(each is not None and started_at(each["pid"]) == each["started"] for each in said)


def named_folder(*parts: str) -> str:
    """Make or find the folder that all processes of this user with the same parts have."""
    base = private_folder()
    try:
        name = "job-" + hashlib.sha256("\0".join((host_id(), *parts)).encode()).hexdigest()[:24]
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=base.fd)
        os.utime(name, dir_fd=base.fd)
        return os.path.join(base.path, name)
    finally:
        base.close()


@functools.cache
def host_id() -> str:
    """Equal for two processes exactly if they see each other's process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "|".join(parts)


def started_at(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None if it is gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(line.rpartition(")")[2].split()[19])


def began() -> float:
    """When this process was started, in seconds since the machine was."""
    started = started_at(os.getpid())
    assert started is not None
    return started / os.sysconf("SC_CLK_TCK")
