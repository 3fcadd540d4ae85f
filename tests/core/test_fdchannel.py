"""Descriptors between ranks: every rank gets every peer's, strangers get nothing and disturb nothing."""

import errno
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading

import pytest

from iris_core import fdchannel
from iris_core.errors import CollectiveTimeoutError, IrisError, PeerAccessError
from iris_core.fdchannel import FdChannel


class ThreadWorld:
    """Ranks that are threads of this process."""

    def __init__(self, rank, shared):
        self.rank = rank
        self.world_size = shared.size
        self._shared = shared

    @property
    def pids(self):
        return [os.getpid()] * self.world_size

    def all_gather_object(self, obj):
        shared = self._shared
        out = shared.gather(self.rank, obj)
        if not shared.gathered.is_set():  # the first time: addresses and tokens
            shared.addresses = out
            shared.barrier.wait(20)
            shared.gathered.set()
            if self.rank in shared.late:
                assert shared.proceed.wait(20)
        return out

    def all_gather_ints(self, values):
        return [tuple(row) for row in self._shared.gather(self.rank, values)]

    def check_peers(self):
        pass


class Shared:
    def __init__(self, size, late=()):
        self.size, self.late = size, late
        self.slots = [None] * size
        self.barrier = threading.Barrier(size)
        self.gathered, self.proceed = threading.Event(), threading.Event()
        self.addresses = []

    def gather(self, rank, obj):
        self.slots[rank] = obj
        self.barrier.wait(20)
        out = list(self.slots)
        self.barrier.wait(20)
        return out


class Run:
    """The exchange on every rank; `results` are lists of descriptors or errors."""

    def __init__(self, shared, per_rank, timeout_s=10.0, counts=None):
        self.shared = shared
        self._results = [None] * shared.size
        self._arguments = per_rank, counts or [len(fds) for fds in per_rank], timeout_s
        self._threads = [threading.Thread(target=self._work, args=(rank,)) for rank in range(shared.size)]
        for thread in self._threads:
            thread.start()

    def _work(self, rank):
        per_rank, counts, timeout_s = self._arguments
        try:
            channel = FdChannel(ThreadWorld(rank, self.shared))
            self._results[rank] = channel.exchange(per_rank[rank], counts, timeout_s)
        except IrisError as e:
            self._results[rank] = e
        except Exception as e:  # noqa: BLE001 - looked at by the test
            self.shared.barrier.abort()
            self._results[rank] = e

    @property
    def addresses(self):
        """(address, token) of every rank."""
        assert self.shared.gathered.wait(10)
        return self.shared.addresses

    @property
    def results(self):
        self.shared.proceed.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self._results

    def same_error(self, kind):
        """Check that every rank raised the same; return its text."""
        assert [type(e) for e in self.results] == [kind] * self.shared.size, self.results
        assert len({str(e) for e in self.results}) == 1
        return str(self.results[0])


@pytest.fixture(autouse=True)
def _nothing_leaks():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before  # what an earlier test has left may go at any time


def files(names):
    fds = []
    for name in names:
        fd = os.memfd_create(name)
        os.write(fd, name.encode())
        fds.append(fd)
    return fds


def content(fd):
    return os.pread(fd, 100, 0).decode()


def close_all(*groups):
    for group in groups:
        for fd in group:
            os.close(fd)


def received_all(run, mine):
    """Whether every rank has every peer's descriptors; closes them all."""
    results = run.results
    seen = [[[content(fd) for fd in fds] for fds in received] for received in results]
    close_all(*mine, *(fds for received in results for fds in received))
    return seen


def test_every_rank_gets_every_peers_descriptors():
    names = [[], ["b0"], [f"c{i}" for i in range(450)]]
    mine = [files(each) for each in names]
    seen = received_all(Run(Shared(3), mine), mine)
    assert seen == [[each if peer != rank else [] for peer, each in enumerate(names)] for rank in range(3)]


def connect(address):
    s = socket.socket(socket.AF_UNIX)
    s.connect(address)
    return s


def got(s):
    """The descriptors that come over a connection until it is closed."""
    s.settimeout(5)
    try:
        return socket.recv_fds(s, 1, 9)[1]
    except OSError:  # reset
        return []
    finally:
        s.close()


@pytest.mark.parametrize("stranger", ["wrong token", "silent", "no such rank", "half a greeting", "the own rank"])
def test_a_stranger_gets_nothing_and_disturbs_nothing(stranger):
    mine = [files(["a"]), files(["b"])]
    run = Run(Shared(2, late={0, 1}), mine)  # the stranger is the first in the queue
    strangers, theirs = [], files(["stranger"])
    for rank, (address, token) in enumerate(run.addresses):
        strangers.append(connect(address))
        if stranger == "wrong token":
            strangers[-1].sendall(struct.pack("<I", 1 - rank) + secrets.token_bytes(32))
            socket.send_fds(strangers[-1], [b"."], theirs)
        elif stranger == "no such rank":
            strangers[-1].sendall(struct.pack("<I", 77) + token)
        elif stranger == "the own rank":
            strangers[-1].sendall(struct.pack("<I", rank) + token)
        elif stranger == "half a greeting":
            strangers[-1].sendall(struct.pack("<I", 1 - rank) + token[:5])
    assert received_all(run, mine) == [[[], ["b"]], [["a"], []]]
    assert [got(s) for s in strangers] == [[]] * 2
    close_all(theirs)


