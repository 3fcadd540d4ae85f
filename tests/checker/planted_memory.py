"""Planted mistakes in what memory a kernel touches; see `corpus`."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from corpus import N, flags, heap, launch, out, registry
from triton.tools.tensor_descriptor import TensorDescriptor

import iris_triton as iris

CASES, case, planted = registry()


@triton.jit
def read(data, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + i))  # B unwritten


planted(
    "unwritten", "A kernel reads what nobody has written.", read, (heap(N), lambda ctx: ctx.empty(N)), out, ranks=1,
    kind="uninitialised",
)  # fmt: skip


@case(kind="freed")
def freed_block(ctx, bug):
    """A tensor is used whose block belongs to another one by now."""
    data = ctx.zeros(N)
    if bug:
        ctx.free(data)
        ctx.barrier()
    other = ctx.zeros(N)
    read[(1,)](data, out(ctx), N)  # B freed_block
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
    read[(1,)](part, out(ctx), N)  # B view_of_a_freed_block
    ctx.barrier()


@triton.jit
def beyond(
    context, data, other, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr,
    PEER: tl.constexpr
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    if PEER:
        ctx.store(data + FIRST + i, i.to(tl.float32), 1 - RANK)  # B off_by_one_remote
    else:
        tl.store(data + FIRST + i, i.to(tl.float32))  # B off_by_one


BEYOND = {"kind": "bounds", "FIRST": (0, 1)}
planted(
    "off_by_one", "One element too far: another tensor begins there.", beyond, heap(N), heap(N), ranks=1, PEER=False,
    **BEYOND,
)  # fmt: skip
planted("off_by_one_remote", "The same in a peer's memory.", beyond, heap(N), heap(N), PEER=True, **BEYOND)


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


COLUMNS = columns, lambda ctx: ctx.zeros((4, 2 * N))[:, N:], out, 2 * N
planted(
    "beyond_a_view", "A kernel of half of the columns reads another one.", *COLUMNS, ranks=1, HOW="load", kind="bounds"
)
planted("beyond_a_remote_view", "The same in a peer's memory.", *COLUMNS, HOW="get", kind="bounds")
planted("before_a_view", "A mask that begins one element too early.", *COLUMNS, ranks=1, HOW="masked", kind="bounds")
planted(
    "atomics_beyond_a_view", "Additions to another half of the columns.", *COLUMNS, ranks=1, HOW="add", kind="bounds"
)


@triton.jit
def row_of(data, out, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + stride + i))  # B into_another_tensor


@case(ranks=1, kind="bounds")
def into_another_tensor(ctx, bug):
    """An offset that is so wrong that all of the access lies in another tensor."""
    data, other = ctx.zeros(2 * N), ctx.zeros(2 * N)
    launch(ctx, row_of, data, out(ctx), (other.data_ptr() - data.data_ptr()) // 4 if bug else N)
    del other


@triton.jit
def described(tensor, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tensor.load([1, 0])  # B descriptor_beyond_a_view
    tl.store(out + i, x.reshape([N]))


def rows_of(count):
    return lambda ctx: TensorDescriptor(ctx.zeros((4, N))[:count], [2, N], [N, 1], [1, N])


planted(
    "descriptor_beyond_a_view", "A descriptor that says more rows than the tensor has.", described,
    (rows_of(2), rows_of(1)), out, ranks=1, kind="bounds",
)  # fmt: skip


@triton.jit
def wrapped(data, out, row, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + row * stride + i))  # B wraps_into_the_tensor


planted(
    "wraps_into_the_tensor", "A product of int32 that is too large becomes an offset of another row.", wrapped,
    heap(4, N), out, (3, 1 << 16), (N, (1 << 16) + 2 * N), ranks=1, kind="wrapped",
)  # fmt: skip


@triton.jit
def wrapped_rows(data, out, first, stride, BUG: tl.constexpr):
    row = first + tl.arange(0, 4)
    column = tl.arange(0, 8)
    if BUG:
        offset = row[:, None] * stride + column
    else:
        offset = ((row * stride) % 32)[:, None] + column  # what wraps on purpose
    mask = (row < first + 3)[:, None]
    x = tl.load(data + offset, mask=mask & (column < 8), other=0)  # B block_that_wraps
    tl.store(out + tl.arange(0, 4)[:, None] * 8 + column, x)


planted(
    "block_that_wraps", "Some rows of a block lie behind 2**31 elements, and come from the beginning.", wrapped_rows,
    heap(64), out, (1 << 16) - 1, 1 << 16, ranks=1, kind="wrapped",
)  # fmt: skip


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


MIXED = mixed, flags(2)
planted("atomics_of_two_widths", "To 32 bits, and to the 64 that have them.", *MIXED, HOW="wide")
planted("atomics_of_two_types", "One rank adds an integer, one a float.", *MIXED, HOW="float")


# -- lanes that a mask leaves out -------------------------------------------------------------------------------------
@triton.jit
def masked(data, out, N: tl.constexpr, HOW: tl.constexpr):
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


planted(
    "lanes_without_other", "A sum has lanes that the mask of the load has left out.", masked, heap(N), out, ranks=1,
    kind="undefined", HOW=("other", "none"),
)  # fmt: skip
planted(
    "lanes_of_half_precision", "The same in float16; in the twin they are taken out afterwards.", masked,
    heap(N, dtype=torch.float16), lambda ctx: torch.zeros(N).half(), ranks=1, kind="undefined", HOW=("where", "none"),
)  # fmt: skip


@triton.jit
def gathered(index, data, out, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    mask = i < N - 3
    row = tl.load(index + i, mask=mask)
    if BUG:
        x = tl.load(data + row)  # B index_without_other
    else:
        x = tl.load(data + row, mask=mask, other=0)
    tl.store(out + i, x)


planted(
    "index_without_other", "Rows are loaded from places that are undefined where the mask has left out the index.",
    gathered, flags(N), heap(N), out, ranks=1, kind="bounds",
)  # fmt: skip
