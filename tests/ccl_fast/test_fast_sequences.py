"""Calls one after the other, in groups, and without a rank that should take part."""

import contextlib
import itertools
import random
import re
import threading
import time
from functools import partial

import jobs_ccl
import jobs_norm
import pytest
import torch
import torch.distributed as dist
from ccl_cases import ENCODINGS, SMALL, Case, kinds, of, sequence_cases
from emulation import emulation
from jobs_common import in_vain, said_by
from jobs_sequences import back_to_back
from rank_counts import rank_counts

from iris_core import Iris
from iris_core.ccl import Config
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, WORDS

SELDOM = pytest.mark.exhaustive(device="cpu")


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
def played(device, cases, **variables):
    """A context, with tensors for cases, of each of which one call was made; `variables` are of the environment."""
    with emulation(**variables), Iris("24MiB", device=device) as ctx:
        plays = [jobs_ccl.jobs_of(case).Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks) for case in cases]
        for tensors in plays:
            tensors.fill(0)
            jobs_ccl.jobs_of(tensors.case).call(ctx, tensors.case, tensors)
        ctx.barrier()
        yield ctx, plays


def go_on(ctx, plays):
    """All put the group back to its beginning, and call in turn."""
    ctx.ccl.reset()
    for turn in range(1, 4):
        for tensors in plays:
            jobs, inputs = jobs_ccl.jobs_of(tensors.case), tensors.fill(turn)
            jobs.call(ctx, tensors.case, tensors)
            assert jobs.verify(tensors.case, tensors, inputs, f", call {turn} after the reset") == []
    ctx.barrier()


@jobs_ccl.on_heap("24MiB", packets=True, IRIS_DEVICE_TIMEOUT="20")
def plan_again(ctx, algorithms):
    """One member alone plans again, for another beginning, after a larger mailbox was made."""
    inp, out = (ctx.zeros(5001, dtype=torch.float32) for _ in range(2))
    calls = (500, None), (5000, None), (500, 0), (500, 1), (500, None)
    for algorithm, (turn, (count, odd_rank)) in itertools.product(algorithms, enumerate(calls)):
        begin, ranks = int(ctx.cur_rank == odd_rank), ctx.num_ranks
        source, target = inp[begin : begin + count], out[begin : begin + count]
        source.copy_(torch.arange(count) % 7 + ctx.cur_rank + turn)
        target.fill_(-1)
        ctx.ccl.all_reduce(target, source, config=Config(algorithm=algorithm))
        expected = (torch.arange(count) % 7 + turn) * ranks + ranks * (ranks - 1) // 2
        assert torch.equal(target.cpu(), expected.float()), (algorithm, turn)


def run_overlapping(device, algorithm):
    """Rank 0 makes two calls at once, as graphs do: its next barrier says so, and after a reset all is well."""
    case = Case("all_reduce", "float32", shape=(40,), config={"algorithm": algorithm})
    with played(device, [case] * 2, IRIS_DEVICE_TIMEOUT="4") as (ctx, both):
        for order in ctx.ccl._binder._orders.values():
            order._lock = contextlib.nullcontext()
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
        text = said_by(ctx.barrier)
        dist.barrier()
        words = rf"DeviceError(?=.*at the same time on the device of rank 0)(?=.*all_reduce).*\({algorithm}\)"
        assert ctx.cur_rank > 0 or re.match(words, text, re.DOTALL), text
        go_on(ctx, both[:1])


def call_in_other_order(device, algorithm):
    """Two calls, on the last rank in the other order: all raise it, and after a reset all is well."""
    is_norm, config = algorithm.endswith(" norm"), {"algorithm": algorithm}
    cases = [Case("all_reduce", shape=(40,), reduction=each, config=config) for each in ("sum", "max")]
    if is_norm:
        cases = [jobs_norm.Case(algorithm.removesuffix(" norm"), (3, 8), eps=eps) for eps in (1e-3, 1e-5)]
    with played(device, cases, IRIS_DEVICE_TIMEOUT="5") as (ctx, both):
        text, order = "", both if ctx.cur_rank < ctx.num_ranks - 1 else both[::-1]
        steps = [partial(jobs_ccl.jobs_of(tensors.case).call, ctx, tensors.case, tensors) for tensors in order]
        for step in (*steps, ctx.barrier):
            time.sleep(0.3 * random.random())
            with in_vain(2.5):
                text += said_by(step)
        dist.barrier()
        about = "(?=.*all_reduce_rms_norm)" if is_norm else "(?=.*sum)(?=.*max)"
        words = f"Device(?=.*have called differently){about}"
        assert re.match(words, text, re.DOTALL), text
        go_on(ctx, both)


