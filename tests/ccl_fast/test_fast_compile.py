"""Kernels of packets compile for sm_90, with the accesses that they are made for."""

import itertools
import re

import pytest
import torch
import triton.language as tl
from cubins import resources
from tables import table

from iris_triton.collectives.packets.exchange import exchange
from iris_triton.collectives.packets.split import split
from iris_triton.gemm.packet_norm import norm_packets
from iris_triton.gemm.packet_product import packet_product
from iris_triton.testing.compile_only import assembly, compile_for

PUSH, POLL = "st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"
VECTOR = {"ll": "ld.global.v2.b32", "ll128": "ld.global.v2.b32", "sentinel": "ld.global.v4.b32"}
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


def compiled_exchange(size, hops, **given):
    """The kernel of most algorithms, compiled for so many members."""
    return compile_for(exchange, [torch.int16] * 2, common(size) | HOPS[hops] | given)


HOPS = {1: {"HOPS": 1, "EVEN": True, "nbytes": None}, 2: {"HOPS": 2, "SHARDED": True, "REDUCES": False}}


def peers(size):
    return tuple((127 << 40) + (i << 34) for i in range(size))


def check(compiled, encoding, polls, waits=1):
    """What all kernels have; `polls` packets are awaited, by `waits` calls of `poll`."""
    text = assembly(compiled)
    # "ll" leans on 8 bytes that arrive together, so those are the elements
    push, poll = ((each.replace("v4.b32", "v2.b64") if encoding == "ll" else each) for each in (PUSH, POLL))
    assert VECTOR[encoding] in text
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
    for (i, operation), (j, encoding), (k, size) in itertools.product(*map(enumerate, (operations, VECTOR, SIZES))):
        seldom = (i + j) % 3 != k
        yield pytest.param(encoding, size, *operation, marks=[pytest.mark.exhaustive] if seldom else [])


@table(("encoding", "size", "sharded", "reduces"), list(exchanges()))
def test_exchange(encoding, size, sharded, reduces):
    given = {"SHARDED": sharded, "REDUCES": reduces, "DT": tl.bfloat16 if reduces else None, "ENC": encoding}
    given |= {"STEP": size == 8, "EARLY": size == 2, "ONCE": size != 3}
    if size == 3:
        given |= {"EVEN": False, "ROOT": "to" if reduces else "from"}
    check(compiled_exchange(size, 1, **given), encoding, size)


