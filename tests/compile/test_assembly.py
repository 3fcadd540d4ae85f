"""Kernels compile without a GPU, in both languages, and their assembly has what it must have."""

import functools
import itertools
import re

import pytest
import torch
import triton
import triton.language as tl
from compile_language import kernel_cases, language_cases
from cubins import resources
from kernel_text import kernel_of
from tables import says, table
from triton.runtime import driver

from iris_core.types import CompileCase, DeviceType
from iris_gluon import default_layout
from iris_triton import _compat, language
from iris_triton.collectives.nvls import nvls
from iris_triton.collectives.packets.exchange import exchange
from iris_triton.collectives.packets.split import split
from iris_triton.device_barrier import device_barrier, signal, signal_wait
from iris_triton.gemm.packet_norm import norm_packets
from iris_triton.gemm.packet_product import packet_product
from iris_triton.language.multimem import multimem_fence, multimem_load_reduce, multimem_store
from iris_triton.launcher import early_launch
from iris_triton.testing import selftest
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for
from iris_triton.testing.languages import in_gluon

F32, BF16, F16, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int64


add_one, broken = (kernel_of(triton.jit, "x", each, tl=tl) for each in ("tl.store(x, tl.load(x) + 1)", "undefined"))


@table("target, text", [("sm_90", ".target sm_90a"), ("gfx942", "gfx942"), ("gfx950", "gfx950")])
def test_compiles_for_the_target_named_and_restores_the_driver(target, text):
    before = driver._active
    assert text in assembly(compile_for(add_one, (torch.float32,), {}, target))
    assert driver._active is before
    with pytest.raises(triton.CompilationError):
        compile_for(broken, (torch.float32,), {}, target)
    assert driver._active is before
    with pytest.raises(KeyError, match="gfx1"):
        compile_for(add_one, (torch.float32,), {}, "gfx1")


VECTOR = {"sm_90": r"st\.global\.v4\.b32", "gfx942": r"global_store_dwordx4", "gfx950": r"global_store_dwordx4"}
SINGLE = {"sm_90": r"st\.global\.b32", "gfx942": r"global_store_dword ", "gfx950": r"global_store_dword "}


fill, fill_2d, fill_from_table = (
    kernel_of(
        triton.jit, "x, bases, me, peer, stride, hint: tl.constexpr, BLOCK: tl.constexpr",
        f"language.store(x + {where}, 1.0, {me}, {peer}, bases, hint=hint)", tl=tl, language=language,
    )
    for where, me, peer in (
        ("stride + tl.arange(0, BLOCK)", "me", "peer"),
        ("tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK)[None, :]", "me", "peer"),
        ("tl.arange(0, BLOCK)", "tl.load(me)", "tl.load(me + 1)"),  # neither rank is known to the compiler
    )
)  # fmt: skip


@triton.jit
def move_again(x, out, bases, stores: tl.constexpr, modifier: tl.constexpr, volatile: tl.constexpr):
    i = tl.arange(0, 1024)
    if stores:
        language.store(x + i, 1.0, 0, 1, bases, cache_modifier=modifier)
    else:
        tl.store(out + i, language.load(x + i, 0, 1, bases, cache_modifier=modifier, volatile=volatile))


@table("target", TARGETS)
def test_unknown_alignment_needs_a_hint(target):
    def text(kernel, hint, block):  # neither a shift by 7 elements nor rows of 7 are aligned
        return assembly(compile_for(kernel, (F32, I64, 3, 5, 7), {"hint": hint, "BLOCK": block}, target))

    for hint, found, lacking in ((None, SINGLE, VECTOR), (16, VECTOR, SINGLE)):
        assert re.search(found[target], text(fill, hint, 1024))
        assert not re.search(lacking[target], text(fill, hint, 1024))
    assert not re.search(VECTOR[target], text(fill_2d, None, 64))
    assert re.search(VECTOR[target], text(fill_2d, (1, 16), 64))
    assert re.search(VECTOR[target], text(fill_2d, 16, 64))
    unknown_ranks = compile_for(fill_from_table, (F32, I64, torch.int32, 5, 7), {"hint": None, "BLOCK": 1024}, target)
    assert re.search(VECTOR[target], assembly(unknown_ranks))


@table("target, dtype", [("sm_90", torch.float32), ("gfx942", torch.bool), ("gfx950", torch.int8),
                         ("gfx942", torch.float16), ("gfx950", torch.float64)])  # fmt: skip
