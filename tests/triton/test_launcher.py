"""Launching a compiled kernel again: what reaches the driver, and the cache of calls in C."""

import concurrent.futures
import contextlib
import ctypes
import gc
import itertools
import random
import re
import struct
import sys
import threading
import types
import weakref
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from tables import raises
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import _allocation

from iris_triton import _compat, launcher
from iris_triton.launcher import BoundKernel
from iris_triton.testing.compile_only import TARGETS, compile_for

VALUES = [0x7000, 0x8000, 5, 128]


@pytest.fixture(autouse=True)
def active(monkeypatch):
    """A driver that Triton takes for active; from 3.8 on its launcher asks for one, also where it has no use for it."""
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace())


def tritons(given):
    """Triton's launcher of a kernel, whose compiled function writes down what it is given."""
    made = object.__new__(CudaLauncher)
    vars(made).update(
        launch=lambda *args: given.append(args), num_ctas=1, global_scratch_size=0, global_scratch_align=128,
        profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        arg_annotations=("annotations",), kernel_signature=b"signature", gsan_enabled=False,
    )  # fmt: skip
    return made


@triton.jit
def every_kind(out, flag, small, wide, address, nothing, pair, one, ratio, inp, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(inp + at) + ratio + small + wide.to(tl.float32) + one + pair[0] + pair[1][1]
    tl.store(out + at, tl.where(flag, value, tl.load(address + at).to(tl.float32)))


BOUND = [0, True, -7, 2**64 - 5, 0x7FFF12345678, None, (2**40, (None, 3)), 1, 1.5, 0, 128]
PLACES = 9, 0
"""A call gives `inp`, then `out`."""


@pytest.fixture(scope="module")
def compiled():
    """The kernel for sm_90, and offset and size of each parameter that its PTX has."""
    given = [torch.float32, *BOUND[1:4], torch.int64, *BOUND[5:9], torch.float32, 128]
    found = compile_for(every_kind, given, {"num_warps": 2})
    head = re.search(r"\.entry \w+\((.*?)\n\)", found.asm["ptx"], re.DOTALL)[1]
    layout, end = [], 0
    for size in (int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head)):
        layout.append((-(-end // size) * size, size))
        end = sum(layout[-1])
    metadata = types.SimpleNamespace(**found.metadata._asdict() | {"launch_pdl": True})
    kernel = types.SimpleNamespace(
        run=tritons([]), function=17, packed_metadata=(4, 1, 0), src=found.src, metadata=metadata,
        launch_metadata=lambda *args: types.SimpleNamespace(get=lambda: {"name": "kernel"}),
    )  # fmt: skip
    return kernel, layout


class Config(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attrs", ctypes.POINTER(ctypes.c_int)),
                ("num_attrs", ctypes.c_uint))  # fmt: skip


class Fake:
    """A driver that writes down what it is asked to launch."""

    def __init__(self, layout, codes=()):
        self.launched, self.contexts, self.codes, self.layout = [], [], list(codes), layout
        pointers = ctypes.POINTER(ctypes.c_void_p)
        self._kept = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, pointers, pointers)(self._launch),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda context: self.contexts.append(context) or 0),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(self._text),
        )

    def _launch(self, config, function, params, extra):
        values = [ctypes.string_at(params[i], size) for i, (_, size) in enumerate(self.layout)]
        self.launched.append((config[0].stream, values))
        given = config[0]
        self.how = list(given.size), function, [given.attrs[i] for i in range(given.num_attrs)]
        return self.codes.pop(0) if self.codes else 0

    def _text(self, code, text):
        text[0] = b"the device is lost"
        return 0

    def __call__(self):
        parameter = lambda function, number: self.layout[number] if number < len(self.layout) else None
        functions = tuple(ctypes.cast(each, ctypes.c_void_p).value for each in self._kept)
        return launcher._Driver(functions, lambda index: 500 + index, parameter, lambda index: 1000 + index)


def bound(compiled, fake, through_triton=None):
    return launcher._c_launch(compiled, 6, BOUND, PLACES, 3, through_triton, driver=fake)


@pytest.fixture
def made(compiled):
    """A function (codes, through_triton): a launch of the kernel, and the driver with its answers."""

    def make(*codes, through_triton=None):
        fake = Fake(compiled[1], codes)
        return bound(compiled[0], fake, through_triton), fake

    return make


def wanted(out, inp):
    """The bytes of the parameters, and of the two addresses of scratch memory."""
    values = out, True, -7, 2**64 - 5, 0x7FFF12345678, 2**40, 3, 1.5, inp, 0, 0
    return [struct.pack(f"<{kind}", value) for kind, value in zip("Q?iQQqifQQQ", values, strict=True)]


def stream(number):
    return types.SimpleNamespace(cuda_stream=number)


