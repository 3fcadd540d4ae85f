"""Rank jobs whose kernels put and signal to other nodes: emulated on CPU ranks, by NCCL on GPUs."""

import random
import re
from functools import partial

import torch
import triton
import triton.language as tl
from jobs_common import refusal, unlike
from jobs_nodes import divided  # noqa: F401 - for tests/multigpu
from kernel_text import kernel_of
from tables import says
from test_one_sided import rounds_of_puts

import iris_triton as iris
from iris_core import Iris
from iris_core.device.context_words import NETWORK_WORDS
from iris_core.errors import UnsupportedError
from iris_triton.language import gin
from iris_triton.testing.selftest import self_test

BLOCK = 256


def opened(device, delay=0.002):
    """A context whose kernels reach other nodes."""
    return Iris("8MiB", device=device, allocator="nccl", options={"nccl": {"emulated_delay": delay}})


@triton.jit
def exchange(
    data, box, flags, places, wrong, context, to, source, turns, rank: tl.constexpr, world: tl.constexpr,
    BLOCK: tl.constexpr, FORM: tl.constexpr, CARELESS: tl.constexpr
):  # fmt: skip
    """Every turn: fill a piece of `data`, put it, wait for the one of `source`, look at it, and say so.

    One that is careless does not wait, or changes what it has put without having flushed that.
    `places` has (first, count) for every rank and turn; `flags` are two words, of data and of thanks.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    i = tl.arange(0, BLOCK)
    missing = tl.full((), 0, tl.int64)
    for turn in range(1, turns + 1):
        mine = places + 2 * (rank * turns + turn - 1)
        first, count = tl.load(mine), tl.load(mine + 1)
        tl.store(data + first + i, rank * 7919 + turn * 31 + i, mask=i < count)
        if FORM == "put_signal":
            ctx.put_signal(data + first + i, box + first + i, flags, 1, to, op="add", mask=i < count)
        else:
            ctx.put(data + first + i, box + first + i, to, mask=i < count)
            ctx.signal(flags, 1, to, op="add")
        if CARELESS == "flush":
            tl.store(data + first + i, -5, mask=i < count)
        if CARELESS != "wait":
            ctx.wait(flags, turn)
        theirs = places + 2 * (source * turns + turn - 1)
        first, count = tl.load(theirs), tl.load(theirs + 1)
        found = tl.load(box + first + i, mask=i < count, other=0)
        expected = tl.where(i < count, source * 7919 + turn * 31 + i, 0)
        missing += tl.sum((found != expected).to(tl.int64))
        ctx.signal(flags + 1, 1, source, op="add")
        ctx.wait(flags + 1, turn)
        ctx.flush()
    tl.store(wrong, missing)


def exchanges(device, turns, distance, form="put_signal", seed=0, delay=0.0005, careless=""):
    """How many elements were wrong that the rank at a distance has sent, in random pieces."""
    with opened(device, delay) as ctx:
        me, world = ctx.cur_rank, ctx.num_ranks
        draw = random.Random(seed)
        rows = [(draw.randrange(BLOCK), draw.randint(0, BLOCK)) for _ in range(world * turns)]
        places = torch.tensor(rows, dtype=torch.int32, device=ctx.device)
        data, box = (ctx.full((2 * BLOCK,), -1, dtype=torch.int32) for _ in range(2))
        flags, wrong = ctx.zeros(2, dtype=torch.int64), torch.full((1,), -1, device=ctx.device)
        to, source = (me + distance) % world, (me - distance) % world
        ctx.barrier()
        exchange[(1,)](
            data, box, flags, places, wrong, ctx.get_device_context(), to, source, turns, me, world, BLOCK, form,
            careless, **ctx.launch_options(),
        )  # fmt: skip
        ctx.barrier()
        return int(wrong)


ONE_RUN, OF_64_BITS = says("memory.run"), says("memory.signals")
PUT = "ctx.put(x + i, y + i, to)"
REFUSED = {
    "flag of 32 bits": ("ctx.signal(flags.to(tl.pointer_type(tl.int32)), 1, to, op='add')", OF_64_BITS),
    "got by stride": ("ctx.get(x + 2 * i, y + 2 * i, to)", ONE_RUN),
    "load": ("tl.store(y + i, ctx.load(x + i, to))", "refused: rank"),
    "store": ("ctx.store(x + i, 1.0, to)", "refused: rank"),
    "atomic_add": ("ctx.atomic_add(x + i, 1.0, to)", "refused: rank"),
    "set": ("ctx.signal(flags, 1, to)", OF_64_BITS),
    "stride": ("ctx.put(x + 2 * i, y + 2 * i, to)", ONE_RUN),
    "hole": ("ctx.put(x + i, y + i, to, mask=i != 5)", ONE_RUN),
    "beyond": ("gin.put_bytes(context + (2 + world + 20), to, 0, 1 << 40, 16)", "gin: 16 bytes"),
    "source": (PUT, says("memory.outside", what="source")), "target": (PUT, says("memory.outside", what="target")),
    "freed": (PUT, "out of bounds"), "not linked": (PUT, r"ctx.launch_options\(\)"),
}  # fmt: skip
"""What a kernel does, with tensors that are wrong in the last rows, and what is said of it."""


def refusals():
    """Each wrong access to another node says what it is and where, and changes nothing."""
    with opened("cpu") as ctx:
        me, world = ctx.cur_rank, ctx.num_ranks
        x, y, flags = ctx.zeros(64), ctx.zeros(64), ctx.zeros(2, dtype=torch.int64)
        gone = ctx.zeros(64)
        ctx.free(gone)
        ctx.barrier()
        parameters = "x, y, flags, context, to, rank: tl.constexpr, world: tl.constexpr"
        begin = "ctx = iris.DeviceContext.initialize(context, rank, world)\ni = tl.arange(0, 16)\n"
        for what, (text, part) in REFUSED.items():
            kernel = kernel_of(triton.jit, parameters, begin + text, iris=iris, tl=tl, gin=gin)
            source = {"source": torch.zeros(64), "freed": gone}.get(what, x)
            target = torch.zeros(64) if what == "target" else y
            options = {} if what == "not linked" else ctx.launch_options()
            launch = partial(kernel[(1,)], source, target, flags, ctx.get_device_context(), (me + 1) % world, me, world)
            *_, said = refusal(partial(launch, **options))
            assert all(re.search(each, said) for each in (part, "kernel 'kernel'", f"rank {me} of {world}")), (
                what,
                said,
            )
        words = ctx.get_device_context()[-NETWORK_WORDS:].tolist()
        ctx.tracing.enable()  # which leaves the words of the network as they are
        assert ctx.get_device_context()[-NETWORK_WORDS:].tolist() == words
        assert len(set(words) - {0}) == 2
        ctx.barrier()
        assert (x.any(), y.any(), flags.tolist()) == (False, False, [0, 0])


@triton.jit
def tell_all(flags, total, context, far, near, rank: tl.constexpr, world: tl.constexpr, SIZE: tl.constexpr):
    """Several programs add to one word of every rank on another node, and to one of every rank on theirs."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    for to in range(world):
        ctx.signal(flags + (to // SIZE == rank // SIZE), 1 + rank, to, op="add")
    if tl.program_id(0) == 0:
        tl.store(total, ctx.wait(flags, far))
        tl.store(total + 1, ctx.wait(flags + 1, near))


def everyone(device, programs):
    """Whether all programs of other nodes have added to a word of this rank, and those of its node to another one."""
    with opened(device) as ctx:
        flags, total = ctx.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device=ctx.device)
        ctx.barrier()
        me, world, node = ctx.cur_rank, ctx.num_ranks, ctx.node_ranks
        near = programs * sum(1 + rank for rank in node)
        far = programs * world * (world + 1) // 2 - near
        tell_all[(programs,)](
            flags, total, ctx.get_device_context(), far, near, me, world, len(node), **ctx.launch_options()
        )  # fmt: skip
        ctx.barrier()
        return total.tolist() == flags.tolist() == [far, near]


@triton.jit
def shapes(x, y, flags, context, to, rank: tl.constexpr, world: tl.constexpr):
    """Put and get a block of rows, nothing, and one element; the rows of a near rank need not be one run."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    places = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    ctx.put(x + places, y + places, to)
    ctx.put_signal(x + places, y + 100 + places, flags, 1, to, op="add", mask=places < 0)
    ctx.put_signal(x + 77, y + 77, flags, 1, to, op="add")
    near = rank ^ 1
    ctx.put(x + 2 * places, y + 200 + 2 * places, near)
    ctx.get(x + places, y + 400 + places, to)
    ctx.get(x + 77, y + 480, to)
    ctx.get(x + 78, y + 481, near)
    ctx.signal(flags + 1, 1, near)
    ctx.wait(flags, 2)
    ctx.wait(flags + 1, 1)
    ctx.flush()


def put_shapes(dtype):
    """What a far and a near rank have put, and what was got from them: where it differs from what they had."""
    with opened("cpu") as ctx:
        me, world = ctx.cur_rank, ctx.num_ranks
        had = lambda rank: ((torch.arange(512) + 3 * rank) % 5).to(dtype)
        x, y = ctx.as_symmetric(had(me)), ctx.zeros(512, dtype=dtype)
        flags = ctx.zeros(2, dtype=torch.int64)
        ctx.barrier()
        shapes[(1,)](x, y, flags, ctx.get_device_context(), (me + 2) % world, me, world, **ctx.launch_options())
        ctx.barrier()
        expected = torch.zeros(512, dtype=dtype)
        far, near = had((me + 2) % world), had(me ^ 1)
        expected[:64], expected[77] = far[:64], far[77]
        expected[200:328:2] = near[:128:2]
        expected[400:464], expected[480], expected[481] = far[:64], far[77], near[78]
        return (y != expected).nonzero().flatten().tolist()


def without_network(allocator):
    """The options of a launch, and the words of the context tensor, where nothing reaches other nodes."""
    with Iris("1MiB", device="cpu", allocator=allocator) as ctx:
        return ctx.launch_options(), ctx.get_device_context().numel() - ctx.num_ranks


def host_rounds(device, rounds, distance):
    rounds_of_puts(opened(device), rounds, distance, between_nodes=True)


def host_refusals(allocator):
    """Calls of the host that another node is not reached by, and do not say so; and what they have changed."""
    with Iris("4MiB", device="cpu", allocator=allocator) as ctx:
        far = (ctx.cur_rank + ctx.num_ranks // 2) % ctx.num_ranks
        x, y, word, short = (
            ctx.zeros(8, 8), ctx.ones(8, 8), ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        where, adds = f"rank {far} ", f"rank {far} .* 64 bits"
        of_network = (
            (f"UnsupportedError: put: {where}.*contiguous", lambda: ctx.put(x[:, :2], far, y[:, :2])),
            (f"UnsupportedError: get: {where}.*contiguous", lambda: ctx.get(x, far, y.t())),
            ("UnsupportedError: get: .*pass out", lambda: ctx.get(x, far)),
            (f"UnsupportedError: put: {adds}", lambda: ctx.put(x, far, y, signal=word)),
            (f"UnsupportedError: signal: {adds}", lambda: ctx.signal(short, far, op="add")),
            ("NotOnHeapError: put: the source", lambda: ctx.put(x, far, torch.ones(8, 8))),
            ("NotOnHeapError: signal: the signal",
             lambda: ctx.signal(torch.zeros(1, dtype=torch.int64), far, op="add")),
            ("ArgumentError: signal: a signal ", lambda: ctx.signal(x, far, op="add")),
            ("ArgumentError: put: the source is", lambda: ctx.put(x, far, y[:4])),
        )  # fmt: skip
        way = r".*\(allocator='nccl'\), ctx.ccl"
        of_all = (
            (f"UnsupportedError: put: {where}{way}", lambda: ctx.put(x, far, y)),
            (f"UnsupportedError: get: {where}{way}", lambda: ctx.get(x, far, y)),
            (f"UnsupportedError: signal: {where}{way}", lambda: ctx.signal(word, far, op="add")),
        )
        wrong = unlike(*(of_network if allocator == "nccl" else of_all))
        ctx.barrier()
        return wrong, int(word), x.unique().tolist()


def same_node():
    """What the backend's self-test says of all pairs, and how many elements of a sum are wrong."""
    with Iris("256MiB", device="cuda", allocator="nccl") as ctx:
        problems = [str(each) for each in self_test(ctx, lambda operation, peer: None) if each.problem]
        x = ctx.arange(1 << 20, dtype=torch.int32) + ctx.cur_rank
        total = ctx.empty(1 << 20, dtype=torch.int32)
        ctx.ccl.all_reduce(total, ctx.as_symmetric(x))
        world = ctx.num_ranks
        expected = torch.arange(1 << 20, device=x.device) * world + world * (world - 1) // 2
        return problems, int((total != expected).sum())


def or_reason(job, *args):
    """What a job returns; or why this machine's NCCL cannot connect nodes for kernels."""
    try:
        return job(*args)
    except UnsupportedError as error:
        return str(error)