def test_distance_is_added_as_64_bits(target, dtype):
    # A tensor of less than 2 GiB, of which Triton assumes that 32-bit offsets reach all that its pointer leads to.
    small = torch.empty(4096, dtype=dtype)
    compiled = compile_for(fill, (small, torch.int64, 3, 5, 0), {"hint": None, "BLOCK": 1024}, target)
    assert re.search(r"arith\.shrsi .* : i64", compiled.asm["ttir"])
    assert re.search(r"tt\.addptr .*, tensor<1024xi64>", compiled.asm["ttir"])
    if target != "sm_90":
        assert "tt.pointer_range = 32" in compiled.asm["ttgir"]
        assert "buffer_store" not in assembly(compiled)
        assert "trunci" not in compiled.asm["ttgir"]


@table("stores, modifier, volatile, cuda, amd", [
    (False, ".ca", False, r"ld\.global\.ca\.v4",
     r"global_load_dwordx4 [^\n]*off$|global_load_dwordx4 [^\n]*\]$"),
    (False, ".cg", False, r"ld\.global\.cg\.v4", r"global_load_dwordx4 .* nt"),
    *((False, modifier, is_volatile, r"ld\.volatile\.global\.v4", r"global_load_dwordx4 .* sc0 sc1")  # which goes first
      for modifier, is_volatile in ((".cv", False), *((each, True) for each in (None, "", ".ca", ".cv")))),
    *((True, modifier, False, rf"st\.global\{modifier}\.v4", "") for modifier in (".wb", ".cg", ".cs", ".wt")),
])  # fmt: skip
def test_modifiers_reach_the_assembly(stores, modifier, volatile, cuda, amd):
    kwargs = {"stores": stores, "modifier": modifier, "volatile": volatile}
    for target, pattern in (("sm_90", cuda), ("gfx942", amd))[: 1 if stores else 2]:
        assert re.search(pattern, assembly(compile_for(move_again, (F32, F32, I64), kwargs, target)), re.MULTILINE)


ARGUMENTS = (I64, I64, 8, 1000, 0, 1)
MEMORY = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red)\.\S*(global|relaxed|acquire|release)", re.MULTILINE)
WAIT = re.compile(r"\bld\.acquire\.")


def barrier(target, **options):
    return compile_for(device_barrier, ARGUMENTS, {"sem": "release", "LANES": 8, "num_warps": 1, **options}, target)


def test_nothing_is_read_before_the_wait_and_nothing_waits_for_peers_when_the_next_kernel_starts():
    """It may take all multiprocessors, also the one that a peer's kernel would be waited for with."""
    compiled = barrier("sm_90", EARLY=True, launch_pdl=True)
    assert compiled.metadata.launch_pdl
    text = assembly(compiled)
    assert text.index("griddepcontrol.wait") < MEMORY.search(text).start()
    *_, last = (wait.start() for wait in WAIT.finditer(text))
    assert "bar.sync" in text[last : text.index("griddepcontrol.launch_dependents")]


@table("target", TARGETS)
def test_without_it_nothing_is_there_and_signals_of_the_host_compile(target):
    """A release of the whole system; "add" is one atomic operation."""
    assert "griddepcontrol" not in assembly(barrier(target, EARLY=False))
    for word in (torch.int32, torch.int64):
        for add in (False, True):
            text = assembly(compile_for(signal, (word, 1), {"ADD": add, "num_warps": 1}, target))
            wanted = r"(atom|red)\.\S*sys\S*add" if add else r"release\.sys|membar\.sys|fence\.\S*sys"
            assert re.search(wanted if target == "sm_90" else "atomic_add|atomic_swap", text)
        awaited = assembly(compile_for(signal_wait, (word, 1, 1000, 0, 1), {"cmp": "ge", "num_warps": 1}, target))
        assert WAIT.search(awaited) if target == "sm_90" else "s_cbranch" in awaited


@table("device, hip, capability, early", [
    ("cpu", None, None, {}), ("cuda:1", None, (9, 0), {"launch_pdl": True}), ("cuda:1", None, (8, 9), {}),
    ("cuda:0", "6.3", (9, 4), {}),
])  # fmt: skip
def test_where_it_is_possible(monkeypatch, device, hip, capability, early):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
    assert early_launch(device) == early


KINDS = {F32: r"add\.v4\.f32", BF16: r"add\.acc::f32\.v4\.bf16x2", F16: r"add\.acc::f32\.v4\.f16x2"}
REDUCE, STORE = r"multimem\.ld_reduce\.relaxed\.sys\.global\.", r"multimem\.st\.relaxed\.sys\.global\.v4\.f32"
ADDRESS = 1 << 40


