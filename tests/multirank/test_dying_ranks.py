"""Ranks that die while others open a world or use it, launchers that die, and processes that are forked off."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jobs_dying as jobs
import pytest

from iris_core.errors import IrisError
from iris_core.world import rendezvous
from iris_core.world.rendezvous import Folder

HANG_S = 300.0  # bounds a hang, and says nothing about how long anything takes
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Processes:
    """Processes that send one answer each; all are gone at the end."""

    def __init__(self, server):
        self._server = server
        self.started = []

    def start(self, main, *args):
        ours, theirs = self._server.Pipe(duplex=False)
        process = self._server.Process(target=main, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self.started.append((process, ours))
        return process

    def start_ranks(self, folder, num_ranks, job, *args):
        with contextlib.closing(Folder(folder)) as opened:
            for rank in range(num_ranks):
                process = self.start(jobs.rank_main, folder, rank, num_ranks, job, *args)
                opened.announce(rank, process.pid)

    def answer(self, index):
        pipe = self.started[index][1]
        assert pipe.poll(HANG_S), f"process {index} still runs"
        return pipe.recv()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        for process, pipe in self.started:
            process.kill()
            process.join()
            pipe.close()


def one_kill(server, seed, span_s):
    """Kill one of four ranks; returns by which error the others know, and how long after."""
    chosen = random.Random(seed)
    victim, moment = chosen.randrange(4), chosen.uniform(0, span_s)
    with tempfile.TemporaryDirectory() as folder, Processes(server) as ranks:
        ranks.start_ranks(folder, 4, jobs.use_until_it_fails)
        time.sleep(moment)
        when = jobs.end(ranks.started[victim][0])
        answers = [ranks.answer(rank) for rank in range(4) if rank != victim]
    for kind, lost, _, afterwards in answers:
        assert (kind, lost, afterwards) == ("PeerLostError", (victim,), ""), (seed, moment, answers)
    return max(heard - when for _, _, heard, _ in answers)


def test_all_survivors_name_the_rank_that_died_first(server, request):
    """At random moments of opening worlds, using and closing them."""
    number = 200 if request.config.getoption("exhaustive") else 8
    one_kill(server, 0, 1.0)  # imports
    took = sorted(one_kill(server, seed, 0.7 if seed % 4 else 0.05) for seed in range(number))
    print(f"{number} kills: all have heard of it after {took[number // 2]:.3f} s (median), {took[-1]:.3f} s (longest)")


LAUNCHER = """
import os, sys, time
if __name__ != "__main__":  # a rank imports this file, and does not end by itself
    with open(os.path.join({folder!r}, str(os.getpid())), "w"):
        pass
    time.sleep(600)
import iris_core

def main():
    time.sleep(600)

if __name__ == "__main__":
    iris_core.run(main, 2)
"""


def test_ranks_end_with_a_launcher_that_dies_while_they_import(tmp_path):
    script, noted = tmp_path / "script.py", tmp_path / "noted"
    noted.mkdir()
    script.write_text(LAUNCHER.format(folder=str(noted)))
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "TMPDIR": str(tmp_path)}) as launcher:
        wait_until(lambda: len(os.listdir(noted)) == 2)
        launcher.send_signal(signal.SIGKILL)
    pids = [int(name) for name in os.listdir(noted)]
    try:
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))
    finally:
        for pid in pids:
            if os.path.exists(f"/proc/{pid}/exe"):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- strangers --------------------------------------------------------------------------------------------------------
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
            processes.start(jobs.rank_main, None, rank, 2, jobs.open_by_variables, variables, str(tmp_path))
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
