"""mbarriers, TMA and copies in groups on the CPU: what they do, and every missing wait, arrival and fence."""

import functools

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

import iris_gluon.interpreter  # noqa: F401
from iris_core.errors import UnsupportedError
from iris_gluon._compat import tma_load, tma_store
from iris_gluon.interpreter.cta import complete_stores
from iris_gluon.interpreter.errors import MBarrierError, RaceError, UninitializedMemoryError
from iris_triton import interpreter
from iris_triton.testing.compile_only import assembly, compile_for

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
WAITS_FOR_WRITES = "read_only" in tma.store_wait.signature.parameters if hasattr(tma.store_wait, "signature") else False


@pytest.fixture(autouse=True)
def _executor():
    interpreter.enable()


ELEMENTS = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.int32: gl.int32,
    torch.float32: gl.float32,
}


def describe(tensor, block, padding="zero"):
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout, padding)


# -- copies -----------------------------------------------------------------------------------------------------------
@gluon.jit
def copy_boxes(source, target, rows, columns, to_row, to_column):
    """Copy one box per program through shared memory."""
    memory = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    tma_load(source, [rows, columns], ready, memory)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    tma_store(target, [to_row, to_column], memory)
    tma.store_wait(0)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_boxes_are_cut_off_at_the_edges(dtype):
    for place in [(0, 0), (16, 32), (40, 48), (-8, -16), (1000, 0), (48, 0)]:
        x = torch.randint(-100, 100, (50, 64)).to(dtype)
        out = torch.full((64, 96), 55).to(dtype)
        copy_boxes[(1,)](describe(x, [32, 32]), describe(out, [32, 32]), *place, 48, 16)
        wanted = torch.full((64, 96), 55).to(dtype)
        for i in range(16):  # the other rows lie beyond the edge of `out`
            for j in range(32):
                r, c = place[0] + i, place[1] + j
                wanted[48 + i, 16 + j] = x[r, c] if 0 <= r < 50 and 0 <= c < 64 else 0
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_with_nan(dtype):
    x, out = torch.randn(32, 32).to(dtype), torch.zeros(32, 32, dtype=dtype)
    copy_boxes[(1,)](describe(x, [32, 32], "nan"), describe(out, [32, 32]), 16, 0, 0, 0)
    assert torch.equal(out[:16], x[16:])
    assert out[16:].isnan().all()


def test_strides():
    whole, out = torch.randn(64, 128), torch.zeros(32, 32)
    part = whole[8:40, 64:96]
    copy_boxes[(1,)](describe(part, [32, 32]), describe(out, [32, 32]), 0, 0, 0, 0)
    assert torch.equal(out, part)


@gluon.jit
def copy_three_dimensions(source, target):
    memory = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    tma_load(source, [1, 4, 0], ready, memory)
    mbarrier.wait(ready, 0)
    tma_store(target, [0, 0, 0], memory)
    tma.store_wait(0)


def test_three_dimensions():
    x, out = torch.randn(4, 16, 32), torch.zeros(2, 8, 32)
    copy_three_dimensions[(1,)](describe(x, [2, 8, 32]), describe(out, [2, 8, 32]))
    assert torch.equal(out, x[1:3, 4:12])


@gluon.jit
def described_inside(x, out, rows, columns, layout: gl.constexpr):
    source = tma.make_tensor_descriptor(x, [rows, columns], [columns, 1], [16, 32], layout)
    target = tma.make_tensor_descriptor(out, [rows, columns], [columns, 1], [16, 32], layout)
    copy_boxes(
        source, target, gl.program_id(0) * 16, gl.program_id(1) * 32, gl.program_id(0) * 16, gl.program_id(1) * 32
    )


def test_descriptors_made_in_the_kernel():
    x, out = torch.randn(50, 100), torch.zeros(50, 100)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    described_inside[(4, 4)](x, out, 50, 100, layout)
    assert torch.equal(out, x)