@pytest.mark.parametrize("encoding", VECTOR)
@pytest.mark.parametrize(("dtype", "reduction"), [(tl.bfloat16, "sum"), (tl.float32, "avg"), (tl.int64, "max")])
def test_two_shot(encoding, dtype, reduction):
    if encoding == "ll" or (encoding == "sentinel" and not dtype.is_floating()):
        pytest.skip("not served")
    given = {"DT": dtype, "OP": reduction, "ITEM": dtype.primitive_bitwidth // 8, "EVEN": reduction != "max"}
    check(compiled_exchange(4, 2, ENC=encoding, ONCE=reduction != "avg", **given), encoding, 8, 2)


@table(("hops", "encoding"), [(1, "ll"), (1, "ll128"), (2, "ll128"), (2, "sentinel")])
def test_the_next_kernel_starts_when_nothing_waits_for_peers_any_more(hops, encoding):
    text = assembly(compiled_exchange(4, hops, ENC=encoding, EVEN=True, EARLY=True, launch_pdl=True))
    begin, end = text.index("griddepcontrol.wait"), text.index("griddepcontrol.launch_dependents")
    assert begin < text.index("ld.global")
    waits = [match.start() for match in re.finditer(r"\bld\.relaxed\.sys", text)]
    assert "bar.sync" in text[waits[-1] : end]


@table("encoding", VECTOR)
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
    """The arguments of `norm_packets`, for rows of a packet for each thread."""
    common = {
        "scales": None, "counters": FLAGS, "peers": peers(size), "me": 1, "rank": 1, "kind": 5, "rows": 16, "cap": 1024,
        "box": 1 << 21, "half": 1 << 20, "eps": 1e-6, "most": 448.0, "timeout_ns": 10**9, "status": 1 << 40, "N": size,
        "TWO": False, "ALIGNED": True, "BLOCK": 64, "EARLY": True, "LOOKS": 1, "num_warps": 2, "launch_pdl": True,
        "parts": None, "PARTS": 1,
    }  # fmt: skip
    tensors = dict.fromkeys(("out", "residual", "x", "weight"), torch.zeros(16, dtype=dtype))
    of_type = {"DT": getattr(tl, str(dtype)[6:]), "ITEM": dtype.itemsize, "hidden": 1024 // dtype.itemsize}
    return {**common, **tensors, **of_type, **more}


@table("size", [2, pytest.param(4, marks=pytest.mark.exhaustive), 8])
@table("dtype", [torch.bfloat16, torch.float32])
def test_norms(size, dtype):
    compiled = compile_for(norm_packets, (), norm(size, dtype))
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
    numbers = dict.fromkeys((
        "bias_step", "a_scale_down", "a_scale_right", "b_scale_down", "b_scale_right"), 0
    ) | dict.fromkeys(("a_right", "b_right", "out_right", "me", "rank", "LOOKS"), 1)  # fmt: skip
    compiled = compile_for(packet_product, (), tensors | numbers | {
        "bias": None, "a_scales": None, "b_scales": None, "counters": FLAGS, "words": FLAGS, "partial": torch.zeros(16),
        "peers": peers(size), "kind": 5, "m": 64, "n": 4096, "k": 8192, "rows": 64 // size, "inner": 8192, "span": 4096,
        "a_down": 8192, "b_down": 4096, "out_down": 4096, "tiles_n": 64, "slot": 1 << 16, "box": 1 << 21,
        "half": 1 << 20, "timeout_ns": 10**9, "status": 1 << 40, "N": size, "FORM": form, "DIM": 0, "DT": tl.bfloat16,
        "BIAS": "none", "A_ALIGNED": True, "B_ALIGNED": True, "OUT_ALIGNED": True, "BM": 64, "BN": 64, "BK": 128,
        "EVEN_K": True, "PRECISION": "ieee", "A_CACHE": "", "B_CACHE": "", "STAGES": 5, "SCALES": "none", "SPLITS": 2,
        "TURNED": True, "PROGRAMS": 128, "C": 512, "num_warps": 4,
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
    text = assembly(compile_for(norm_packets, (), norm(2, torch.bfloat16, **given)))
    assert all(re.search(each, text) for each in patterns)
    for size in (2, 8):
        check(compile_for(norm_packets, (), norm(size, torch.bfloat16, TWO=True)), "sentinel", 2 * size, 1 + size)


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
    given |= {"control": WORDS, "local": FLAGS, "bases": WORDS, "nbytes": 1 << 19, "slots": 4096, **HOPS[hops]}
    known = {name: value for name, value in (common(8) | given).items() if name in kernel.arg_names}
    block = 32 * warps * (4 if kernel is split else 1)
    two_hops = kernel is exchange and hops == 2
    asked = {"maxnreg": 64} if two_hops else {}  # as `shape_for` does
    compiled = compile_for(kernel, [torch.int16] * 2, known | {"BLOCK": block, "num_warps": warps} | asked)
    check(compiled, encoding, 8 * hops if kernel is exchange else 8, hops)
    registers, stack = resources(compiled)
    assert registers <= most
    assert stack <= 8 * two_hops  # the epoch, and what was claimed of it, wait there for the packets
    text = assembly(compiled)
    assert not re.search(r"\b(div|rem)\.[su]64", text)
    assert kernel is split or not re.search(r"\b(div|rem)\.", text)
