"""Ranks that wait for others, and strangers that try to disturb them."""

import array
import contextlib
import errno
import os
import resource
import socket
import struct
import tempfile
import time
import warnings

from iris_core.world import connect


def open_late(tell, go, limit):
    """Open a world with few descriptors, the last rank when there is a file, and use it; tell what it has seen."""
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
    tell(seen)


def open_by_variables(tell, rank, num_ranks, variables, folder):
    """Open a world by torchrun's variables, in a folder for temporary files that others can write to."""
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ.update(variables, TMPDIR=folder, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    tempfile.tempdir = None
    world = connect(None, 60.0)
    seen = world.all_gather_ints([world.rank])
    world.close()
    tell((seen, sorted(os.listdir(folder))))


def stranger_main(tell, uid, job, *args):
    """Run a job as another user, and tell what it returns."""
    warnings.simplefilter("ignore")
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    tell(job(*args))


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