def test_the_driver_gets_each_parameter_where_the_kernel_has_it(compiled, made):
    launch, fake = made()
    inp, out, other = torch.zeros(3, 128)
    launch(stream(12), inp, out)
    launch(None, out, other)
    first, second = wanted(out.data_ptr(), inp.data_ptr()), wanted(other.data_ptr(), out.data_ptr())
    assert fake.launched == [(12, first), (1003, second)]
    programmatic_stream_serialization = 6
    shared = compiled[0].metadata.shared
    assert fake.how == ([6, 1, 1, 64, 1, 1, shared], 17, [programmatic_stream_serialization])
    described = changed(compiled[0], global_scratch_size=8)
    launcher._c_launch(described, 6, BOUND, PLACES, 3, None, 0x9000, fake)(stream(5), inp, out)
    assert fake.launched[2][1][-2:] == [struct.pack("<Q", 0x9000), bytes(8)]


class Described:
    """A kernel that describes memory: Triton's launch asks for scratch memory."""

    params = types.SimpleNamespace(name="out"), types.SimpleNamespace(name="inp")

    def __init__(self):
        self.asked, self.nbytes = [], 256

    def __getitem__(self, grid):
        return lambda **arguments: self.run() or types.SimpleNamespace(run=self.run)

    def run(self, *_):
        self.asked.append(_allocation._allocator.get()(self.nbytes, 128, None))


def test_launches_share_scratch_memory(monkeypatch):
    """Triton's launches and those from C; other kernels have what they had before."""
    given, kernel, empty, before = [], Described(), torch.empty, _allocation._allocator.get()
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype))  # no GPU is asked for
    monkeypatch.setattr(launcher, "_c_launch", lambda *how: given.append(how))
    monkeypatch.setattr(launcher, "_through_triton", lambda compiled, *how: lambda stream, *tensors: compiled.run())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    launch, tensors = BoundKernel(kernel, 1, {}, ("out", "inp"), "cuda:0"), torch.zeros(2, 1)
    for _ in range(3):
        launch(None, *tensors)
        assert _allocation._allocator.get() is before
    assert len(kernel.asked) == 3
    assert {each.data_ptr() for each in kernel.asked} == {given[0][-1]}


def test_threads_launch_with_their_own_addresses(made):
    launch, fake = made()

    def work(base):
        for at in range(base, base + 16 * 500, 16):
            launch(stream(at), *(types.SimpleNamespace(data_ptr=lambda at=each: at) for each in (at, at + 8)))

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (1 << 40, 2 << 40, 3 << 40)))
    assert len(fake.launched) == 1500
    assert all(values == wanted(number + 8, number) for number, values in fake.launched)


def test_a_thread_gets_a_context_and_what_the_driver_refuses_is_an_error(made):
    launch, fake = made(201, 0, 719)
    launch(None, *torch.zeros(2, 1))
    assert (len(fake.launched), fake.contexts) == (2, [503])
    with raises(RuntimeError, "kernel.refused"):
        launch(None, *torch.zeros(2, 1))
    fake.launched.clear()
    for arguments, named in (((None, torch.zeros(1)), {}), ((None, *torch.zeros(2, 1)), {"x": 1}), ((), {})):
        with raises(TypeError, "kernel.arguments"):
            launch(*arguments, **named)
    with raises(AttributeError, name="data_ptr"):
        launch(None, torch.zeros(1), "text")
    with raises(AttributeError, name="cuda_stream"):
        launch(7, *torch.zeros(2, 1))
    assert fake.launched == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told(monkeypatch, compiled, made, name):
    given, (kernel, _) = [], compiled
    kernel.run = tritons(given)
    through_triton = launcher._through_triton(kernel, 6, BOUND, PLACES, 3)
    launch, fake = made(through_triton=through_triton)
    hook, tensors = (lambda metadata: None), torch.zeros(2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, name, hook)
        launch(stream(5), *tensors)
    assert fake.launched == []
    assert hook in given[0]
    chain = getattr(triton.knobs.runtime, name)
    chain.add(hook)
    try:
        launch(stream(5), *tensors)
    finally:
        chain.remove(hook)
    assert (fake.launched, len(given)) == ([], 2)
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    launch(stream(5), *tensors)
    assert (len(fake.launched), len(given)) == (1, 2)


def changed(compiled, **fields):
    metadata = types.SimpleNamespace(**vars(compiled.metadata) | fields)
    return types.SimpleNamespace(**vars(compiled) | {"metadata": metadata})


