"""Tensor factories given what they cannot do: the errors, and that nothing leaks."""

import pytest
import torch
from tables import table

from iris_core.errors import (
    ArgumentError,
    DeviceError,
    HeapClosedError,
    HeapExhaustedError,
    LayoutError,
    UnsupportedError,
)

from .fakes import Cluster, Context
from .test_tensors import BASE, IMAGES

# -- errors -----------------------------------------------------------------------------------------------------------
INF, NAN = float("inf"), float("nan")
FACTORIES = [
    ("zeros", (3,)), ("ones", (3,)), ("empty", (3,)), ("full", ((3,), 1)), ("zeros_like", (BASE,)),
    ("ones_like", (BASE,)), ("empty_like", (BASE,)), ("full_like", (BASE, 1)), ("arange", (3,)),
    ("linspace", (0, 1, 3)), ("rand", (3,)), ("randn", (3,)), ("randint", (3, (3,))),
]  # fmt: skip


@table(("name", "args"), FACTORIES)
def test_options_that_the_heap_does_not_have(ctx, name, args):
    for kinds, words, options in (
        ((DeviceError, RuntimeError), "requested device cuda:1 but .* is on device cpu", {"device": "cuda:1"}),
        ((DeviceError,), "leave device out", {"device": "meta"}),
        ((LayoutError, ValueError), r"torch\.sparse_coo", {"layout": torch.sparse_coo}),
        ((RuntimeError,), "require gradients", {"dtype": torch.int32, "requires_grad": True}),
    ):
        with pytest.raises(kinds[0], match=words) as caught:
            getattr(ctx, name)(*args, **options)
        assert isinstance(caught.value, kinds)
    assert ctx.heap.live_blocks() == ()


class FakeGenerator:
    """This torch has generators of the CPU only."""

    device = torch.device("meta")


def test_pinning_and_generators_of_another_device(ctx):
    for name in ("empty", "rand", "randn"):
        with pytest.raises(UnsupportedError, match="cannot be pinned"):
            getattr(ctx, name)(3, pin_memory=True)
    for name, *args in (("rand", 2), ("randn", 2), ("randint", 3, (2,)), ("uniform", 2)):
        with pytest.raises(DeviceError, match=r"generator is on meta.*torch\.Generator\(device='cpu'\)"):
            getattr(ctx, name)(*args, generator=FakeGenerator())
    assert ctx.heap.live_blocks() == ()


REFUSED = [
    ("zeros", (-1,), {}, RuntimeError), ("zeros", (2.5,), {}, TypeError), ("zeros", (), {}, TypeError),
    ("zeros", (2,), {"size": (2,)}, TypeError), ("zeros", ((2, (3,)),), {}, TypeError), ("ones", ("x",), {}, TypeError),
    ("empty", (2, 3), {"memory_format": torch.channels_last}, RuntimeError),
    ("empty", (2, 3), {"memory_format": torch.preserve_format}, RuntimeError),
    ("full", ((2,), 300), {"dtype": torch.uint8}, RuntimeError), ("full", ((2,), 2**64), {}, OverflowError),
    ("full", ((2,), float("nan")), {"dtype": torch.int32}, RuntimeError),
    ("full", ((2,), 1j), {"dtype": torch.float32}, RuntimeError), ("full", ((2,), torch.tensor([1, 2])), {}, TypeError),
    ("full", ((2,), "x"), {}, TypeError), ("full_like", (IMAGES, 2**40), {}, RuntimeError),
    ("zeros_like", (torch.eye(2).to_sparse(),), {}, LayoutError),
    ("zeros_like", (BASE,), {"memory_format": torch.channels_last}, RuntimeError), ("arange", (), {}, TypeError),
    ("arange", ("x",), {}, TypeError), ("arange", (torch.tensor([3, 4]),), {}, TypeError),
    ("arange", (0, 5, 0.5), {"dtype": torch.int64}, ArgumentError), ("arange", (0, 5, 0), {}, ArgumentError),
    ("arange", (5, 0), {}, ArgumentError), ("arange", (0, 5, -1), {}, ArgumentError),
    ("arange", (0, float("nan")), {}, ArgumentError), ("arange", (0, float("inf")), {}, ArgumentError),
    ("arange", (3,), {"dtype": torch.bool}, RuntimeError), ("arange", (3,), {"dtype": torch.complex64}, RuntimeError),
    ("arange", (0, 2**63 - 1, 2**62), {}, RuntimeError), ("linspace", (0, 1, -1), {}, RuntimeError),
    ("linspace", (0, 1, 2.5), {}, TypeError), ("linspace", (0, 1j, 3), {"dtype": torch.float32}, RuntimeError),
    ("rand", (2,), {"dtype": torch.int32}, RuntimeError), ("randn", (2,), {"dtype": torch.int32}, RuntimeError),
    ("randint", (5, 2, (3,)), {}, RuntimeError), ("randint", (300, (3,)), {"dtype": torch.int8}, RuntimeError),
    ("randint", (2.5, (3,)), {}, TypeError), ("randint", (True, (3,)), {}, TypeError),
    ("randint", (3, (-1,)), {}, RuntimeError),
]  # fmt: skip


@table(("name", "args", "kwargs", "error"), REFUSED)
def test_what_torch_refuses_is_refused_and_leaks_nothing(ctx, name, args, kwargs, error: type[Exception]) -> None:
    if error is not LayoutError and "size" not in kwargs:
        with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)):
            getattr(torch, name)(*args, **kwargs)
    with pytest.raises(error):
        getattr(ctx, name)(*args, **kwargs)
    assert ctx.heap.stats().free == ctx.heap.nbytes


@table(("name", "args", "kwargs", "error", "words"), [
    *(("arange", args, {}, ValueError, "arange: ") for args in [(0, 5, 0), (5, 0), (0, 5, -1)]),
    *(("uniform", (3, *bounds), {}, ArgumentError, "low must not be above") for bounds in [(2, 1), (0, INF), (NAN, 1)]),
    ("uniform", ((3,),), {"dtype": torch.int32}, UnsupportedError, "floating"),
    *(("randint", args, kwargs, ValueError, "randint") for args, kwargs in [
        ((), {}), ((5,), {}), ((1, 2, (3,), 4), {}), ((1, 2, (3,)), {"high": 3}), ((5, (3,)), {"high": 3, "low": 1}),
        ((), {"low": 1, "size": (3,)}),
    ]),
])  # fmt: skip
def test_what_torch_says_less_clearly(ctx, name, args, kwargs, error, words):
    with pytest.raises(error, match=words):
        getattr(ctx, name)(*args, **kwargs)


def test_empty_does_not_mix_out_and_memory_format(ctx):
    with pytest.raises(ArgumentError, match="memory_format= cannot be combined with out="):
        ctx.empty(1, 2, 3, 4, out=ctx.empty(24), memory_format=torch.channels_last)


def test_a_fill_that_fails_frees_the_block_on_every_rank():
    with Cluster(2) as c:
        contexts = [Context(heap) for heap in c.heaps]
        c.refused(RuntimeError, "", lambda heap: contexts[heap.rank].randint(300, (3,), dtype=torch.int8))
        c.barrier()
        assert c.stats("free") == [c.heap.nbytes] * 2


def test_exhaustion_and_close(ctx):
    with pytest.raises(HeapExhaustedError, match=r"zeros\(\(1048576,\), float32\) needs 4194304 bytes"):
        ctx.zeros(1 << 20)
    assert ctx.zeros(3).tolist() == [0, 0, 0]
    ctx.heap.close()
    with pytest.raises(HeapClosedError):
        ctx.zeros(3)
