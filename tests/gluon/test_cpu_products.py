"""Matrix instructions of Gluon on the CPU: wgmma, mma_v2, mfma, wmma, dot_fma; AMD's buffer operations."""

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

import iris_gluon.interpreter  # noqa: F401
from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.errors import RaceError
from iris_triton import interpreter
from iris_triton.testing.compile_only import assembly, compile_for

ELEMENTS = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@pytest.fixture(autouse=True)
def _executor():
    interpreter.enable()


@gluon.jit
def load_matrix(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.load(x + r[:, None] * COLUMNS + c[None, :])


@gluon.jit
def store_matrix(x, value):
    layout: gl.constexpr = value.type.layout
    r = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(x + r[:, None] * value.shape[1] + c[None, :], value)


BLOCKED = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


# -- wgmma ------------------------------------------------------------------------------------------------------------
@gluon.jit
def wgmma(
    a, b, c, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, k_instruction: gl.constexpr,
    blocked: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, N, k_instruction])
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, K], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, N], dtype)
    acc = gl.convert_layout(load_matrix(c, M, N, blocked), layout)
    left = load_matrix(a, M, K, blocked)
    if how == "transposed" or dtype.primitive_bitwidth != 16:  # the instruction transposes 16-bit types only
        bt_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, K], dtype)
        b_memory = gl.allocate_shared_memory(dtype, [N, K], bt_layout, load_matrix(b, N, K, blocked)).permute([1, 0])
    else:
        b_memory = gl.allocate_shared_memory(dtype, [K, N], b_layout, load_matrix(b, K, N, blocked))
    if how == "registers":
        operand: gl.constexpr = gl.DotOperandLayout(0, layout, 32 // dtype.primitive_bitwidth)
        a_memory = gl.convert_layout(left, operand)
    else:
        a_memory = gl.allocate_shared_memory(dtype, [M, K], a_layout, left)
    if how != "no fence":
        fence_async_shared()
    if how == "synchronous":
        result = warpgroup_mma(a_memory, b_memory, acc)
    elif how == "no accumulator":
        result = warpgroup_mma(a_memory, b_memory, acc, use_acc=False)
    elif how == "twice":
        result = warpgroup_mma(a_memory, b_memory, acc, is_async=True)
        result = warpgroup_mma(a_memory, b_memory, result, is_async=True)
        result = warpgroup_mma_wait(0, deps=(result,))
    else:
        result = warpgroup_mma(a_memory, b_memory, acc, is_async=True)
        if how == "overwritten":
            b_memory.store(load_matrix(b, K, N, blocked))
        elif how == "never waited":
            return
        elif how == "one may be under way":
            result = warpgroup_mma_wait(1, deps=(result,))
            store_matrix(out, result)
        result = warpgroup_mma_wait(0, deps=(result,))
        b_memory.store(b_memory.load(blocked))
    store_matrix(out, result)


def run_wgmma(how, dtype=torch.float16, sum_dtype=torch.float32, m=64, n=64, k=64):
    if dtype is torch.int8:
        a, b, c = (torch.randint(-100, 100, shape).to(dtype) for shape in ((m, k), (k, n), (m, n)))
    else:
        a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(m, n)
    c, out = c.to(sum_dtype), torch.zeros(m, n, dtype=sum_dtype)
    bits = torch.finfo(dtype).bits if dtype.is_floating_point else 8
    given = b.T.contiguous() if how == "transposed" or bits != 16 else b
    wgmma[(1,)](a, given, c, out, m, n, k, 256 // bits, BLOCKED, how)
    product = a.double() @ b.double()
    expected = {"no accumulator": product, "twice": c.double() + 2 * product}.get(how, c.double() + product)
    return out, expected


HOWS = ["asynchronous", "synchronous", "no accumulator", "twice", "registers", "transposed"]
WGMMA_TYPES = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.float32),
    (torch.int8, torch.int32),
]


@pytest.mark.parametrize("how", HOWS)
def test_wgmma(how):
    for dtype, sum_dtype in WGMMA_TYPES:
        out, expected = run_wgmma(how, dtype, sum_dtype)
        tolerance = {torch.int32: 0, torch.float16: 2e-2}.get(sum_dtype, 1e-4)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


HAZARDS = {
    "no fence": "warpgroup_mma of '[ab]_memory' goes through the async proxy.*not ordered with the store",
    "overwritten": "store overwrites 'b_memory'.*warpgroup_mma that .* may still be reading it: call warpgroup_mma",
    "never waited": "the kernel ends while 1 products of warpgroup_mma may be under way, the last one issued in line",
    "one may be under way": "the result of warpgroup_mma in line .* is used while the product may be under way",
}


def test_hazards():
    for how in HAZARDS:
        with pytest.raises(RaceError, match=HAZARDS[how]):
            run_wgmma(how)


