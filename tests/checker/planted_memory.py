"""Planted mistakes in what memory a kernel touches; see `corpus`."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from corpus import N, launch, out, registry
from triton.tools.tensor_descriptor import TensorDescriptor

import iris_triton as iris

CASES, case = registry()


@triton.jit
def read(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + i))  # B unwritten partly_written


@case(ranks=1, kind="uninitialised")
def unwritten(ctx, bug):
    """A kernel reads what nobody has written."""
    launch(ctx, read, ctx.empty(N) if bug else ctx.zeros(N), out(ctx), N=N)


@case(kind="uninitialised")
def partly_written(ctx, bug):
    """A kernel reads one element more than was written."""
    data = ctx.empty(N)
    data[: N - 1 if bug else N].fill_(1)
    launch(ctx, read, data, out(ctx), N=N)
    ctx.barrier()


@case(kind="freed")
def freed_block(ctx, bug):
    """A tensor is used whose block belongs to another one by now."""
    data = ctx.zeros(N)
    if bug:
        ctx.free(data)
        ctx.barrier()
    other = ctx.zeros(N)
    rank = ctx.cur_rank
    read[(1,)](ctx.get_device_context(), data, out(ctx), RANK=rank, WORLD=2, N=N)  # B freed_block
    ctx.barrier()
    del other


@case(kind="freed")
def freed_on_the_host(ctx, bug):
    """The host uses a tensor that it has freed."""
    data = ctx.zeros(N)
    if bug:
        ctx.free(data)
    data.add_(1)  # B freed_on_the_host
    ctx.barrier()


@case(kind="freed")
def freed_before_a_collective(ctx, bug):
    """A collective takes a tensor whose block belongs to another one by now."""
    data, result = ctx.zeros(N), ctx.zeros(N)
    if bug:
        ctx.free(data)
    other = ctx.zeros(N)
    ctx.ccl.all_reduce(result, data)  # B freed_before_a_collective
    ctx.barrier()
    del other


@case(kind="freed")
def view_of_a_freed_block(ctx, bug):
    """A part of a tensor is used after the tensor was freed."""
    data = ctx.zeros((4, N))
    part = data[1]
    if bug:
        ctx.free(data)
    rank = ctx.cur_rank
    read[(1,)](ctx.get_device_context(), part, out(ctx), RANK=rank, WORLD=2, N=N)  # B view_of_a_freed_block
    ctx.barrier()


@triton.jit
def beyond(
    context, data, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr, PEER: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    first = 1 if BUG else 0
    if PEER:
        ctx.store(data + first + i, i.to(tl.float32), 1 - RANK)  # B off_by_one_remote
    else:
        tl.store(data + first + i, i.to(tl.float32))  # B off_by_one


@case(ranks=1, kind="bounds")
def off_by_one(ctx, bug):
    """One element too far: another tensor begins there."""
    data, other = ctx.zeros(N), ctx.zeros(N)
    launch(ctx, beyond, data, N=N, BUG=bug, PEER=False)
    del other


@case(kind="bounds")
def off_by_one_remote(ctx, bug):
    """The same in a peer's memory."""
    data, other = ctx.zeros(N), ctx.zeros(N)
    ctx.barrier()
    launch(ctx, beyond, data, N=N, BUG=bug, PEER=True)
    ctx.barrier()
    del other


@triton.jit
def columns(
    context, data, out, stride, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr,
    BUG: tl.constexpr
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    first = i - 1 if BUG else i
    row = data + stride
    if HOW == "load":
        tl.store(out + i, tl.load(row + first))  # B beyond_a_view
    elif HOW == "get":
        tl.store(out + i, ctx.load(row + first, 1 - RANK))  # B beyond_a_remote_view
    elif HOW == "masked":
        x = tl.load(row + first, mask=i >= (0 if BUG else 1), other=0)  # B before_a_view
        tl.store(out + i, x)
    else:
        tl.atomic_add(row + first, i.to(tl.float32))  # B atomics_beyond_a_view


def _columns(ctx, bug, how):
    whole = ctx.zeros((4, 2 * N))
    ctx.barrier()
    launch(ctx, columns, whole[:, N:], out(ctx), 2 * N, N=N, HOW=how, BUG=bug)
    ctx.barrier()


@case(ranks=1, kind="bounds")
def beyond_a_view(ctx, bug):
    """A kernel that was given half of the columns reads one of the other half."""
    _columns(ctx, bug, "load")


@case(kind="bounds")
def beyond_a_remote_view(ctx, bug):
    """The same in a peer's memory."""
    _columns(ctx, bug, "get")


@case(ranks=1, kind="bounds")
def before_a_view(ctx, bug):
    """A mask that begins one element too early."""
    _columns(ctx, bug, "masked")


@case(ranks=1, kind="bounds")
def atomics_beyond_a_view(ctx, bug):
    """Additions to another half of the columns."""
    _columns(ctx, bug, "add")


@case(ranks=1, kind="bounds")
def strides_of_the_whole(ctx, bug):
    """A kernel takes the rows of a part for dense."""
    whole = ctx.zeros((4, 2 * N))
    launch(ctx, row_of, whole[:, :N], out(ctx), N if bug else 2 * N, N=N)


@triton.jit
def row_of(context, data, out, stride, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + stride + i))  # B strides_of_the_whole into_another_tensor


