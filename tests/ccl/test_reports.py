"""What kernels report reaches the next call of every rank that it concerns; and long waits are warned about."""

import concurrent.futures
import contextlib
import functools
import logging
import operator
import os
import pathlib
import random
import re
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from ccl_cases import ENCODINGS
from jobs_ccl import on_heap, wait_until
from jobs_common import environment, in_vain
from rank_counts import rank_counts
from tables import table

import iris_triton as iris
from iris_core import Iris
from iris_core.ccl import Config
from iris_core.device import status
from iris_core.device.status import StatusPage
from iris_core.errors import DeviceError
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


def calls_of(ctx, x, y):
    """What a program may do next, by name."""
    a, b = torch.ones(16, 16, device=ctx.device), torch.ones(16, 16, device=ctx.device)
    out = ctx.zeros(16, 16)
    outs = {"all_reduce": y, "reduce_scatter": y[: len(y) // ctx.num_ranks]}
    packets = {
        f"{op} {name}": functools.partial(getattr(ctx.ccl, op), outs[op], x, config=Config(algorithm=name))
        for op, name in (*PACKETS, IN_GLUON)
    }
    return {
        **packets,
        "all_reduce": lambda: ctx.ccl.all_reduce(y, x),
        "all_reduce of another kind": lambda: ctx.ccl.all_reduce(y[:3], x[:3]),
        "async": lambda: ctx.ccl.all_reduce(y, x, async_op=True).wait(),
        "matmul_all_reduce": lambda: ctx.ops.matmul_all_reduce(out, a, b),
        "device_barrier": ctx.device_barrier,
        "ccl.barrier": ctx.ccl.barrier,
        "barrier": ctx.barrier,
    }


failing = on_heap("16MiB", packets=True, IRIS_DEVICE_TIMEOUT=SOON)


@failing
def gives_up(ctx, following, first="all_reduce"):
    """Rank 1 does not come to a call; returns what the next one, if any, raises on each; then all reset and go on."""
    x, y = ctx.ones(6, 4), ctx.zeros(6, 4)
    calls = calls_of(ctx, x, y)
    for name in filter(None, (following, first)):
        calls[name]()
    meet(ctx)
    if ctx.cur_rank != 1:
        with in_vain(20 if ctx.num_ranks == 2 else 2):
            calls[first]()
    meet(ctx)
    said = facts_of(calls[following]) if following else None
    meet(ctx)
    ctx.ccl.reset()
    for name in (first, "all_reduce") * 3:
        y.zero_()
        calls[name]()
        assert y[y != 0].unique().tolist() == [float(ctx.num_ranks)] * (name != "device_barrier")
    ctx.device_barrier()
    ctx.barrier()
    return said


def goes_wrong(device, how):
    """A call goes wrong on rank 1: what the next one raises, as facts and text; later ones are right.

    Args:
        how: it makes "another call" that all know; it waits for nothing in a kernel of its "own"; it does not come to
            its "group"; it expects another "message" than rank 0 sends, through words that all know.
    """
    bound = {"IRIS_DEVICE_TIMEOUT": SOON} if how in ("own kernel", "group") else {}
    with environment(**bound), Iris("16MiB", device=device) as ctx:
        rank, x, y, texts, group = ctx.cur_rank, ctx.ones(8), ctx.zeros(8), [], None
        config = Config(algorithm="one_shot") if how == "another call" else None
        if how == "group":
            group = (0, 1) if rank < 2 else (2, 3)
        reduce = functools.partial(ctx.ccl.all_reduce, y, x, group=group, config=config)
        reduce()
        if how == "another call":
            ctx.ccl.all_reduce(y[:4], x[:4], config=config)
        flag = ctx.zeros(1, dtype=torch.int64)
        meet(ctx)
        with in_vain(20) if rank == {"own kernel": 1, "group": 0}.get(how) else contextlib.nullcontext():
            if how == "own kernel" and rank == 1:
                wait_for_nothing[(1,)](flag, ctx.get_device_context(), ctx.num_ranks)
            elif how == "group" and rank != 1:
                reduce()
            elif how == "another call":
                reduce() if rank == 1 else ctx.ccl.all_reduce(y[:4], x[:4], config=config)
            elif how == "message" and rank < 2:
                ctx.ccl.send(x, 1) if rank == 0 else ctx.ccl.recv(y[:4], 0)
        meet(ctx)
        said = facts_of(ctx.barrier if how == "message" else reduce, texts)
        meet(ctx)
        if how in ("group", "another call"):
            ctx.ccl.reset(group)
        reduce()
        ctx.barrier()
        assert y.unique().tolist() == [2.0 if how == "group" else float(ctx.num_ranks)]
        return said, texts


@failing
def messages_at_the_same_time(ctx, op):
    """Rank 0 makes a call twice at once, as graphs do, and rank 1 comes to none: the next barrier says so."""
    peer = 1 - ctx.cur_rank
    count = ctx.ccl.team((0, 1)).mail.nbytes // 4  # more pieces than an inbox takes
    small, large = torch.ones(1, device=ctx.device), torch.ones(count, device=ctx.device)
    ctx.ccl.send(small, 1) if peer == 1 else ctx.ccl.recv(small, 0)
    ctx.ccl.recv(small, 1) if peer == 1 else ctx.ccl.send(small, 0)
    for order in ctx.ccl._binder._orders.values():
        order._lock = contextlib.nullcontext()
    meet(ctx)
    if ctx.cur_rank == 0:
        with in_vain(20), concurrent.futures.ThreadPoolExecutor() as threads:
            for _ in range(2):
                threads.submit(facts_of, lambda: getattr(ctx.ccl, op)(large, 1))
    meet(ctx)
    assert facts_of(ctx.barrier)[:3] == ("DeviceError", 0, 0)
    ctx.ccl.reset()
    ctx.ccl.send(small, 1) if peer == 1 else ctx.ccl.recv(small, 0)
    ctx.barrier()


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
    records, handler = [], logging.Handler()

    def emit(record):
        records.append(record.getMessage())
        if " has waited for " in records[-1]:
            warned.touch()

    handler.emit = emit
    logging.getLogger("iris").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("iris").removeHandler(handler)


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
            wait_until(lambda: any("no longer waits for rank 1" in text for text in records))
        ctx.broadcast(0)
    assert threads() == []
    if (rank := ctx.cur_rank) != 1:  # whose machine may be slow, too
        said = f"rank {rank} has waited for rank 1 in all_reduce 8192 x bfloat16 ("
        waited = [text for text in records if text.startswith(said)]
        assert waited
        assert all(int(re.search(r" for (\d+) s; ", text)[1]) < 120 for text in waited)  # and no time of day
        assert any(text.startswith(f"rank {rank} no longer waits for rank 1") for text in records)


FOLLOWING = [
    "all_reduce", "all_reduce of another kind", "async", "matmul_all_reduce", "device_barrier", "ccl.barrier",
    "barrier",
]  # fmt: skip


SELDOM = pytest.mark.exhaustive(device="cpu")


@pytest.mark.parametrize(("num_ranks", "first", "following", "encoding"), [
    *((2, "all_reduce", each, "") for each in FOLLOWING), (3, "all_reduce", "all_reduce", ""),
    *(pytest.param(3, "all_reduce", each, "", marks=SELDOM) for each in FOLLOWING[1:]),
    *(pytest.param(3, f"{op} {name}", "barrier", name.split("_")[0], marks=[SELDOM] * (number in (1, 4, 5)))
      for number, (op, name) in enumerate(PACKETS)),
    (2, "device_barrier", "all_reduce", ""), (2, "all_reduce", None, ""),  # a reset drops what was not raised
])  # fmt: skip
def test_every_member_raises_at_its_next_call(pool, num_ranks, first, following, encoding, device):
    late = [("DeviceTimeoutError", rank, 1, first.split()[0]) for rank in (0, 2)[: num_ranks - 1]]
    for said in pool.run(gives_up, num_ranks, device, following, first):
        assert said in (late if following else [None])


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_every_member_hears_of_a_different_call(pool, num_ranks, device):
    for (kind, rank, peer, op), (text,) in pool.run(goes_wrong, num_ranks, device, "another call"):
        assert (kind, op, 1 in (rank, peer), rank != peer) == ("DeviceError", "all_reduce", True, True)
        for who in (rank, peer):
            elements = 8 if who == 1 else 4
            assert f"on rank {who}, operation all_reduce, dtype float32, elements {elements}," in text


@pytest.mark.parametrize(("num_ranks", "how", "wanted"), [
    *(pytest.param(number, "own kernel", [("DeviceTimeoutError", 1, None, "")] * number, marks=marks)
      for number, marks in ((2, SELDOM), (3, ()))),
    (4, "group", [("DeviceTimeoutError", 0, 1, "all_reduce")] * 2 + [None] * 2),  # other groups go on
    (3, "message", [("DeviceError", 1, 0, "recv")] * 2 + [None]),  # other ranks hear nothing of messages
])  # fmt: skip
def test_who_hears_of_what_goes_wrong(pool, num_ranks, device, how, wanted):
    assert [said for said, _ in pool.run(goes_wrong, num_ranks, device, how)] == wanted


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages_at_the_same_time_are_reported(pool, op):
    """Two graphs on two streams do the same on GPUs."""
    assert pool.run(messages_at_the_same_time, 2, "cpu", op) == [None] * 2


@pytest.mark.multigpu(2)
def test_replays_of_graphs(pool):
    wanted = ("DeviceTimeoutError", 0, 1, "all_reduce"), None, [2.0]
    assert pool.run(in_graphs, 2, "cuda", 20) == [wanted] * 2


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


class Driver(set):
    """The addresses that a driver has registered, which refuses those again, as NVIDIA's does; `code` is its answer."""

    code = 0

    def register(self, address, nbytes, flags):
        if not self.code and address.value not in self:
            return self.add(address.value) or 0
        return self.code or 712

    def locate(self, found, address, flags):
        found._obj.value = address.value
        return 0

    def unregister(self, address):
        self.discard(address.value)
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(status, "_DRIVERS", {DeviceType.CUDA: ("a driver", "register", "locate", "unregister")})
    monkeypatch.setattr(status.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(status, "_registered", {})
    return found


def test_registered_pages(driver):
    """Kernels of a context that was dropped may still write there: else the next context could not register its own."""
    gpu, pages = DeviceTarget(DeviceType.CUDA), []
    for _ in range(4):
        pages.append(StatusPage(World()))
        assert pages[-1].register(gpu) == pages[-1].address
    last = pages.pop()
    del pages
    assert len(driver) == 4
    for _ in range(2):
        last.close()
    assert len(driver) == len(status._registered) == 3
    driver.code = 801
    with pytest.raises(DeviceError, match="register failed with code 801"):
        StatusPage(World()).register(gpu)