@gluon.jit
def bad_wgmma(what: gl.constexpr):
    v3: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 16])
    shallow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 8])
    deep: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 32])
    broad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 128, 16])
    v2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], instr_shape=[16, 8])
    blocked: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    zero = gl.zeros([64, 64], gl.bfloat16, blocked)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], wide, zero)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], wide, zero)
    fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, v3)
    if what == "blocked accumulator":
        warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, blocked))
    elif what == "version":
        warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, v2))
    elif what == "b in registers":
        warpgroup_mma(a, zero, acc)
    elif what == "a in registers":
        warpgroup_mma(zero, b, acc)
    elif what == "b swizzled":
        warpgroup_mma(a, gl.allocate_shared_memory(gl.bfloat16, [64, 64], plain, zero), acc)
    elif what == "inner size":
        warpgroup_mma(a, gl.allocate_shared_memory(gl.bfloat16, [32, 64], wide), acc)
    elif what == "outer size":
        warpgroup_mma(a, gl.allocate_shared_memory(gl.bfloat16, [64, 32], narrow), acc)
    elif what == "element types":
        warpgroup_mma(a, gl.allocate_shared_memory(gl.float16, [64, 64], wide), acc)
    elif what == "sum type":
        warpgroup_mma(a, b, gl.zeros([64, 64], gl.bfloat16, v3))
    elif what == "rows":
        half = gl.allocate_shared_memory(gl.bfloat16, [32, 64], wide)
        warpgroup_mma(half, b, gl.zeros([32, 64], gl.float32, v3))
    elif what == "instruction":
        warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, shallow))
    elif what == "columns":
        warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, broad))
    elif what == "not transposed":
        bytes_layout: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
        c = gl.allocate_shared_memory(gl.int8, [64, 64], bytes_layout)
        warpgroup_mma(c, c, gl.zeros([64, 64], gl.int32, deep))
    elif what == "no deps":
        warpgroup_mma_wait(0)


REFUSED = {
    "blocked accumulator": "accumulator must have an NVMMADistributedLayout of version",
    "version": "accumulator must have an NVMMADistributedLayout of version",
    "b in registers": "b must be in shared memory",
    "a in registers": "b must be in shared memory with an NVMMASharedLayout, a there or have a DotOperandLayout",
    "b swizzled": "b must be in shared memory with an NVMMASharedLayout",
    "inner size": r"a of \[64, 64\] and b of \[32, 64\] do not make an accumulator",
    "outer size": r"b of \[64, 32\] do not make an accumulator of \[64, 64\]",
    "element types": "a is bf16 and b is fp16",
    "sum type": "no wgmma that sums products of bf16 in bf16",
    "rows": r"no instruction \[16, 64, 16\] multiplies \[32, 64\]",
    "instruction": r"no instruction \[16, 64, 8\] multiplies .* of 16 bits",
    "columns": r"no instruction \[16, 128, 16\]",
    "not transposed": "with operands of type int8 the inner dimension of both must be the contiguous one",
    "no deps": "warpgroup_mma_wait deps must be given",
}


def test_layouts_and_types_of_wgmma():
    for what in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[what]):
            bad_wgmma[(1,)](what)


def test_the_compiler_refuses_the_same():
    """The other cases end the compiler's process, or it does not look."""
    for what in ["inner size", "outer size", "no deps", "rows"]:
        with pytest.raises((triton.CompilationError, RuntimeError)):
            compile_for(bad_wgmma, (what,))


@gluon.jit
def few_warps():
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [2, 1], instr_shape=[16, 64, 16])
    memory = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    warpgroup_mma(memory, memory, gl.zeros([64, 64], gl.float32, layout))


def test_a_warpgroup_has_four_warps():
    with pytest.raises(ValueError, match="has 2 warps; a warpgroup is 4"):
        few_warps[(1,)](num_warps=2)


# -- instructions on registers ----------------------------------------------------------------------------------------
@gluon.jit
def on_registers(
    a, b, c, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, layout: gl.constexpr, k_width: gl.constexpr,
    multiply: gl.constexpr,
):  # fmt: skip
    left = gl.convert_layout(load_matrix(a, M, K, layout), gl.DotOperandLayout(0, layout, k_width))
    right = gl.convert_layout(load_matrix(b, K, N, layout), gl.DotOperandLayout(1, layout, k_width))
    store_matrix(out, multiply(left, right, load_matrix(c, M, N, layout)))


AMPERE = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
MFMA = gl.amd.AMDMFMALayout(version=3, instr_shape=[32, 32, 8], transposed=True, warps_per_cta=[4, 1])
_WMMA_WARPS = {"warp_bases": [[1, 0], [2, 0]]}
if "warps_per_cta" in gl.amd.AMDWMMALayout.__dataclass_fields__:  # Triton 3.6
    _WMMA_WARPS = {"warps_per_cta": [4, 1]}
