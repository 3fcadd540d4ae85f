"""What users of the reference system find: names, parameter orders, DeviceContext, the backend object."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core.errors import CapabilityError, PluginNotFoundError, UnsupportedError
from iris_core.types import ContextSpec, CreateRequest, DeviceTarget, DeviceType
from iris_triton import context, interpreter, language
from iris_triton.backend import TritonBackend
from iris_triton.language import asm
from iris_triton.settings import TritonSettings
from iris_triton.testing.compile_only import TARGETS, compile_for


def test_every_exported_name_can_be_had():
    for name in iris.__all__:
        assert getattr(iris, name) is not None
    assert set(iris.__all__) <= set(dir(iris))
    assert set(language.__all__) <= set(iris.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fence'"):
        iris.fence  # noqa: B018


def test_importing_the_package_is_light():
    code = "import sys, iris_triton; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_iris_opens_a_context_with_this_backend():
    with iris.iris(1 << 20, allocator_type="host") as ctx:
        assert isinstance(ctx, iris.Iris)
        assert (ctx.heap_size, ctx.num_ranks) == (1 << 20, 1)
        assert isinstance(ctx.backend, TritonBackend)
    with pytest.raises(PluginNotFoundError, match="no_such_allocator"):
        iris.iris(1 << 20, allocator_type="no_such_allocator")


def test_device_id_for_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [iris.get_device_id_for_rank(rank) for rank in (0, 3, 4, 9)] == [0, 3, 0, 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert iris.get_device_id_for_rank(3) == 0


# -- DeviceContext ----------------------------------------------------------------------------------------------------
@triton.jit
def describe(out, context_tensor, rank, world_size: tl.constexpr, how: tl.constexpr, given: tl.constexpr):
    if how == "constexpr":
        ctx = iris.DeviceContext.initialize(context_tensor, given, world_size)
    elif how == "runtime":
        ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size, False)
    else:
        ctx = iris.DeviceContext.from_tensor(context_tensor, world_size)
    tl.store(out, ctx.rank)
    tl.store(out + 1, ctx.world_size)
    tl.store(out + 2, tl.load(ctx.heap_bases + ctx.rank))
    if ctx.tracing.enabled:
        tl.store(out + 3, 1)


def test_fields(make_world):
    world = make_world(3)
    for how in ("constexpr", "runtime", "tensor"):
        out = torch.full((4,), -1, dtype=torch.int64)
        describe[(1,)](out, world.context(2), 2, world_size=3, how=how, given=2)
        assert out.tolist() == [2, 3, world.bases[2].item(), -1]
    # the order of the others is tests/kit's
    assert iris.DeviceContext.initialize.arg_names == ["context_tensor", "rank", "world_size", "tracing"]


def test_fields_compile():
    for how, target in zip(("constexpr", "runtime", "tensor"), TARGETS, strict=True):
        compile_for(describe, (torch.int64, torch.int64, 2), {"world_size": 3, "how": how, "given": 2}, target)


# -- intrinsics -------------------------------------------------------------------------------------------------------
@triton.jit
def measure(out, BLOCK: tl.constexpr):
    tl.store(out, asm.read_realtime())
    tl.store(out + 1, asm.read_realtime())
    tl.store(out + 2, asm.wait_clock_ns(1))
    tl.store(out + 3, asm.get_cu_id())
    tl.store(out + 4, asm.get_xcc_id())
    asm.wait_stores()


def test_intrinsics_on_the_cpu():
    interpreter.enable()
    out = torch.full((5,), -1, dtype=torch.int64)
    measure[(1,)](out, BLOCK=4)
    first, second, third = out[:3].tolist()
    assert 0 < first <= second <= third < first + 10**9
    assert out[3:].tolist() == [0, 0]


# -- the backend object -----------------------------------------------------------------------------------------------
def make_backend(kind=DeviceType.CPU, **settings):
    target = DeviceTarget(kind)
    return TritonBackend(CreateRequest(target, 0, 1, 1 << 20, TritonSettings(**settings)))


class Heap:
    """A stand-in for the core's heap: one live block in the middle."""

    def __init__(self, tensor):
        from iris_core.types import Block

        self.rank, self.nbytes, self.version = 0, tensor.nbytes, 1
        self.heap_bases, self.nodes = (tensor.data_ptr(),), ((0,),)
        self._blocks = [Block(64, 64, "middle")]

    def live_blocks(self):
        return self._blocks

    def stands_still(self, quiet):
        return False

    def elsewhere(self):
        return ()

    def check_peers(self):
        return None


@triton.jit
def store_at(address, value):
    tl.store(tl.load(address).to(tl.pointer_type(tl.int32)), value)


def test_backend_refuses_heaps_that_are_not_aligned():
    with pytest.raises(CapabilityError, match=r"multiples of 4096 bytes.*rank 1 at 0x1001"):
        make_backend().make_context(ContextSpec(0, 2, (0x1000, 0x1001)))


def test_backend_lets_the_executor_know_the_heap_until_it_is_detached():
    memory, backend = torch.zeros(256, dtype=torch.uint8), make_backend(cpu_timeout=12.5)
    before = interpreter.configuration()
    backend.attach(Heap(memory))
    try:
        assert interpreter.configuration().timeout_s == 12.5
        address = torch.tensor([memory.data_ptr() + 64])
        store_at[(1,)](address, 7)
        assert memory.view(torch.int32)[16].item() == 7
        with pytest.raises(interpreter.OutOfBoundsError, match="middle"):
            store_at[(1,)](address + 64, 7)
        backend.detach()
        with pytest.raises(interpreter.OutOfBoundsError):
            store_at[(1,)](address, 8)
        backend.detach()
    finally:
        interpreter.configure(bounds_check=before.bounds_check, timeout_s=before.timeout_s)


def test_backend_offers_the_device_functions():
    api = make_backend().device_api()
    assert set(api) == {*language.__all__, "DeviceContext"}
    assert api["store"] is iris.store
    assert api["DeviceContext"] is context.DeviceContext
    assert len(make_backend().compile_cases()) > 50
    assert [demo.name for demo in make_backend().demos()]


def test_copy_engines_are_refused_and_not_ignored():
    with iris.iris(1 << 20, "host", engines=None) as ctx:
        assert ctx.get_num_ranks() == 1
    for engines in ("sdma", ["sdma"]):
        with pytest.raises(UnsupportedError, match="no copy engines"):
            iris.iris(1 << 20, "host", engines=engines)
