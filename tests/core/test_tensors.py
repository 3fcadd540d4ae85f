"""Every factory against torch, over many forms of arguments; errors; nothing leaks."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from tables import raises, table

from iris_core.errors import ArgumentError, DeviceError, LayoutError, NotOnHeapError, UnsupportedError

from .fakes import Cluster, Context

T = torch.tensor


def call(*args, **kwargs):
    return args, kwargs


BASE = torch.arange(24.0).reshape(2, 3, 4)
IMAGES = torch.arange(48, dtype=torch.int32).reshape(2, 3, 4, 2)
INF, NAN, BIG = math.inf, math.nan, 2**62

# Arguments by name, with some that torch refuses; options are drawn.
SIZES = [
    call(3), call(2, 3), call((2, 3)), call([2, 3]), call(torch.Size([4, 1])), call(()), call(0), call(2, 0, 3),
    call(size=(2, 2)), call(np.int64(3), 2), call(T(3)), call(-1), call(2.5), call(), call("x"), call(1000),
]  # fmt: skip
FORMATS = [
    call(2, 3, 4, 5, memory_format=torch.channels_last), call((1, 2, 3, 4, 5), memory_format=torch.channels_last_3d),
    call(2, 0, 4, 5, memory_format=torch.channels_last), call(2, 3, memory_format=torch.channels_last),
    call(2, 3, memory_format=torch.preserve_format), call(3, pin_memory=False),
]  # fmt: skip
FILLS = [
    1, 1.5, True, False, 1 + 2j, 7, NAN, -INF, BIG + 1, 3, 2.9, 0.1, 300, 2**64, "x", T(5), T(2.5).double(), T(True),
    T([1, 2]),
]  # fmt: skip
LIKE = [
    call(BASE), call(BASE.transpose(0, 2)), call(BASE[:, ::2, 1:]), call(BASE[0, 0, 0]), call(BASE[:0]),
    call(BASE.expand(5, 2, 3, 4)), call(BASE, memory_format=torch.channels_last), call(IMAGES),
    call(IMAGES.to(memory_format=torch.channels_last)), call(IMAGES, memory_format=torch.channels_last),
    call(IMAGES.to(memory_format=torch.channels_last), memory_format=torch.contiguous_format),
    call(torch.zeros(1, 2, 3, 4, 5, dtype=torch.bool), memory_format=torch.channels_last_3d),
]  # fmt: skip
FRACTIONS = (0.5, -0.25) if torch.__version__ > "2.13" else (1.5, -1.25)  # as integers they ended older ones
NUMBERS = [0, 1, 5, -3, 10, 5.5, 0.0, 0.1, 3.0, True, T(4), T(4.0), np.int64(6), np.float64(0.5), NAN, "x", T([3, 4])]
CASES = {
    "zeros": SIZES, "ones": SIZES, "empty": SIZES + FORMATS, "rand": SIZES, "randn": [*SIZES, call(15), call(16)],
    "full": [call(*form, fill) for form in (((2, 3),), ([4],)) for fill in FILLS]
    + [call((), 7), call((0,), 7), call(size=(2,), fill_value=3), call((2,))],
    "zeros_like": LIKE, "ones_like": LIKE, "empty_like": LIKE,
    "full_like": [call(*args, fill_value=3, **kwargs) for args, kwargs in LIKE]
    + [call(input, fill) for input in (BASE, IMAGES) for fill in FILLS],
    "arange": [call(each) for each in NUMBERS]
    + [call(*pair) for pair in itertools.combinations(NUMBERS[:-3], 2)]
    + [call(one, other, step) for one, other in ((0, 5), (-3, 2.5), (10, 1), (3, 3), (T(1), T(4.0)), (np.int64(1), 6))
       for step in (1, 2, 3, -3, *FRACTIONS, T(2), np.int64(2), 0)]
    + [call(), call(end=5), call(start=2, end=5), call(start=2, end=9, step=2), call(2, end=4), call(0, 5.7, 1.9),
       call(2**40, 2**40 + 3), call(-BIG, 2 - BIG), call(0, 2**63 - 1, BIG), call(0, INF)],
    "linspace": [call(*ends, steps) for ends in ((0, 1), (0, 10), (3, -3), (-2.5, 2.5), (T(0.0), T(2)))
                 for steps in (0, 1, 3, 7, 1000, -1, 2.5)] + [call(start=0, end=1, steps=3), call(0, 1j, 3)],
    "randint": [
        call(10, (3,)), call(-5, 5, (2, 3)), call(10, size=(4,)), call(high=10, size=(4,)),
        call(low=2, high=10, size=(4,)), call(2, 10, size=[4]), call(2, high=10, size=(4,)), call(10, ()),
        call(10, (0,)), call(2**40, (5,)), call(-(2**63), 2**63 - 1, (5,)), call(100, (5,)), call(2, (50,)),
        call(5, 2, (3,)), call(300, (3,)), call(2.5, (3,)), call(True, (3,)), call(3, (-1,)),
    ],
}  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPTIONS = {
    "dtype": [None, *DTYPES], "requires_grad": [False, True], "layout": [torch.strided],
    "device": ["cpu", torch.device("cpu"), "cpu:0"],
}  # fmt: skip


def form(t):
    return t.shape, t.dtype, t.stride(), t.requires_grad, t.layout, t.device, t.untyped_storage().nbytes() or 256


def results(owner, name, args, options, turn):
    """What is made, or the error, by a generator or the global one; and that one's next number."""
    generator = torch.Generator().manual_seed(7) if turn % 2 else torch.manual_seed(5)
    given = {"generator": generator} if turn % 2 and "rand" in name else {}
    try:
        return getattr(owner, name)(*args, **options, **given), torch.rand(1, generator=generator)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        return error, None


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_what_torch_makes_is_made_and_what_it_refuses_is_refused(ctx, name, default):
    """Every form of arguments, by itself and with drawn options; nothing leaks."""
    draw = random.Random(name)
    for (args, kwargs), turn in itertools.product(CASES[name], range(2 if default is torch.float32 else 1)):
        chosen = draw.sample(list(OPTIONS), draw.randint(1, 3)) if turn else []
        options = kwargs | {each: draw.choice(OPTIONS[each]) for each in chosen}
        ctx.heap.free(ctx.heap.allocate(1 << 14, torch.uint8).fill_(0xA5))  # old data where the next tensors will lie
        torch.set_default_dtype(default)
        try:
            (mine, after_mine), (theirs, after) = (results(each, name, args, options, turn) for each in (ctx, torch))
        finally:
            torch.set_default_dtype(torch.float32)
        case = args, options, mine, theirs
        empty_normal = name == "randn" and isinstance(mine, UnsupportedError)
        if isinstance(theirs, Exception) or (empty_normal and not theirs.numel()):
            kind = RuntimeError if isinstance(theirs, RuntimeError) else type(theirs)
            assert isinstance(mine, (kind, ArgumentError, UnsupportedError)), case
        else:
            assert isinstance(mine, torch.Tensor), case
            assert form(mine) == form(theirs), case
            assert (mine.is_leaf, mine._is_view(), ctx.heap.is_symmetric(mine)) == (True, False, True), case
            values = [each.detach().nan_to_num(8) for each in (mine, theirs)]
            assert "empty" in name or torch.equal(*values), case
            assert torch.equal(after_mine, after), case
            ctx.heap.free(mine)
        assert ctx.heap.stats().free == ctx.heap.nbytes, case