@triton.jit
def sum_to_all(data, out, me, bases, multicast, count, W: tl.constexpr, BLOCK: tl.constexpr):
    """Add up all ranks' `data` and store the sums into all ranks' `out`, 16 bytes for each lane."""
    UNIT: tl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, BLOCK) * UNIT
    words = multimem_load_reduce(data + place, me, bases, multicast, place < count, W)
    multimem_fence()
    multimem_store(out + place, words, me, bases, multicast, place < count, W)


@table("dtype", KINDS)
def test_device_functions(dtype):
    given = sum_to_all, (dtype, dtype, 1, I64, ADDRESS, 1000), {"W": 4, "BLOCK": 256, "num_warps": 4}
    compiled = compile_for(*given)
    fenced = rf"{REDUCE}{KINDS[dtype]} (.|\n)*fence\.proxy\.alias(.|\n)*{STORE} "
    assert re.search(fenced, assembly(compiled))
    assert compiled.asm["cubin"], "the assembler takes it"
    with pytest.raises(triton.CompilationError) as caught:
        compile_for(*given, "gfx942")
    assert re.search(says("kernel.multimem"), str(caught.value.__cause__ or caught.value))


@table("dtype, sums, to_all, direct", [
    (BF16, True, True, True), (F32, True, True, False), (F16, True, False, False), (torch.int8, False, True, False),
])  # fmt: skip
def test_collectives(dtype, sums, to_all, direct):
    args = (dtype, dtype, I64, torch.uint8, I64, 1, 1, 1, 4000, 1000, 1000, ADDRESS, 0, ADDRESS, (1,), (1,), (1,), (1,))
    forms = {"SUMS": sums, "TO_ALL": to_all, "DIRECT": direct, "IN_DIMS": 0, "OUT_DIMS": 0, "BLOCK": 4096}
    compiled = compile_for(nvls, args, {"SIZE": 4, **forms, "num_warps": 8})
    text = assembly(compiled)
    assert bool(re.search(REDUCE + KINDS[dtype] if sums else REDUCE, text)) == sums
    assert bool(re.search(STORE, text)) == to_all
    assert len(re.findall(r"fence\.proxy\.alias", text)) >= 1 + (not direct)
    assert compiled.asm["cubin"]


VENDORS = {"cuda": DeviceType.CUDA, "hip": DeviceType.HIP}
(NVIDIA,), AMD = ([name for name, gpu in TARGETS.items() if gpu.backend == each] for each in ("cuda", "hip"))
INT32, INT64 = torch.int32, torch.int64


