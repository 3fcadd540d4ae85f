"""Index blocks and blocks of scalars, in functions that Gluon kernels call as well.

Gluon compiles functions of Triton by its own rules, under which a new block needs a layout.  The functions here ask who
is compiling; whatever else makes no block of its own serves both languages as it is.
"""

from iris_triton._compat import builtin, core, gluon_warps


@builtin
def num_threads(_semantic=None, _generator=None):
    """Threads that run this code; a constexpr.  Meaningless on the CPU."""
    options = _semantic.builder.options
    return core.constexpr((gluon_warps(_semantic, _generator) or options.num_warps) * options.warp_size)


@builtin
def lanes(count, vector=1, _semantic=None, _generator=None):
    """Return 0 .. count - 1 as int32; in Gluon each thread has `vector` consecutive elements."""
    count, vector = core._unwrap_if_constexpr(count), core._unwrap_if_constexpr(vector)
    warps = gluon_warps(_semantic, _generator)
    if warps is None:
        return _semantic.arange(0, count)
    from triton.experimental.gluon.language._layouts import BlockedLayout

    layout = BlockedLayout([min(vector, count)], [_semantic.builder.options.warp_size], [warps], [0])
    return _semantic.arange(0, count, layout)


@builtin
def places_in(block, _semantic=None):
    """Return 0, 1, ... for the elements of a one-dimensional block, as int32, with its layout in Gluon."""
    layout = getattr(block.type, "layout", None)
    return _semantic.arange(0, int(block.type.shape[0]), *([] if layout is None else [layout]))


def _along(semantic, count, axis, layout):
    """Return 0 .. count - 1 along an axis of a two-dimensional block with that layout (Gluon only)."""
    if getattr(semantic, "num_warps", None) is None:
        return semantic.arange(0, count)
    from triton.experimental.gluon.language._layouts import SliceLayout

    if layout is None:
        raise ValueError("in Gluon the axes of a block need its layout: give it, or a block that has one")
    return semantic.arange(0, count, SliceLayout(1 - axis, layout))


@builtin
def axis_of(block, axis, _semantic=None):
    """Return 0, 1, ... along one axis of a two-dimensional block, as int32.

    With an axis added ([:, None] or [None, :]) it broadcasts with the block, also in Gluon: it has a slice layout.
    """
    axis = core._unwrap_if_constexpr(axis)
    return _along(_semantic, int(block.type.shape[axis]), axis, getattr(block.type, "layout", None))


@builtin
def axis_for(shape, axis, layout=None, _semantic=None):
    """Return `axis_of` a block of this shape without the block itself; Gluon needs its layout."""
    axis, layout = core._unwrap_if_constexpr(axis), core._unwrap_if_constexpr(layout)
    return _along(_semantic, int(core._unwrap_if_constexpr(shape[axis])), axis, layout)


@builtin
def spread(value, pointer, _semantic=None):
    """Broadcast a scalar to the shape of `pointer`; return other values unchanged.

    Gluon's atomics, unlike Triton's, do not broadcast.
    """
    value = _semantic.to_tensor(value)
    if pointer.type.is_block() and not value.type.is_block():
        value, _ = _semantic.broadcast_impl_value(value, pointer)
    return value
