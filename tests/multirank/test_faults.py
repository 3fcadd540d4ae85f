"""What happens to one rank in each phase: all others name it and keep nothing, and a new world opens at once."""

import collections
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from jobs_common import refusal
from rank_processes import HANG_S, Processes, wait_until

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import IrisError
from iris_core.logs import logger
from iris_core.testing.conformance import oracle
from iris_core.world.launch import join_rank

PHASES = "opening", "allocation", "barrier", "kernel", "collective", "close"
EXIT_CODE = 7
LONG_S, SHORT_S = 600.0, 4.0  # bounds: of what must not end by time, and of waits for a rank that is stopped
OPENING_S = 30.0  # of opening: before a rank has announced itself, the others can only miss it


class Broken(Exception):
    """What a program raises by itself."""


def leave():
    sys.exit(EXIT_CODE)


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exiting": leave, "raising": mock.Mock(side_effect=Broken),
    "interrupted": lambda: signal.raise_signal(signal.SIGINT),
}  # fmt: skip
OWN = {"raising": "Broken", "interrupted": "KeyboardInterrupt"}
"""What a rank raises to which something happens."""


@triton.jit
def ring(context, flags, turn, rank, world: tl.constexpr):
    """Wait for the rank before, having told the next one."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    ctx.signal(flags, turn, (rank + 1) % world)
    ctx.wait(flags, turn)


class Calls:
    """Counts the calls of Python functions in a phase, or does something at one of them, or after the phase."""

    def __init__(self, phase, at=0, act=None):
        self.count = 0
        self._phase, self._at, self._act, self._done = phase, at, act, False

    @contextlib.contextmanager
    def __call__(self, phase):
        if phase != self._phase:
            yield
            return

        def called(frame, event, _):
            if event == "call":
                self.count += 1
                if self._act is not None and self.count >= self._at:
                    self._fire()

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)
        # not come so far; or it was raised in a destructor, where Python ignores it
        if self._act is not None and not (self._done and self._act is FAULTS["stopped"]):
            self._fire()

    def _fire(self):
        sys.setprofile(None)
        self._done = True
        self._act()


def live(step, before=lambda phase, ctx: None, turn=1, **bounds):
    """Open a context, use it in every way and close it, each phase within `step`."""
    with step("opening"):
        ctx = Iris("2MiB", device="cpu", **bounds)
    with ctx:
        flags, x = ctx.zeros(1, dtype=torch.int64), ctx.ones(5000)
        before("allocation", ctx)
        with step("allocation"):
            ctx.as_symmetric(torch.ones(4))
            ctx.empty(3 << 17)  # beyond the half that allocations have at first
        before("barrier", ctx)
        with step("barrier"):
            ctx.barrier()
        before("kernel", ctx)
        with step("kernel"):
            ring[(2,)](ctx.get_device_context(), flags, turn, ctx.cur_rank, ctx.num_ranks)
        before("collective", ctx)
        with step("collective"):
            ctx.ccl.all_reduce(x, x)
        ctx.barrier()
        before("close", ctx)
        with step("close"):
            ctx.close()
    return x.tolist()[0]


def held():
    """What this process holds: descriptors, mappings, threads, child processes."""
    found = collections.Counter()
    opened = [each.partition(" ")[2] for each in oracle.open_descriptors()]
    found.update("descriptor " + re.sub(r"\d+", "", each) for each in opened if not each.startswith("/proc/"))
    with open("/proc/self/maps") as maps:
        found.update("mapping " + line.split(maxsplit=5)[5].strip() for line in maps if "memfd:" in line)
    own = [each for each in threading.enumerate() if each.name != "iris-cpu-program"]  # a few stay for later launches
    found.update(f"thread {each.name}" for each in own)
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as children:
            found["child process"] += len(children.read().split())
    return found


def suffer(tell, phase, fault, victim, share, folder):
    """Rehearse a world, then live through one in which a fault happens to a rank; open a new world in a folder.

    Tells the kind of what was raised, the ranks that it names, its text, the warnings, and what is left of it all.  The
    fault happens at this `share`, from 0 to 1, of the calls of Python functions that the phase has made before.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, warned = int(os.environ["RANK"]), []
    logger.addFilter(lambda record: warned.append(record.getMessage()) or True)
    step, calls = contextlib.nullcontext, Calls(phase)
    live(calls if rank == victim else step, barrier_timeout=LONG_S)
    before, warned[:] = held(), []
    if rank == victim:
        step = Calls(phase, int(share * calls.count), FAULTS[fault])
    short = fault == "stopped"

    def shorten(entered, ctx):
        if entered == phase and short:  # everything before has no such bound
            ctx.barrier()
            ctx._world.timeout_s = SHORT_S

    bound = (SHORT_S if short else OPENING_S) if phase == "opening" else LONG_S
    wait_s = SHORT_S if short and phase == "kernel" else LONG_S
    device = {"device_timeout": SHORT_S} if short and phase == "collective" else {}
    how = {"barrier_timeout": bound, "options": {"triton": {"cpu_timeout": wait_s}}, **device}
    kind, named, text = refusal(lambda: live(step, shorten, **how), (IrisError, Broken, KeyboardInterrupt))
    if rank == victim and fault == "exiting":  # a plugin's exit is an error of the plugin
        leave()
    tell((kind, named, text, tuple(warned), +(held() - before)))
    tell(renew(folder, rank, int(os.environ["WORLD_SIZE"])))


