"""Bulk copies: what they compile to, where they are refused, and what they copy."""

import itertools
import re

import bulk_kernels
import pytest
import torch
from gluon_kernels import said_by_the_compiler
from rank_counts import rank_counts
from tables import table
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from iris_core import Iris
from iris_core.errors import ArgumentError
from iris_core.tracing.layout import TraceEvent
from iris_gluon import IrisDeviceCtx
from iris_gluon._compat import tma_store
from iris_gluon.bulk import await_bulk_stores, peer_descriptor
from iris_triton.interpreter import OutOfBoundsError
from iris_triton.testing.compile_only import assembly, compile_for

INT64 = torch.int64
ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


def compiled(target="sm_90", op="put", dtype=torch.int32, chunk=16384, stages=4, num_warps=4):
    arguments = [IrisDeviceCtx, INT64, dtype, dtype, 1000, 0, 0, 1, op]
    return compile_for(
        bulk_kernels.move, arguments, {"CHUNK_BYTES": chunk, "STAGES": stages, "num_warps": num_warps}, target
    )


@table("op, dtype, num_warps", [("put", torch.int8, 1), ("put", torch.float32, 4), ("get", torch.bfloat16, 1)])
def test_what_it_compiles_to(op, dtype, num_warps):
    kernel = compiled(op=op, dtype=dtype, num_warps=num_warps)
    ptx = assembly(kernel)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\.mbarrier", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.bulk_group", ptx)
    # before the copies what was stored and acquired; behind them all that was begun, not only its reading
    first_fence, first_load = ptx.index("fence.proxy.async;"), ptx.index("cp.async.bulk.tensor")
    assert first_fence < first_load
    assert ptx.rindex("cp.async.bulk.wait_group 0;") > ptx.rindex("cp.async.bulk.tensor")
    assert kernel.metadata.shared < 2 * 65536, "the second copy uses the first one's shared memory"


@table("whole_program", [True, False])
def test_a_fence_stands_between_a_wait_and_tma(whole_program):
    arguments = IrisDeviceCtx, INT64, INT64, torch.int32, torch.int32, whole_program
    ptx = assembly(compile_for(bulk_kernels.load_awaited, (*arguments, True)))
    between = ptx[ptx.index("ld.acquire.sys") : ptx.index("cp.async.bulk.tensor")]
    assert "fence.proxy.async;" in between
    behind = between[between.index("fence.proxy.async;") :]
    assert ("bar.sync" in behind) or not whole_program
    assert "buffer_inv" in assembly(compile_for(bulk_kernels.load_awaited, (*arguments, False), target="gfx942"))


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[3]))
def test_tma_reads_what_was_awaited(pool, num_ranks, device):
    assert pool.run(bulk_kernels.run_load_awaited, num_ranks, device) == [True] * num_ranks


@table("change, text", [
    *(({"target": target}, "bulk copies need NVIDIA Hopper or newer")
      for target in ("gfx942", "gfx950", GPUTarget("cuda", 80, 32))),
    ({"chunk": 1000}, "CHUNK_BYTES must be a power of 2 from 1024 to 32768"),
    ({"chunk": 65536}, "CHUNK_BYTES must be a power of 2 from 1024 to 32768"),
    ({"stages": 1}, "two stages or more"),
])  # fmt: skip
def test_what_is_refused(change, text):
    assert text in said_by_the_compiler(compiled, **change)


DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64]
COMBINATIONS = list(itertools.product(("put", "get"), (1, 4), DTYPES))


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 4, 8]))
def test_copies(pool, num_ranks, device, some):
    """One rank and two copy every size of elements, on the CPU in turn; more of them only a few."""
    cases = (
        COMBINATIONS if num_ranks <= 2 else [each for each in COMBINATIONS if each[2] in (torch.bool, torch.float32)]
    )
    for op, num_warps, dtype in some(cases, 7, num_ranks) if device == "cpu" else cases:
        results = pool.run(bulk_kernels.run_moves, num_ranks, op, dtype, num_warps, device)
        assert [line for lines in results for line in lines] == []


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2, 4, 8]))
def test_stored_before_and_loaded_behind(pool, num_ranks, device):
    rounds = 3 if device == "cpu" else 200
    for num_warps in (1, 4):
        results = pool.run(bulk_kernels.run_hand_over, num_ranks, rounds, num_warps, device)
        assert results == [[0] * rounds] * num_ranks


def test_a_partition_of_one_warp_copies_while_the_others_compute():
    arguments = [IrisDeviceCtx, INT64, torch.float32, torch.float32, 1001]
    kernel = compile_for(bulk_kernels.move_aside, arguments, {"num_warps": 4})
    assert "cp.async.bulk.tensor" in assembly(kernel)
    assert len(re.findall(r"ttg\.warp_specialize\(", kernel.asm["ttgir"])) == 1
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        x, y = ctx.arange(2048, dtype=torch.float32), ctx.zeros(2048)
        bulk_kernels.move_aside[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, 1001, num_warps=4)
        assert torch.equal(y[:1001], x[:1001])
        assert not y[1001:2000].any()
        assert y[2047] == 7
        with pytest.raises(AssertionError, match="a bulk copy of less than no elements"):
            bulk_kernels.move_aside[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, -5, num_warps=4)


def test_copies_are_traced():
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        x, y = ctx.zeros(2048, dtype=torch.float16), ctx.zeros(2048, dtype=torch.float16)
        ctx.tracing.enable()
        bulk_kernels.traced[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, 1001)
        events = ctx.tracing.events().columns
    names = "event_id", "payload_size", "address", "target_rank"
    rows = list(zip(*(events[name].tolist() for name in names), strict=True))
    assert rows == [(TraceEvent.PUT, 2002, y.data_ptr(), 0), (TraceEvent.GET, 2000, x.data_ptr(), 0)]
    assert (events["duration_cycles"] > 0).all()
    arguments = [IrisDeviceCtx, INT64, torch.float16, torch.float16, 1001]
    assert "globaltimer" in assembly(compile_for(bulk_kernels.traced, arguments))


@gluon.jit
def write_off_the_heap(context, own, x, what: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context)
    if what == "bulk":
        ctx.put_bulk(own, x, 128, 0)
    else:
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 32], gl.int32)
        there = peer_descriptor(x, ctx.cur_rank, 0, ctx.heap_bases, [8, 32], [32, 1], [8, 32], shared)
        content = gl.allocate_shared_memory(gl.int32, [8, 32], shared, gl.full([8, 32], 1, gl.int32, ROWS))
        fence_async_shared()
        tma_store(there, [0, 0], content)
        await_bulk_stores()


@table("what", ["bulk", "descriptor"])
def test_a_pointer_off_the_heap_or_a_context_of_zeros_is_an_error(what):
    """As of all device functions in tests/triton/test_cpu_memory.py."""
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        own, good, off = *(ctx.zeros(256, dtype=torch.int32) for _ in range(2)), torch.zeros(256, dtype=torch.int32)
        write_off_the_heap[(1,)](ctx.get_device_context(), own, good, what)
        with pytest.raises(OutOfBoundsError) as caught:
            write_off_the_heap[(1,)](ctx.get_device_context(), own, off, what)
        with pytest.raises(ArgumentError):
            write_off_the_heap[(1,)](torch.zeros(32, dtype=INT64), own, own, what)
        assert not own.any()
    assert (caught.value.kernel, caught.value.address) == ("write_off_the_heap", off.data_ptr())
    assert any(", rank 0 of 1, at " in note for note in caught.value.__notes__)
    assert not off.any()
