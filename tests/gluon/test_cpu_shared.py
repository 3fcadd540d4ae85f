"""Shared memory on the CPU: views, mbarriers, TMA, copies in groups, and every missing wait, arrival and fence."""

import functools
import itertools

import pytest
import torch
from gluon_kernels import ELEMENTS, describe, load_block, said_by_the_compiler, store_block
from kernel_text import kernel_of
from tables import raises, table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon._compat import tma_load, tma_store
from iris_gluon.bulk import await_bulk_stores
from iris_gluon.interpreter.errors import MBarrierError, RaceError, UninitializedMemoryError
from iris_triton import interpreter
from iris_triton.testing.compile_only import assembly, compile_for

SHARED = [gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]), gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0]),
          gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)]  # fmt: skip
PLAIN, BLOCKED = gl.constexpr(SHARED[0]), gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
FILLED = """
memory = gl.allocate_shared_memory(x.dtype.element_ty, [2, 32, 64], shared)
value = load_block(x, 32, 64, BLOCKED)
memory.index(1).store(value)
memory.index(0).store(-value)
tile = memory.index(1)
"""


@table("text, expected", [
    ("tile", lambda x: x),
    ("gl.allocate_shared_memory(gl.float32, [32, 64], shared, value)", lambda x: x),
    ("memory.index(0)", lambda x: -x), ("tile.permute([1, 0])", lambda x: x.T),
    ("tile.slice(8, 16)", lambda x: x[8:24]),
    ("tile.slice(32, 16, dim=1)", lambda x: x[:, 32:48]),
    ("tile.reshape([64, 32])", lambda x: x.reshape(64, 32)),
    ("tile.permute([1, 0]).slice(16, 32)", lambda x: x.T[16:48]),
    ("part = tile.slice(16, 16, dim=1)\npart.store(part.load(BLOCKED) + 100)\ntile",
     lambda x: torch.cat([x[:, :16], x[:, 16:32] + 100, x[:, 32:]], 1)),
])  # fmt: skip
def test_views(text, expected):
    before, _, view = text.rpartition("\n")
    text = f"{FILLED}{before}\nstore_block(out, {view}.load(BLOCKED))"
    names = {"gl": gl, "load_block": load_block, "store_block": store_block, "BLOCKED": BLOCKED}
    kernel, x = kernel_of(gluon.jit, "x, out, shared: gl.constexpr", text, **names), torch.randn(32, 64)
    for shared in SHARED:
        out = torch.zeros(2048)
        kernel[(1,)](x, out, shared)
        wanted = expected(x)
        assert torch.equal(out[: wanted.numel()].view(wanted.shape), wanted)


TILES = """
memory = gl.allocate_shared_memory(gl.float32, [4, 16, 16], PLAIN)
zero = gl.zeros([16, 16], gl.float32, BLOCKED)
"""
PART = "memory.index(1).slice(0, 8).store(gl.zeros([8, 16], gl.float32, BLOCKED))\nmemory.index(1).load(BLOCKED)"
REINTERPRET = "reinterpret" if hasattr(_compat.core.shared_memory_descriptor, "reinterpret") else "_reinterpret"


@table("text, place, error, key, compiles", [
    ("memory.index(1).load(BLOCKED)", 0, UninitializedMemoryError, "shared.nothing written", True),
    (PART, 0, UninitializedMemoryError, "shared.half written", True),
    ("memory.index(place).store(zero)", 4, IndexError, "shared.outside", True),
    ("memory.index(0).slice(8, 16)", 0, IndexError, "shared.outside", True),
    ("memory.index(0).store(gl.zeros([8, 16], gl.float32, BLOCKED))", 0, ValueError, "shared.shapes", False),
    ("memory.index(0).load(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))", 0, ValueError, "layout.warps", False),
    (f"memory.{REINTERPRET}(gl.int32, [4, 16, 16], PLAIN)", 0, UnsupportedError, "names", True),
])  # fmt: skip
def test_misuse(text, place, error, key, compiles):
    kernel = kernel_of(gluon.jit, "x, place", TILES + text, gl=gl, PLAIN=PLAIN, BLOCKED=BLOCKED)
    with raises(error, key, has=8, warps=4, name="'memdesc_reinterpret'"):
        kernel[(1,)](torch.zeros(1), place)
    assert compiles or said_by_the_compiler(kernel, torch.float32, 4)


copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
WAITS_FOR_WRITES = "read_only" in tma.store_wait.signature.parameters if hasattr(tma.store_wait, "signature") else False
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BOX = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
NAMES = {
    "gl": gl, "mbarrier": mbarrier, "tma": tma, "tma_load": tma_load, "tma_store": tma_store, "async_copy": async_copy,
    "copy_to_shared": copy_to_shared, "fence_async_shared": fence_async_shared, "BOX": BOX, "FLAT": FLAT, "LINE": LINE,
}  # fmt: skip


@gluon.jit
def copy_box(source, target, places, to):
    memory = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    tma_load(source, places, ready, memory)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    tma_store(target, to, memory)
    tma.store_wait(0)


@table("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float32])
def test_boxes_are_cut_off_at_the_edges(dtype):
    assert dtype in ELEMENTS
    for row, column in [(0, 0), (16, 32), (40, 48), (-8, -16), (1000, 0), (48, 0)]:
        x, out = torch.randint(-100, 100, (50, 64)).to(dtype), torch.full((64, 96), 55).to(dtype)
        copy_box[(1,)](describe(x, [32, 32]), describe(out, [32, 32]), (row, column), (48, 16))
        wanted = torch.full((64, 96), 55).to(dtype)
        for i, j in itertools.product(range(16), range(32)):  # the other rows lie beyond the edge of `out`
            r, c = row + i, column + j
            wanted[48 + i, 16 + j] = x[r, c] if 0 <= r < 50 and 0 <= c < 64 else 0
        assert torch.equal(out, wanted)


def test_padding_strides_and_three_dimensions():
    for dtype in (torch.float32, torch.bfloat16):
        x, out = torch.randn(32, 32).to(dtype), torch.zeros(32, 32, dtype=dtype)
        copy_box[(1,)](describe(x, [32, 32], "nan"), describe(out, [32, 32]), (16, 0), (0, 0))
        assert torch.equal(out[:16], x[16:])
        assert out[16:].isnan().all()
    whole, out = torch.randn(64, 128), torch.zeros(32, 32)
    part = whole[8:40, 64:96]
    for to in ((0, 0), (32, 0)):  # the second one lies beyond the edge
        copy_box[(1,)](describe(part, [32, 32]), describe(out, [32, 32]), (0, 0), to)
        assert torch.equal(out, part)
    x, out = torch.randn(4, 16, 32), torch.zeros(2, 8, 32)
    copy_box[(1,)](describe(x, [2, 8, 32]), describe(out, [2, 8, 32]), (1, 4, 0), (0, 0, 0))
    assert torch.equal(out, x[1:3, 4:12])


@gluon.jit
def described(x, out, rows, columns, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    source = tma.make_tensor_descriptor(x, [rows, columns], [stride, 1], [ROWS, COLUMNS], layout)
    target = tma.make_tensor_descriptor(out, [rows, columns], [stride, 1], [ROWS, COLUMNS], layout)
    here = (gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS)
    copy_box(source, target, here, here)


@table("skipped, stride, box, swizzle, key, known", [
    (1, 64, [16, 32], 128, "tma.address", False), (4, 65, [16, 32], 128, "tma.stride", False),
    (0, 64, [16, 8], 64, "tma.swizzle", True), (4, 64, [16, 32], 128, "", True), (0, 64, [16, 64], 128, "", True),
    (0, 64, [512, 8], 32, "", True),  # more than one box of the hardware, which the compiler takes apart
])  # fmt: skip
def test_descriptors_made_in_the_kernel(skipped, stride, box, swizzle, key, known):
    x, out = torch.randn(512 * 65 + 4), torch.zeros(512 * 64)
    arguments = 512, 60, stride, *box, gl.NVMMASharedLayout(swizzle, 32, 2)
    grid = (512 // box[0], -(-60 // box[1]))
    with raises(ValueError, key):
        described[grid](x[skipped:], out, *arguments)
    if key:
        assert not known or said_by_the_compiler(described, torch.float32, torch.float32, *arguments)
    else:
        assert torch.equal(out.view(512, 64)[:, :60], x[skipped : skipped + 512 * 64].view(512, 64)[:, :60])
        assert not out.view(512, 64)[:, 60:].any()
        compiled = compile_for(described, (torch.float32, torch.float32, *arguments))
        assert "cp.async.bulk.tensor" in assembly(compiled)


FACTS = "source.shape[0]", "source.shape[1]", "gl.cast(source.strides[0], gl.int32)", "source.block_type.nbytes"


def test_what_kernels_ask_descriptors():
    text = "\n".join(f"gl.store(out + {place}, {fact})" for place, fact in enumerate(FACTS))
    facts = kernel_of(gluon.jit, "source, out", f"gl.static_assert(source.dtype == gl.float32)\n{text}", gl=gl)
    out, x = torch.zeros(4, dtype=torch.int32), torch.zeros(48, 64)
    facts[(1,)](describe(x[:, :32], [16, 32]), out)
    assert out.tolist() == [48, 32, 64, 2048]
    with raises(TypeError, name="hopper.TensorDescriptor"):
        facts[(1,)](TritonDescriptor.from_tensor(x, [16, 32]), out)


def test_outside_the_tensors_of_the_launch():
    x = torch.randn(64, 64)
    right, wrong = describe(x, [32, 32]), describe(x, [32, 32])
    wrong.shape = [128, 64]  # as if it had more rows
    with raises(interpreter.OutOfBoundsError, name="TMA load"):
        copy_box[(1,)](wrong, right, (64, 0), (0, 0))
    with raises(interpreter.OutOfBoundsError, name="TMA store"):
        copy_box[(1,)](right, wrong, (0, 0), (64, 0))


@gluon.jit
def other_memory(source, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    tma_load(source, [0, 0], ready, gl.allocate_shared_memory(dtype, shape, layout))


@table("dtype, shape, swizzle, key", [
    (gl.float32, [16, 32], 128, "boxes"), (gl.int32, [32, 32], 128, "boxes"), (gl.float32, [32, 32], 64, "layout"),
])  # fmt: skip
def test_memory_that_does_not_fit_the_descriptor(dtype, shape, swizzle, key):
    with raises(ValueError, f"tma.{key}"):
        other_memory[(1,)](describe(torch.zeros(32, 32), [32, 32]), dtype, shape, gl.NVMMASharedLayout(swizzle, 32, 2))


STORED = """
memory = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout, gl.full([16, 32], 7.0, gl.float32, BOX))
fence_async_shared()
tma_store(desc, [0, 0], memory)
"""


@table("wait, seen", [
    ("tma.store_wait(0)", 0.0), ("await_bulk_stores()", 7.0),
    *([("tma.store_wait(0, read_only=False)", 7.0)] if WAITS_FOR_WRITES else []),
])  # fmt: skip
def test_a_wait_for_reads_is_no_wait_for_writes(wait, seen):
    x, out, text = torch.zeros(16, 32), torch.zeros(1), f"{STORED}{wait}\ngl.store(out, gl.load(x))"
    kernel = kernel_of(gluon.jit, "desc, x, out", text, await_bulk_stores=await_bulk_stores, **NAMES)
    kernel[(1,)](describe(x, [16, 32]), x, out)
    assert out.item() == seen
    assert torch.equal(x, torch.full((16, 32), 7.0))  # at the end of the program in any case


BEGIN = {
    "load": "memory.load(BOX)",
    "store": "memory.store(gl.zeros([16, 32], gl.float32, BOX))",
    "TMA load": "mbarrier.expect(ready, desc.block_type.nbytes)\ntma_load(desc, [0, 0], ready, memory)",
    "TMA store": "tma_store(desc, [0, 0], memory)",
    "copy": "copy_to_shared(memory, x + gl.full([16, 32], 0, gl.int32, BOX))\nasync_copy.commit_group()",
}
COMPLETE = {"TMA load": "mbarrier.wait(ready, 0)", "TMA store": "tma.store_wait(0)", "copy": "async_copy.wait_group(0)"}
FENCES = {
    "none": "", "function": "fence_async_shared()",
    "assembly": 'gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)',
}  # fmt: skip
REMEDIES = {"TMA load": "wait for mbarrier 'bars", "TMA store": "store_wait", "copy": "wait_group"}
WRITING, ASYNCHRONOUS, BY_PROXY = ("store", "TMA load", "copy"), (*COMPLETE,), ("TMA load", "TMA store")


@functools.cache
def part(*lines):
    return kernel_of(gluon.jit, "desc, x, memory, ready, done", "\n".join(filter(None, lines)), **NAMES)


@gluon.jit
def do_both(desc, x, first: gl.constexpr, second: gl.constexpr, partitions: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout, gl.zeros([16, 32], gl.float32, BOX))
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    one = (desc, x, memory, bars.index(0), bars.index(2))
    other = (desc, x, memory, bars.index(1), bars.index(2))
    if partitions == 2:
        gl.warp_specialize([(first, one), (second, other)], [4], [24])
    else:
        first(*one)
        second(*other)
    memory.load(BOX)  # behind both


@pytest.mark.parametrize("first", BEGIN)
def test_two_operations_on_the_same_memory(first):
    """In one partition, or the second one in another: what is missing between them is found, and nothing else."""
    x = torch.randn(16, 32)
    where = (1, True), (2, True), (2, False)
    for second, waits, fence, (partitions, ordered) in itertools.product(BEGIN, (True, False), FENCES, where):
        done = "written" if first == "store" else "read"
        is_awaited = waits or (partitions == 1 and first == second)  # by the second one's wait
        key = "" if is_awaited or first not in ASYNCHRONOUS else "shared.at the end"
        if first in WRITING or second in WRITING:
            if first in ASYNCHRONOUS and not (waits and ordered):
                key = "shared.under way"
            elif not ordered:
                key = "shared.not ordered"
            elif first not in BY_PROXY and second in BY_PROXY and fence == "none":
                key = "shared.proxy"
        ends = COMPLETE.get(first) if waits else ""
        one = part(BEGIN[first], ends, FENCES[fence], "mbarrier.arrive(done, count=1)")
        other = part("mbarrier.wait(done, 0)" if ordered else "", BEGIN[second], COMPLETE.get(second))
        said = {"first": first, "second": second, "done": done, "remedy": REMEDIES.get(first)}
        with raises(RaceError, key, **said):
            do_both[(1,)](describe(x, [16, 32]), x, one, other, partitions)


@table("one, other, error, key", [
    ("mbarrier.arrive(done, count=1)", "mbarrier.wait(done, 0)\n" + BEGIN["TMA store"], RaceError, "shared.store ends"),
    ("mbarrier.wait(done, 0)\nmbarrier.expect(done, 2048 - 16)\ntma_load(desc, [0, 0], done, memory)",
     "mbarrier.arrive(done, count=1)\nmbarrier.wait(done, 1)", MBarrierError, "mbarrier.more bytes"),
])  # fmt: skip
def test_mistakes_that_another_partition_comes_upon(one, other, error, key):
    x = torch.randn(16, 32)
    with raises(error, key, bar="bars[2]"):
        do_both[(1,)](describe(x, [16, 32]), x, part(one), part(other), 2)


SPACE = """
memory = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout)
line = gl.allocate_shared_memory(gl.float32, [128], LINE)
ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
mbarrier.init(ready, count=1)
raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
mbarrier.init(bar, count=2)
i = gl.arange(0, 128, layout=FLAT)
"""
LOAD, COPY = "tma_load(desc, [0, 0], ready, memory)\nmbarrier.wait(ready, 0)", "copy_to_shared(line, x + i)\n"


@table("text, error, key", [
    ("mbarrier.arrive(raw, count=1)", MBarrierError, "mbarrier.raw"),
    ("mbarrier.init(raw, count=0)", MBarrierError, "mbarrier.count"),
    *((f"mbarrier.init(gl.allocate_shared_memory({what}, mbarrier.MBarrierLayout()), count=1)", MBarrierError,
       "mbarrier.type") for what in ("gl.int64, [2]", "gl.int32, [1]")),
    ("mbarrier.init(bar, count=2)", MBarrierError, "mbarrier.again"),
    ("mbarrier.wait(bar, 0, pred=two < 0)\nmbarrier.arrive(bar, count=3, pred=two < 0)", None, ""),
    ("mbarrier.wait(bar, 1)\nmbarrier.arrive(bar, count=2)\nmbarrier.wait(bar, 0)", None, ""),
    ("mbarrier.invalidate(bar)\nmbarrier.init(bar, count=2)", None, ""),
    ("mbarrier.arrive(bar, count=3)", MBarrierError, "mbarrier.arrivals"),
    ("mbarrier.wait(bar, two)", ValueError, "any"),
    ("mbarrier.invalidate(bar)\nmbarrier.wait(bar, 1)", MBarrierError, "mbarrier.gone"),
    ("mbarrier.arrive(bar, count=1)\nmbarrier.wait(bar, 0)", interpreter.DeadlockError, "mbarrier.lacks"),
    ("mbarrier.arrive(bar, count=2)\nmbarrier.wait(bar, 1)", interpreter.DeadlockError, "mbarrier.lacks"),
    (BEGIN["TMA store"], UninitializedMemoryError, "tma.unwritten"),
    (BEGIN["TMA load"] + "\nmbarrier.invalidate(ready)", MBarrierError, "mbarrier.in use"),
    *((text, RaceError, "shared.at the end")
      for text in (COPY, COPY + "async_copy.commit_group()", "copy_to_shared(line, x + i, mask=i < 1)")),
    (COPY + "async_copy.mbarrier_arrive(ready)", UnsupportedError, "names"),
    ("copy_to_shared(line, x + i, mask=i < 0)", None, ""),  # reads nothing
    (f"mbarrier.expect(ready, 2048 - 16)\n{LOAD}", MBarrierError, "mbarrier.more bytes"),
    (f"mbarrier.expect(ready, 2048 + 16)\n{LOAD}", interpreter.DeadlockError, "mbarrier.fewer bytes"),
    (LOAD, interpreter.DeadlockError, "mbarrier.no expect"),
])  # fmt: skip
def test_wrong_use_of_barriers_and_what_is_under_way_at_the_end(text, error, key):
    x = torch.randn(16, 32)
    kernel = kernel_of(gluon.jit, "desc, x, two", SPACE + text, **NAMES)
    said = {"bar": "ready", "first": "asynchronous copy to 'line'", "remedy": "wait_group(0)"}
    said |= {"phase": text[-2], "lacks": 2 if "count=2" in text else 1, "name": "'async_copy_mbarrier_arrive'"}
    with raises(error, key, **said):
        kernel[(1,)](describe(x, [16, 32]), x, 2)


@gluon.jit
def pipelined_sum(x, out, blocks, last, STAGES: gl.constexpr, what: gl.constexpr):
    """The sum of blocks of 128, of which elements from `last` on are masked off."""
    i = gl.arange(0, 128, layout=FLAT)
    memory = gl.allocate_shared_memory(gl.float32, [STAGES, 128], LINE)
    for k in gl.static_range(STAGES - 1):
        copy_to_shared(memory.index(k), x + k * 128 + i, mask=(k < blocks) & (i < last))
        async_copy.commit_group()
    total = gl.zeros([128], gl.float32, FLAT)
    for k in range(blocks):
        if what == "waits for too few":
            async_copy.wait_group(STAGES - 1)
        elif what != "no wait":
            async_copy.wait_group(STAGES - 2)
        total += memory.index(k % STAGES).load(FLAT)
        ahead = k + STAGES - 1
        copy_to_shared(memory.index(ahead % STAGES), x + ahead * 128 + i, mask=(ahead < blocks) & (i < last))
        if what != "no commit":
            async_copy.commit_group()
    gl.store(out + i, total)


@table("stages, last, what, error", [
    (2, 128, "", None), (3, 128, "", None),
    (4, 100, "", None),  # what is masked off arrives as 0
    *((3, 128, what, RaceError) for what in ("no wait", "waits for too few", "no commit")),
    (2, 129, "beyond", interpreter.OutOfBoundsError),
])  # fmt: skip
def test_copies_in_groups(stages, last, what, error):
    x, out = torch.randn(7, 128), torch.ones(128)
    given = torch.randn(60) if what == "beyond" else x
    key = {None: "", RaceError: "shared.written"}.get(error, "any")
    with raises(error, key) as caught:
        pipelined_sum[(1,)](given, out, 7, last, stages, what)
    if what == "beyond":
        assert caught.value.lane == 60
    if not error:
        torch.testing.assert_close(out[:last], x.sum(0)[:last])
        assert not out[last:].any()
