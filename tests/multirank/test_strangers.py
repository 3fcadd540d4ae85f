"""Processes that are no ranks of a world: they get nothing, and disturb nothing."""

import json
import os
import socket
import tempfile

import jobs_strangers as jobs
import pytest
from rank_processes import HANG_S, Processes, wait_until

from iris_core.errors import IrisError
from iris_core.world import rendezvous
from iris_core.world.rendezvous import Folder

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("let_in", [False, True], ids=["as it is", "let into the folder, with the tokens"])
@pytest.mark.parametrize("uid", [pytest.param(NOBODY, marks=as_root), os.geteuid()], ids=["nobody", "the same user"])
def test_strangers_get_nothing_and_disturb_nothing(server, uid, let_in):
    """500 connections, garbage and descriptors, while ranks with 256 descriptors wait for one that is late."""
    if uid == os.geteuid() and not let_in:
        pytest.skip("the same user can enter the folder")
    with tempfile.TemporaryDirectory() as folder, Processes(server) as processes:
        processes.start_ranks(folder, 3, jobs.open_late, f"{folder}/go", 256)
        ready = ("card.1.0", "card.1.1", "go.asked")
        wait_until(lambda: all(os.path.exists(f"{folder}/{name}") for name in ready))
        cards = []
        for rank in (0, 1):
            with open(f"{folder}/card.1.{rank}") as file:
                cards.append(json.load(file))
            if let_in:
                os.chmod(f"{folder}/{cards[-1]['socket']}", 0o777)
        if let_in:
            os.chmod(folder, 0o711)
        processes.start(jobs.stranger_main, uid, jobs.flood, folder, cards, 500)
        found, errors = processes.answer(3)
        os.chmod(folder, 0o700)
        with open(f"{folder}/go", "w"):
            pass
        assert found <= {b""}
        if not let_in:
            assert errors == {"EACCES"}
        assert [processes.answer(rank) for rank in range(3)] == [[0, 1, 2, "0", "1", "2"]] * 3


@pytest.fixture
def opening(tmp_path):
    """Rank 0 of 2, which listens."""
    tmp_path.chmod(0o700)
    opening = rendezvous.Opening(rendezvous.Rendezvous(str(tmp_path), 0, 2, "1"))
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


def test_a_process_of_no_rank_is_hung_up_on_at_once(opening):
    with greet(opening) as connection:
        assert opening._peers[1].link is None
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


@pytest.mark.parametrize("token", ["the right one", "another one"])
def test_a_rank_shows_the_token_of_the_others_card(opening, token):
    peer, theirs = opening._peers[1], bytes(range(32))
    peer.pid, peer.card = os.getpid(), {"pid": os.getpid(), "socket": "socket", "token": theirs.hex()}
    shown = opening._token if token == "the right one" else bytes(32)
    with greet(opening, jobs.hello(shown)) as connection:
        opening._prove(peer, peer.link)
        assert peer.proven == (peer.link is not None) == (token == "the right one")
        assert connection.recv(100) == jobs.hello(theirs)


@as_root
def test_a_folder_that_a_stranger_has_made_beforehand(server, tmp_path):
    """The ranks take another one."""
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith(tempfile.gettempdir() + "/"):
            parent.chmod(0o755)
    name = f"iris-{os.geteuid()}"
    with Processes(server) as processes:
        processes.start(jobs.stranger_main, NOBODY, jobs.squat, str(tmp_path), name)
        assert processes.answer(0)
        variables = {"MASTER_ADDR": "here", "MASTER_PORT": str(os.getpid())}
        for rank in range(2):
            processes.start(jobs.open_by_variables, rank, 2, variables, str(tmp_path))
        assert [processes.answer(1 + rank) for rank in range(2)] == [([(0,), (1,)], [name])] * 2
    assert os.listdir(tmp_path / name) == []
    with pytest.raises(IrisError, match=rf"{name} belongs to user {NOBODY}"):
        Folder(tmp_path / name)


@pytest.mark.parametrize("kind", ["link", "open to others", "a file"])
def test_folders_that_are_not_safe(tmp_path, kind):
    path = tmp_path / "folder"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        path.touch()
    else:
        path.mkdir(0o750)
    with pytest.raises(IrisError, match=r"folder belongs to user \d+ .* has mode"):
        Folder(path)
