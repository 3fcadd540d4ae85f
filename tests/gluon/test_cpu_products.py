"""Matrix instructions of Gluon on the CPU: wgmma, mma_v2, mfma, wmma, dot_fma; AMD's buffer operations."""

import pytest
import torch
from gluon_kernels import load_block, said_by_the_compiler, store_block
from kernel_text import kernel_of
from tables import raises, table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.errors import RaceError
from iris_triton import interpreter
from iris_triton.testing.compile_only import assembly, compile_for

BLOCKED = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, I32 = torch.int8, torch.int32


@gluon.jit
def wgmma(
    a, b, c, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, k_instruction: gl.constexpr,
    blocked: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, N, k_instruction])
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, K], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, N], dtype)
    acc = gl.convert_layout(load_block(c, M, N, blocked), layout)
    left = load_block(a, M, K, blocked)
    if how == "transposed" or dtype.primitive_bitwidth != 16:  # the instruction transposes 16-bit types only
        bt_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, K], dtype)
        b_memory = gl.allocate_shared_memory(dtype, [N, K], bt_layout, load_block(b, N, K, blocked)).permute([1, 0])
    else:
        b_memory = gl.allocate_shared_memory(dtype, [K, N], b_layout, load_block(b, K, N, blocked))
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
            b_memory.store(load_block(b, K, N, blocked))
        elif how == "never waited":
            return
        elif how == "one may be under way":
            result = warpgroup_mma_wait(1, deps=(result,))
            store_block(out, result)
        result = warpgroup_mma_wait(0, deps=(result,))
        b_memory.store(b_memory.load(blocked))
    store_block(out, result)


def run_wgmma(how, dtype, sum_dtype):
    a, b, c = (torch.randn(64, 64) * (40 if dtype is I8 else 1) for _ in range(3))
    a, b, c, out = a.to(dtype), b.to(dtype), c.to(sum_dtype), torch.zeros(64, 64, dtype=sum_dtype)
    bits = 8 * dtype.itemsize
    given = b.T.contiguous() if how == "transposed" or bits != 16 else b
    wgmma[(1,)](a, given, c, out, 64, 64, 64, 256 // bits, BLOCKED, how)
    product = a.double() @ b.double()
    expected = {"no accumulator": product, "twice": c.double() + 2 * product}.get(how, c.double() + product)
    return out, expected


@table("how", ["asynchronous", "synchronous", "no accumulator", "twice", "registers", "transposed"])
def test_wgmma(how):
    for dtype, sum_dtype, tolerance in (
        (F16, F32, 1e-4), (BF16, F32, 1e-4), (F32, F32, 1e-4), (F16, F16, 2e-2), (torch.float8_e4m3fn, F32, 1e-4),
        (torch.float8_e5m2, F32, 1e-4), (I8, I32, 0),
    ):  # fmt: skip
        out, expected = run_wgmma(how, dtype, sum_dtype)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@table("how", ["no fence", "overwritten", "never waited", "one may be under way"])
def test_hazards(how):
    with raises(RaceError, f"wgmma.{how}"):
        run_wgmma(how, F16, F32)


V3, SHALLOW, DEEP = (gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, depth]) for depth in (16, 8, 32))
FEW = gl.NVMMADistributedLayout([3, 0], [2, 1], instr_shape=[16, 64, 16])
V2 = gl.NVMMADistributedLayout([2, 0], [4, 1], instr_shape=[16, 8])
WIDE, NARROW, BYTES = (gl.NVMMASharedLayout(*given) for given in ((128, 16, 2), (64, 16, 2), (64, 8, 2)))
PLAIN = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
A = B = (gl.bfloat16, (64, 64), WIDE)
SUM = (gl.float32, (64, 64), V3)
HALF = (gl.bfloat16, (64, 64), BLOCKED)


@gluon.constexpr_function
def is_shared(given):
    return isinstance(given[2], (gl.NVMMASharedLayout, gl.SwizzledSharedLayout))


@gluon.jit
def operand(given: gl.constexpr):
    """Element type, shape and layout, of shared memory or of registers."""
    if is_shared(given):
        return gl.allocate_shared_memory(given[0], [given[1][0], given[1][1]], given[2])
    else:
        return gl.full([given[1][0], given[1][1]], 0, given[0], given[2])


@gluon.jit
def bad_wgmma(a: gl.constexpr, b: gl.constexpr, acc: gl.constexpr):
    if a is None:
        warpgroup_mma_wait(0)
    else:
        warpgroup_mma(operand(a), operand(b), operand(acc))


