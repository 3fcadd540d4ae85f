"""What kernels report reaches the next call of every rank that it concerns; and long waits are warned about."""

import concurrent.futures
import contextlib
import functools
import operator
import os
import pathlib
import random
import re
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from ccl_cases import ENCODINGS
from jobs_ccl import on_heap
from jobs_common import environment, in_vain
from rank_counts import rank_counts
from rank_processes import wait_until
from tables import raises, says, table

import iris_triton as iris
from iris_core import Iris
from iris_core.ccl import Config
from iris_core.device import status
from iris_core.device.status import StatusPage
from iris_core.errors import DeviceError
from iris_core.logs import logger
from iris_core.types import DeviceTarget, DeviceType
from iris_core.world import World

PACKETS = [
    *(("all_reduce", name) for name in ("ll128_two_shot", "sentinel_two_shot", "sentinel_split")),
    *(("reduce_scatter", f"{encoding}_mailbox") for encoding in ENCODINGS),
]
"""All encodings in one form, and all forms in one at least."""

IN_GLUON = "all_reduce", "gluon_two_shot"  # of contexts that tests/gluon opens

SOON = "4"
"""A bound for waits that are going to fail, in seconds: all kernels are compiled before, but for the first ones."""


@triton.jit
def wait_for_nothing(flag, context, world_size: tl.constexpr):
    iris.DeviceContext.from_tensor(context, world_size).wait(flag, 1)


def facts_of(call, texts=None):
    """What a call raises, as type and fields; None if nothing.  Its text is added to a list, if there is one."""
    try:
        call()
    except DeviceError as error:
        if texts is not None:
            texts.append(str(error))
        return type(error).__name__, error.rank, error.peer, error.op
    return None


def meet(ctx):
    """Wait for this rank's device, and for all ranks, without looking at reports; and then a random while."""
    if ctx.device != "cpu":
        torch.cuda.synchronize()
    ctx.broadcast(0)
    time.sleep(random.Random(time.time_ns() + ctx.cur_rank).uniform(0, 0.02))


