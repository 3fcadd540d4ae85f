"""Kernels of benchmarks/gluon_bulk.py: each program copies a piece, by the copy unit or by plain accesses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon import default_layout

# The number of the peer is not specialised: one binary serves every pair of ranks.


@gluon.jit
def _piece(numel, BLOCK: gl.constexpr):
    """First element of this program's piece, and the number of elements: whole blocks but for the last one."""
    each = gl.cdiv(gl.cdiv(numel, gl.num_programs(0)), BLOCK) * BLOCK
    first = gl.minimum(gl.program_id(0) * each, numel)
    return first, gl.minimum(each, numel - first)


@gluon.jit(do_not_specialize=["peer"])
def bulk(
    IrisDeviceCtx: gl.constexpr, context, source, target, numel, peer, PUSH: gl.constexpr,
    CHUNK_BYTES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Push own `source` to `target` on the peer, or pull the other way round, by bulk copies."""
    ctx = IrisDeviceCtx.initialize(context)
    first, count = _piece(numel, CHUNK_BYTES // 4)
    if PUSH:
        ctx.put_bulk(source + first, target + first, count, peer, CHUNK_BYTES, STAGES)
    else:
        ctx.get_bulk(source + first, target + first, count, peer, CHUNK_BYTES, STAGES)


@gluon.jit(do_not_specialize=["peer"])
def plain(IrisDeviceCtx: gl.constexpr, context, source, target, numel, peer, PUSH: gl.constexpr, BLOCK: gl.constexpr):
    """The same by loads and stores of 16 bytes."""
    ctx = IrisDeviceCtx.initialize(context)
    first, count = _piece(numel, BLOCK)
    lanes = gl.arange(0, BLOCK, layout=default_layout([BLOCK], vector=4))
    for start in range(first, first + count, BLOCK):
        i = start + lanes
        if PUSH:
            ctx.put(source + i, target + i, peer, mask=i < numel)
        else:
            ctx.get(source + i, target + i, peer, mask=i < numel)
