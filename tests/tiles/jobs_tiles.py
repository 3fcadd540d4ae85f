"""Kernels and rank jobs of tests/tiles, in Triton and in Gluon; they run on CPU ranks and on GPUs."""

import contextlib
import time
import zlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jobs_common import environment, said_by

import iris_gluon
from iris_core import Iris
from iris_triton import DeviceContext, x
from iris_triton.language.sync import gather_stores
from iris_triton.testing.languages import in_gluon, open_context
from iris_triton.tiles import AllReduceConfig, Tile, TileView, make_locks, make_tensor_view

BLOCK_M, BLOCK_N = 8, 16
LAUNCHES = 3
SENTINEL = 77  # exact in every dtype
WITH_LOCKS = ("one_shot", "two_shot", "owner", "ring", "reduce_scatter")
RAISED = ("one_shot", "two_shot", "owner", "reduce_scatter")
GUARD = 64  # words behind the flags that nobody may touch
ADDING = ("atomic", "spinlock", "default", 4)
MOVES = ("all_gather_rows", "all_gather_columns", "all_to_all", "gather")
OPS = (*WITH_LOCKS, *ADDING, *MOVES)


@triton.constexpr_function
def default_layout(shape, vector):
    """Triton's tiles have no layout; kernels in Gluon have another function in place of this one."""
    return None


@triton.jit
def call(ctx, op: tl.constexpr, tile, mem, src, dst, locks, rank, size, number):
    """One tile-level collective, the same in both languages; `number` is its last argument, if any.

    Functions of `x` call the methods of their names.
    """
    if op == "all_gather_rows":
        x.all_gather(tile, dst, 0, ctx)
    elif op == "all_gather_columns":
        x.all_gather(tile, dst, 1, ctx)
    elif op == "all_to_all":
        x.all_to_all(mem, src, dst, number, ctx)
    elif op == "gather":
        ptr, mask = dst.tile_ptr(mem)
        tl.store(ptr, x.gather(mem, src, number, ctx), mask=mask)
    elif op == "atomic":
        x.all_reduce_atomic(tile, dst, ctx)
    elif op == "spinlock":
        x.all_reduce_spinlock(tile, dst, locks, ctx)
    elif op == "one_shot":
        x.all_reduce_one_shot(tile, src, dst, locks, ctx)
    elif op == "two_shot":
        x.all_reduce_two_shot(tile, src, dst, locks, ctx)
    elif op == "owner":
        x.all_reduce_two_shot(tile, src, dst, locks, rank, size, ctx)
    elif op == "ring":
        x.all_reduce_ring(tile, src, dst, ctx, locks)
    elif op == "reduce_scatter":
        x.reduce_scatter(tile, src, dst, locks, ctx)
    elif op == "await":
        ctx.await_tile(mem, dst, locks)
    elif op == "default":
        ctx.all_reduce(tile, src, dst)
    else:  # a variant by its number
        number = mem.pid_m * tl.cdiv(dst.N, mem.block_n) + mem.pid_n
        ctx.all_reduce(tile, src, dst, config=AllReduceConfig(op, locks), tile_id=number)


@triton.jit
def publish(tile, src, flag):
    """Store a part and raise its flag, as kernels of AMD's Iris do by themselves."""
    tile.publish(src)
    gather_stores()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["M", "N", "dst_M", "dst_N", "number"])
