"""How many lanes a warp has, and layouts that fit the target."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_triton._compat import builtin, core, gluon_warps


@builtin
def warp_size(_semantic=None):
    """Lanes of a warp of the target that the kernel is compiled for: 32 or 64.  In kernels only; a constexpr."""
    return core.constexpr(_semantic.builder.options.warp_size)


@builtin
def default_layout(shape, num_warps=None, vector=1, _semantic=None, _generator=None):
    """Return `blocked_layout` of a shape for the target that the kernel is compiled for.  In kernels only; a constexpr.

    Args:
        shape, vector: see there.
        num_warps: warps that work on the block; by default those that run the caller: the kernel's, or in
            gl.warp_specialize those of the partition.

    Example:
        layout: gl.constexpr = default_layout([BLOCK], vector=4)
        i = gl.arange(0, BLOCK, layout=layout)
    """
    shape, num_warps, vector = map(core._unwrap_if_constexpr, (shape, num_warps, vector))
    num_warps = num_warps or gluon_warps(_semantic, _generator)
    return core.constexpr(blocked_layout(shape, num_warps, _semantic.builder.options.warp_size, vector))


@gluon.constexpr_function
def blocked_layout(shape, num_warps, warp_size, vector=1):
    """Return a gl.BlockedLayout for blocks of a shape, on the host and in kernels.

    The last dimension is the contiguous one: a warp covers as much of it as there is, then of the one before.

    Args:
        shape: sizes.
        num_warps: warps of a program.
        warp_size: lanes of a warp.
        vector: neighbouring elements of the last dimension that a thread holds.

    Raises:
        ValueError: one of these is not a power of 2.

    Example:
        >>> blocked_layout([16, 64], num_warps=4, warp_size=32, vector=4).threads_per_warp
        [2, 16]
    """
    sizes = [int(getattr(size, "value", size)) for size in shape]
    for number in (*sizes, num_warps, warp_size, vector):
        if number < 1 or number & (number - 1):
            given = f"shape {sizes}, {num_warps} warps of {warp_size} lanes and vector={vector}"
            raise ValueError(f"a layout needs powers of 2, got {given}")
    per_thread, lanes, warps = ([1] * len(sizes) for _ in range(3))
    per_thread[-1] = min(vector, sizes[-1])
    for spread, count in ((lanes, warp_size), (warps, num_warps)):
        for axis in range(len(sizes) - 1, 0, -1):
            room = max(1, sizes[axis] // (per_thread[axis] * lanes[axis] * warps[axis]))
            spread[axis] = min(count, room)
            count //= spread[axis]
        spread[0] = count  # what is left repeats the block
    return gl.BlockedLayout(per_thread, lanes, warps, list(range(len(sizes) - 1, -1, -1)))