PACKETS = partial(back_to_back, packets=True, slow=True, IRIS_CCL_WORKSPACE=SMALL)
MIXED = [([each], rank_counts(seldom=[2, 3, 4, 8])) for each in ENCODINGS]
MIXED += [(list(ENCODINGS), rank_counts(3, seldom=[2, 4, 8])), (["portable"], [3]), (["nvls"], [3])]


@pytest.mark.parametrize(("encodings", "num_ranks"), [
    pytest.param(encodings, *getattr(count, "values", [count]), marks=getattr(count, "marks", ()))
    for encodings, counts in MIXED for count in counts
])  # fmt: skip
def test_in_any_order_with_ranks_out_of_step(pool, some, encodings, num_ranks, device):
    if encodings[0] in ("portable", "nvls"):
        if encodings == ["nvls"] and device != "cpu":
            pytest.skip("on GPUs it needs a setting that no test sets")
        known = kinds(*encodings)
        cases = [of(kind, "bfloat16", shape=(701,)) for kind in known]
        if encodings == ["nvls"]:
            cases += [of(kind, "bfloat16", shape=(701,), place="ordinary") for kind in known]
            cases += [of(kind, shape=(5003,), place="skewed") for kind in known]
        cases += [Case("all_reduce", place="ordinary"), Case("all_gather", place="ordinary"), Case("reduce_scatter")]
    else:
        cases = [case for encoding in encodings for case in sequence_cases(encoding)]
        few = 14 if device == "cpu" else 7
        cases = some(cases, 11 if num_ranks == 8 else few if len(encodings) > 1 else 4, num_ranks)
    calls = (8 if num_ranks > 3 else 10) if device == "cpu" else 2000
    assert pool.run(partial(PACKETS, cases=cases), num_ranks, device, calls, 0) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize(("encoding", "epoch"), [
    ("ll", -1), ("ll128", -1), ("sentinel", 2**31 - 3),
    *(pytest.param(*each, marks=SELDOM) for each in (("ll", 2**31 - 3), ("ll128", 2**31 - 3), ("sentinel", -1))),
])  # fmt: skip
def test_epochs_wrap_around(pool, some, encoding, epoch, num_ranks, device):
    """Places that nothing was sent to are not taken for packets where the counters pass 0."""
    # all sizes, and of each algorithm one or two with the two epochs together
    cases = some(sequence_cases(encoding), 4 if device == "cpu" else 2, epoch)
    job = partial(PACKETS, cases=cases, begin=partial(set_epochs, epoch=epoch))
    assert pool.run(job, num_ranks, device, 8 if device == "cpu" else 12, 0) == [[]] * num_ranks


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_member_plans_again(pool, encoding, device):
    names = [algorithm for op, algorithm in kinds(encoding) if op == "all_reduce"]
    assert pool.run(plan_again, 2, device, names) == [None] * 2


@pytest.mark.parametrize("algorithm", [
    "sentinel_split", "one_shot",
    *(pytest.param(f"{each}_shot", marks=pytest.mark.exhaustive) for each in ("ll_one", "sentinel_one", "ll128_two")),
])  # fmt: skip
def test_launches_at_the_same_time_are_reported(pool, algorithm):
    """Two graphs on two streams do the same on GPUs: see tests/multigpu."""
    assert pool.run(run_overlapping, 2, "cpu", algorithm) == [None] * 2


@pytest.mark.parametrize(("num_ranks", "algorithm"), [
    (3, "sentinel_one_shot"), pytest.param(4, "ll128_two_shot", marks=pytest.mark.exhaustive),
    *((2, f"{each} norm") for each in ("one_shot", "two_shot", "sentinel_one_shot", "sentinel_two_shot")),
])  # fmt: skip
def test_ranks_that_call_in_different_orders_are_told(pool, num_ranks, algorithm):
    """Replays of graphs in different orders do the same on GPUs: the kernels compare, not the hosts."""
    assert pool.run(call_in_other_order, num_ranks, "cpu", algorithm) == [None] * num_ranks
