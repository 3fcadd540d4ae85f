"""What happens to one rank in each phase: all others name it and keep nothing, and a new world opens at once."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile

import jobs_faults as jobs
import pytest
from rank_processes import HANG_S, Processes, wait_until

SIZE = 3
SEEDS = 5
WATCHDOG = "thread iris-watchdog", "mapping /memfd:iris-status", "descriptor /memfd:iris-status"
CELLS = [
    pytest.param(phase, fault, marks=[pytest.mark.exhaustive] * ((row + column) % 3 != 0))
    for row, phase in enumerate(jobs.PHASES)
    for column, fault in enumerate(jobs.FAULTS)
]


def one_fault(server, phase, fault, seed):
    """Let a fault happen, at a random place of the phase; returns to whom, what the ranks say, and files that stay."""
    chosen = random.Random(f"{phase} {fault} {seed}")
    victim, share = chosen.randrange(SIZE), chosen.random()
    with tempfile.TemporaryDirectory() as base, Processes(server) as ranks:
        first, second = os.path.join(base, "first"), os.path.join(base, "second")
        os.mkdir(first, 0o700)
        os.mkdir(second, 0o700)
        ranks.start_ranks(first, SIZE, jobs.suffer, phase, fault, victim, share, second)
        indices = list(range(SIZE))
        said = {rank: ranks.answer(rank) for rank in range(SIZE) if rank != victim}
        process = ranks.started[victim][0]
        if fault in ("killed", "exiting"):
            process.join(HANG_S)
            assert process.exitcode == (-signal.SIGKILL if fault == "killed" else jobs.EXIT_CODE)
            indices[victim] = len(ranks.started)
            ranks.start(jobs.replace, second, victim, SIZE)
        else:
            os.kill(process.pid, signal.SIGCONT)
            said[victim] = ranks.answer(victim)
        assert [ranks.answer(index) for index in indices] == [float(SIZE)] * SIZE
        files = [name for folder in (first, second) for name in os.listdir(folder)]
    return victim, said, [name for name in files if not name.startswith(("pid.", "failed."))]


def names(victim, named, text):
    """Whether an error names the rank."""
    return victim in named or re.search(rf"\branks? ([\d, ]*, )?{victim}\b", text.partition(": ")[2])


def check(phase, fault, victim, said):
    """Every rank has raised an error that names the victim, and keeps nothing; the victim has raised its own."""
    for rank, (kind, named, text, warned, kept) in said.items():
        if rank == victim and phase == "close":  # within the end of the thread that looks for long waits
            kept = {name for name in kept if not name.startswith(WATCHDOG)}
        assert not kept, (rank, kept)
        if rank == victim:
            assert jobs.OWN.get(fault, "") in f"{kind} {text}"  # in the code of a plugin, its error quotes it
        elif phase == "close":  # that raises nothing
            assert kind == "nothing", text
            assert all(names(victim, (), text) for text in warned)
        elif fault == "stopped":
            assert kind in ("CollectiveTimeoutError", "DeadlockError", "DeviceTimeoutError", "PeerLostError"), text
            assert names(victim, named, text), (rank, kind, named, text)
        elif phase == "opening" and kind in ("IrisError", "CollectiveTimeoutError"):
            assert names(victim, named, text), (rank, kind, named, text)
        else:
            assert (kind, named) == ("PeerLostError", (victim,)), (rank, text)


@pytest.mark.parametrize(("phase", "fault"), CELLS)
def test_what_happens_to_one_rank(server, request, phase, fault):
    """At any call of a Python function there."""
    shared = lambda: {name for name in os.listdir("/dev/shm") if "iris" in name and "example" not in name}
    before = shared()
    for seed in range(SEEDS if request.config.getoption("exhaustive") else 1):
        victim, said, files = one_fault(server, phase, fault, seed)
        check(phase, fault, victim, said)
        assert len(files) <= (3 if fault == "killed" else 0), files  # its card, socket, and one that it was writing
    new = shared() - before
    wait_until(lambda: not new & shared())  # other tests' come and go


# -- launchers --------------------------------------------------------------------------------------------------------
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
