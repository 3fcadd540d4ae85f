"""Planted mistakes in Gluon: boxes of TMA; those in messages are Triton's.  See `corpus`."""
# mypy: ignore-errors

import pathlib

from corpus import registry
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_gluon._compat import tma_load, tma_store

CASES, case, _ = registry()


@gluon.jit
def boxes(source, target, FROM: gl.constexpr, TO: gl.constexpr, layout: gl.constexpr):
    inside = tma.make_tensor_descriptor(source, [FROM, 32], [32, 1], [8, 32], layout)
    outside = tma.make_tensor_descriptor(target, [TO, 32], [32, 1], [8, 32], layout)
    memory = gl.allocate_shared_memory(gl.float32, [8, 32], layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, inside.block_type.nbytes)
    tma_load(inside, [0, 0], ready, memory)  # tma_load_beyond_a_view
    mbarrier.wait(ready, 0)
    tma_store(outside, [0, 0], memory)  # tma_store_beyond_a_view
    tma.store_wait(0)


def launch(ctx, source, target):
    layout = gl.NVMMASharedLayout.get_default_for([8, 32], gl.float32)
    data = ctx.zeros((4, 8, 32))
    boxes[(1,)](data[0, :4], data[2, :4], source, target, layout)
    ctx.barrier()


@case(ranks=1, kind="bounds")
def tma_load_beyond_a_view(ctx, bug):
    """A descriptor has more rows than the tensor, and the rest of its block lies there."""
    launch(ctx, 8 if bug else 4, 4)


@case(ranks=1, kind="bounds")
def tma_store_beyond_a_view(ctx, bug):
    """The same of a store, which is looked at where it is issued."""
    launch(ctx, 4, 8 if bug else 4)


for _number, _line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1):
    if (_name := _line.rpartition("  # ")[2]) in CASES:
        CASES[_name].marks["B"].add(_number)
