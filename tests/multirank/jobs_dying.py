"""Ranks that a process with everything imported forks off, so that opening a world takes a moment; and strangers."""

import array
import contextlib
import errno
import os
import resource
import signal
import socket
import struct
import tempfile
import time
import warnings

import iris_triton.context  # noqa: F401 - imported once, for all ranks
from iris_core import Iris
from iris_core.errors import IrisError
from iris_core.world import connect
from iris_core.world.launch import join_rank


def rank_main(pipe, folder, rank, num_ranks, job, *args):
    """Run a job as one rank, whose process others have announced; sends what it returns."""
    if folder is None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    else:
        join_rank(folder, rank, num_ranks, torch_distributed=False)
    pipe.send(job(*args))
    pipe.close()


def use_until_it_fails():
    """Open a context and use it, over and over; what the first error is, when, and what closing raises then."""
    kind, ranks, when, afterwards = "", (), 0.0, ""
    while not kind:
        ctx = None
        try:
            ctx = Iris("1MiB", device="cpu")
            for _ in range(3):
                x = ctx.zeros(64)
                ctx.barrier()
                ctx.ccl.all_reduce(x, x)
                ctx.free(x)
        except IrisError as error:
            when, kind, ranks = time.monotonic(), type(error).__name__, getattr(error, "ranks", ())
        try:
            if ctx is not None:
                ctx.close()
        except Exception as error:  # noqa: BLE001 - told to the test
            if not kind:
                when, kind, ranks = time.monotonic(), type(error).__name__, getattr(error, "ranks", ())
            else:
                afterwards = repr(error)
    return kind, tuple(ranks), when, afterwards


def open_late(go, limit):
    """Open a world with few descriptors, the last rank when there is a file, and use it; returns what it has seen."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        with open(f"{go}.asked", "w"):
            pass
        while not os.path.exists(go):
            time.sleep(0.02)
    world = connect(None, 60.0)
    seen = world.all_gather_object(world.rank)
    fd = os.memfd_create("mine")
    os.write(fd, b"%d" % world.rank)
    from iris_core.types import Segment

    rows = world.exchange_segments([Segment(0, 1, b"", fd)])
    seen += [os.pread(row[0].fd, 9, 0).decode() for row in rows]
    world.barrier()
    world.close()
    return seen


def open_by_variables(variables, folder):
    """Open a world by torchrun's variables, in a folder for temporary files that others can write to."""
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ.update(variables, TMPDIR=folder)
    tempfile.tempdir = None
    world = connect(None, 60.0)
    seen = world.all_gather_ints([world.rank])
    world.close()
    return seen, sorted(os.listdir(folder))


def stranger_main(pipe, uid, job, *args):
    """Run a job as another user; sends what it returns."""
    warnings.simplefilter("ignore")
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    pipe.send(job(*args))
    pipe.close()


def squat(folder, name):
    """Make the folder of another user beforehand."""
    os.mkdir(os.path.join(folder, name), 0o777)
    return True


def hello(token):
    """The frame with which a rank begins."""
    return struct.pack("<QQBHIQ", 0, 0, 255, 0, 0, len(token)) + token


def flood(folder, cards, number):
    """Connect to ranks, many times, and send all sorts of things; what came back, and which errors there were.

    Args:
        folder: where the ranks meet.
        cards: what stands on their cards, which no stranger can read: tokens and names of sockets.
        number: of connections.
    """
    found, connections, errors = set(), [], set()
    for index in range(number):
        card = cards[index % len(cards)]
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5.0)
        try:
            connection.connect(os.path.join(folder, card["socket"]))
            greeting = hello(bytes.fromhex(card["token"]))
            kinds = [b"", b"garbage" * 1000, greeting[:20], greeting]
            fds = [] if index % 5 else [0, 1]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            connection.sendmsg([kinds[index % 4] or b"\0"], rights)
            connections.append(connection)
        except OSError as error:
            errors.add(errno.errorcode[error.errno] if error.errno else type(error).__name__)
            connection.close()
    for connection in connections:
        with contextlib.suppress(ConnectionResetError):
            found.add(connection.recv(1000))
        connection.close()
    return found, errors


def end(process):
    """Kill a process that this one has started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()