def test_triton_launches_what_c_cannot(monkeypatch, compiled):
    compiled, layout = compiled
    for needs in ({"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_cooperative_grid": True}):
        assert bound(changed(compiled, **needs), Fake(layout)) is None
    for other in (layout[:-1], [*layout, (160, 8)], [*layout[:2], (8, 8), *layout[3:]]):  # of a Triton to come
        assert bound(compiled, Fake(other)) is None
    signature = types.SimpleNamespace(signature=compiled.src.signature | {"wide": "tensordesc<fp32[8]>"})
    assert bound(types.SimpleNamespace(**vars(compiled) | {"src": signature}), Fake(layout)) is None

    assert bound(compiled, mock.Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))) is None
    monkeypatch.setattr(launcher._compat, "c_module", mock.Mock(side_effect=RuntimeError("no C compiler")))
    launcher._c_type.cache_clear()
    try:
        assert bound(compiled, Fake(layout)) is None
    finally:
        launcher._c_type.cache_clear()


def test_kernels_compile_beside_each_other(monkeypatch):
    """On other threads, for the tensors of the launch, as without."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())  # a torch for CPUs has none
    compiled = []
    note = lambda **about: compiled.append(threading.current_thread().name)
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    names = [parameter.name for parameter in every_kind.params]
    arguments = dict(zip(names, [None, True, -7, 2**64 - 5, torch.zeros(1), *BOUND[5:9], None], strict=False))
    del arguments["out"], arguments["inp"]
    with _compat.active_target(TARGETS["sm_90"]):
        for block in (32, 64):
            of_block = arguments | {"BLOCK": block}
            ahead = launcher.BoundKernel(every_kind, 6, of_block, ("out", "inp"), "cuda:0", {"num_warps": 1})
            ahead.compile_ahead(out=torch.float32, inp=torch.float16, other=torch.int8)
            ahead._compiling.result()
            given = {"out": torch.zeros(128), "inp": torch.zeros(128, dtype=torch.float16)}
            every_kind.warmup(grid=(6,), **of_block, **given, num_warps=1)
    assert len(compiled) == 2
    assert all(name.startswith("iris-compile") for name in compiled)


def test_a_first_launch_waits_for_the_compiler(monkeypatch):
    """And says itself what is wrong, if something is."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    order, begun = [], threading.Event()

    class Kernel:
        def warmup(self, **_):
            begun.wait()
            order.append("compiled")
            raise RuntimeError("ahead")

        def __getitem__(self, grid):
            order.append("launched")
            raise RuntimeError("launched")

    ahead = launcher.BoundKernel(Kernel(), 1, {}, (), "cuda:0")
    ahead.compile_ahead()
    threading.Timer(0.1, begun.set).start()
    with pytest.raises(RuntimeError, match=r"^launched$"):
        ahead(None)
    assert order == ["compiled", "launched"]


def test_each_launch_that_differs_is_bound_once_and_few_are_kept(monkeypatch):
    made = []

    class Recorded:
        def __init__(self, *args):
            made.append((args, self))

        def __call__(self, stream, *tensors):
            launched.append((self, stream, tensors))

    launched, x = [], torch.zeros(64)
    monkeypatch.setattr(launcher, "BoundKernel", Recorded)
    monkeypatch.setattr(launcher.BoundKernels, "_MOST", 64)
    kernels = launcher.BoundKernels("kernel", {"B": 8}, ("x", "y"), "cuda:1", {"num_warps": 2})
    for pair in ((x, x), (x[4:], x[8:]), (x[1:], x), (x, x[1:]), (x, x.double()), (x[5:], x)):
        kernels(3, *pair, numel=5)
        assert launched[-1][1] is None
        assert all(one is other for one, other in zip(launched[-1][2], pair, strict=True))
    given = "kernel", 3, {"B": 8, "numel": 5}, ("x", "y"), "cuda:1", {"num_warps": 2}
    assert [args for args, _ in made] == [given] * 4
    assert [made.index(pair) for each, *_ in launched for pair in made if pair[1] is each] == [0, 0, 1, 2, 3, 1]
    for number in range(200):
        kernels(3, x, x, numel=number)
        kernels(4, x, x, numel=number)
    assert len(made) == 4 + 400 - 1  # one of them was there
    assert len(kernels._made) == 64


LOW, HIGH = 1 << 12, 1 << 20
ARENA = torch.zeros(1 << 14, dtype=torch.uint8)


def new(skips_float32=False):
    at = ARENA.data_ptr()
    made = launcher.call_cache(at + LOW, at + HIGH, skips_float32)
    if made is None:
        pytest.skip("there is no C compiler here, or torch is older than 2.11")
    return made


def drawn(generator):
    dtype = generator.choice([torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.bool])
    begin = generator.choice([0, 63, 64, 72, LOW - 64, LOW - 1, LOW, LOW + 512]) // dtype.itemsize * dtype.itemsize
    flat = ARENA[begin : begin + 2048].view(dtype)
    return generator.choice([
        lambda: flat[:64], lambda: flat[:64].view(8, 8), lambda: flat[:64].view(8, 8).t(), lambda: flat[:64:2],
        lambda: flat[0], lambda: flat[:1].expand(64), lambda: None,
    ])()  # fmt: skip