@gluon.jit
def described(x, out, rows, columns, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    source = tma.make_tensor_descriptor(x, [rows, columns], [stride, 1], [ROWS, COLUMNS], layout)
    target = tma.make_tensor_descriptor(out, [rows, columns], [stride, 1], [ROWS, COLUMNS], layout)
    copy_boxes(source, target, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("skipped", "stride", "box", "swizzle", "text"),
    [
        (1, 64, [16, 32], 128, "begins at a multiple of 16 bytes: 0x[0-9a-f]+ is 4 bytes behind one"),
        (4, 65, [16, 32], 128, "stride 0 is 65 elements, 260 bytes"),
        (0, 64, [16, 8], 64, "along the contiguous dimension 1 is too small for the swizzle byte size 64"),
        (4, 64, [16, 32], 128, ""),
        (0, 64, [512, 8], 32, ""),  # more than one box of the hardware, which the compiler takes apart
        (0, 64, [16, 64], 128, ""),
    ],
)
def test_the_rules_of_descriptors(skipped, stride, box, swizzle, text):
    x, out = torch.randn(512 * 65 + 4), torch.zeros(512 * 64)
    layout = gl.NVMMASharedLayout(swizzle, 32, 2)
    arguments = (x[skipped:], out, 512, 60, stride, *box, layout)
    if text:
        with pytest.raises(ValueError, match=f"line .*{text}"):
            described[(1,)](*arguments)
    else:
        described[(1,)](*arguments)
        expected = torch.zeros(512, 64)
        part = (slice(box[0]), slice(min(box[1], 60)))
        expected[part] = x[skipped : skipped + 512 * 64].view(512, 64)[part]
        assert torch.equal(out.view(512, 64), expected)
    if not text or "swizzle" in text:  # what the compiler can know
        types = (torch.float32, torch.float32, 512, 60, stride, *box, layout)
        if text:
            with pytest.raises((CompilationError, RuntimeError)):
                compile_for(described, types, {}, "sm_90")
        else:
            assert "cp.async.bulk.tensor" in assembly(compile_for(described, types, {}, "sm_90"))


@gluon.jit
def facts(source, out):
    gl.store(out, source.shape[0])
    gl.store(out + 1, source.shape[1])
    gl.store(out + 2, gl.cast(source.strides[0], gl.int32))
    gl.store(out + 3, source.block_type.nbytes)
    gl.static_assert(source.dtype == gl.float32)


def test_what_kernels_ask_descriptors():
    out = torch.zeros(4, dtype=torch.int32)
    facts[(1,)](describe(torch.zeros(48, 64)[:, :32], [16, 32]), out)
    assert out.tolist() == [48, 32, 64, 2048]


def test_outside_the_tensors_of_the_launch():
    x = torch.randn(64, 64)
    wrong = describe(x, [32, 32])
    wrong.shape = [128, 64]  # as if it had more rows
    with pytest.raises(interpreter.OutOfBoundsError, match="TMA load"):
        copy_boxes[(1,)](wrong, describe(x, [32, 32]), 64, 0, 0, 0)
    with pytest.raises(interpreter.OutOfBoundsError, match="TMA store"):
        copy_boxes[(1,)](describe(x, [32, 32]), wrong, 0, 0, 64, 0)


def test_descriptors_of_triton_are_refused():
    x = torch.zeros(32, 32)
    with pytest.raises(TypeError, match=r"a Gluon kernel takes .*hopper.TensorDescriptor"):
        facts[(1,)](TritonDescriptor.from_tensor(x, [16, 32]), x)


@gluon.jit
def other_memory(source, what: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    if what == "shape":
        memory = gl.allocate_shared_memory(gl.float32, [16, 32], source.layout)
    elif what == "type":
        memory = gl.allocate_shared_memory(gl.int32, [32, 32], source.layout)
    else:
        memory = gl.allocate_shared_memory(gl.float32, [32, 32], gl.NVMMASharedLayout(64, 32, 2))
    tma_load(source, [0, 0], ready, memory)


@pytest.mark.parametrize(
    ("what", "text"), [("shape", "boxes"), ("type", "boxes"), ("layout", "the descriptor's layout")]
)
def test_memory_that_does_not_fit_the_descriptor(what, text):
    with pytest.raises(ValueError, match=text):
        other_memory[(1,)](describe(torch.zeros(32, 32), [32, 32]), what)


# -- stores reach global memory late ----------------------------------------------------------------------------------
@gluon.jit
def full_wait():
    tma.store_wait(0)


@interpreter.cpu_entry(full_wait)
def _full_wait(program):
    complete_stores()


@gluon.jit
def look_after_store(source, x, out, how: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, source.block_type.shape, source.layout)
    memory.store(gl.full([16, 32], 7.0, gl.float32, layout))
    fence_async_shared()
    tma_store(source, [0, 0], memory)
    if how == "full":
        full_wait()
    elif how == "writes":
        tma.store_wait(0, read_only=False)
    tma.store_wait(0)
    gl.store(out, gl.load(x))


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("reads", 0.0),
        ("full", 7.0),
        pytest.param(
            "writes", 7.0, marks=pytest.mark.skipif(not WAITS_FOR_WRITES, reason="this Triton waits for reads only")
        ),
    ],
)
def test_a_wait_for_reads_is_no_wait_for_writes(how, seen):
    x, out = torch.zeros(16, 32), torch.zeros(1)
    look_after_store[(1,)](describe(x, [16, 32]), x, out, how)
    assert out.item() == seen
    assert torch.equal(x, torch.full((16, 32), 7.0))  # at the end of the program in any case


