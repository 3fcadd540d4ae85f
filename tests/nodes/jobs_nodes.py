"""Rank jobs of worlds of several nodes, into which IRIS_NODES divides the ranks of this host."""

import contextlib
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from jobs_common import refusal, unlike

import iris_triton as iris
from iris_allocators.host import HostAllocator
from iris_core import Iris
from iris_core.errors import DeviceError
from iris_core.world import arrive, connect
from iris_core.world.rendezvous import divide, private_folder
from iris_triton import DeviceContext
from iris_triton.clocks import compare


def divided(nodes, job, *args):
    """Run a job, which may set further variables, on ranks that are divided into nodes, for NCCL as well."""
    host = f"node {divide(nodes, int(os.environ['WORLD_SIZE']))[int(os.environ['RANK'])]}"
    with mock.patch.dict(os.environ, IRIS_NODES=nodes, NCCL_HOSTID=host):
        return job(*args)


def divided_otherwise():
    """Each rank has another IRIS_NODES, by which all are on one node."""
    with mock.patch.dict(os.environ, IRIS_NODES=("2x1", "1x2")[int(os.environ["RANK"])]):
        words = "RankMismatchError: .*IRIS_NODES: 2x1 on rank 0; 1x2 on rank 1"
        assert unlike((words, lambda: Iris("4MiB", device="cpu"))) == []


def heap():
    """Allocate, free and import, and compare clocks, which are one; returns how this rank sees the nodes."""
    with Iris("4MiB", device="cpu") as ctx:
        me, node = ctx.cur_rank, ctx.node_ranks
        tensors = [ctx.full((256,), float(me)) for _ in range(3)]
        ctx.free(tensors[1])
        ctx.barrier()
        tensors[1] = ctx.zeros(64)
        tensors.append(ctx.as_symmetric(torch.full((16,), float(me))))
        big = [ctx.empty(1 << 18) for _ in range(2)]  # beyond the half that allocations have at first
        offsets = [ctx.heap.offset_of(each) for each in (*tensors, *big)]
        assert ctx._world.all_gather_object(offsets) == [offsets] * ctx.num_ranks
        ctx.barrier()
        for peer in node:
            for each in (tensors[0], tensors[3]):
                assert ctx.as_remote(each, peer).unique().tolist() == [float(peer)]
        bases = ctx.get_heap_bases().tolist()
        near, far = ({bases[peer] for peer in range(ctx.num_ranks) if (peer in node) == is_near} for is_near in (1, 0))
        assert (len(near), len(far), near & far) == (len(node), ctx.num_nodes > 1, set()), bases
        clock = compare(ctx)
        assert abs(clock.ahead) <= clock.error < 1e9
        ctx.barrier()
        return ctx.node, ctx.num_nodes, node, ctx.rail_group


def cannot_map():
    """Rank 3 cannot map a peer, or has an allocator of nonsense: all refuse, and open a world afterwards."""
    fails = mock.patch.object(HostAllocator, "import_peer", mock.Mock(side_effect=OSError("no room")))
    odd, words = mock.patch.object(HostAllocator, "granularity", 0), "IrisError: .*rank 3 could not .*'host'.* by zero"
    for each, text in ((fails, "PeerAccessError: .*rank 3 could not.*no room"), (odd, words)):
        with each if int(os.environ["RANK"]) == 3 else contextlib.nullcontext():
            assert unlike((text, lambda: Iris("1MiB", device="cpu"))) == []
    with Iris("1MiB", device="cpu") as ctx:
        assert ctx.broadcast(ctx.cur_rank, 3) == 3


@triton.jit
def fetch(out, x, bases, rank, peer, MASKED: tl.constexpr):
    lanes = tl.arange(0, 8)
    tl.store(out + lanes, iris.load(x + lanes, rank, peer, bases, mask=lanes < (0 if MASKED else 8)))


@triton.jit
def fetch_by_address(out, addresses, peer):
    x = tl.load(addresses + peer).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(x))


def kernels():
    """Kernels reach the ranks of their node; they and the host are refused another rank by name."""
    with Iris("4MiB", device="cpu") as ctx:
        me, bases = ctx.cur_rank, ctx.get_heap_bases()
        x, addresses = ctx.allocate_symmetric(8, dtype=torch.float32)
        x.fill_(float(me))
        out = torch.zeros(8)
        ctx.barrier()
        for peer in ctx.node_ranks:
            fetch[(1,)](out, x, bases, me, peer, False)
            assert out.tolist() == [float(peer)] * 8
        stranger = next(peer for peer in range(ctx.num_ranks) if not ctx.is_reachable(peer))
        fetch[(1,)](out, x, bases, me, stranger, True)  # masked off
        kernel, _, text = refusal(lambda: fetch[(1,)](out, x, bases, me, stranger, False))
        assert kernel == "OutOfBoundsError"
        assert all(each in text for each in (f"rank {stranger} ", f"rank {me} (node {ctx.node})"))
        assert "in kernel 'fetch', program (0, 0, 0)" in text
        assert f"rank {me} of 4, at {__file__}:" in text
        of_host = f"UnsupportedError: .*rank {stranger} .*node {ctx.node}"
        assert unlike(
            ("OutOfBoundsError: .*another node", lambda: fetch_by_address[(1,)](out, addresses, stranger)),
            *((f"ArgumentError: .*{each!r}", partial(ctx.is_reachable, each)) for each in (-1, "0")),
            (of_host, lambda: ctx.as_remote(x, stranger)),
            (of_host, lambda: ctx.heap.translate(x.data_ptr(), me, stranger)),
            (r"UnsupportedError: .*use ctx.ccl.barrier\(\) or ctx.barrier\(\)", ctx.device_barrier),
        ) == []  # fmt: skip
        ctx.barrier()