def renew(folder, rank, num_ranks):
    join_rank(folder, rank, num_ranks, torch_distributed=False)
    return live(contextlib.nullcontext, barrier_timeout=LONG_S)


def replace(tell, folder, rank, num_ranks):
    tell(renew(folder, rank, num_ranks))


SIZE = 3
SEEDS = 5
WATCHDOG = "thread iris-watchdog", "mapping /memfd:iris-status", "descriptor /memfd:iris-status"
CELLS = [
    pytest.param(phase, fault, marks=[pytest.mark.exhaustive] * ((row + column) % 3 != 0))
    for row, phase in enumerate(PHASES)
    for column, fault in enumerate(FAULTS)
]


def one_fault(server, phase, fault, seed):
    """Let a fault happen, at a random place of the phase; returns to whom, what the ranks say, and files that stay."""
    chosen = random.Random(f"{phase} {fault} {seed}")
    victim, share = chosen.randrange(SIZE), chosen.random()
    with tempfile.TemporaryDirectory() as base, Processes(server) as ranks:
        first, second = (tempfile.mkdtemp(dir=base) for _ in range(2))
        ranks.start_ranks(first, SIZE, suffer, phase, fault, victim, share, second)
        indices = list(range(SIZE))
        said = {rank: ranks.answer(rank) for rank in range(SIZE) if rank != victim}
        process = ranks.started[victim][0]
        if fault in ("killed", "exiting"):
            process.join(HANG_S)
            assert process.exitcode == (-signal.SIGKILL if fault == "killed" else EXIT_CODE)
            indices[victim] = len(ranks.started)
            ranks.start(replace, second, victim, SIZE)
        else:
            os.kill(process.pid, signal.SIGCONT)
            said[victim] = ranks.answer(victim)
        assert [ranks.answer(index) for index in indices] == [float(SIZE)] * SIZE
        files = [name for folder in (first, second) for name in os.listdir(folder)]
    return victim, said, [name for name in files if not name.startswith(("pid.", "failed."))]


def names(victim, named, text):
    return victim in named or re.search(rf"\branks? ([\d, ]*, )?{victim}\b", text.partition(": ")[2])


def check(phase, fault, victim, said):
    """Every rank has raised an error that names the victim, and keeps nothing; the victim has raised its own."""
    for rank, (kind, named, text, warned, kept) in said.items():
        if rank == victim and phase == "close":  # within the end of the thread that looks for long waits
            kept = {name for name in kept if not name.startswith(WATCHDOG)}
        assert not kept, (rank, kept)
        if rank == victim:
            assert OWN.get(fault, "") in f"{kind} {text}"  # in the code of a plugin, its error quotes it
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