def run(
    Context: tl.constexpr, op: tl.constexpr, form: tl.constexpr, data, src, dst, locks, context, world: tl.constexpr,
    M, N, data_m, data_n, src_m, src_n, dst_M, dst_N, dst_m, dst_n, number, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, VECTOR: tl.constexpr = 2, OTHER: tl.constexpr = 4
):  # fmt: skip
    """Programs take tiles of `data` in turn; in Gluon, data has another layout than a tile without data.

    `form`: where the parts are: in the "tile", in src ("memory"), or in src with a flag ("raised").
    """
    ctx = open_context(Context, context, world)
    layout: tl.constexpr = default_layout([BLOCK_M, BLOCK_N], vector=VECTOR)
    other: tl.constexpr = default_layout([BLOCK_M, BLOCK_N], vector=OTHER)
    view = make_tensor_view(data, M, N, data_m, data_n)
    src_view = make_tensor_view(src, M, N, src_m, src_n)
    dst_view = make_tensor_view(dst, dst_M, dst_N, dst_m, dst_n)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for i in range(tl.program_id(0), view.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        mem = TileView(i // tiles_n, i % tiles_n, BLOCK_M, BLOCK_N, other)
        if form == "memory":
            call(ctx, op, mem, mem, src_view, dst_view, locks, ctx.rank, world, number)
        else:
            place = TileView(mem.pid_m, mem.pid_n, BLOCK_M, BLOCK_N, layout)
            tile = Tile(mem.pid_m, mem.pid_n, BLOCK_M, BLOCK_N, place.partial(view))
            if form == "raised":
                publish(tile, src_view, locks + i)
            call(ctx, op, tile, mem, src_view, dst_view, locks, ctx.rank, world, number)


KERNELS = {
    "triton": (run, DeviceContext),
    "gluon": (in_gluon(run, default_layout=iris_gluon.default_layout), iris_gluon.IrisDeviceCtx),
}


@dataclass(frozen=True)
class Case:
    """One collective, launched `LAUNCHES` times in a row."""

    op: str
    dtype: str  # of the data and, if the others are empty, of everything
    form: str = "tile"  # where the parts are, see `run`
    strided: bool = False  # tensors are every second column of wider ones, transposed in memory
    in_place: bool = False  # dst is src
    src_dtype: str = ""
    dst_dtype: str = ""


class Matrix:
    """A symmetric matrix with a margin that nobody may touch."""

    def __init__(self, ctx, rows, columns, dtype, strided):
        self.whole = ctx.empty(*((2 * columns + 1, rows + 1) if strided else (rows + 1, columns + 3)), dtype=dtype)
        self.inner = (self.whole[::2, :].t() if strided else self.whole)[:rows, :columns]
        self.whole.fill_(SENTINEL)

    def margin_is_whole(self):
        """Whether everything outside the matrix is as it was."""
        copy = self.whole.clone()
        inner = copy.as_strided(self.inner.shape, self.inner.stride())
        inner.fill_(SENTINEL)
        return bool((copy == SENTINEL).all())


def sizes(case, world):
    """Rows and columns of a part and of dst; odd, in fewer tiles for more ranks; what is gathered is not divided."""
    m, n = {1: (9, 19), 2: (9, 19), 3: (9, 13)}.get(world, (5, 19))
    if case.op == "all_to_all":
        return m, 7 * world, m, 7 * world
    if case.op == "all_gather_rows":
        rows = 17 if world < 4 else 9
        return -(-rows // world), n, rows, n
    if case.op == "all_gather_columns":
        return m, -(-33 // world), m, 33
    return m, n, m, n


def part(case, rank, turn, shape):
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    dtype = getattr(torch, case.dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    return torch.randint(-(2**20), 2**20, shape, generator=generator).to(dtype)


def tile_numbers(shape):
    i, j = torch.arange(shape[0])[:, None] // BLOCK_M, torch.arange(shape[1])[None, :] // BLOCK_N
    return i * -(-shape[1] // BLOCK_N) + j


def owned(shape, world, rank):
    """Which elements lie in tiles that reduce_scatter gives to a rank."""
    numbers = tile_numbers(shape)
    share = (int(numbers.max()) + 1) // world
    return (numbers // share).clamp(max=world - 1) == rank if share else torch.full_like(numbers, rank == world - 1) > 0


def expected(case, parts, rank, before):
    """The exact result or None where additions have no order, and that in float64; `before` is where none is stored."""
    world, shape = len(parts), parts[0].shape
    if case.op in MOVES:
        if case.op == "gather":
            result = parts[(rank + 1) % world]
        elif case.op == "all_to_all":
            result = torch.cat([p.chunk(world, dim=1)[rank] for p in parts], dim=1)
        else:
            result = torch.cat(parts, dim=int(case.op.endswith("columns")))[: before.shape[0], : before.shape[1]]
        return result, result.double()
    src, dst = (getattr(torch, name or case.dtype) for name in (case.src_dtype, case.dst_dtype))
    true = sum(p.double() for p in parts)
    if case.op in ADDING:
        return (sum(parts) if not src.is_floating_point else None), true
    sums = torch.float32 if src.is_floating_point and src.itemsize < 4 else max(src, dst, key=lambda t: t.itemsize)
    wide = [p.to(src).to(sums) for p in parts]
    numbers = tile_numbers(shape)
    if case.op == "ring":  # tile t begins at rank t % world
        total = torch.empty_like(wide[0])
        for start in range(world):
            here = numbers % world == start
            total[here] = sum((wide[(start + i) % world] for i in range(1, world)), wide[start])[here]
    else:
        total = sum(wide[1:], wide[0])
    total = total.to(dst)
    if case.op == "reduce_scatter":
        mine = owned(shape, world, rank)
        return torch.where(mine, total, before), torch.where(mine, true, before.double())
    return total, true


def run_cases(language, cases, device):
    """Run cases one after the other; returns a checksum of dst per case and launch."""
    sums = []
    with Iris("8MiB", device=device, backend=language) as ctx:
        for case in cases:
            with ctx.scope():
                sums += run_case(ctx, language, case)
    return sums


def run_case(ctx, language, case):
    rank, world = ctx.cur_rank, ctx.num_ranks
    m, n, dst_m, dst_n = sizes(case, world)
    src_dtype, dst_dtype = (getattr(torch, name or case.dtype) for name in (case.src_dtype, case.dst_dtype))
    src = Matrix(ctx, m, n, src_dtype, case.strided)
    dst = src if case.in_place else Matrix(ctx, dst_m, dst_n, dst_dtype, case.strided)
    locks = make_locks(ctx, dst_m, dst_n, BLOCK_M, BLOCK_N, "spinlock" if case.op == "spinlock" else "two_shot")
    raised = case.form == "raised"
    if raised:
        tiles = int(tile_numbers((m, n)).max()) + 1
        locks = ctx.full((tiles + GUARD,), SENTINEL, dtype=torch.int32)
    data = torch.empty(m, n, dtype=getattr(torch, case.dtype), device=ctx.device)
    number = {"gather": (rank + 1) % world, "all_to_all": 7}.get(case.op, 0)

    def launch(op):
        simple_launch(ctx, language, op, data, src.inner, dst.inner, locks, 2, case.form, number)

    ctx.barrier()
    results = []
    for turn in range(LAUNCHES):
        mine = part(case, rank, turn, (m, n))
        data.copy_(mine)
        if case.op in WITH_LOCKS and not raised:  # no barrier: the kernels themselves keep the launches apart
            if case.form == "memory":
                launch("await")
                src.inner.copy_(mine)
        else:
            ctx.barrier()
            src.inner.copy_(mine if not raised else torch.full_like(mine, SENTINEL))
            if raised:
                locks[:tiles] = 0
            if case.op in ADDING:
                dst.inner.zero_()
            ctx.barrier()
        if turn % world == rank:
            time.sleep(0.005)
        launch(case.op)
        if case.op in (*ADDING, *MOVES) or raised:
            ctx.barrier()
        elif case.op in ("two_shot", "owner", "reduce_scatter"):
            launch("await")
        results.append(dst.inner.clone())
    ctx.barrier()
    sums = []
    for turn, result in enumerate(results):
        parts = [part(case, r, turn, (m, n)) for r in range(world)]
        before = parts[rank] if case.in_place else torch.full((dst_m, dst_n), SENTINEL, dtype=dst_dtype)
        result = result.cpu()
        exact, true = expected(case, parts, rank, before)
        assert exact is None or torch.equal(result, exact), f"launch {turn}: {case} is not exact"
        scale = 0.0 if case.op in MOVES else sum(p.double().abs() for p in parts)  # of each element
        rounding = 0.0
        if dst_dtype.is_floating_point:
            fine = torch.finfo(torch.float32).eps
            coarse = max(torch.finfo(dtype).eps for dtype in (src_dtype, dst_dtype))
            rounding = world * coarse if exact is None else coarse + world * fine  # sums on their way are float32
        error = (result.double() - true).abs()
        assert (error <= rounding * scale).all(), f"launch {turn}: {case} is off by {error.max()}"
        sums.append(zlib.crc32(result.contiguous().view(torch.uint8).numpy().tobytes()))
    assert src.margin_is_whole(), f"{case} touches memory outside src"
    assert dst.margin_is_whole(), f"{case} touches memory outside dst"
    if raised:
        assert locks.tolist() == [1] * tiles + [SENTINEL] * GUARD, case
    elif case.op in WITH_LOCKS:
        stamps, taken = locks.cpu().view(-1, 2 * world + 3)[:, 2 * world : 2 * world + 2].t()
        assert (set((stamps >> 3).tolist()), set(taken.tolist())) == ({LAUNCHES}, {0}), case
    else:
        assert not locks.any(), f"{case} leaves a lock taken"
    return sums


def simple_launch(ctx, language, op, data, src, dst, locks, programs=2, form="tile", number=0):
    """Launch with a source of the shape of the data."""
    kernel, context = KERNELS[language]
    kernel[(programs,)](
        context, op, form, data, src, dst, locks, ctx.get_device_context(), ctx.num_ranks, *data.shape, *data.stride(),
        *src.stride(), *dst.shape, *dst.stride(), number, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@contextlib.contextmanager
def opened(language, device, op="two_shot", m=9, n=20, dtype=torch.float32):
    """A context, two symmetric matrices, locks for an operation, and a function (value) that makes a part."""
    with Iris("4MiB", device=device, backend=language) as ctx:
        src, dst = ctx.zeros(m, n, dtype=dtype), ctx.zeros(m, n, dtype=dtype)
        locks = make_locks(ctx, m, n, BLOCK_M, BLOCK_N, op if op in ("spinlock", "atomic") else "two_shot")
        ctx.barrier()
        yield ctx, src, dst, locks, lambda value: torch.full((m, n), float(value), device=ctx.device)


def one_after_the_other(language, op, device):
    """Each rank's kernel ends before the next one's begins; returns whether the result is right everywhere."""
    with opened(language, device, op) as (ctx, src, dst, locks, part):
        rank, world = ctx.cur_rank, ctx.num_ranks
        for launch in range(2):
            for turn in range(world):
                if turn == rank:
                    simple_launch(ctx, language, op, part((rank + 1) * (launch + 1)), src, dst, locks)
                ctx.barrier()  # raises if a wait has timed out
        scale = 3 if op in ADDING else 2  # what adds has added twice
        total = scale * world * (world + 1) / 2
        if op == "reduce_scatter":
            return torch.equal(dst.cpu(), torch.where(owned(dst.shape, world, rank), total, 0.0))
        return bool((dst == total).all())


def mistaken(language, mistakes):
    """Calls that the executor must refuse, by operation and dtype, on 9 x 20 elements; returns what it says."""
    said = []
    for op, dtype, number in mistakes:
        with opened(language, "cpu", dtype=getattr(torch, dtype)) as (ctx, _, dst, locks, _):
            said.append(said_by(simple_launch, ctx, language, op, torch.ones_like(dst), dst, dst, locks, number=number))
            ctx.barrier()
    return said


def sequence(language, ops, device, start=0, replays=0):
    """Different algorithms one after the other with the same locks, from a given stamp on; returns who is wrong.

    They are launched once, or captured and replayed, with new data and no barrier.
    """
    with opened(language, device, m=33, n=35) as (ctx, src, dst, locks, part):
        rank, world = ctx.cur_rank, ctx.num_ranks
        stamps = locks.view(-1, 2 * world + 3)
        stamps[:] = start
        stamps[:, 2 * world + 1] = 0
        data, turn = part(0), torch.zeros(1, dtype=torch.int64, device=ctx.device)
        results = data.new_zeros(len(ops) * max(replays, 1), *data.shape)

        def step():
            for number, op in enumerate(ops):
                if not replays and number % world == rank:
                    time.sleep(0.005)
                data.copy_((turn + rank).expand(data.shape))
                simple_launch(ctx, language, op, data, src, dst, locks)
                simple_launch(ctx, language, "await", data, src, dst, locks)
                results.index_copy_(0, turn, dst[None])
                turn.add_(1)

        ctx.barrier()
        step()  # in which kernels are compiled
        ctx.barrier()
        if replays:
            turn.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for replay in range(replays):
            if replay % world == rank:
                torch.cuda.synchronize()
                time.sleep(0.002)
            graph.replay()
        ctx.barrier()
        wants = [sum(r + turn for r in range(world)) for turn in range(len(results))]
        wrong = [turn for turn, want in enumerate(wants) if not (results[turn] == want).all()]
        return wrong, int(stamps[0, 2 * world])


def nobody_else_calls(language, op, device):
    """Rank 0 calls alone, or finds a lock taken; returns the text of its error and whether dst is untouched."""
    with environment(IRIS_DEVICE_TIMEOUT="0.3"), opened(language, device, op, 5, 9) as (ctx, src, dst, locks, part):
        if op == "spinlock":
            locks.fill_(1)
        ctx.barrier()
        if ctx.cur_rank == 0:
            for _ in range(2 if op == "two_shot" else 1):  # the second one waits for the end of the first
                simple_launch(ctx, language, op, part(1), src, dst, locks, programs=1)
        text = said_by(ctx.barrier)
        ctx.barrier()
        return text, not dst.any()
