"""Pointers off the heap and foreign context tensors in Gluon kernels, on the CPU, in a world of one."""

import pytest
import torch
from tables import table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from iris_core import Iris
from iris_core.errors import ArgumentError
from iris_gluon import IrisDeviceCtx
from iris_gluon._compat import tma_store
from iris_gluon.bulk import await_bulk_stores, peer_descriptor
from iris_triton.interpreter import OutOfBoundsError

ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def access(context, own, x, what: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 128, layout=layout)
    if what == "load":
        ctx.load(x + offsets, 0)
    elif what == "store":
        ctx.store(x + offsets, 1, 0)
    elif what == "get":
        ctx.get(x + offsets, own + offsets, 0)
    elif what == "put":
        ctx.put(own + offsets, x + offsets, 0)
    elif what == "atomic_add":
        ctx.atomic_add(x + offsets, gl.full([128], 1, gl.int64, layout), 0)
    elif what == "signal":
        ctx.signal(x, 1, 0)
    elif what == "bulk":
        ctx.put_bulk(own, x, 128, 0)
    else:
        rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 32], gl.int32)
        there = peer_descriptor(
            x.to(gl.pointer_type(gl.int32), bitcast=True), ctx.cur_rank, 0, ctx.heap_bases, [8, 32], [32, 1], [8, 32],
            rows
        )  # fmt: skip
        content = gl.allocate_shared_memory(gl.int32, [8, 32], rows, gl.full([8, 32], 1, gl.int32, ROWS))
        fence_async_shared()
        tma_store(there, [0, 0], content)
        await_bulk_stores()


@table("what", ["load", "store", "get", "put", "atomic_add", "signal", "bulk", "descriptor"])
def test_a_pointer_off_the_heap_or_a_context_of_zeros_is_an_error(what):
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        own, good = ctx.zeros(128, dtype=torch.int64), ctx.zeros(128, dtype=torch.int64)
        off = torch.zeros(128, dtype=torch.int64)
        access[(1,)](ctx.get_device_context(), own, good, what)
        with pytest.raises(OutOfBoundsError) as caught:
            access[(1,)](ctx.get_device_context(), own, off, what)
        with pytest.raises(ArgumentError):
            access[(1,)](torch.zeros(32, dtype=torch.int64), own, own, what)
        assert not own.any()
    assert (caught.value.kernel, caught.value.address) == ("access", off.data_ptr())
    assert any(", rank 0 of 1, at " in note for note in caught.value.__notes__)
    assert not off.any()