@table("a, b, acc, key, compiler_looks", [
    (A, B, (gl.float32, (64, 64), V2), "accumulator", False), (HALF, B, SUM, "a and b", False),
    (A, (gl.bfloat16, (64, 64), PLAIN), SUM, "b", False), (A, (gl.bfloat16, (64, 32), NARROW), SUM, "shapes", True),
    (A, (gl.float16, (64, 64), WIDE), SUM, "dtypes", False), (A, B, (gl.bfloat16, (64, 64), V3), "sum", False),
    ((gl.bfloat16, (32, 64), WIDE), B, (gl.float32, (32, 64), V3), "rows", True),
    (A, B, (gl.float32, (64, 64), SHALLOW), "depth", False),
    ((gl.int8, (64, 64), BYTES), (gl.int8, (64, 64), BYTES), (gl.int32, (64, 64), DEEP), "contiguous", False),
    (A, B, (gl.float32, (64, 64), FEW), "warps", False), (None, None, None, "deps", True),
])  # fmt: skip
def test_layouts_and_types_of_wgmma(a, b, acc, key, compiler_looks):
    """Cases other than those in which the compiler looks end its process, or it does not."""
    with raises(ValueError, f"wgmma.{key}"):
        bad_wgmma[(1,)](a, b, acc, num_warps=2 if acc and acc[2] is FEW else 4)
    assert not compiler_looks or said_by_the_compiler(bad_wgmma, a, b, acc)
    assert not said_by_the_compiler(bad_wgmma, A, B, SUM)


@gluon.jit
def on_registers(
    a, b, c, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, layout: gl.constexpr, k_width: gl.constexpr,
    multiply: gl.constexpr,
):  # fmt: skip
    left = gl.convert_layout(load_block(a, M, K, layout), gl.DotOperandLayout(0, layout, k_width))
    right = gl.convert_layout(load_block(b, K, N, layout), gl.DotOperandLayout(1, layout, k_width))
    store_block(out, multiply(left, right, load_block(c, M, N, layout)))


AMPERE = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
MFMA, MFMA_SMALL, MFMA_BYTES = (
    gl.amd.AMDMFMALayout(version=3, instr_shape=shape, transposed=True, warps_per_cta=[4, 1])
    for shape in ([32, 32, 8], [16, 16, 4], [32, 32, 16])
)
_WMMA_WARPS = {"warp_bases": [[1, 0], [2, 0]]}
if "warps_per_cta" in gl.amd.AMDWMMALayout.__dataclass_fields__:  # Triton 3.6
    _WMMA_WARPS = {"warps_per_cta": [4, 1]}
WMMA = gl.amd.AMDWMMALayout(version=1, transposed=True, **_WMMA_WARPS)
FMA = gl.BlockedLayout([4, 4], [4, 8], [4, 1], [1, 0])


@table("layout, k_width, multiply, dtype, sum_dtype, target", [
    (AMPERE, 2, mma_v2, F16, F32, "sm_90"), (AMPERE, 2, mma_v2, BF16, F32, ""),
    (AMPERE, 4, mma_v2, I8, I32, ""), (AMPERE, 1, mma_v2, F64, F64, "sm_90"),
    (MFMA, 4, gl.amd.cdna3.mfma, F16, F32, ""), (MFMA, 4, gl.amd.cdna4.mfma, BF16, F32, ""),
    (MFMA_SMALL, 4, gl.amd.cdna3.mfma, F32, F32, "gfx942"), (MFMA_SMALL, 1, gl.amd.cdna3.mfma, F64, F64, "gfx942"),
    (MFMA_BYTES, 8, gl.amd.cdna3.mfma, I8, I32, "gfx942"),
    (WMMA, 16, gl.amd.rdna3.wmma, F16, F32, ""), (FMA, 0, gl.dot_fma, F32, F32, ""),
])  # fmt: skip
def test_instructions_on_registers(layout, k_width, multiply, dtype, sum_dtype, target):
    m, n, k = 128, 32, 64
    a, b = (torch.randint(-20, 20, shape).to(dtype) for shape in ((m, k), (k, n)))
    c, out = torch.randint(-20, 20, (m, n)).to(sum_dtype), torch.zeros(m, n, dtype=sum_dtype)
    on_registers[(1,)](a, b, c, out, m, n, k, layout, k_width, multiply)
    assert torch.equal(out.double(), a.double() @ b.double() + c.double())
    if target:
        types = (dtype, dtype, sum_dtype, sum_dtype, m, n, k, layout, k_width, multiply)
        assert ("mma.sync" if target == "sm_90" else "v_mfma") in assembly(compile_for(on_registers, types, {}, target))


