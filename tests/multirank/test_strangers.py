"""Processes that are no ranks of a world: they get nothing, and disturb nothing."""

import array
import contextlib
import errno
import json
import os
import resource
import socket
import struct
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from rank_processes import HANG_S, Processes, wait_until
from tables import raises, table

from iris_core.errors import IrisError
from iris_core.types import Segment
from iris_core.world import connect, rendezvous
from iris_core.world.rendezvous import Folder


def open_late(tell, go, limit):
    """Open a world with few descriptors, the last rank when there is a file, and use it; tell what it has seen."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        Path(f"{go}.asked").touch()
        while not os.path.exists(go):
            time.sleep(0.02)
    world = connect(None, 60.0)
    seen = world.all_gather_object(world.rank)
    fd = os.memfd_create("mine")
    os.write(fd, b"%d" % world.rank)
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
    warnings.simplefilter("ignore")
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    tell(job(*args))


def squat(folder, name):
    os.mkdir(os.path.join(folder, name), 0o777)
    return True


def hello(token):
    """The frame with which a rank begins."""
    return struct.pack("<QQBHIQ", 0, 0, 255, 0, 0, len(token)) + token


def flood(folder, cards, number):
    """Connect to ranks, many times, and send all sorts of things; what came back, and which errors there were.

    The ranks' cards, which no stranger can read, have tokens and names of sockets.
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


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("let_in", [False, True], ids=["as it is", "let into the folder, with the tokens"])
@pytest.mark.parametrize("uid", [pytest.param(NOBODY, marks=as_root), os.geteuid()], ids=["nobody", "the same user"])
def test_strangers_get_nothing_and_disturb_nothing(server, uid, let_in):
    """500 connections, garbage and descriptors, while ranks with 256 descriptors wait for one that is late."""
    if uid == os.geteuid() and not let_in:
        pytest.skip("the same user can enter the folder")
    with tempfile.TemporaryDirectory() as folder, Processes(server) as processes:
        processes.start_ranks(folder, 3, open_late, f"{folder}/go", 256)
        ready = ("card.1.0", "card.1.1", "go.asked")
        wait_until(lambda: all(os.path.exists(f"{folder}/{name}") for name in ready))
        cards = [json.loads(Path(folder, f"card.1.{rank}").read_text()) for rank in (0, 1)]
        if let_in:
            os.chmod(folder, 0o711)
            for card in cards:
                os.chmod(f"{folder}/{card['socket']}", 0o777)
        processes.start(stranger_main, uid, flood, folder, cards, 500)
        found, errors = processes.answer(3)
        os.chmod(folder, 0o700)
        Path(folder, "go").touch()
        assert found <= {b""}
        if not let_in:
            assert errors == {"EACCES"}
        assert [processes.answer(rank) for rank in range(3)] == [[0, 1, 2, "0", "1", "2"]] * 3


@pytest.fixture
def opening(tmp_path):
    """Rank 0 of 2, which listens."""
    tmp_path.chmod(0o700)
    opening = rendezvous.Opening(str(tmp_path), 0, 2, "1")
    opening._listen()
    yield opening
    opening._listener.close()
    opening.fail(RuntimeError())


def greet(opening, said=b""):
    """Connect from this process, and let the rank look; the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(HANG_S)
    connection.connect(opening._address(opening._socket_name))
    connection.sendall(said or b"\0")
    opening._accept()
    return connection


@pytest.mark.parametrize("token", ["the right one", "another one"])
def test_a_rank_shows_the_token_of_the_others_card(opening, token):
    peer, theirs = opening._peers[1], bytes(range(32))
    peer.pid, peer.card = os.getpid(), {"pid": os.getpid(), "socket": "socket", "token": theirs.hex()}
    shown = opening._token if token == "the right one" else bytes(32)
    with greet(opening, hello(shown)) as connection:
        opening._prove(peer, peer.link)
        assert peer.proven == (peer.link is not None) == (token == "the right one")
        assert connection.recv(100) == hello(theirs)


@as_root
def test_a_folder_that_a_stranger_has_made_beforehand(server, tmp_path):
    """The ranks take another one."""
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith(tempfile.gettempdir() + "/"):
            parent.chmod(0o755)
    name = f"iris-{os.geteuid()}"
    with Processes(server) as processes:
        processes.start(stranger_main, NOBODY, squat, str(tmp_path), name)
        assert processes.answer(0)
        variables = {"MASTER_ADDR": "here", "MASTER_PORT": str(os.getpid())}
        for rank in range(2):
            processes.start(open_by_variables, rank, 2, variables, str(tmp_path))
        assert [processes.answer(1 + rank) for rank in range(2)] == [([(0,), (1,)], [name])] * 2
    assert os.listdir(tmp_path / name) == []
    with raises(IrisError, "world.stranger", name=name, user=NOBODY):
        Folder(tmp_path / name)


@table("make", [lambda path: path.symlink_to(path.parent), lambda path: path.mkdir(0o750), Path.touch])
def test_folders_that_are_not_safe(tmp_path, make):
    """A link, one that is open to others, and a file."""
    tmp_path.chmod(0o700)
    make(path := tmp_path / "folder")
    with raises(IrisError, "world.mode"):
        Folder(path)
