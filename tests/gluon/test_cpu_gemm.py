"""A pipelined GEMM for Hopper on the CPU, right and with one mistake at a time, each of which must be found."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris_gluon.interpreter  # noqa: F401
from iris_gluon._compat import tma_load, tma_store
from iris_gluon.interpreter.errors import MBarrierError, RaceError, UninitializedMemoryError
from iris_triton import interpreter
from iris_triton.testing.compile_only import assembly, compile_for


@pytest.fixture(autouse=True)
def _executor():
    interpreter.enable()


@gluon.jit
def produce(a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles, tiles_n, steps, BUG: gl.constexpr):
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BN: gl.constexpr = b_desc.block_type.shape[1]
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(steps):
            s = it % STAGES
            if BUG == "wrong empty parity":
                mbarrier.wait(empty.index(s), (it // STAGES) & 1)
            elif BUG == "empty parity never changes":
                mbarrier.wait(empty.index(s), 1)
            elif BUG != "no empty wait":
                mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            if BUG == "expects too much":
                mbarrier.expect(full.index(s), NBYTES + 16)
            elif BUG == "expects too little":
                mbarrier.expect(full.index(s), NBYTES - 16)
            elif BUG != "no expect":
                mbarrier.expect(full.index(s), NBYTES)
            tma_load(a_desc, [tile // tiles_n * BM, k * BK], full.index(s), a_bufs.index(s))
            if BUG != "half is loaded":
                tma_load(b_desc, [k * BK, tile % tiles_n * BN], full.index(s), b_bufs.index(s))
            it += 1


@gluon.jit
def consume(a_bufs, b_bufs, c_buf, full, empty, tiles, tiles_n, steps, c_desc, NW: gl.constexpr, BUG: gl.constexpr):
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    BM: gl.constexpr = a_bufs.type.shape[1]
    BN: gl.constexpr = b_bufs.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BN, 16])
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((BM, BN), gl.float32, layout)
        for k in range(steps):
            s = it % STAGES
            if BUG == "wrong full parity":
                mbarrier.wait(full.index(s), ((it // STAGES) & 1) ^ 1)
            elif BUG != "no full wait":
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
            acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s), acc, use_acc=k > 0, is_async=True)
            if BUG == "arrives too early":
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(s), count=1)
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if BUG != "no arrival":
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
            it += 1
        if BUG != "no product wait":
            acc = warpgroup_mma_wait(0, deps=(acc,))
        if BUG != "arrives too early" and BUG != "no arrival":
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        value = acc.to(c_buf.dtype)
        left, right = value.reshape([BM, 2, BN // 2]).permute(0, 2, 1).split()
        for half in gl.static_range(2):
            if BUG != "no store wait":
                tma.store_wait(0)
            c_buf.store(left if half == 0 else right)
            if BUG != "no fence":
                fence_async_shared()
            tma_store(c_desc, [tile // tiles_n * BM, tile % tiles_n * BN + half * (BN // 2)], c_buf)
    if BUG != "no last store wait":
        tma.store_wait(0)


@gluon.jit
def gemm(
    a_desc, b_desc, c_desc, tiles, tiles_n, steps, STAGES: gl.constexpr, BUG: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    c_buf = gl.allocate_shared_memory(dtype, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        if BUG != "no init" or i > 0:
            mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if FIRST == "consumer":
        gl.warp_specialize(
            [
                (consume, (a_bufs, b_bufs, c_buf, full, empty, tiles, tiles_n, steps, c_desc, gl.num_warps(), BUG)),
                (produce, (a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles, tiles_n, steps, BUG)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (produce, (a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles, tiles_n, steps, BUG)),
                (consume, (a_bufs, b_bufs, c_buf, full, empty, tiles, tiles_n, steps, c_desc, gl.num_warps(), BUG)),
            ],
            [4],
            [40],
        )


ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def describe(matrix, block):
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, block, layout)


def arguments(a, b, c, block, stages, bug="", first="consumer"):
    bm, bn, bk = block
    tiles_m, tiles_n = -(-c.shape[0] // bm), -(-c.shape[1] // bn)
    descriptions = describe(a, [bm, bk]), describe(b, [bk, bn]), describe(c, [bm, bn // 2])
    return (*descriptions, tiles_m * tiles_n, tiles_n, -(-a.shape[1] // bk), stages, bug, first)


def multiply(
    m, n, k, block=(64, 64, 64), stages=3, programs=2, bug="", first="consumer", dtype=torch.bfloat16, num_warps=4
):  # fmt: skip
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    c = torch.full((m, n), float("nan"), dtype=dtype)
    gemm[(programs,)](*arguments(a, b, c, block, stages, bug, first), num_warps=num_warps)
    rounding = torch.finfo(dtype).eps / 2 * (a.double() @ b.double()).abs()
    return c, a.double() @ b.double(), rounding + 2**-18 * (a.double().abs() @ b.double().abs())


@pytest.mark.parametrize(
    ("shape", "block", "num_warps", "dtype", "stages"),
    [
        ((128, 128, 256), (64, 64, 64), 4, torch.bfloat16, 3),
        ((256, 128, 64), (128, 128, 64), 8, torch.float16, 2),
        ((200, 136, 152), (64, 64, 64), 4, torch.float16, 3),  # beyond the edges 0 is read, and nothing written
        ((200, 136, 152), (64, 64, 64), 4, torch.bfloat16, 4),
        ((64, 64, 512), (64, 64, 32), 4, torch.float16, 4),
        ((64, 64, 512), (64, 64, 32), 4, torch.bfloat16, 2),
    ],
)
def test_right(shape, block, num_warps, dtype, stages):
    c, expected, allowed = multiply(*shape, block=block, stages=stages, dtype=dtype, num_warps=num_warps)
    assert ((c.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_persistent_and_not(programs):
    for first in ["consumer", "producer"]:
        c, expected, allowed = multiply(128, 256, 128, programs=programs, first=first)
        assert ((c.double() - expected).abs() <= allowed).all()


BUGS = {
    "no full wait": (UninitializedMemoryError, RaceError, "never been written|may still be writing"),
    "wrong full parity": (UninitializedMemoryError, RaceError, "never been written|may still be writing"),
    "no empty wait": (MBarrierError, RaceError, "wait for the phase before arriving again|overwrites"),
    "wrong empty parity": (interpreter.DeadlockError, None, r"'empty\[0\]' with phase=0.*lacks 1 of 1 arrivals"),
    "empty parity never changes": (MBarrierError, RaceError, "wait for the phase|overwrites"),
    "expects too much": (
        interpreter.DeadlockError,
        None,
        r"'full\[0\]'.*16 bytes that mbarrier.expect announced and no copy",
    ),
    "expects too little": (MBarrierError, None, r"'full\[0\]' brought 16 bytes more"),
    "no expect": (
        interpreter.DeadlockError,
        None,
        r"'full\[0\]'.*lacks 1 of 1 arrivals and an mbarrier.expect for 16384 bytes",
    ),
    "half is loaded": (interpreter.DeadlockError, None, r"8192 bytes that mbarrier.expect announced"),
    "arrives too early": (RaceError, None, "TMA load overwrites '[ab]_bufs.*warpgroup_mma_wait first"),
    "no arrival": (
        interpreter.DeadlockError,
        None,
        r"(partition 1 \(produce\)|the default partition) waits for mbarrier 'empty\[0\]' with phase=0",
    ),
    "no product wait": (RaceError, None, "result of warpgroup_mma .* call warpgroup_mma_wait"),
    "no store wait": (RaceError, None, "store overwrites 'c_buf'.*call tma.store_wait first"),
    "no fence": (RaceError, None, "TMA store of 'c_buf' goes through the async proxy.*fence_async_shared"),
    "no last store wait": (RaceError, None, r"ends while 1 TMA stores .* tma.store_wait\(0\)"),
    "no init": (MBarrierError, None, r"'full\[0\]', which mbarrier.init has not initialised"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_mistake_is_found_whoever_runs_first(bug):
    for first in ["consumer", "producer"]:
        one, other, message = BUGS[bug]
        raised = pytest.raises((one, other or one), match=f"(?s){message}")
        with interpreter.configured(timeout_s=1e6), raised:  # not after the bound of polls
            multiply(128, 128, 512, bug=bug, first=first, stages=3, programs=1)


def test_it_is_a_kernel_for_hopper():
    a = torch.empty(128, 128, dtype=torch.bfloat16)
    text = assembly(compile_for(gemm, arguments(a, a, a, (64, 128, 64), 3), {"num_warps": 4}, "sm_90"))
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier.try_wait", "setmaxnreg"):
        assert instruction in text
