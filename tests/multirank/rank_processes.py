"""Processes of ranks and others, started one by one, and waiting for what they find."""

import contextlib
import time

from iris_core.world.launch import join_rank
from iris_core.world.rendezvous import Folder

HANG_S = 600.0  # bounds a hang, and says nothing about how long anything takes


class Processes(contextlib.AbstractContextManager):
    """Processes that send what they find; all are gone at the end."""

    def __init__(self, server):
        self._server = server
        self.started = []

    def start(self, main, *args):
        ours, theirs = self._server.Pipe(duplex=False)
        process = self._server.Process(target=_run, args=(theirs, main, *args), daemon=True)
        process.start()
        theirs.close()
        self.started.append((process, ours))
        return process

    def start_ranks(self, folder, num_ranks, job, *args):
        with contextlib.closing(Folder(folder)) as opened:
            for rank in range(num_ranks):
                opened.announce(rank, self.start(rank_main, folder, rank, num_ranks, job, *args).pid)

    def answer(self, index):
        process, pipe = self.started[index]
        assert pipe.poll(HANG_S), f"process {index} still runs"
        try:
            return pipe.recv()
        except EOFError:
            process.join(HANG_S)
            raise AssertionError(f"process {index} ended with exit code {process.exitcode}") from None

    def __exit__(self, *args):
        for process, pipe in self.started:
            process.kill()
            process.join()
            pipe.close()


def _run(pipe, main, *args):
    with contextlib.closing(pipe):
        main(pipe.send, *args)


def rank_main(tell, folder, rank, num_ranks, job, *args):
    """Run a job as one rank, whose process others have announced."""
    join_rank(folder, rank, num_ranks, torch_distributed=False)
    job(tell, *args)


def wait_until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