def described(tensors):
    """What the cache tells calls apart by, and no more."""
    found, ranges = [], []
    for each in tensors:
        if each is None:
            found.append(None)
            continue
        at = each.data_ptr() - ARENA.data_ptr()
        last = sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True))
        ranges.append((at, at + (last + 1) * each.itemsize))
        found.append((each.shape, each.stride(), each.dtype, LOW <= at < HIGH, each.data_ptr() % 16 == 0))
    for (one, its_end), (other, others_end) in itertools.combinations(ranges, 2):
        found.append(other - one if one < others_end and other < its_end else None)
    return found


def test_finds_calls_with_tensors_like_those_that_were_kept():
    cache, generator, how, found = new(), random.Random(5), ("op", None, object()), 0
    for _ in range(400):
        kept = tuple(drawn(generator) for _ in range(generator.choice([1, 2, 2, 5])))
        cache.clear()
        cache.keep(kept, how, "value")
        assert cache(kept, how) == "value"
        for _ in range(30):
            asked = tuple(generator.choice([each, drawn(generator)]) for each in kept)
            is_like = described(asked) == described(kept)
            assert cache(asked, how) == ("value" if is_like else None), (kept, asked)
            found += is_like
        assert not cache(kept[:-1], how)
        assert cache(kept, ("op", None, object())) is None
    assert found > 500


def test_what_needs_a_closer_look_is_never_found():
    class Own(torch.Tensor):
        pass

    cache, x, how, found = new(), torch.ones(4), ("op",), []
    recorded, half = torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.complex64).conj()
    others = half, half.imag, x.as_subclass(Own), x[:0], torch.empty(4, device="meta")[:0], recorded, 5, x.to_sparse()
    for other in others:
        for tensors in ((x, other), (other,)):
            cache.keep(tensors, how, "value")
            assert cache(tensors, how) is False
    assert cache((x,) * 9, how) is False
    assert cache([x], how) is False
    with torch.no_grad():
        cache.keep((recorded,), how, "value")
        assert cache((recorded,), how) == "value"
    assert cache((recorded,), how) is False
    torch.func.vmap(lambda each: found.append(cache((each,), how)), out_dims=None)(torch.ones(2, 4))
    assert found == [False]
    cache.keep((x,), ([0, 1],), "value")  # a list may change
    assert cache((x,), ([0, 1],)) is None
    assert new(skips_float32=True)((x,), how) is False
    for wrong in ((), ((x,),), ((x,), [1])):
        with pytest.raises(TypeError):
            cache(*wrong)


def test_how_is_compared_by_value_or_is_the_same_object():
    cache, x, number = new(), (ARENA[64:128],), int("1000")
    how = "".join(["su", "m"]), number, (0, number), float("1.5"), True
    cache.keep(x, how, "value")
    assert cache(x, ("".join(["s", "um"]), int("1000"), (0, int("1000")), float("1.5"), True)) == "value"
    for place, other in ((0, "min"), (0, how), (1, 1000.0), (1, 1), (2, (0, True)), (2, (0,)), (3, 1), (4, 1)):
        assert cache(x, (*how[:place], other, *how[place + 1 :])) is None, other
    assert cache(x, (*how, [0])) is None


def test_at_the_end_of_the_stack_nothing_is_found_at_worst():
    def ask(depth, how):
        return ask(depth - 1, how) if depth else cache(x, how)

    cache, x, found = new(), (ARENA[64:128],), set()
    cache.keep(x, ((1, 10**30),), "value")
    for depth in range(sys.getrecursionlimit()):
        with contextlib.suppress(RecursionError):
            found.add(ask(depth, ((1, 10 ** len("x" * 30)),)))
    assert found <= {"value", None}
    assert "value" in found


def test_holds_many_calls_and_lets_them_go():
    cache, how = new(), [(object(),) for _ in range(2000)]
    values = [threading.Event() for _ in how]  # any objects that weak references can hold
    for each, value in zip(how, values, strict=True):
        cache.keep((ARENA,), each, value)
    hits = [cache((ARENA,), each) for each in how]
    assert all(hit in (None, value) for hit, value in zip(hits, values, strict=True))
    assert sum(each is not None for each in hits) == 256
    seen = [weakref.ref(each) for each in values]
    values[-1].cache = cache  # a cycle
    del cache, hits, values, value
    gc.collect()
    assert not any(each() for each in seen)


def test_without_a_table_that_it_knows_there_is_no_cache(monkeypatch):
    def refuse(*about):
        raise ValueError("DLPack 2")

    monkeypatch.setattr(launcher, "_c_type", lambda file, name: refuse)
    assert launcher.call_cache(0, 0, False) is None