LANES = gl.constexpr(gl.BlockedLayout([1], [64], [2], [0]))
COUNTED, FLOATS = torch.arange(128), torch.randn(100)


@table("text, x, n, left, found", [
    ("gl.amd.cdna3.buffer_load(x, i, mask=i < n, other=-1.0)", FLOATS, 100, FLOATS,
     torch.cat([FLOATS, torch.full((28,), -1.0)])),
    ("gl.amd.cdna3.buffer_load(x, i % n)", FLOATS, 100, FLOATS, FLOATS[COUNTED % 100]),
    ("gl.amd.cdna3.buffer_store(i + 0.5, x, i, mask=i < n)", torch.zeros(128), 100,
     (COUNTED + 0.5) * (COUNTED < 100), None),
    ("gl.amd.cdna3.buffer_atomic_add(x, i % 4, gl.full([128], 1.0, gl.float32, LANES), mask=i < n)",
     torch.zeros(4), 64, torch.full((4,), 16.0), None),
    ('gl.amd.cdna3.buffer_atomic_max(x, i % 4, i, sem="relaxed", scope="gpu")', torch.zeros(4, dtype=I32), 0,
     torch.tensor([124, 125, 126, 127]), None),
    ("gl.amd.cdna3.buffer_atomic_xchg(x, i % 4, i)", torch.zeros(4, dtype=I32), 0, torch.tensor([124, 125, 126, 127]),
     None),
])  # fmt: skip
def test_buffers(text, x, n, left, found):
    """What memory holds afterwards, and what loads and atomics have found; of each cell every value but the last."""
    text = f"i = gl.arange(0, 128, layout=LANES)\n{'' if 'store' in text else 'seen = '}{text}"
    text += "" if "store" in text else "\ngl.store(out + i, seen)"
    x, out = x.clone(), torch.full((128,), -1.0)
    kernel = kernel_of(gluon.jit, "x, out, n", text, gl=gl, LANES=LANES)
    kernel[(1,)](x, out, n, num_warps=2)
    assert torch.equal(x, left.to(x.dtype))
    assert found is None or torch.equal(out, found)
    assert "atomic_add" not in text or sorted(out[:64].tolist()) == sorted(list(range(16)) * 4)
    if "i, mask" in text:
        with pytest.raises(interpreter.OutOfBoundsError):
            kernel[(1,)](x[: n // 2].clone(), out, n, num_warps=2)


DIRECT = """
i = gl.arange(0, 1024, layout=FOUR)
memory = gl.allocate_shared_memory(gl.float32, [1024], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
copies.{}, mask=i < 1000, other=5.0)
copies.commit_group()
{}
gl.store(out + i, copies.load_shared_relaxed(memory, FOUR))
"""


@table("load", ["global_load_to_shared(memory, x + i", "buffer_load_to_shared(memory, x, i"])
def test_direct_loads_to_shared_memory(load):
    x, out = torch.randn(1000), torch.zeros(1024)
    names = {"gl": gl, "copies": gl.amd.cdna4.async_copy, "FOUR": gl.constexpr(gl.BlockedLayout([4], [64], [4], [0]))}
    kernel_of(gluon.jit, "x, out", DIRECT.format(load, "copies.wait_group(0)"), **names)[(1,)](x, out)
    assert torch.equal(out[:1000], x)
    assert (out[1000:] == 5).all()
    with pytest.raises(RaceError):
        kernel_of(gluon.jit, "x, out", DIRECT.format(load, ""), **names)[(1,)](x, out)


SCALED = """
a = gl.full([64, 64], 0, gl.uint8, gl.DotOperandLayout(0, MFMA_SCALED, 16))
b = gl.full([64, 64], 0, gl.uint8, gl.DotOperandLayout(1, MFMA_SCALED, 16))
gl.amd.cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", gl.zeros([64, 64], gl.float32, MFMA_SCALED))
"""


@table("text, name", [
    ("blackwell.allocate_tensor_memory(gl.float32, [128, 64], blackwell.TensorMemoryLayout([128, 64], 1))", "memory"),
    (SCALED, "dot_scaled"),
    ('gl.inline_asm_elementwise("foo $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)', "'foo"),
])  # fmt: skip
def test_what_is_left_out_is_refused_by_name(text, name):
    scaled = gl.constexpr(gl.amd.AMDMFMALayout(4, [32, 32, 64], True, [4, 1]))
    kernel = kernel_of(gluon.jit, "x", text, gl=gl, blackwell=blackwell, MFMA_SCALED=scaled)
    with raises(UnsupportedError, name=name):
        kernel[(1,)](torch.zeros(1))