def calls_of(ctx, x, y, group):
    """What a program may do, by name; x and y have 24 elements."""
    a, b = torch.ones(16, 16, device=ctx.device), torch.ones(16, 16, device=ctx.device)
    out, flag = ctx.zeros(16, 16), ctx.zeros(1, dtype=torch.int64)
    outs = {"all_reduce": y, "reduce_scatter": y[: len(y) // ctx.num_ranks]}
    packets = {
        f"{op} {name}": functools.partial(getattr(ctx.ccl, op), outs[op], x, config=Config(algorithm=name))
        for op, name in (*PACKETS, IN_GLUON)
    }
    reduce, send, recv = functools.partial(ctx.ccl.all_reduce, group=group), ctx.ccl.send, ctx.ccl.recv
    return {
        **packets,
        "all_reduce": lambda: reduce(y, x),
        "all_reduce of another kind": lambda: reduce(y[:3], x[:3]),
        "one_shot": lambda: reduce(y, x, config=Config(algorithm="one_shot")),
        "staged": lambda: ctx.ccl.all_gather(torch.cat([b] * ctx.num_ranks), a, config=Config(algorithm="pull")),
        "one_shot of half": lambda: reduce(y[:3], x[:3], config=Config(algorithm="one_shot")),
        "async": lambda: reduce(y, x, async_op=True).wait(),
        "matmul_all_reduce": lambda: ctx.ops.matmul_all_reduce(out, a, b),
        "device_barrier": ctx.device_barrier,
        "ccl.barrier": ctx.ccl.barrier,
        "barrier": ctx.barrier,
        "message": lambda: send(x, 1) if ctx.cur_rank == 0 else recv(y, 0) if ctx.cur_rank == 1 else None,
        "message of less": lambda: send(x, 1) if ctx.cur_rank == 0 else recv(y[:1], 0),
        "own kernel": lambda: wait_for_nothing[(1,)](flag, ctx.get_device_context(), ctx.num_ranks),
    }


failing = on_heap("16MiB", packets=True, IRIS_DEVICE_TIMEOUT=SOON)


@failing
def goes_wrong(ctx, before, made, following, groups=None, resets=True):
    """Each rank makes a call, or none, and these go wrong; later ones are right, behind a reset or without.

    Returns what the next one, if any, raises on each, as facts and text; all have made those `before`.
    """
    x, y, texts = ctx.ones(6, 4), ctx.zeros(6, 4), []
    group = groups and next(each for each in groups if ctx.cur_rank in each)
    calls = calls_of(ctx, x, y, group)
    for name in (following, *before):
        calls.get(name, lambda: None)()
    meet(ctx)
    with in_vain(20 if sum(map(bool, made)) == 1 else 2):
        calls.get(made[ctx.cur_rank], lambda: None)()
    meet(ctx)
    said = facts_of(calls[following], texts) if following else None
    meet(ctx)
    if resets:
        ctx.ccl.reset(group)
    for name in (*before, "all_reduce") * 3:
        y.zero_()
        calls[name]()
        sums = [float(len(group) if group else ctx.num_ranks)]
        wanted = {"message": [1.0] * (ctx.cur_rank == 1), "device_barrier": [], "staged": []}.get(name, sums)
        assert y[y != 0].unique().tolist() == wanted
    ctx.device_barrier()
    ctx.barrier()
    return said, texts


@failing
def at_the_same_time(ctx, name):
    """Rank 0 makes a call twice at once, as graphs do: its next barrier says so, and after a reset all is well.

    To messages, of more pieces than an inbox takes, rank 1 does not come; to collectives it does when both wait.
    """
    x, y, rank, texts = ctx.ones(6, 4), ctx.zeros(6, 4), ctx.cur_rank, []
    calls, comes = calls_of(ctx, x, y, None), name not in ("send", "recv")
    large = torch.ones(ctx.ccl.team((0, 1)).mail.nbytes // 4, device=ctx.device)
    calls |= {each: functools.partial(getattr(ctx.ccl, each), large, 1) for each in ("send", "recv")}
    calls["reply"] = lambda: ctx.ccl.recv(y, 1) if rank == 0 else ctx.ccl.send(x, 0)
    known = [name] if comes else ["message", "reply"]
    for each in known:
        calls[each]()
    for order in ctx.ccl._binder._orders.values():
        order._lock = contextlib.nullcontext()
    meet(ctx)
    store, both_wait = dist.distributed_c10d._get_default_store(), f"at the same time/{name}"
    with in_vain(1 if comes else 20), concurrent.futures.ThreadPoolExecutor(2 if rank == 0 else 1) as threads:
        if comes and rank == 1:
            store.wait([both_wait])
        for _ in range(2 * (comes or rank == 0)):
            threads.submit(facts_of, calls[name])
            time.sleep(0.5 * (comes and rank == 0))
        store.set(both_wait, "")
    meet(ctx)
    said = facts_of(ctx.barrier, texts)
    assert (comes and rank == 1) or said[:3] == ("DeviceError", 0, 0)
    assert rank == 1 or re.search(says("ccl.twice"), texts[0])
    meet(ctx)
    ctx.ccl.reset()
    for _ in range(3):
        y.zero_()
        for each in known:
            calls[each]()
        ctx.barrier()
        assert y.unique().tolist() == ([2.0] if comes else [1.0])


@failing
def in_graphs(ctx, replays):
    """Rank 1 replays once less than the others; then all capture a call, and make one that is not captured."""
    x, y = ctx.ones(64), ctx.zeros(64)
    ctx.ccl.all_reduce(y, x)
    ctx.barrier()
    graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ctx.ccl.all_reduce(y, x)
    meet(ctx)
    for _ in range(replays - (ctx.cur_rank == 1)):
        graph.replay()
    meet(ctx)
    with torch.cuda.graph(second):
        ctx.ccl.all_reduce(y, x)
    said = facts_of(lambda: ctx.ccl.all_reduce(y, x))
    meet(ctx)
    ctx.ccl.reset()
    graph.replay()
    second.replay()
    return said, facts_of(ctx.barrier), y.unique().tolist()


@contextlib.contextmanager
def recorded(warned):
    """Records of Iris's logger; with the first warning of a wait, the file `warned` is made."""
    records = []

    def note(record):
        records.append(record.getMessage())
        if " has waited for " in records[-1]:
            warned.touch()
        return True

    logger.addFilter(note)
    try:
        yield records
    finally:
        logger.removeFilter(note)


def threads():
    return [each.name for each in threading.enumerate() if each.name == "iris-watchdog"]


def late(device, folder):
    """Rank 1 comes to a call when the others have been warned, without a bound."""
    warned = [pathlib.Path(folder) / str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    here = warned[int(os.environ["RANK"])]
    bounds = environment(IRIS_DEVICE_TIMEOUT="", IRIS_WATCHDOG="0.3")
    with bounds, recorded(here) as records, Iris("16MiB", device=device) as ctx:
        x, y = ctx.ones(8192, dtype=torch.bfloat16), ctx.zeros(8192, dtype=torch.bfloat16)
        ctx.ccl.all_reduce(y, x)
        meet(ctx)
        assert records == []
        if ctx.cur_rank == 1:
            wait_until(lambda: all(each.exists() for rank, each in enumerate(warned) if rank != 1))
        ctx.ccl.all_reduce(y, x)
        ctx.barrier()
        if ctx.cur_rank != 1:
            # for rank 1, or on a busy machine for another one, which came after it
            wait_until(lambda: any("no longer waits for rank" in text for text in records))
        ctx.broadcast(0)
    assert threads() == []
    if (rank := ctx.cur_rank) != 1:  # whose machine may be slow, too
        said = f"rank {rank} has waited for rank 1 in all_reduce 8192 x bfloat16 ("
        waited = [text for text in records if text.startswith(said)]
        assert waited
        assert all(int(re.search(r" for (\d+) s; ", text)[1]) < 120 for text in waited)  # and no time of day
        assert any(text.startswith(f"rank {rank} no longer waits for rank") for text in records)


BARRIERS = "device_barrier", "ccl.barrier", "barrier"
FOLLOWING = "all_reduce", "all_reduce of another kind", "async", "matmul_all_reduce", *BARRIERS
SELDOM = pytest.mark.exhaustive(device="cpu")


@pytest.mark.parametrize(("num_ranks", "first", "following", "encoding"), [
    *((2, "all_reduce", each, "") for each in FOLLOWING), (3, "all_reduce", "all_reduce", ""),
    *(pytest.param(3, "all_reduce", each, "", marks=SELDOM) for each in FOLLOWING[1:]),
    *(pytest.param(3, f"{op} {name}", "barrier", name.split("_")[0], marks=[SELDOM] * (number in (1, 4, 5)))
      for number, (op, name) in enumerate(PACKETS)),
    (2, "device_barrier", "all_reduce", ""), (2, "all_reduce", None, ""),  # a reset drops what was not raised
])  # fmt: skip
def test_every_member_raises_at_its_next_call(pool, num_ranks, first, following, encoding, device):
    """Rank 1 does not come."""
    late = [("DeviceTimeoutError", rank, 1, first.split()[0]) for rank in (0, 2)[: num_ranks - 1]]
    made = (first, "", first)[:num_ranks]
    for said, _ in pool.run(goes_wrong, num_ranks, device, (first,), made, following):
        assert said in (late if following else [None])


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_member_hears_of_a_different_call(pool, num_ranks, device):
    both = "one_shot of half", "one_shot"
    for (kind, rank, peer, op), (text,) in pool.run(goes_wrong, num_ranks, device, both, (*both, both[0]), both[1]):
        assert (kind, op, 1 in (rank, peer), rank != peer) == ("DeviceError", "all_reduce", True, True)
        for who in (rank, peer):
            elements = 24 if who == 1 else 12
            assert f"on rank {who}, operation all_reduce, dtype float32, elements {elements}," in text


TWO = (0, 1), (2, 3)


@pytest.mark.parametrize(("before", "made", "following", "groups", "resets", "num_ranks", "wanted"), [
    *(pytest.param((), ("", "own kernel", ""), "all_reduce", None, False, n, [("DeviceTimeoutError", 1, None, "")] * n,
                   marks=marks) for n, marks in ((2, SELDOM), (3, ()))),
    (("all_reduce",), ("all_reduce", "", "all_reduce", "all_reduce"), "all_reduce", TWO, True, 4,
     [("DeviceTimeoutError", 0, 1, "all_reduce")] * 2 + [None] * 2),  # other groups go on
    (("one_shot", "staged"), ("one_shot", ""), "barrier", None, True, 2,  # what rank 1 sent before is no place
     [("DeviceTimeoutError", 0, 1, op) for op in ("all_reduce", "all_gather")]),
    (("message",), ("message of less",) * 2 + ("",), "barrier", None, False, 3,
     [("DeviceError", 1, 0, "recv")] * 2 + [None]),  # other ranks hear nothing of messages
])  # fmt: skip
def test_who_hears_of_what_goes_wrong(pool, before, made, following, groups, resets, num_ranks, wanted, device):
    how = before, made, following, groups, resets
    assert [said for said, _ in pool.run(goes_wrong, num_ranks, device, *how)] == wanted


@pytest.mark.parametrize("name", [
    "send", "recv", "all_reduce sentinel_split", "one_shot",
    *(pytest.param(f"all_reduce {each}_two_shot", marks=pytest.mark.exhaustive) for each in ("sentinel", "ll128")),
])  # fmt: skip
def test_launches_at_the_same_time_are_reported(pool, name):
    """Two graphs on two streams do the same on GPUs: see tests/multigpu."""
    assert pool.run(at_the_same_time, 2, "cpu", name) == [None] * 2


@pytest.mark.multigpu(2)
def test_replays_of_graphs(pool):
    assert pool.run(in_graphs, 2, "cuda", 20) == [(("DeviceTimeoutError", 0, 1, "all_reduce"), None, [2.0])] * 2


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_a_long_wait_is_warned_about(pool, num_ranks, device, tmp_path):
    assert pool.run(late, num_ranks, device, str(tmp_path)) == [None] * num_ranks


@table("begin", ["", "get_device_context", "device_barrier", "ccl.barrier", "ccl.all_reduce"])
def test_the_watchdog_begins_with_the_first_kernel_unless_it_is_switched_off(monkeypatch, begin):
    monkeypatch.delenv("IRIS_DEVICE_TIMEOUT", raising=False)
    if not begin:
        monkeypatch.setenv("IRIS_WATCHDOG", "0")
    with Iris("1MiB", device="cpu") as ctx:
        assert begin or ctx._reports.timeout_ns == 0
        assert threads() == []
        tensors = [torch.zeros(1)] * 2 if begin == "ccl.all_reduce" else []
        operator.attrgetter(begin or "get_device_context")(ctx)(*tensors)
        assert threads() == ["iris-watchdog"] * bool(begin)


def test_registered_pages(monkeypatch):
    """Kernels of a context that was dropped may still write there: else the next context could not register its own."""
    known, gpu, pages, code = set(), DeviceTarget(DeviceType.CUDA), [], [0]

    def register(address, nbytes, flags):  # NVIDIA's driver refuses what is registered
        answer = 712 if address.value in known else code[0]
        known.add(address.value)
        return answer

    def locate(found, address, flags):
        found._obj.value = address.value
        return 0

    driver = mock.Mock(register=register, locate=locate, unregister=lambda address: known.discard(address.value) or 0)
    monkeypatch.setattr(status, "_DRIVERS", {DeviceType.CUDA: ("a driver", "register", "locate", "unregister")})
    monkeypatch.setattr(status.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(status, "_registered", {})
    for _ in range(4):
        pages.append(StatusPage(World()))
        assert pages[-1].register(gpu) == pages[-1].address
    last = pages.pop()
    del pages
    assert len(known) == 4
    for _ in range(2):
        last.close()
    assert len(known) == len(status._registered) == 3
    code[0] = 801
    with raises(DeviceError, "device.failed", name="register", code=801):
        StatusPage(World()).register(gpu)