@case(ranks=1, kind="bounds")
def into_another_tensor(ctx, bug):
    """An offset that is so wrong that all of the access lies in another tensor."""
    data, other = ctx.zeros(2 * N), ctx.zeros(2 * N)
    launch(ctx, row_of, data, out(ctx), (other.data_ptr() - data.data_ptr()) // 4 if bug else N, N=N)
    del other


@triton.jit
def described(context, tensor, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tensor.load([1, 0])  # B descriptor_beyond_a_view
    tl.store(out + i, x.reshape([N]))


@case(ranks=1, kind="bounds")
def descriptor_beyond_a_view(ctx, bug):
    """A descriptor that says more rows than the tensor has."""
    whole = ctx.zeros((4, N))
    tensor = TensorDescriptor(whole[: 1 if bug else 2], [2, N], [N, 1], [1, N])
    launch(ctx, described, tensor, out(ctx), N=N)


@triton.jit
def wrapped(context, data, out, row, stride, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + row * stride + i))  # B wraps_below wraps_into_the_tensor


@case(ranks=1, kind="wrapped")
def wraps_below(ctx, bug):
    """A product of int32 that is too large becomes negative."""
    data = ctx.zeros((4, N))
    launch(ctx, wrapped, data, out(ctx), 1 << 15 if bug else 3, (1 << 16) + N if bug else N, N=N)


@case(ranks=1, kind="wrapped")
def wraps_into_the_tensor(ctx, bug):
    """A product of int32 that is too large becomes an offset of another row."""
    data = ctx.zeros((4, N))
    launch(ctx, wrapped, data, out(ctx), 1 << 16 if bug else 3, (1 << 16) + 2 * N if bug else N, N=N)


@triton.jit
def wrapped_rows(context, data, out, first, stride, RANK: tl.constexpr, WORLD: tl.constexpr, BUG: tl.constexpr):
    row = first + tl.arange(0, 4)
    column = tl.arange(0, 8)
    if BUG:
        offset = row[:, None] * stride + column
    else:
        offset = ((row * stride) % 32)[:, None] + column  # what wraps on purpose
    mask = (row < first + 3)[:, None]
    x = tl.load(data + offset, mask=mask & (column < 8), other=0)  # B block_that_wraps
    tl.store(out + tl.arange(0, 4)[:, None] * 8 + column, x)


@case(ranks=1, kind="wrapped")
def block_that_wraps(ctx, bug):
    """Some rows of a block lie behind 2**31 elements, and come from the beginning."""
    launch(ctx, wrapped_rows, ctx.zeros(64), out(ctx), (1 << 16) - 1, 1 << 16, BUG=bug)


# -- atomics of several kinds on one word ------------------------------------------------------------------------------
@triton.jit
def mixed(context, words, RANK: tl.constexpr, WORLD: tl.constexpr, HOW: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    if RANK == 0:
        if HOW == "float":
            as_float = words.to(tl.pointer_type(tl.float32), bitcast=True)
            ctx.atomic_add(as_float, 1.0, 0)  # A atomics_of_two_types
        else:
            ctx.atomic_add(words, 1, 0)  # A atomics_of_two_widths
    elif BUG and HOW == "wide":
        wide = words.to(tl.pointer_type(tl.int64), bitcast=True)
        ctx.atomic_add(wide, tl.full((), 1, tl.int64), 0)  # B atomics_of_two_widths
    elif BUG or HOW == "wide":
        ctx.atomic_add(words, 1, 0)  # B atomics_of_two_types
    else:
        ctx.atomic_add(words.to(tl.pointer_type(tl.float32), bitcast=True), 1.0, 0)


def _mixed(ctx, bug, how):
    words = ctx.zeros(2, dtype=torch.int32)
    ctx.barrier()
    launch(ctx, mixed, words, HOW=how, BUG=bug)
    ctx.barrier()


@case()
def atomics_of_two_widths(ctx, bug):
    """One rank adds to 32 bits, another one to 64, of which they are the lower ones."""
    _mixed(ctx, bug, "wide")


@case()
def atomics_of_two_types(ctx, bug):
    """One rank adds an integer, another one a float."""
    _mixed(ctx, bug, "float")


# -- lanes that a mask leaves out -------------------------------------------------------------------------------------
@triton.jit
def masked(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    mask = i < N - 3
    if HOW == "other":
        x = tl.load(data + i, mask=mask, other=0)
    else:
        x = tl.load(data + i, mask=mask)  # A lanes_without_other lanes_of_half_precision
    if HOW == "where":
        x = tl.where(mask, x, 0)
    tl.store(out + i, x * 2, mask=mask)
    tl.store(out, tl.sum(x, 0))  # B lanes_without_other lanes_of_half_precision


@case(ranks=1, kind="undefined")
def lanes_without_other(ctx, bug):
    """A sum has lanes that the mask of the load has left out."""
    launch(ctx, masked, ctx.zeros(N), out(ctx), N=N, HOW="none" if bug else "other")


@case(ranks=1, kind="undefined")
def lanes_of_half_precision(ctx, bug):
    """The same in float16; in the twin they are taken out afterwards."""
    data = ctx.zeros(N, dtype=torch.float16)
    launch(ctx, masked, data, out(ctx).to(torch.float16), N=N, HOW="none" if bug else "where")


@triton.jit
def gathered(context, index, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    mask = i < N - 3
    row = tl.load(index + i, mask=mask)
    if BUG:
        x = tl.load(data + row)  # B index_without_other
    else:
        x = tl.load(data + row, mask=mask, other=0)
    tl.store(out + i, x)


@case(ranks=1, kind="bounds")
def index_without_other(ctx, bug):
    """Rows are loaded from places that are undefined where the mask has left out the index."""
    launch(ctx, gathered, ctx.zeros(N, dtype=torch.int32), ctx.zeros(N), out(ctx), N=N, BUG=bug)