@triton.jit
def store_there(x, context, world: tl.constexpr, peer):
    ctx = DeviceContext.from_tensor(context, world)
    lanes = tl.arange(0, 8)
    ctx.store(x + lanes, 1.0, peer, mask=lanes < 0)
    ctx.store(x + lanes, 1.0, peer, mask=lanes < 5)


def kernel_on_a_gpu():
    """A kernel compiled with debug=True says whose memory it cannot store to; returns the error of the next call."""
    ctx = Iris("4MiB", device="cuda")  # without its end: the GPU has stopped, also for this process
    me = ctx.cur_rank
    store_there[(2,)](ctx.zeros(8), ctx.get_device_context(), 2, me, debug=True)
    ctx.barrier()
    store_there[(2,)](ctx.zeros(8), ctx.get_device_context(), 2, 1 - me, debug=True)
    try:
        ctx.barrier()
    except DeviceError as error:
        return type(error).__name__, error.rank, error.peer, str(error)


class Code:
    """What runs a function where it is unpickled."""

    def __reduce__(self):
        return exec, ("import os; os.environ['RAN'] = 'here'",)


def broadcasts():
    """Only data is sent between nodes, and nothing that comes from there is run.

    At last rank 1 allocates something else, which is named across nodes.
    """
    data = {"a": [1, 2.5, ("x", None)], "b": {3, 4}, "c": 1j, "d": slice(1, 2)}
    with Iris("1MiB", device="cpu") as ctx:
        assert ctx.broadcast(data, 3) == data
        assert ctx.broadcast(torch.arange(3), 3).tolist() == [0, 1, 2]
        kind = "UnsupportedError" if ctx.cur_rank == 3 else "IrisError"
        words = f"{kind}: .*only numbers, text, containers and arrays are sent, no "
        for each in (Code(), [os.path.join], {"x": Code}):
            assert unlike((words, lambda each=each: ctx.broadcast(each, 3))) == []
        assert ctx.broadcast(ctx.cur_rank, 3) == 3
        assert "RAN" not in os.environ
        ctx.zeros(8 if ctx.cur_rank != 1 else 9999)
        words = r"SymmetryError: .*ranks 0, 2, 3: zeros\(\(8,\).*rank 1: zeros\(\(9999,\)"
        assert unlike((words, ctx.barrier)) == []


def exchanges():
    """Exchange among all ranks, within nodes and across them, from several threads."""
    with Iris("4MiB", device="cpu") as ctx:
        me, size, world = ctx.cur_rank, ctx.num_ranks, ctx._world
        for length in (0, 5000, 9 << 20):  # the last one is more than a value of torch's store may have
            assert ctx.broadcast(bytes([me]) * length, src=size - 1) == bytes([size - 1]) * length
        pairs = [dist.new_group([rank, (rank + 1) % size]) for rank in range(size)]
        for rank in range(size):
            if me in (rank, (rank + 1) % size):
                ctx.barrier(group=pairs[rank])
        if len(ctx.node_group) > 1:
            for _ in range(3):
                ctx.device_barrier(ctx.node_group)
            x = ctx.heap.take_for_group(world.subworld(ctx.node_group), ctx.node_group, 4096, "test")[1]
            x.fill_(me)
            ctx.barrier(group=ctx.node_group)

        def gather(members):
            part = world.subworld(members)
            for number in range(40):
                assert part.all_gather_object([me, number]) == [[rank, number] for rank in members]

        everyone = tuple(range(size))
        groups = [everyone[::-1], everyone[1:] + everyone[:1], ctx.node_group, ctx.rail_group]
        with ThreadPoolExecutor(len(groups)) as threads:
            assert [*threads.map(gather, groups)] == [None] * len(groups)
        rows = [{"operation": "", "rank": each} for each in everyone]
        late = refusal(lambda: world.compare_calls(rows[0], 0.0)) if me == 0 else ("nothing", (), "")
        ctx._world.subworld(everyone[::-1]).barrier()
        assert me == 0 or world.compare_calls(rows[me]) == rows, "what rank 0 has left behind"
        assert me != 0 or late[:2] == ("CollectiveTimeoutError", everyone[1:])
        ctx.barrier()