WMMA = gl.amd.AMDWMMALayout(version=1, transposed=True, **_WMMA_WARPS)
FMA = gl.BlockedLayout([4, 4], [4, 8], [4, 1], [1, 0])
INSTRUCTIONS = {
    "mma_v2 f16": (AMPERE, 2, mma_v2, torch.float16, torch.float32),
    "mma_v2 bf16": (AMPERE, 2, mma_v2, torch.bfloat16, torch.float32),
    "mma_v2 i8": (AMPERE, 4, mma_v2, torch.int8, torch.int32),
    "mfma f16": (MFMA, 4, gl.amd.cdna3.mfma, torch.float16, torch.float32),
    "mfma bf16": (MFMA, 4, gl.amd.cdna4.mfma, torch.bfloat16, torch.float32),
    "wmma f16": (WMMA, 16, gl.amd.rdna3.wmma, torch.float16, torch.float32),
    "fma f32": (FMA, 0, gl.dot_fma, torch.float32, torch.float32),
}


def test_instructions_on_registers():
    for which in INSTRUCTIONS:
        layout, k_width, multiply, dtype, sum_dtype = INSTRUCTIONS[which]
        m, n, k = 128, 32, 64
        a, b = (torch.randint(-20, 20, shape).to(dtype) for shape in ((m, k), (k, n)))
        c, out = torch.randint(-20, 20, (m, n)).to(sum_dtype), torch.zeros(m, n, dtype=sum_dtype)
        on_registers[(1,)](a, b, c, out, m, n, k, layout, k_width, multiply)
        assert torch.equal(out.double(), a.double() @ b.double() + c.double())


MFMA_SMALL = gl.amd.AMDMFMALayout(version=3, instr_shape=[16, 16, 4], transposed=True, warps_per_cta=[4, 1])
MFMA_BYTES = gl.amd.AMDMFMALayout(version=3, instr_shape=[32, 32, 16], transposed=True, warps_per_cta=[4, 1])
EXISTING = {
    "mma_v2 f64": (AMPERE, 1, mma_v2, torch.float64, torch.float64, "sm_90"),
    "mfma f32": (MFMA_SMALL, 4, gl.amd.cdna3.mfma, torch.float32, torch.float32, "gfx942"),
    "mfma f64": (MFMA_SMALL, 1, gl.amd.cdna3.mfma, torch.float64, torch.float64, "gfx942"),
    "mfma i8": (MFMA_BYTES, 8, gl.amd.cdna3.mfma, torch.int8, torch.int32, "gfx942"),
}


def test_instructions_that_exist():
    for which in EXISTING:
        layout, k_width, multiply, dtype, sum_dtype, target = EXISTING[which]
        a = torch.randint(-20, 20, (64, 64)).to(dtype)
        c, out = torch.zeros(64, 64, dtype=sum_dtype), torch.zeros(64, 64, dtype=sum_dtype)
        on_registers[(1,)](a, a, c, out, 64, 64, 64, layout, k_width, multiply)
        assert torch.equal(out.double(), a.double() @ a.double())
        types = (dtype, dtype, sum_dtype, sum_dtype, 64, 64, 64, layout, k_width, multiply)
        assert ("mma.sync" if target == "sm_90" else "v_mfma") in assembly(compile_for(on_registers, types, {}, target))


@pytest.mark.parametrize("target", ["sm_90"])
def test_mma_v2_is_an_instruction(target):
    arguments = (torch.float16, torch.float16, torch.float32, torch.float32, 128, 32, 64, AMPERE, 2, mma_v2)
    assert "mma.sync" in assembly(compile_for(on_registers, arguments, {}, target))


@gluon.jit
def wrong_parent(x, multiply: gl.constexpr):
    v2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], instr_shape=[16, 8])
    other: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], instr_shape=[16, 8])
    a = gl.full([64, 64], 0.0, gl.float16, gl.DotOperandLayout(0, other, 2))
    b = gl.full([64, 64], 0.0, gl.float16, gl.DotOperandLayout(1, v2, 2))
    multiply(a, b, gl.zeros([64, 64], gl.float32, v2))


def test_operands_of_another_layout_are_refused():
    with pytest.raises(AssertionError, match="a's parent layout must be the same as acc's layout"):
        wrong_parent[(1,)](torch.zeros(1), mma_v2)


# -- AMD --------------------------------------------------------------------------------------------------------------
@gluon.jit
def buffers(x, out, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [64], [4], [0])
    i = gl.arange(0, BLOCK, layout=layout)
    value = gl.amd.cdna3.buffer_load(x, i, mask=i < n, other=-1.0)
    gl.amd.cdna3.buffer_store(value + 1, out, i)
    gl.amd.cdna3.buffer_store(gl.amd.cdna3.buffer_load(x, i % n) * 2, out + BLOCK, i, mask=i < n)


