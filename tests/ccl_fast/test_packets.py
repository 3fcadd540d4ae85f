"""Algorithms of packets: where they are offered, chosen and launched, and calls in any order; the kit on every one."""

import contextlib
import dataclasses
import itertools
import json
import random
import re
import time
from functools import partial
from types import SimpleNamespace

import jobs_ccl
import jobs_norm
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from ccl_cases import ENCODINGS, OPS, SMALL, Case, kinds, of, registered, sequence_cases
from emulation import emulation
from jobs_common import in_vain, said_by
from jobs_sequences import back_to_back
from rank_counts import rank_counts
from tables import table

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.dispatch.choice import Chooser, Tables
from iris_core.dispatch.tables import read_table
from iris_core.protocols import Collective
from iris_core.testing import CollectiveConformance
from iris_core.testing.conformance.plugin import member_problems
from iris_core.types import DeviceTarget, DeviceType
from iris_triton import interpreter
from iris_triton.collectives import TABLES, collectives, fast_collectives
from iris_triton.collectives.copy_engine import CopyEngine
from iris_triton.collectives.nvls import Nvls
from iris_triton.collectives.packets import base as fast_algorithms
from iris_triton.collectives.packets import fabric
from iris_triton.collectives.packets.exchange import shape_for
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, WORDS
from iris_triton.collectives.packets.packet import spot
from iris_triton.collectives.parts.sizes import layout_of

KB, MB = 1 << 10, 1 << 20
ALGORITHMS = {(each.op, each.name): each for each in fast_collectives()}


@table("size", [2, 3, 4, 8])
@table("nbytes", [KB, 64 * KB, MB, 16 * MB, 64 * MB])
@table(("op", "name"), [key for key in ALGORITHMS if not key[1].endswith("split")])
def test_every_packet_has_a_thread_while_programs_are_left(op, name, size, nbytes):
    count = nbytes // size * size // 2 // (1 if op in ("all_reduce", "reduce", "broadcast") else size)
    target = DeviceTarget(DeviceType.CUDA, 0, "sm_90")
    request = Case(op, "bfloat16", shape=(count,)).request(0, range(size), target)
    packets = ALGORITHMS[op, name]._packets(request)
    shape = shape_for(request, packets, *name.split("_", 1))
    programs, warps = shape.programs, shape.options["num_warps"]
    assert 1 <= programs <= 1024
    assert programs * warps * 32 >= min(packets, 1024 * 8 * 32)
    assert (programs - 1) * warps * 32 < packets


def test_alignment_makes_another_kind_of_call():
    """What was compiled for aligned tensors must not be launched with others: on GPUs, it would be a fault."""
    config = Config(algorithm="ll128_one_shot")
    with emulation(), Iris("4MiB", device="cpu") as ctx:
        inp, out = ctx.ones(100, dtype=torch.float32), ctx.zeros(100, dtype=torch.float32)
        for begins, whole in (((0, 0), True), ((4, 8), True), ((1, 0), False), ((0, 2), False), ((3, 3), False)):
            target, source = out[begins[0] :][:64], inp[begins[1] :][:64]
            target.fill_(-1)
            ctx.ccl.all_reduce(target, source, config=config)
            assert torch.equal(target, source)
            plans = [bound.plan for bound in ctx.ccl._bound.values()]
            assert len(plans) == (1 if whole else 2)
            assert plans[-1].kernels[0]._arguments["IN_WHOLE"] is whole


@table(("shape", "stride", "expected"), [
    ((5, 3), (3, 1), True), ((5, 8), (12, 1), True), ((5, 6), (12, 1), False), ((5, 8), (10, 1), False),
    ((5, 8), (16, 2), False), ((1 << 20, 1 << 10), (1 << 12, 1), True), ((1 << 21, 1 << 10), (1 << 12, 1), False),
])  # fmt: skip
def test_runs_of_four_elements(shape, stride, expected):
    assert layout_of(shape, stride).has_runs(4) is expected


@triton.jit(do_not_specialize=["first"])
def spots(offsets, flags, first, ENC: tl.constexpr, BLOCK: tl.constexpr):
    """Where the data of BLOCK packets lies."""
    lanes = tl.arange(0, BLOCK)
    offset, flag = spot(first + lanes, ENC)
    tl.store(offsets + lanes, offset)
    tl.store(flags + lanes, flag)