@table("dtype", [None, torch.float64, torch.float16, torch.complex64])
def test_uniform(ctx, dtype):
    mine = ctx.uniform((3, 5), -2, 7.5, dtype, generator=torch.Generator().manual_seed(3), requires_grad=True)
    theirs = torch.empty(3, 5, dtype=dtype).uniform_(-2, 7.5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mine, theirs)
    assert mine.requires_grad
    assert ctx.uniform(4, 1, 1).tolist() == [1.0] * 4


def test_sizes_may_be_nested_and_steps_may_be_tuples(ctx):
    made = ctx.zeros(((2, 3),)), ctx.rand([[4]]), ctx.full(3, 1.0)
    assert [t.shape for t in made] == [(2, 3), (4,), (3,)]
    assert torch.equal(ctx.linspace(0, 1, (5,)), torch.linspace(0, 1, 5))
    assert torch.equal(ctx.linspace(0, 1, [2, 3]), torch.linspace(0, 1, 6))


def test_contexts_of_torch_do_not_interfere(ctx):
    with torch.device("meta"):
        made = [
            ctx.zeros(2), ctx.full((2,), 3), ctx.arange(3), ctx.linspace(0, 1, 3), ctx.rand(2), ctx.randint(3, (2,)),
            ctx.ones_like(torch.ones(2)),
        ]  # fmt: skip
    assert all(t.device.type == "cpu" and ctx.heap.is_symmetric(t) for t in made)
    assert ctx.heap.is_symmetric(ctx.ones_like(torch.empty(2, 3, device="meta")))
    with torch.inference_mode():
        assert ctx.ones(2).is_inference()


OUT = {
    "zeros": ((2, 3),), "ones": ((2, 3),), "full": ((2, 3), 1.5), "arange": (6,), "linspace": (0, 1, 6),
    "rand": ((2, 3),), "randn": ((2, 3),), "randint": (9, (2, 3)),
}  # fmt: skip