def test_buffer_loads_and_stores():
    x, out = torch.randn(100), torch.full((256,), 9.0)
    buffers[(1,)](x, out, 100, 128)
    assert torch.equal(out[:100], x + 1)
    assert not out[100:128].any()
    assert torch.equal(out[128:228], 2 * x)
    assert (out[228:] == 9).all()
    with pytest.raises(interpreter.OutOfBoundsError, match="load"):
        buffers[(1,)](x, out, 128, 128)


@gluon.jit
def buffer_atomics(x, old, kind: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [2], [0])
    i = gl.arange(0, 128, layout=layout)
    if kind == "add":
        result = gl.amd.cdna3.buffer_atomic_add(x, i % 4, gl.full([128], 1.0, gl.float32, layout), mask=i < 64)
    elif kind == "max":
        result = gl.amd.cdna3.buffer_atomic_max(x, i % 4, i, sem="relaxed", scope="gpu")
    else:
        result = gl.amd.cdna3.buffer_atomic_xchg(x, i % 4, i)
    gl.store(old + i, result)


def test_buffer_atomics():
    x, old = torch.zeros(4), torch.full((128,), -1.0)
    buffer_atomics[(1,)](x, old, "add", num_warps=2)
    assert x.tolist() == [16.0] * 4
    assert sorted(old[:64].tolist()) == sorted(list(range(16)) * 4)
    x, old = torch.zeros(4, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    buffer_atomics[(1,)](x, old, "max", num_warps=2)
    assert x.tolist() == [124, 125, 126, 127]
    buffer_atomics[(1,)](x, old, "xchg", num_warps=2)
    assert x.tolist() == [124, 125, 126, 127]


@gluon.jit
def direct_to_shared(x, out, what: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [64], [4], [0])
    i = gl.arange(0, 1024, layout=layout)
    memory = gl.allocate_shared_memory(gl.float32, [1024], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    if what == "pointers":
        gl.amd.cdna4.async_copy.global_load_to_shared(memory, x + i, mask=i < 1000, other=5.0)
    else:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(memory, x, i, mask=i < 1000, other=5.0)
    gl.amd.cdna4.async_copy.commit_group()
    if what != "no wait":
        gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out + i, gl.amd.cdna4.async_copy.load_shared_relaxed(memory, layout))


@pytest.mark.parametrize("what", ["pointers", "offsets"])
def test_direct_loads_to_shared_memory(what):
    x, out = torch.randn(1000), torch.zeros(1024)
    direct_to_shared[(1,)](x, out, what)
    assert torch.equal(out[:1000], x)
    assert (out[1000:] == 5).all()
    with pytest.raises(RaceError, match="asynchronous copy"):
        direct_to_shared[(1,)](x, out, "no wait")


@gluon.jit
def stages(x, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [2], [0])
    i = gl.arange(0, 128, layout=layout)
    for k in range(2):
        with gl.amd.warp_pipeline_stage("load", priority=1):
            value = gl.load(x + k * 128 + i)
        with gl.amd.warp_pipeline_stage("store"):
            gl.store(out + k * 128 + i, value * 2)


@pytest.mark.skipif(not hasattr(gl.amd, "warp_pipeline_stage"), reason="this Triton has no warp pipelines")
def test_stages_of_warp_pipelines_are_hints():
    x, out = torch.randn(256), torch.zeros(256)
    stages[(1,)](x, out, num_warps=2)
    assert torch.equal(out, 2 * x)


# -- what is left out -------------------------------------------------------------------------------------------------
@gluon.jit
def left_out(what: gl.constexpr):
    if what == "tensor memory":
        blackwell.allocate_tensor_memory(gl.float32, [128, 64], blackwell.TensorMemoryLayout([128, 64], 1))
    elif what == "scaled":
        v2: gl.constexpr = gl.amd.AMDMFMALayout(4, [32, 32, 64], True, [4, 1])
        a = gl.full([64, 64], 0, gl.uint8, gl.DotOperandLayout(0, v2, 16))
        b = gl.full([64, 64], 0, gl.uint8, gl.DotOperandLayout(1, v2, 16))
        gl.amd.cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", gl.zeros([64, 64], gl.float32, v2))
    elif what == "assembly":
        gl.inline_asm_elementwise("foo $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("tensor memory", "Blackwell's tensor memory is not emulated"),
        ("scaled", "dot_scaled"),
        ("assembly", "cannot run the inline assembly 'foo"),
    ],
)
def test_what_is_left_out_is_refused_by_name(what, text):
    with pytest.raises(UnsupportedError, match=text):
        left_out[(1,)](what)
