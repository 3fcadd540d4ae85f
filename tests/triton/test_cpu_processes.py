"""Two processes on shared memory: atomics are exact, waits make progress, a peer that ends is noticed."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "cpu_process_kernels.py"
NBYTES, PAGE = 1 << 20, 4096  # as in the script
ROUNDS = 100
ADDS = 2 * 2 * ROUNDS  # processes, programs, rounds


CASES = [
    *(f"add:{name}" for name in ("int32", "int64", "float32", "float64", "float16", "bfloat16")),
    "max:float32",
    "min:float64",
    "max:int64",
    "lanes:int32",
    "lock:int32",
    "pingpong",
    "dead",  # the last one: rank 1 ends, and rank 0 waits for it
]


@pytest.fixture(scope="module")
def ranks():
    """Run all cases on two ranks, once: the lines that each rank has printed, and rank 0's memory."""
    fds = [os.memfd_create(f"rank{rank}") for rank in range(2)]
    for fd in fds:
        os.ftruncate(fd, NBYTES)
    # Rank 1 has the only writing end: when it ends, the reading end becomes readable.
    reading, writing = os.pipe()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(2):
            passed = [*fds, reading, *([writing] if rank else [])]
            command = [sys.executable, str(SCRIPT), *map(str, (rank, 2, reading, *fds)), ",".join(CASES)]
            processes.append(subprocess.Popen(command, pass_fds=passed, env=env, text=True, stdout=-1, stderr=-1))
        os.close(writing)
        outputs = [process.communicate(timeout=120) for process in processes]
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors
        with mmap.mmap(fds[0], NBYTES) as memory:
            content = bytearray(memory[:])
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for fd in (*fds, reading):
            os.close(fd)
    return [dict(line.split(" ", 1) for line in out.splitlines()) for out, _ in outputs], content


def words(ranks, case):
    dtype = getattr(torch, case.partition(":")[2])
    return torch.frombuffer(ranks[1], dtype=dtype, count=2, offset=CASES.index(case) * PAGE).tolist()


@pytest.mark.parametrize("case", CASES[:6])
def test_additions_of_two_processes_all_count(ranks, case):
    # bfloat16 holds integers exactly up to 256 only; from there on adding 1 is a tie that rounds to even and stays.
    assert words(ranks, case)[0] == (256 if case == "add:bfloat16" else ADDS)


@pytest.mark.parametrize(("case", "expected"), [("max:float32", 1099), ("min:float64", -1099), ("max:int64", 1099)])
def test_extremes_of_two_processes(ranks, case, expected):
    assert words(ranks, case)[0] == expected


def test_lanes_of_two_processes_on_the_same_words(ranks):
    assert words(ranks, "lanes:int32") == [32 * ADDS, 32 * ADDS]


def test_a_lock_shared_by_two_processes(ranks):
    assert words(ranks, "lock:int32") == [0, ADDS]


def test_ping_pong_hands_data_over(ranks):
    total = ROUNDS * (ROUNDS + 1) // 2
    assert [out["pingpong"] for out in ranks[0]] == ["sent", str([total, total + ROUNDS, total + 2 * ROUNDS])]


def test_a_peer_that_ends_is_noticed_by_a_waiting_kernel(ranks):
    message = ranks[0][0]["dead"]
    assert message.startswith("rank 1 has ended in kernel 'wait_kernel', program (")