def exchanges_that_fail():
    """Rank 1 is in another exchange, rank 3 waits for rank 0 elsewhere, rank 3 closes its world while others need it.

    Each time the others name it and, of a time-out, where it is; they go on after the first two.
    """
    world = connect(None, 30.0)
    is_last = world.rank == 3
    call = world.barrier if world.rank == 1 else lambda: world.all_gather_ints([1])
    assert unlike((r"RankMismatchError: .*rank 1: barrier\(\)", call)) == []
    assert world.all_gather_object(world.rank) == [0, 1, 2, 3]
    world.timeout_s = 6.0 if is_last else 2.0  # it still waits when the others give up
    *late, text = refusal(world.subworld((3, 2, 1, 0)).barrier if is_last else world.barrier)
    assert late == ["CollectiveTimeoutError", (0, 1, 2) if is_last else (3,)]
    assert is_last or "rank 3 waits in barrier(), among ranks 3, 2, 1, 0" in text
    world.timeout_s = 30.0
    world.subworld((1, 0, 2, 3)).barrier()
    assert is_last or refusal(world.barrier)[:2] == ("PeerLostError", (3,))
    world.close()


def stay_away():
    """Rank 2 announces itself and does not open the world, rank 3 comes when the others have given up.

    Whoever opens it names both.
    """
    rank = int(os.environ["RANK"])

    def give_up():
        assert refusal(lambda: connect(None, 4.0))[:2] == ("CollectiveTimeoutError", (2, 3))

    with arrive(None) if rank == 2 else contextlib.nullcontext():
        if rank < 2:
            give_up()
        dist.barrier()
        if rank == 3:
            give_up()


def open_and_close(times, folder):
    """Open worlds and close them; how many descriptors, ranges, keys of the store and folders that has left."""
    os.environ["XDG_RUNTIME_DIR"] = folder  # other programs have folders elsewhere
    store = dist.distributed_c10d._get_default_store()
    before = ()
    for number in range(times + 1):
        with Iris("1MiB", device="cpu") as ctx:
            ctx.barrier(group=dist.group.WORLD)
        dist.barrier()
        if not number:
            gc.collect()
            before = left_behind(store, ctx.heap.nbytes)
    return [after - each for each, after in zip(before, left_behind(store, ctx.heap.nbytes), strict=True)]


def left_behind(store, nbytes):
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    fds = sum(os.path.islink(link) and not os.readlink(link).startswith("socket:") for link in links)
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if " ---p " in line]
    nothing = sum(int(end, 16) - int(begin, 16) == nbytes for begin, end in ranges)
    dist.barrier()
    found = fds, nothing, store.num_keys(), len(os.listdir(private_folder()))
    dist.barrier()
    return found


def opening():
    """Rank 3 divides the ranks otherwise than possible: all refuse to open a context."""
    if rank_3 := int(os.environ["RANK"]) == 3:
        os.environ["IRIS_NODES"] = "2x3"
    words = f"{'SettingsError' if rank_3 else 'IrisError'}: .*'2x3' .*4"
    assert unlike((words, lambda: Iris("1MiB", device="cpu"))) == []


def opening_without_torch():
    words = r"UnsupportedError: .*torch.distributed.init_process_group\(\)"
    assert unlike((words, lambda: Iris("1MiB", device="cpu"))) == []


@triton.jit
def wait_for_ever(flag):
    iris.wait(flag, 1)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def lose(victims, folder, run, use, *args):
    """Some ranks die while they use something; the others write what they are told into a folder.

    `run` is for files of Iris.
    """
    os.environ |= {"XDG_RUNTIME_DIR": run, "SURVIVORS": folder}
    rank = int(os.environ["RANK"])
    said = refusal(lambda: use(rank in victims, *args))
    if rank in victims:  # the other one was faster
        die()
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(repr(said))


def use(is_victim, phase, timeout_s):
    """Open a context and use it up to a phase, in which a victim dies."""
    if phase == "opening":
        with arrive(None) as arrival:
            if is_victim:
                die()
            arrival.open(timeout_s)
        raise AssertionError("opened")
    with Iris("1MiB", device="cpu", barrier_timeout=600.0) as ctx:
        flag = ctx.zeros(1, dtype=torch.int32)
        mine = dist.get_rank() // 2 == 1
        ctx.barrier()
        ctx._world.timeout_s = timeout_s
        if phase == "kernel" and mine:
            if is_victim:
                threading.Timer(0.5, die).start()
            wait_for_ever[(1,)](flag)
        if is_victim:
            time.sleep(0.3)
            die()
        if phase == "allocation":
            ctx.as_symmetric(torch.ones(4))
        ctx.barrier()