@table("first", [0, 143165576, 2**31 - 64])
@table("encoding", ["ll", "ll128", "sentinel"])
def test_places_of_packets_in_large_messages(encoding, first):
    """The first of them whose data lies behind 2 GiB, and the last of 32 bits."""
    interpreter.enable()
    offsets, flags = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    spots[(1,)](offsets, flags, first, ENC=encoding, BLOCK=64)
    numbers = range(first, first + 64)
    if encoding == "ll128":
        assert offsets.tolist() == [each // 8 * 120 + each % 8 * 16 for each in numbers]
        assert flags.tolist() == [each % 8 == 7 for each in numbers]
    else:
        assert offsets.tolist() == [each * (8 if encoding == "ll" else 16) for each in numbers]
        assert not flags.any()


@pytest.mark.parametrize("path", sorted(TABLES.glob("nvidia-h200-*.json")), ids=lambda path: path.stem)
def test_models_come_near_what_was_measured(path, tmp_path, monkeypatch):
    """What they would choose without the table takes at most 1.6 times as long as the best, as far as it is there."""
    monkeypatch.setattr(fast_algorithms, "lines_problem", lambda index: "")
    table, known = read_table(path), Tables(TABLES, [], "NVIDIA H200")
    chooser = Chooser(collectives(), Tables(tmp_path, [], "a GPU"), ())
    compared = 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (1 << shift for shift in range(9, 29, 2)):
            call = Case(op, "bfloat16", shape=(nbytes // 2,))
            call = call.request(0, range(table.group_size), DeviceTarget(DeviceType.CUDA))
            call = dataclasses.replace(call, nbytes=nbytes, shape=(nbytes // 2,))
            entries = known.nearest(call).entries
            assert entries[0].source == str(path)
            seconds = {entry.algorithm: entry.seconds for entry in reversed(entries)}
            chosen = chooser.choose(call, None).name
            if chosen in seconds:
                assert seconds[chosen] <= 1.6 * min(seconds.values()), (op, nbytes, chosen, seconds)
                compared += 1
    assert compared > 20


@table(("text", "holds"), [
    (None, False),  # a device that was not probed
    *((json.dumps({"format": 1, "device": "x", "facts": {"whole_lines": {"holds": holds}}}), holds is True)
      for holds in (True, False, "no")),
    *((text, False) for text in ("", "[" * 100_000, '{"format": 2, "facts": {}}')),
])  # fmt: skip
def test_facts_are_read(tmp_path, monkeypatch, text, holds):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    path = tmp_path / "fabric" / "NVIDIA_X_200.json"
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    fabric.has_whole_lines.cache_clear()
    assert fabric.has_whole_lines("NVIDIA X-200") is holds
    fabric.has_whole_lines.cache_clear()


@table(("op", "name"), [key for key, each in registered().items() if "torch" in each.layouts and key[0] in OPS])
def test_the_kit_without_ranks(op, name):
    algorithm, kit = registered()[op, name], CollectiveConformance()
    here = isinstance(algorithm, Nvls | CopyEngine)  # drivers of GPUs say whether they can
    portable = (DeviceType.CPU,) if here else tuple(DeviceType)
    assert member_problems(algorithm, Collective) == []
    kit.test_host_supports_always_answers(algorithm)
    kit.test_host_supports_something(algorithm, SimpleNamespace(devices=getattr(algorithm, "devices", portable)))
    kit.test_host_cost_is_positive_and_grows(algorithm, DeviceTarget(DeviceType.CPU))


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
        words = f"Device(?=.*differently){about}"
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


@pytest.mark.parametrize(("num_ranks", "algorithm"), [
    (3, "sentinel_one_shot"), pytest.param(4, "ll128_two_shot", marks=pytest.mark.exhaustive),
    *((2, f"{each} norm") for each in ("one_shot", "two_shot", "sentinel_one_shot", "sentinel_two_shot")),
])  # fmt: skip
def test_ranks_that_call_in_different_orders_are_told(pool, num_ranks, algorithm):
    """Replays of graphs in different orders do the same on GPUs: the kernels compare, not the hosts."""
    assert pool.run(call_in_other_order, num_ranks, "cpu", algorithm) == [None] * num_ranks
