"""Rank jobs of tests/ccl_fast."""

import contextlib
import random
import re
import threading
import time
from functools import partial

import jobs_ccl
import torch
import torch.distributed as dist
from ccl_cases import Case
from emulation import emulation
from jobs_common import in_vain

from iris_core import Iris
from iris_core.ccl import Config
from iris_triton.collectives.packets.fabric import lines_problem
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, WORDS

SMALL = "64KiB"  # a workspace in which few messages go in one piece


def unprobed(device, encodings):
    """Why calls in these encodings cannot be made on this machine; empty if they can."""
    if device == "cpu" or "ll128" not in encodings:
        return ""
    return lines_problem(0)


def set_epochs(ctx, epoch):
    """Let mailboxes be as new, with counters that are `epoch`; every rank calls it."""
    ctx.barrier()
    ctx.ccl.reset()
    regions = ctx.ccl.team(range(ctx.num_ranks))._regions
    counters = [region for name, known in regions.items() if name.startswith("epochs of mailbox") for region in known]
    assert counters
    for region in counters:
        words = region.tensor[: 4 * WORDS].view(torch.int32)
        words[: 2 * MAX_PROGRAMS + 1] = epoch
        words[2 * MAX_PROGRAMS + 1 :] = 0  # no launch of these epochs was made
    ctx.barrier()


@contextlib.contextmanager
def played(device, cases, backend="auto", **variables):
    """A context, with tensors for cases, of each of which one call was made; `variables` are of the environment."""
    with emulation(**variables), Iris("24MiB", device=device, backend=backend) as ctx:
        plays = [jobs_ccl.Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks) for case in cases]
        for tensors in plays:
            tensors.fill(0)
            jobs_ccl.call(ctx, tensors.case, tensors)
        ctx.barrier()
        yield ctx, plays


def run_mixed(device, cases, calls, seed, workspace, epoch=None):
    """Calls of all kinds in any order, and ranks that are out of step; returns what was wrong.

    No host waits for another one: results are looked at in the end.  `epoch` is where mailboxes begin.
    """
    order = random.Random(seed)
    own = random.Random()
    wrong = []
    with played(device, cases, IRIS_CCL_WORKSPACE=workspace) as (ctx, kinds):
        if epoch is not None:
            set_epochs(ctx, epoch)
        done = []
        for turn in range(calls):
            tensors = kinds[order.randrange(len(kinds))]
            inputs = tensors.fill(turn)
            jobs_ccl.call(ctx, tensors.case, tensors)
            done.append((tensors, inputs, tensors.out.clone(), tensors.inp.clone(), turn))
            if epoch is not None and (turn + ctx.cur_rank) % ctx.num_ranks == 0:
                time.sleep(0.05)  # in every call, one rank is late
            elif own.random() < 0.2:
                time.sleep(0.01 * own.random())
        for tensors, inputs, out, inp, turn in done:
            tensors.out.copy_(out)
            tensors.inp.copy_(inp)
            wrong += jobs_ccl.verify(tensors.case, tensors, inputs, f", call {turn}")
        ctx.barrier()
    return wrong


def go_on(ctx, plays):
    """All put the group back to its beginning, and call in turn."""
    ctx.ccl.reset()
    for turn in range(1, 4):
        for tensors in plays:
            inputs = tensors.fill(turn)
            jobs_ccl.call(ctx, tensors.case, tensors)
            assert jobs_ccl.verify(tensors.case, tensors, inputs, f", call {turn} after the reset") == []
    ctx.barrier()


def plan_again(device, algorithms):
    """One member alone makes another plan, for a tensor that begins elsewhere, when a larger mailbox has been made.

    The others use the plan that they have; returns what was wrong.
    """
    wrong = []
    with emulation(IRIS_DEVICE_TIMEOUT="20"), Iris("24MiB", device=device) as ctx:
        inp, out = (ctx.zeros(20001, dtype=torch.float32) for _ in range(2))
        for algorithm in algorithms:
            config = Config(algorithm=algorithm)
            for turn, (count, odd_rank) in enumerate(((500, None), (20000, None), (500, 0), (500, 1), (500, None))):
                begin = int(ctx.cur_rank == odd_rank)
                source, target = inp[begin : begin + count], out[begin : begin + count]
                source.copy_(torch.arange(count) % 7 + ctx.cur_rank + turn)
                target.fill_(-1)
                ctx.ccl.all_reduce(target, source, config=config)
                ranks = ctx.num_ranks
                expected = (torch.arange(count) % 7 + turn) * ranks + ranks * (ranks - 1) // 2
                if not torch.equal(target.cpu(), expected.float()):
                    wrong.append(f"{algorithm}, call {turn}, rank {ctx.cur_rank}")
        ctx.barrier()
    return wrong


def leave_one_out(device, algorithm, op):
    """Rank 0 does not come in time; returns what is raised then.  After a reset all is well."""
    case = Case(op, "float32", shape=(40,), config={"algorithm": algorithm})
    with played(device, [case], IRIS_DEVICE_TIMEOUT="10") as (ctx, (tensors,)):
        if ctx.cur_rank > 0:
            with in_vain(10):
                jobs_ccl.call(ctx, case, tensors)
            if device != "cpu":
                torch.cuda.synchronize()
        text = jobs_ccl.said_by(ctx.barrier)
        ctx.barrier()
        go_on(ctx, [tensors])
        return text


def run_overlapping(device, algorithm):
    """Rank 0 makes a call in a thread, which waits for the others, and another one meanwhile.

    Its next barrier says so, and after a reset all is well.
    """
    case = Case("all_reduce", "float32", shape=(40,), config={"algorithm": algorithm})
    backend = "gluon" if algorithm.startswith("gluon") else "triton"
    with played(device, [case] * 2, backend, IRIS_DEVICE_TIMEOUT="4") as (ctx, both):
        first = threading.Thread(target=jobs_ccl.call, args=(ctx, case, both[0]))
        store, both_wait = dist.distributed_c10d._get_default_store(), f"overlapping/{algorithm}"
        if ctx.cur_rank > 0:
            store.wait([both_wait])
        first.start()
        if ctx.cur_rank > 0:
            first.join()
        else:
            time.sleep(0.5)
            threading.Timer(0.5, store.set, (both_wait, "")).start()
        jobs_ccl.call(ctx, case, both[1])
        first.join()
        text = jobs_ccl.said_by(ctx.barrier)
        dist.barrier()
        words = rf"DeviceError(?=.*at the same time on the device of rank 0)(?=.*all_reduce).*\({algorithm}\)"
        assert ctx.cur_rank > 0 or re.match(words, text, re.DOTALL), text
        go_on(ctx, both[:1])


def call_in_other_order(device, algorithm):
    """Two calls that differ in the reduction alone, on the last rank in the other order, and ranks out of step.

    All raise it, and after a reset all is well.
    """
    cases = [
        Case("all_reduce", shape=(40,), reduction=each, config={"algorithm": algorithm}) for each in ("sum", "max")
    ]
    with played(device, cases, IRIS_DEVICE_TIMEOUT="5") as (ctx, both):
        text, order = "", both if ctx.cur_rank < ctx.num_ranks - 1 else both[::-1]
        for step in (*(partial(jobs_ccl.call, ctx, tensors.case, tensors) for tensors in order), ctx.barrier):
            time.sleep(0.3 * random.random())
            with in_vain(2.5):
                text += jobs_ccl.said_by(step)
        dist.barrier()
        words = "Device(?=.*have called differently)(?=.*sum)(?=.*max)"
        assert re.match(words, text, re.DOTALL), text
        go_on(ctx, both)
