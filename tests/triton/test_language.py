"""Device functions on other ranks' memory: which rank is meant, blocks, conversions, hints; names and the backend.

tests/multirank moves and changes every element type, with every mask, order and scope.
"""

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import table

import iris_gluon
import iris_triton as iris
from iris_core import Iris
from iris_core.errors import CapabilityError
from iris_core.types import ContextSpec, CreateRequest, DeviceTarget, DeviceType
from iris_triton import interpreter, language
from iris_triton.backend import TritonBackend
from iris_triton.interpreter import OutOfBoundsError
from iris_triton.language import asm
from iris_triton.settings import TritonSettings


def touching(text):
    """A kernel that works on the memory of rank `second` by a pointer into that of rank `first`."""
    return kernel_of(triton.jit, "x, out, bases, first, second", text, iris=iris, tl=tl)


LOAD = touching("tl.store(out, iris.load(x, first, second, bases))")
TURN = """
rows, columns = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
tile = iris.load(x + rows * 16 + columns, first, second, bases, hint={hint!r})
iris.store(out + rows + columns * 8, tile, first, second, bases)
"""
TO_RANKS = """
ranks, i = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
iris.store(x + ranks * 0 + i, ranks * 10.0 + i, first, ranks, bases)
"""
SUBTRACT = """
iris.atomic_sub(x, out.to(tl.uint32), first, second, bases)
iris.atomic_sub(x, 1, first, second, bases)
"""


def test_the_first_rank_owns_the_pointer(make_world):
    """Called with a pointer into rank 1's heap, whoever calls; values get the element's type."""
    world = make_world(2)
    x, out = world.tensors(*(torch.tensor([1.0 + r], dtype=torch.bfloat16) for r in range(2))), torch.zeros(1)
    for first, second in ((0, 1), (1, 0), (0, 0), (1, 1)):
        LOAD[(1,)](x[first], out, world.bases, first, second)
        assert out.item() == second + 1
    touching("iris.store(x, 3.14159, first, second, bases)")[(1,)](x[1], out, world.bases, 1, 0)
    assert [t.item() for t in x] == [torch.tensor(3.14159).to(torch.bfloat16).item(), 2.0]
    # swapped ranks lead to an address in no heap, which the CPU executor refuses
    with pytest.raises(OutOfBoundsError):
        LOAD[(1,)](x[1], out, world.bases, 0, 1)


def test_blocks_of_two_dimensions_and_of_ranks(make_world):
    world = make_world(4)
    x, y = world.tensors(*(torch.randn(8, 16) for _ in range(4))), world.zeros(16, 8)
    touching(TURN.format(hint=(1, 16)))[(1,)](x[0], y[0], world.bases, 0, 1)
    assert torch.equal(y[1], x[1].T)
    assert not y[0].any()
    touching(TO_RANKS)[(1,)](x[2], y[2], world.bases, 2, 0)
    for rank in range(4):
        assert x[rank][0, :8].tolist() == [rank * 10.0 + i for i in range(8)]


def test_subtraction_wraps_in_the_element_type(make_world):
    world = make_world(2)
    x = world.tensors(*(torch.tensor([10], dtype=torch.uint64) for _ in range(2)))
    for result in (2, 2**64 - 6):
        touching(SUBTRACT)[(1,)](x[0], 7, world.bases, 0, 1)
        assert x[1].item() == result


@table("hint, text", [
    ((1, 1, 4), "3 dimensions, but the block of pointers has 2"),
    *((hint, "a hint must be a power of two") for hint in (0, -4, 3, 16.0, "x", (1, 0), (1, 12))),
])  # fmt: skip
def test_impossible_hints_are_refused(make_world, hint, text):
    world = make_world(2)
    with pytest.raises(Exception, match=text):
        touching(TURN.format(hint=hint))[(1,)](*(world.zeros(128)[0] for _ in range(2)), world.bases, 0, 1)


@triton.jit
def load_from(x, out, context, peer, world_size: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, 0, world_size)
    tl.store(out, ctx.load(x, peer))


def test_a_rank_outside_the_world_is_named():
    with Iris("1MiB", device="cpu") as ctx:
        x, out = ctx.ones(1), torch.zeros(1)
        load_from[(1,)](x, out, ctx.get_device_context(), 0, 1)
        assert out.item() == 1
        for peer in (-1, 1, 7):
            with pytest.raises(AssertionError, match="a rank outside the world is addressed"):
                load_from[(1,)](x, out, ctx.get_device_context(), peer, 1)


# -- names, the context, intrinsics -----------------------------------------------------------------------------------
@table("module", [iris, interpreter, iris_gluon])
def test_every_exported_name_can_be_had(module):
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert module is interpreter or set(module.__all__) <= set(dir(module))
    assert module is not iris or set(language.__all__) <= set(iris.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fence'"):
        module.fence  # noqa: B018


def test_iris_opens_a_context_with_this_backend():
    """tests/compat/test_names.py has what is refused."""
    with iris.iris(1 << 20, allocator_type="host", engines=None) as ctx:
        assert isinstance(ctx, iris.Iris)
        assert (ctx.heap_size, ctx.num_ranks, ctx.get_num_ranks()) == (1 << 20, 1, 1)
        assert isinstance(ctx.backend, TritonBackend)


@triton.jit
def measure(out):
    tl.store(out, asm.read_realtime())
    tl.store(out + 1, asm.read_realtime())
    tl.store(out + 2, asm.wait_clock_ns(1))
    tl.store(out + 3, asm.get_cu_id())
    tl.store(out + 4, asm.get_xcc_id())
    asm.wait_stores()


def test_intrinsics_on_the_cpu():
    out = torch.full((5,), -1, dtype=torch.int64)
    measure[(1,)](out)
    first, second, third = out[:3].tolist()
    assert 0 < first <= second <= third < first + 10**9
    assert out[3:].tolist() == [0, 0]


def test_backend_refuses_heaps_that_are_not_aligned():
    backend = TritonBackend(CreateRequest(DeviceTarget(DeviceType.CPU), 0, 1, 1 << 20, TritonSettings()))
    with pytest.raises(CapabilityError, match=r"multiples of 4096 bytes.*rank 1 at 0x1001"):
        backend.make_context(ContextSpec(0, 2, (0x1000, 0x1001)))