# -- mbarriers --------------------------------------------------------------------------------------------------------
@gluon.jit
def phases(out, rounds):
    """One partition alone: phases go on by arrivals."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=3)
    mbarrier.wait(bar, 1)  # the phase before the first one counts as complete
    for i in range(rounds):
        mbarrier.arrive(bar, count=1)
        mbarrier.arrive(bar, count=2, pred=i >= 0)
        mbarrier.arrive(bar, count=3, pred=i < 0)
        mbarrier.wait(bar, i & 1)
    mbarrier.wait(bar, rounds & 1, pred=False)
    gl.store(out, rounds)
    mbarrier.invalidate(bar)
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_phases(rounds):
    out = torch.zeros(1, dtype=torch.int32)
    phases[(2,)](out, rounds)
    assert out.item() == rounds


@gluon.jit
def wrong_barrier(x, what: gl.constexpr, phase):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if what == "not initialised":
        mbarrier.arrive(bar, count=1)
    elif what == "count":
        mbarrier.init(bar, count=0)
    elif what == "shape":
        mbarrier.init(gl.allocate_shared_memory(gl.int64, [2], mbarrier.MBarrierLayout()), count=1)
    elif what == "type":
        mbarrier.init(gl.allocate_shared_memory(gl.int32, [1], mbarrier.MBarrierLayout()), count=1)
    mbarrier.init(bar, count=2)
    if what == "twice":
        mbarrier.init(bar, count=2)
    elif what == "too many":
        mbarrier.arrive(bar, count=3)
    elif what == "phase":
        mbarrier.wait(bar, phase)
    elif what == "invalid":
        mbarrier.invalidate(bar)
        mbarrier.wait(bar, 1)
    elif what == "deadlock":
        mbarrier.arrive(bar, count=1)
        mbarrier.wait(bar, 0)
    elif what == "next phase":
        mbarrier.arrive(bar, count=2)
        mbarrier.wait(bar, 1)


WRONG = {
    "not initialised": (MBarrierError, "mbarrier.arrive of mbarrier 'bar', which mbarrier.init has not initialised"),
    "count": (MBarrierError, "count of mbarrier 'bar' must be 1 to 1048575, got 0"),
    "shape": (MBarrierError, "must be a descriptor of Nxi64 type with N <= number of CTAs"),
    "type": (MBarrierError, "must be a descriptor of Nxi64 type with N <= number of CTAs"),
    "twice": (MBarrierError, "'bar' is initialised already"),
    "too many": (MBarrierError, "3 arrival.* waits for 2 of 2 only"),
    "phase": (ValueError, "0 or 1, not 2"),
    "invalid": (MBarrierError, "mbarrier.wait of mbarrier 'bar', which"),
    "deadlock": (
        interpreter.DeadlockError,
        "'bar' with phase=0; 0 phases are complete, and phase 0 lacks 1 of 2 arrivals",
    ),
    "next phase": (
        interpreter.DeadlockError,
        "'bar' with phase=1; 1 phases are complete, and phase 1 lacks 2 of 2 arrivals",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_of_barriers(what):
    error, text = WRONG[what]
    with pytest.raises(error, match=text):
        wrong_barrier[(1,)](torch.zeros(1), what, 2)


# -- missing waits and fences -----------------------------------------------------------------------------------------
@gluon.jit
def hazards(x_desc, out_desc, what: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, x_desc.block_type.shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    if what == "write, load":
        memory.store(gl.zeros([16, 32], gl.float32, layout))
    elif what == "write, fence, load":
        memory.store(gl.zeros([16, 32], gl.float32, layout))
        fence_async_shared()
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], ready, memory)
    if what == "read before wait":
        memory.load(layout)
    elif what == "write before wait":
        memory.store(gl.zeros([16, 32], gl.float32, layout))
    elif what == "store before wait":
        tma_store(out_desc, [0, 0], memory)
    elif what == "load before wait":
        tma_load(x_desc, [0, 0], ready, memory)
    elif what == "wait for the phase before":
        mbarrier.wait(ready, 1)
        memory.load(layout)
    mbarrier.wait(ready, 0)
    value = memory.load(layout)
    if what == "read, load" or what == "read, fence, load":
        if what == "read, fence, load":
            fence_async_shared()
        mbarrier.expect(ready, x_desc.block_type.nbytes)
        tma_load(x_desc, [0, 0], ready, memory)
        mbarrier.wait(ready, 1)
    memory.store(value + 1)
    if what == "fence in assembly":
        gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif what != "no fence":
        fence_async_shared()
    tma_store(out_desc, [0, 0], memory)
    if what == "write while stored":
        memory.store(value)
    elif what == "read while stored":
        memory.load(layout)
    elif what == "load while stored":
        tma_load(x_desc, [0, 0], ready, memory)
    if what == "two stores":
        tma_store(out_desc, [0, 0], memory)
        tma.store_wait(1)
    if what != "no last wait":
        tma.store_wait(0)
    if what == "write after wait":
        memory.store(value)


HAZARDS = {
    "read before wait": "load reads 'memory'.*while the TMA load .*may still be writing it: wait for mbarrier 'ready'",
    "write before wait": "store overwrites 'memory'.*while the TMA load",
    "store before wait": "TMA store reads 'memory'.*while the TMA load",
    "load before wait": "TMA load overwrites 'memory'.*while the TMA load",
    "wait for the phase before": "load reads 'memory'.*while the TMA load",
    "write, load": "TMA load of 'memory' goes through the async proxy.*not ordered with the store",
    "read, load": "TMA load of 'memory' goes through the async proxy.*not ordered with the load",
    "no fence": "TMA store of 'memory' goes through the async proxy.*not ordered with the store",
    "write while stored": "store overwrites 'memory'.*while the TMA store.*may still be reading it: call tma.store",
    "load while stored": "TMA load overwrites 'memory'.*while the TMA store",
    "no last wait": "the kernel ends while 1 TMA stores may still read its shared memory",
}
HARMLESS = (
    "",
    "write, fence, load",
    "read, fence, load",
    "read while stored",
    "two stores",
    "write after wait",
    "fence in assembly",
)


def test_hazards():
    for what in HAZARDS:
        x = torch.randn(16, 32)
        with pytest.raises(RaceError, match=f"(?s){HAZARDS[what]}"):
            hazards[(1,)](describe(x, [16, 32]), describe(x.clone(), [16, 32]), what)


def test_no_hazards():
    for what in HARMLESS:
        x, out = torch.randn(16, 32), torch.zeros(16, 32)
        hazards[(1,)](describe(x, [16, 32]), describe(out, [16, 32]), what)
        assert torch.equal(out, x + 1)


@gluon.jit
def never_waited(x_desc, x, what: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    memory = gl.allocate_shared_memory(gl.float32, x_desc.block_type.shape, x_desc.layout)
    line = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    if what == "TMA load" or what == "invalidated":
        mbarrier.expect(ready, x_desc.block_type.nbytes)
        tma_load(x_desc, [0, 0], ready, memory)
        if what == "invalidated":
            mbarrier.invalidate(ready)
    elif what != "nothing":
        copy_to_shared(line, x + i)
        if what == "group":
            async_copy.commit_group()
        elif what == "barrier":
            async_copy.mbarrier_arrive(ready)
    else:
        copy_to_shared(line, x + i, mask=i < 0)  # reads nothing


NEVER_WAITED = {
    "TMA load": (RaceError, "ends while the TMA load to 'memory' in line .* may be under way: wait for mbarrier 'rea"),
    "invalidated": (MBarrierError, "line .*: mbarrier 'ready' is invalidated while the TMA load to 'memory' in line"),
    "group": (RaceError, r"ends while the asynchronous copy to 'line' in line .* may be under way.*wait_group\(0\)"),
    "no group": (RaceError, r"ends while the asynchronous copy to 'line' in line .* may be under way.*wait_group\(0\)"),
    "barrier": (UnsupportedError, "'async_copy_mbarrier_arrive': commit and await groups instead"),
}


def test_what_is_under_way_at_the_end():
    for what in [*NEVER_WAITED, "nothing"]:
        x = torch.randn(16, 32)
        launch = functools.partial(never_waited[(1,)], describe(x, [16, 32]), x, what)
        if what not in NEVER_WAITED:
            launch()
            return
        error, text = NEVER_WAITED[what]
        with pytest.raises(error, match=text):
            launch()


@gluon.jit
def uninitialised_store(out_desc):
    memory = gl.allocate_shared_memory(gl.float32, out_desc.block_type.shape, out_desc.layout)
    tma_store(out_desc, [0, 0], memory)


def test_a_store_of_memory_that_was_never_written():
    with pytest.raises(UninitializedMemoryError, match="a TMA store reads 'memory'"):
        uninitialised_store[(1,)](describe(torch.zeros(16, 32), [16, 32]))


# -- copies in groups -------------------------------------------------------------------------------------------------
@gluon.jit
def pipelined_sum(x, out, blocks, STAGES: gl.constexpr, what: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    memory = gl.allocate_shared_memory(gl.float32, [STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    for k in gl.static_range(STAGES - 1):
        copy_to_shared(memory.index(k), x + k * 128 + i, mask=(k < blocks) & (i < 128))
        async_copy.commit_group()
    total = gl.zeros([128], gl.float32, layout)
    for k in range(blocks):
        if what == "waits for too few":
            async_copy.wait_group(STAGES - 1)
        elif what != "no wait":
            async_copy.wait_group(STAGES - 2)
        total += memory.index(k % STAGES).load(layout)
        ahead = k + STAGES - 1
        copy_to_shared(memory.index(ahead % STAGES), x + ahead * 128 + i, mask=(ahead < blocks) & (i < 128))
        if what != "no commit":
            async_copy.commit_group()
    gl.store(out + i, total)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipelined_copies(stages):
    x, out = torch.randn(7, 128), torch.zeros(128)
    pipelined_sum[(1,)](x, out, 7, stages, "")
    torch.testing.assert_close(out, x.sum(0))


def test_missing_wait_for_copies():
    for what in ["no wait", "waits for too few", "no commit"]:
        with pytest.raises(RaceError, match=r"asynchronous copy that .* issued may still be writing it.*wait_group"):
            pipelined_sum[(1,)](torch.randn(7, 128), torch.zeros(128), 7, 3, what)


@gluon.jit
def masked_copy(x, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    memory = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    copy_to_shared(memory, x + i, mask=i < 100)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out + i, memory.load(layout))


def test_what_is_masked_off_arrives_as_0():
    x, out = torch.randn(128), torch.ones(128)
    masked_copy[(1,)](x, out)
    assert torch.equal(out[:100], x[:100])
    assert not out[100:].any()


def test_the_bounds_of_copies_are_checked():
    with pytest.raises(interpreter.OutOfBoundsError, match="lane 60"):
        masked_copy[(1,)](torch.randn(60), torch.ones(128))
