"""Two processes on shared memory: atomics are exact, waits make progress, a peer that ends is noticed."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

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


def on_two_ranks():
    """Run all cases on two ranks: the lines that each rank has printed, and rank 0's memory."""
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
        outputs = [process.communicate(timeout=300) for process in processes]
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


def test_two_processes():
    (rank_0, rank_1), memory = on_two_ranks()
    words = {}
    for number, case in enumerate(CASES):
        if name := case.partition(":")[2]:
            words[case] = torch.frombuffer(memory, dtype=getattr(torch, name), count=2, offset=number * PAGE).tolist()
    # bfloat16 holds integers exactly up to 256 only; from there on adding 1 is a tie that rounds to even and stays.
    added = {case: values[0] for case, values in words.items() if case.startswith("add")}
    assert added == dict.fromkeys(CASES[:6], ADDS) | {"add:bfloat16": 256}
    assert (words["max:float32"][0], words["min:float64"][0], words["max:int64"][0]) == (1099, -1099, 1099)
    assert words["lanes:int32"] == [32 * ADDS, 32 * ADDS]
    assert words["lock:int32"] == [0, ADDS]
    total = ROUNDS * (ROUNDS + 1) // 2
    assert rank_0["pingpong"] == "sent"
    assert rank_1["pingpong"] == str([total, total + ROUNDS, total + 2 * ROUNDS])
    assert rank_0["dead"].startswith("rank 1 has ended in kernel 'wait_kernel', program (")