def made(owner, name, **kwargs):
    if name.startswith("rand"):
        kwargs["generator"] = torch.Generator().manual_seed(3)
    return getattr(owner, name)(*OUT[name], **kwargs)


@table("name", OUT)
@table("dtype", [torch.float32, torch.float64])
def test_out_is_filled_and_returned(ctx, name, dtype):
    theirs = made(torch, name, dtype=dtype)
    out, other = ctx.empty(theirs.shape, dtype=dtype), ctx.empty(1, 6, 1, dtype=dtype)
    blocks = ctx.heap.live_blocks()
    for extra in ({}, {"dtype": dtype}):  # without dtype, that of `out` counts
        out.fill_(-1)
        assert made(ctx, name, out=out, **extra) is out
        assert torch.equal(out, theirs)
    view = made(ctx, name, out=other)
    assert torch.equal(view, theirs)
    assert (view.data_ptr(), other.shape) == (other.data_ptr(), (1, 6, 1))
    assert ctx.heap.live_blocks() == blocks


@table("name", OUT)
def test_out_is_checked_in_order(ctx, name):
    wrong_everything = torch.empty(7, dtype=torch.int16)
    for kind, key, out in (
        (ArgumentError, "heap.out elements", wrong_everything),
        (ArgumentError, "heap.out dtype", wrong_everything[:6]), (NotOnHeapError, "any", torch.full((6,), 8.0)),
    ):  # fmt: skip
        with raises(kind, key) as caught:
            made(ctx, name, dtype=torch.float32, out=out)
        assert isinstance(caught.value, RuntimeError)
    assert ctx.heap.live_blocks() == ()


def test_out_may_be_strided_and_may_require_grad_afterwards(ctx):
    whole = ctx.zeros(4, 6)
    part = whole[:, :3]
    assert ctx.ones(4, 3, out=part) is part
    assert whole.sum() == 12
    assert ctx.full((3,), 2.0, out=ctx.empty(3), requires_grad=True).requires_grad
    assert ctx.empty(3, out=ctx.empty(3)).shape == (3,)
    with pytest.raises(RuntimeError):
        ctx.zeros(12, out=part)  # cannot be viewed as one row
    with pytest.raises(ArgumentError):
        ctx.empty(1, 2, 3, 4, out=ctx.empty(24), memory_format=torch.channels_last)


@table("name", CASES)
def test_options_that_the_heap_does_not_have(ctx, name):
    args, kwargs = CASES[name][0]
    for kind, key, options in (
        (DeviceError, "device.elsewhere", {"device": "cuda:1"}), (DeviceError, "device.elsewhere", {"device": "meta"}),
        (LayoutError, "any", {"layout": torch.sparse_coo}),
        (RuntimeError, "any", {"dtype": torch.int32, "requires_grad": True}),
    ):  # fmt: skip
        with raises(kind, key, device=options.get("device")):
            getattr(ctx, name)(*args, **kwargs, **options)
    assert ctx.heap.live_blocks() == ()


class FakeGenerator:
    """This torch has generators of the CPU only."""

    device = torch.device("meta")


def test_pinning_and_generators_of_another_device(ctx):
    for name in ("empty", "rand", "randn"):
        with pytest.raises(UnsupportedError):
            getattr(ctx, name)(3, pin_memory=True)
    for name, *args in (("rand", 2), ("randn", 2), ("randint", 3, (2,)), ("uniform", 2)):
        with pytest.raises(DeviceError):
            getattr(ctx, name)(*args, generator=FakeGenerator())
    assert ctx.heap.live_blocks() == ()


@table(("name", "args", "kwargs", "error"), [
    *(("arange", args, {}, ValueError) for args in [(0, 5, 0), (5, 0), (0, 5, -1)]),
    *(("uniform", (3, *bounds), {}, ArgumentError) for bounds in [(2, 1), (0, INF), (NAN, 1)]),
    ("uniform", ((3,),), {"dtype": torch.int32}, UnsupportedError),
    *(("randint", args, kwargs, ValueError) for args, kwargs in [
        ((), {}), ((5,), {}), ((1, 2, (3,), 4), {}), ((1, 2, (3,)), {"high": 3}), ((5, (3,)), {"high": 3, "low": 1}),
        ((), {"low": 1, "size": (3,)}),
    ]),
])  # fmt: skip
def test_what_torch_says_less_clearly(ctx, name, args, kwargs, error):
    with pytest.raises(error):
        getattr(ctx, name)(*args, **kwargs)


def test_a_fill_that_fails_frees_the_block_on_every_rank():
    with Cluster(2) as c:
        contexts = [Context(heap) for heap in c.heaps]
        c.refused(RuntimeError, "any", lambda heap: contexts[heap.rank].randint(300, (3,), dtype=torch.int8))
        c.barrier()
        assert c.stats("free") == [c.heap.nbytes] * 2
