"""Tensor factories given what they cannot do: the errors, and that nothing leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = torch.arange(24.0).reshape(2, 3, 4)
IMAGES = torch.arange(48, dtype=torch.int32).reshape(2, 3, 4, 2)


@pytest.fixture
def ctx() -> Iterator[Context]:
    with Cluster(1, 1 << 20) as cluster:
        yield Context(cluster.heaps[0])


# -- errors -----------------------------------------------------------------------------------------------------------
FACTORIES = [
    ("zeros", (3,)), ("ones", (3,)), ("empty", (3,)), ("full", ((3,), 1)), ("zeros_like", (BASE,)),
    ("ones_like", (BASE,)), ("empty_like", (BASE,)), ("full_like", (BASE, 1)), ("arange", (3,)),
    ("linspace", (0, 1, 3)), ("rand", (3,)), ("randn", (3,)), ("randint", (3, (3,))),
]  # fmt: skip


@table(("name", "args"), FACTORIES)
def test_options_that_the_heap_does_not_have(ctx: Context, name: str, args: Any) -> None:
    factory = getattr(ctx, name)
    with pytest.raises(
        RuntimeError, match="Device mismatch: requested device cuda:1 but Iris instance is on device cpu"
    ) as caught:
        factory(*args, device="cuda:1")
    assert isinstance(caught.value, DeviceError)
    with pytest.raises(DeviceError, match="leave device out"):
        factory(*args, device="meta")
    with pytest.raises(ValueError, match=r"torch\.sparse_coo") as layout_error:
        factory(*args, layout=torch.sparse_coo)
    assert isinstance(layout_error.value, LayoutError)
    with pytest.raises(RuntimeError, match="require gradients"):
        factory(*args, dtype=torch.int32, requires_grad=True)
    assert ctx.heap.live_blocks() == ()


@table("name", ["empty", "rand", "randn"])
def test_pinning(ctx: Context, name: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be pinned"):
        getattr(ctx, name)(3, pin_memory=True)


@table("name", ["rand", "randn", "randint", "uniform"])
def test_a_generator_of_another_device(ctx: Context, name: str) -> None:
    args = (3, (2,)) if name == "randint" else ((2,),)
    with pytest.raises(DeviceError, match=r"generator is on meta.*torch\.Generator\(device='cpu'\)"):
        getattr(ctx, name)(*args, generator=FakeGenerator())
    assert ctx.heap.live_blocks() == ()


class FakeGenerator:
    """This torch has generators of the CPU only."""

    device = torch.device("meta")


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
def test_what_torch_refuses_is_refused_and_leaks_nothing(
    ctx: Context, name: str, args: Any, kwargs: Any, error: type[Exception]
) -> None:
    if error is not LayoutError and "size" not in kwargs:
        with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)):
            getattr(torch, name)(*args, **kwargs)
    with pytest.raises(error):
        getattr(ctx, name)(*args, **kwargs)
    assert ctx.heap.stats().free == ctx.heap.nbytes


def test_ranges_that_cannot_be_are_value_errors_too(ctx: Context) -> None:
    for args in [(0, 5, 0), (5, 0), (0, 5, -1)]:
        with pytest.raises(ValueError, match="arange: "):
            ctx.arange(*args)


@table(("args", "kwargs"), [
    ((), {}), ((5,), {}), ((1, 2, (3,), 4), {}), ((1, 2, (3,)), {"high": 3}), ((5, (3,)), {"high": 3, "low": 1}),
    ((), {"low": 1, "size": (3,)}),
])  # fmt: skip
def test_randint_takes_two_or_three_arguments(ctx: Context, args: Any, kwargs: Any) -> None:
    with pytest.raises(ValueError, match="randint"):
        ctx.randint(*args, **kwargs)


@table("bounds", [(2, 1), (float("nan"), 1), (0, float("inf"))])
def test_uniform_bounds(ctx: Context, bounds: tuple[float, float]) -> None:
    with pytest.raises(ArgumentError, match="uniform: low must not be above high"):
        ctx.uniform((3,), *bounds)
    with pytest.raises(UnsupportedError, match="floating"):
        ctx.uniform((3,), dtype=torch.int32)


def test_empty_does_not_mix_out_and_memory_format(ctx: Context) -> None:
    with pytest.raises(ArgumentError, match="memory_format= cannot be combined with out="):
        ctx.empty(1, 2, 3, 4, out=ctx.empty(24), memory_format=torch.channels_last)


def test_a_fill_that_fails_frees_the_block_on_every_rank() -> None:
    with Cluster(2) as c:
        contexts = [Context(heap) for heap in c.heaps]
        errors = c.attempt(lambda heap: contexts[heap.rank].randint(300, (3,), dtype=torch.int8))
        assert all(type(e) is RuntimeError for e in errors)
        c.each(lambda heap: heap.barrier_agreement())
        assert [heap.stats().free for heap in c.heaps] == [heap.nbytes for heap in c.heaps]


def test_exhaustion_and_close(ctx: Context) -> None:
    with pytest.raises(MemoryError, match=r"zeros\(\(1048576,\), float32\) needs 4194304 bytes") as caught:
        ctx.zeros(1 << 20)
    assert isinstance(caught.value, HeapExhaustedError)
    assert ctx.zeros(3).tolist() == [0, 0, 0]
    ctx.heap.close()
    with pytest.raises(HeapClosedError):
        ctx.zeros(3)