# Knows address and token, sends a descriptor of its own for rank 1's.
IMPOSTOR = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(bytes.fromhex(sys.argv[1]))
fd = os.memfd_create("stranger")
os.write(fd, b"stranger")
s.sendall((1).to_bytes(4, "little") + bytes.fromhex(sys.argv[2]))
socket.send_fds(s, [b"."], [fd])
print("sent", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_although_it_knows_the_token():
    mine = [files(["a"]), files(["b"])]
    run = Run(Shared(2, late={0, 1}), mine)
    address, token = run.addresses[0]
    with subprocess.Popen(
        [sys.executable, "-c", IMPOSTOR, address.hex(), token.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "sent\n"
        seen = received_all(run, mine)
        process.stdin.close()
    assert seen == [[[], ["b"]], [["a"], []]]


def test_another_user_is_refused_although_it_knows_the_token(monkeypatch):
    """The kernel says who is at the other end; here it says of one connection that it is somebody else."""
    mine = [files(["a"]), files(["b"])]
    run = Run(Shared(2, late={0, 1}), mine)
    address, token = run.addresses[0]
    impostor, foreign = connect(address), files(["stranger"])
    impostor.sendall(struct.pack("<I", 1) + token)
    socket.send_fds(impostor, [b"."], foreign)
    seen_by, real = [], fdchannel._credentials

    def credentials(connection):
        pid, uid = real(connection)
        seen_by.append(connection)
        return pid, uid + (connection is seen_by[0] and connection.getsockname() == address)

    monkeypatch.setattr(fdchannel, "_credentials", credentials)
    # rank 1 must not be the first that accepts
    monkeypatch.setattr(fdchannel._Exchange, "_receive", only_after(fdchannel._Exchange._receive, address, seen_by))
    assert received_all(run, mine) == [[[], ["b"]], [["a"], []]]
    close_all(foreign)
    assert got(impostor) == []


def only_after(method, address, seen_by):
    def receive(self):
        return method(self) if self.address[0] == address or seen_by else False

    return receive


def test_a_flood_of_strangers_disturbs_nothing():
    """More connections than a listener's queue holds, before the ranks connect; each stays open."""
    mine = [files(["a"]), files(["b"]), files(["c"])]
    run = Run(Shared(3, late={0, 1, 2}), mine)
    strangers = []
    for address, _ in run.addresses:
        for _ in range(1000):
            s = socket.socket(socket.AF_UNIX)
            strangers.append(s)
            s.setblocking(False)
            try:
                s.connect(address)
            except BlockingIOError:
                break  # full: a rank would be refused as well
        else:
            pytest.fail("the queue of a listener has no end")
    seen = received_all(run, mine)
    for s in strangers:
        s.close()
    assert seen == [[[], ["b"], ["c"]], [["a"], [], ["c"]], [["a"], ["b"], []]]


@pytest.mark.parametrize("promised", [3, 0])
def test_a_broken_promise_is_the_same_error_everywhere(promised):
    mine = [files(["a"]), files(["b", "c"])]
    run = Run(Shared(2), mine, timeout_s=5.0, counts=[1, promised])
    if promised:
        assert run.same_error(PeerAccessError).endswith("rank 1 sent 2 of 3 descriptors")
        close_all(*mine)
    else:  # what was not announced is not taken
        assert received_all(run, mine) == [[[], []], [["a"], []]]


def test_a_rank_that_does_not_come_is_named_everywhere(monkeypatch):
    """It is there, and does not send: the bound holds, and all raise the same."""
    mine = [files(["a"]), files(["b"])]
    real = fdchannel._Exchange._send
    monkeypatch.setattr(fdchannel._Exchange, "_send", lambda self: False if self._world.rank == 1 else real(self))
    run = Run(Shared(2), mine, timeout_s=0.3)
    text = run.same_error(CollectiveTimeoutError)
    assert "no descriptors from rank 1 in time (IRIS_BARRIER_TIMEOUT is 0.3 s)" in text
    close_all(*mine)


FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("call", ["_socket", "accept", "connect", "send_fds"])
def test_a_system_call_that_fails_on_one_rank_is_the_same_error_everywhere(monkeypatch, call):
    mine = [files(["a"]), files(["b"]), files(["c"])]
    failing = threading.local()

    def refuse(*args):
        raise FULL

    real_init, real_run, real_socket = fdchannel._Exchange.__init__, fdchannel._Exchange.run, fdchannel._socket

    def init(self, world, *args):
        failing.now = world.rank == 1
        real_init(self, world, *args)
        if call == "accept" and failing.now:
            self._server.close()
            self._server = Refusing()

    class Refusing:
        accept = refuse
        fileno = refuse

        def close(self):
            pass

    class RefusesToConnect(socket.socket):
        connect = refuse

    def make():
        if call == "_socket" and failing.now:
            raise FULL
        if call == "connect" and failing.now:
            made = RefusesToConnect(socket.AF_UNIX, socket.SOCK_STREAM)
            made.setblocking(False)
            return made
        return real_socket()

    def run_it(self, *args):
        failing.now = self._world.rank == 1
        return real_run(self, *args)

    monkeypatch.setattr(fdchannel._Exchange, "__init__", init)
    monkeypatch.setattr(fdchannel._Exchange, "run", run_it)
    monkeypatch.setattr(fdchannel, "_socket", make)
    if call == "send_fds":
        real_send = socket.send_fds
        monkeypatch.setattr(socket, "send_fds", lambda *args: refuse() if failing.now else real_send(*args))
    text = Run(Shared(3), mine, timeout_s=0.5 if call == "connect" else 5.0).same_error(PeerAccessError)
    assert text.startswith("rank 1 could not exchange descriptors of memory with the other ranks: could not ")
    assert "Too many open files; the limit of open files of this process is" in text
    close_all(*mine)