def self_test_cases():
    """The kernels of `iris doctor`, and how they reach the other rank."""
    numel, additions = selftest.NUMEL, selftest.ADDITIONS
    kernels = {
        "write": (selftest.move, (INT32, INT32, numel, INT64, 8, 3, False), {"BLOCK": 4096}, r"st\.global\.v4\.b32"),
        "read": (selftest.move, (INT32, INT32, numel, INT64, 8, 3, True), {"BLOCK": 4096}, r"ld\.global\.v4\.b32"),
        "add": (selftest.add, (INT32, INT64, additions, INT64, 8), {"BLOCK": 128},
                r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add\.u32(.|\n)*\.add\.u64"),
    }  # fmt: skip
    return [
        CompileCase(f"selftest-{name}", *call, expect={DeviceType.CUDA: (ptx,), DeviceType.HIP: ("global_",)})
        for name, (*call, ptx) in kernels.items()
    ]


LISTS = {
    "triton": [*language_cases("triton"), *kernel_cases(), *self_test_cases()],
    "gluon": language_cases("gluon", functools.cache(functools.partial(in_gluon, default_layout=default_layout))),
}

SLOW_FOR_AMD = {"operation-ring-gradients"}
"""What takes AMD's compiler seconds, and has the device functions of ring attention: for AMD with --exhaustive."""


def family_of(case):
    first = case.name.split("-")[0]
    return f"{first}-{case.kernel.__name__}" if first in ("collective", "operation") else first


FAMILIES = list(dict.fromkeys((of, family_of(case)) for of, cases in LISTS.items() for case in cases))


@table("of", LISTS)
def test_every_device_function_has_cases(of):
    assert {(of, name) for name in language.__all__} <= set(FAMILIES)


@pytest.mark.parametrize(("of", "family"), FAMILIES)
def test_assembly(of, family, request):
    """Cases of a device function, or of a kernel, take turns in the targets; a single one is compiled for both vendors.

    Of device functions with several cases Triton takes a half, Gluon, and of tiles both, a fourth.
    """
    cases = [case for case in LISTS[of] if family_of(case) == family]
    every_case, lacking = request.config.getoption("exhaustive"), []
    step = 1 if every_case or "-" in family or len(cases) < 4 else 4 if family == "tile" or of == "gluon" else 2
    turns = (NVIDIA, AMD[0], NVIDIA, AMD[1]) if "-" in family else tuple(TARGETS)
    for number, case in enumerate(cases[step // 2 :: step], FAMILIES.index((of, family))):
        targets = {turns[number % len(turns)]} if len(cases) > 1 else {NVIDIA, AMD[number % 2]}
        for target in TARGETS if every_case else {NVIDIA} if case.name in SLOW_FOR_AMD else targets:
            text = assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))
            patterns = case.expect[VENDORS[TARGETS[target].backend]]
            assert patterns
            lacking += [f"{case.name} for {target} lacks {p}:\n{text}" for p in patterns if not re.search(p, text)]
    assert not lacking, "\n".join(lacking)


PUSH, POLL = "st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"
OF_LOADS = {"ll": "ld.global.v2.b32", "ll128": "ld.global.v2.b32", "sentinel": "ld.global.v4.b32"}
WORDS = torch.zeros(16, dtype=torch.int64)
FLAGS = torch.zeros(16, dtype=torch.int32)


def common(size):
    return {
        "counters": FLAGS, "me": 0, "rank": 0, "kind": 5, "part": 1 << 16, "first": 0, "cap": 4096, "box": 1 << 21,
        "LOOKS": 1, "half": 1 << 20, "timeout_ns": 10**9, "status": 1 << 40, "in_sizes": (1,), "in_strides": (1,),
        "out_sizes": (1,), "out_strides": (1,), "N": size, "ITEM": 2, "IN_DIMS": 0, "OUT_DIMS": 0,
        "IN_WHOLE": True, "OUT_WHOLE": True, "BLOCK": 64, "num_warps": 2, "nbytes": 1 << 18, "DT": tl.bfloat16,
        "OP": "sum", "STEP": False, "NAP_NS": 0, "pieces": 1, "peers": peers(size), "ONCE": True, "EARLY": False,
        "SHARDED": True, "REDUCES": True, "root": 0, "ROOT": "",
    }  # fmt: skip


def compiled_for(size, kernel, types=(), **given):
    """A kernel, compiled for a number of members, with what it has of the common arguments, and others."""
    names = {*kernel.arg_names, "num_warps", "maxnreg", "launch_pdl"}
    return compile_for(kernel, types, {name: each for name, each in (common(size) | given).items() if name in names})


def compiled_exchange(size, hops, kernel=exchange, **given):
    """The kernel of most algorithms."""
    return compiled_for(size, kernel, [torch.int16] * 2, **HOPS[hops] | given)


HOPS = {1: {"HOPS": 1, "EVEN": True, "nbytes": None}, 2: {"HOPS": 2, "SHARDED": True, "REDUCES": False}}


def peers(size):
    return tuple((127 << 40) + (i << 34) for i in range(size))


def check(compiled, encoding, polls, waits=1):
    """What all kernels have; `polls` packets are awaited, by `waits` calls of `poll`."""
    text = assembly(compiled)
    # "ll" leans on 8 bytes that arrive together, so those are the elements
    push, poll = ((each.replace("v4.b32", "v2.b64") if encoding == "ll" else each) for each in (PUSH, POLL))
    assert OF_LOADS[encoding] in text
    assert push in text
    again = 1 if encoding == "ll" else 2  # looks of a wait, whose packets are looked at one by one when it was long
    assert text.count(poll) == again * polls + waits
    assert "globaltimer" in text  # waits are bounded
    assert not re.search(r"\b(ld|st)\.local", text)
    assert "convert_layout" not in compiled.asm["ttgir"]


SIZES = (2, 3, 8, 1)


def exchanges():
    """(encoding, size, sharded, reduces): by default each operation in each encoding, and each of both in all sizes."""
    operations = ((False, True), (True, True), (False, False), (True, False))
    for (i, operation), (j, encoding), (k, size) in itertools.product(*map(enumerate, (operations, OF_LOADS, SIZES))):
        seldom = (i + j) % 3 != k
        yield pytest.param(encoding, size, *operation, marks=[pytest.mark.exhaustive] if seldom else [])


@table(("encoding", "size", "sharded", "reduces"), list(exchanges()))
def test_exchange(encoding, size, sharded, reduces):
    given = {"SHARDED": sharded, "REDUCES": reduces, "DT": tl.bfloat16 if reduces else None, "ENC": encoding}
    given |= {"STEP": size == 8, "EARLY": size == 2, "ONCE": size != 3}
    if size == 3:
        given |= {"EVEN": False, "ROOT": "to" if reduces else "from"}
    check(compiled_exchange(size, 1, **given), encoding, size)


@table(("hops", "encoding"), [(1, "ll"), (1, "ll128"), (2, "ll128"), (2, "sentinel")])
def test_the_next_kernel_starts_when_nothing_waits_for_peers_any_more(hops, encoding):
    text = assembly(compiled_exchange(4, hops, ENC=encoding, EVEN=True, EARLY=True, launch_pdl=True))
    begin, end = text.index("griddepcontrol.wait"), text.index("griddepcontrol.launch_dependents")
    assert begin < text.index("ld.global")
    waits = [match.start() for match in re.finditer(r"\bld\.relaxed\.sys", text)]
    assert "bar.sync" in text[waits[-1] : end]


@table("encoding", OF_LOADS)
def test_nothing_waits_for_the_check_of_overlaps(encoding):
    """What it loads comes with the epoch, and the answer of its atomic is looked at when all packets have come."""
    text = assembly(compiled_exchange(8, 1, ENC=encoding, SHARDED=False))
    epoch, claim = text.index("ld.volatile.global.b32"), re.search(r"@q atom.relaxed.gpu.global.add.u32 (%r\d+)", text)
    push, poll = (text.index(f"{each}.relaxed.sys.global.v") for each in ("st", "ld"))
    assert epoch < text.index("ld.volatile.global.v4.b32") < push < claim.start() < poll
    used = [match.start() for match in re.finditer(rf"{claim[1]}\b", text)]
    assert min(place for place in used if place > claim.end()) > poll
    assert text.count("bar.sync") == 2  # all have the epoch; all have their packets
    assert ".shared" not in text


def norm(size, dtype, **more):
    """`norm_packets`, compiled for rows of a packet for each thread."""
    own = {"scales": None, "rows": 16, "eps": 1e-6, "most": 448.0, "TWO": False, "ALIGNED": True, "EARLY": True,
           "launch_pdl": True, "parts": None, "PARTS": 1}  # fmt: skip
    own |= dict.fromkeys(("out", "residual", "x", "weight"), torch.zeros(16, dtype=dtype))
    own |= {"DT": getattr(tl, str(dtype)[6:]), "ITEM": dtype.itemsize, "hidden": 1024 // dtype.itemsize}
    return compiled_for(size, norm_packets, **own | more)


@table("size", [2, pytest.param(4, marks=pytest.mark.exhaustive), 8])
@table("dtype", [torch.bfloat16, torch.float32])
def test_norms(size, dtype):
    compiled = norm(size, dtype)
    check(compiled, "sentinel", size)
    text = assembly(compiled)
    begin, end = text.index("griddepcontrol.wait"), text.index("griddepcontrol.launch_dependents")
    assert begin < re.search(r"\bld\.(?!param)", text).start()
    assert text.rindex("ld.relaxed.sys") < end  # nothing waits for a peer afterwards


@table("form", ["sum", "two", "rows", "all", "a"])
@table("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_products(size, form):
    """Products by `wgmma`, whose tiles, or whose A, go as vectors and do not overflow the registers."""
    tensors = dict.fromkeys(("out", "a", "b", "gathered"), torch.zeros(16, dtype=torch.bfloat16))
    zeros = dict.fromkeys(("bias_step", "a_scale_down", "a_scale_right", "b_scale_down", "b_scale_right"), 0)
    compiled = compiled_for(size, packet_product, **tensors | zeros | {
        "bias": None, "a_scales": None, "b_scales": None, "words": FLAGS, "partial": torch.zeros(16), "m": 64,
        "n": 4096, "k": 8192, "rows": 64 // size, "inner": 8192, "span": 4096, "a_down": 8192, "a_right": 1,
        "b_down": 4096, "b_right": 1, "out_down": 4096, "out_right": 1, "tiles_m": 1, "tiles_n": 64, "GROUP": 8,
        "slot": 1 << 16, "FORM": form, "DIM": 0, "BIAS": "none", "A_ALIGNED": True, "B_ALIGNED": True,
        "OUT_ALIGNED": True, "BM": 64, "BN": 64, "BK": 128, "EVEN_K": True, "PRECISION": "ieee", "A_CACHE": "",
        "B_CACHE": "", "STAGES": 5, "SCALES": "none", "SPLITS": 2, "TURNED": True, "PROGRAMS": 128, "C": 512,
        "EARLY": True, "num_warps": 4, "launch_pdl": True,
    })  # fmt: skip
    text = assembly(compiled)
    assert text.count("wgmma.mma_async") == 8
    assert "cp.async.cg.shared.global" in text
    assert PUSH in text
    assert POLL in text
    assert resources(compiled)[1] == 0


@table(("given", "patterns"), [
    # each program looks at the words of its row's others until all have this launch's number
    ({"parts": WORDS, "PARTS": 4}, (r"atom\.global\.gpu\.relaxed\.exch\.b64", r"atom\.global\.gpu\.relaxed\.add\.u64")),
    ({"out": torch.zeros(16, dtype=torch.float8_e4m3fn), "scales": torch.zeros(16), "weight": torch.zeros(16)},
     (r"cvt\.rn\.satfinite\.e4m3x2\.f32",)),
])  # fmt: skip
def test_norms_of_shared_rows_in_two_hops_and_of_eight_bits(given, patterns):
    text = assembly(norm(2, torch.bfloat16, **given))
    assert all(re.search(each, text) for each in patterns)
    for size in (2, 8):
        check(norm(size, torch.bfloat16, TWO=True), "sentinel", 2 * size, 1 + size)


RUNS = {f"{side}_{what}": values for side in ("in", "out")
        for what, values in (("sizes", (4, 64, 1024)), ("strides", (1024, 4096, 1)))}  # fmt: skip


@table(("hops", "layout"), [
    *((hops, {"IN_WHOLE": False, "OUT_WHOLE": False, "EVEN": False}) for hops in (1, 2)),
    (1, {"IN_DIMS": 3, "OUT_DIMS": 3, "REDUCES": False, **RUNS}),
])  # fmt: skip
def test_lines_stay_with_eight_neighbours(hops, layout):
    """Loads and stores one by one, or of runs, must not make the compiler give a thread several packets of a line."""
    compiled = compiled_exchange(4, hops, ENC="ll128", **layout)
    assert ("ld.global.b16" in assembly(compiled)) == ("IN_DIMS" not in layout)
    pushes = [line for line in compiled.asm["ttgir"].splitlines() if "st.relaxed.sys" in line]
    assert pushes
    named = dict(re.findall(r"(#blocked\d*) = .*sizePerThread = \[(\d+)\]", compiled.asm["ttgir"]))
    assert {named[layout] for line in pushes for layout in re.findall(r"#blocked\d*", line)} == {"1"}


@pytest.mark.parametrize(("kernel", "hops", "encoding", "warps", "most"), [
    (exchange, 1, "sentinel", 4, 64), (exchange, 2, "sentinel", 8, 64), (exchange, 1, "ll128", 2, 72),
    (exchange, 1, "ll", 4, 64), (split, 2, "sentinel", 8, 80),
])  # fmt: skip
def test_registers_of_eight_members(kernel, hops, encoding, warps, most):
    """With 64, a thousand programs of four warps are on an H200 at once, and none waits for its turn."""
    given = {"ENC": encoding, "EVEN": True, "STEP": True, "NAP_NS": 100, "ITER": 1, "SUB": 32 * warps}
    given |= {"control": WORDS, "local": FLAGS, "bases": WORDS, "slots": 4096, "num_warps": warps}
    given["BLOCK"] = 32 * warps * (4 if kernel is split else 1)
    two_hops = kernel is exchange and hops == 2
    given |= {"maxnreg": 64} if two_hops else {}  # as `shape_for` does
    compiled = compiled_exchange(8, hops, kernel, **given)
    check(compiled, encoding, 8 * hops if kernel is exchange else 8, hops)
    registers, stack = resources(compiled)
    newer = _compat.version() >= (3, 9)  # which has not run on GPUs
    assert registers <= most + 24 * newer
    assert stack <= (16 if newer else 8) * two_hops  # the epoch, and what was claimed of it, wait there for the packets
    text = assembly(compiled)
    assert not re.search(r"\b(div|rem)\.[su]64", text)
    assert kernel is split or not re.search(r"\b(div|rem)\.", text)
