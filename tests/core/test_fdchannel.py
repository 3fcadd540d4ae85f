"""Descriptors between ranks: every rank gets every peer's, strangers get nothing and disturb nothing."""

import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from iris_core.errors import CollectiveTimeoutError, IrisError
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
        self._shared.slots[self.rank] = obj
        self._shared.barrier.wait(20)
        out = list(self._shared.slots)
        self._shared.gathered.set()
        self._shared.barrier.wait(20)
        if self.rank in self._shared.late:
            time.sleep(0.7)
        return out

    def barrier(self):
        self._shared.barrier.wait(20)

    def check_peers(self):
        pass


class Shared:
    def __init__(self, size, late=()):
        self.size, self.late = size, late
        self.slots = [None] * size
        self.barrier = threading.Barrier(size)
        self.gathered = threading.Event()


def exchange(shared, per_rank, timeout_s=10.0, counts=None):
    """Run the exchange on every rank; return results or errors."""
    results = [None] * shared.size
    counts = counts or [len(fds) for fds in per_rank]

    def work(rank):
        try:
            results[rank] = FdChannel(ThreadWorld(rank, shared)).exchange(per_rank[rank], counts, timeout_s)
        except (IrisError, threading.BrokenBarrierError) as e:
            shared.barrier.abort()
            results[rank] = e

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(shared.size)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    yield results


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


def test_every_rank_gets_every_peers_descriptors():
    before = set(os.listdir("/proc/self/fd"))
    mine = [files([]), files(["b0"]), files([f"c{i}" for i in range(300)])]
    run = exchange(Shared(3), mine)
    next(run)
    results = next(run)
    for rank, received in enumerate(results):
        assert received[rank] == []
        for peer in {0, 1, 2} - {rank}:
            assert [content(fd) for fd in received[peer]] == [content(fd) for fd in mine[peer]]
    close_all(*mine, *(fds for received in results for fds in received))
    assert set(os.listdir("/proc/self/fd")) <= before  # what an earlier test has left may go at any time


def addresses():
    with open("/proc/net/unix") as f:
        return sorted({line.split()[-1][1:] for line in f if " @iris-" in line})


@pytest.mark.parametrize("stranger", ["wrong token", "silent", "claims a rank", "another process"])
def test_a_stranger_gets_nothing_and_disturbs_nothing(stranger):
    shared = Shared(2, late={1})  # rank 0 is listening while rank 1 is still on its way
    mine = [files(["a"]), files(["b"])]
    run = exchange(shared, mine)
    next(run)
    assert shared.gathered.wait(10)
    strangers = []
    for address in addresses():
        if stranger == "another process":
            code = (
                "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(b'\\0'+sys.argv[1].encode()); "
                "s.sendall(bytes(36)); s.settimeout(5); print(s.recv(1))"
            )
            done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, check=False)
            # closed before, while, or after the stranger has written
            closed = "Reset" in done.stderr or "refused" in done.stderr or "BrokenPipeError" in done.stderr
            assert closed or "b''" in done.stdout, done
            continue
        s = socket.socket(socket.AF_UNIX)
        try:
            s.connect(b"\0" + address.encode())
            if stranger != "silent":
                rank = 1 if stranger == "claims a rank" else 77
                s.sendall(struct.pack("<I", rank) + secrets.token_bytes(32))
        except OSError:
            continue  # that rank is through already
        strangers.append(s)
    results = next(run)
    assert [content(fd) for fd in results[0][1]] == ["b"]
    assert [content(fd) for fd in results[1][0]] == ["a"]
    for s in strangers:
        s.settimeout(5)
        try:
            _, fds, _, _ = socket.recv_fds(s, 1, 9)
        except OSError:
            fds = []
        assert fds == []
        s.close()
    close_all(*mine, results[0][1], results[1][0])


def test_a_broken_promise_is_an_error_and_leaks_nothing():
    before = set(os.listdir("/proc/self/fd"))
    mine = [files(["a"]), files(["b"])]
    run = exchange(Shared(2), mine, timeout_s=1.0, counts=[1, 3])
    next(run)
    results = next(run)
    assert isinstance(results[0], IrisError)
    assert "1 of 3 descriptors" in str(results[0]) or isinstance(results[0], CollectiveTimeoutError)
    close_all(*mine)
    if isinstance(results[1], list):
        close_all(*results[1])
    assert set(os.listdir("/proc/self/fd")) <= before  # what an earlier test has left may go at any time
