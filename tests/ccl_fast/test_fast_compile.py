"""Kernels of packets compile for sm_90, with the accesses that they are made for."""

import re

import pytest
import torch
import triton.language as tl

from iris_triton.collectives.fast import probe
from iris_triton.collectives.fast.mailbox import exchange, two_shot
from iris_triton.collectives.fast.split import split
from iris_triton.compile_only import assembly, compile_for

PUSH, POLL = "st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"
VECTOR = {"ll": "ld.global.v2.b32", "ll128": "ld.global.v2.b32", "sentinel": "ld.global.v4.b32"}
WORDS = torch.zeros(16, dtype=torch.int64)
COUNTERS = torch.zeros(16, dtype=torch.int32)


def common(size):
    return {
        "counters": COUNTERS, "me": 0, "rank": 0, "part": 1 << 16, "first": 0, "cap": 4096, "box": 1 << 21,
        "half": 1 << 20, "timeout_ns": 10**9, "status": 1 << 40, "in_sizes": (1,), "in_strides": (1,),
        "out_sizes": (1,), "out_strides": (1,), "N": size, "ITEM": 2, "IN_DIMS": 0, "OUT_DIMS": 0, "BLOCK": 64,
        "num_warps": 2,
    }  # fmt: skip


def peers(size):
    return tuple((127 << 40) + (i << 34) for i in range(size))


def check(compiled, encoding, polls):
    text = assembly(compiled)
    assert VECTOR[encoding] in text
    assert PUSH in text
    assert text.count(POLL) in (polls, 2 * polls)  # LLVM may make a loop for each kind of store
    assert "globaltimer" in text  # waits are bounded
    assert not re.search(r"\b(ld|st)\.local", text)
    assert "convert_layout" not in compiled.asm["ttgir"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("encoding", VECTOR)
@pytest.mark.parametrize(("sharded", "reduces"), [(False, True), (True, True), (False, False), (True, False)])
def test_exchange(encoding, size, sharded, reduces):
    given = {"SHARDED": sharded, "REDUCES": reduces, "DT": tl.bfloat16 if reduces else None, "OP": "sum"}
    given |= {"ENC": encoding, "STEP": size == 8, "NAP_NS": 0, "pieces": 1, "peers": peers(size)}
    check(compile_for(exchange, [torch.int16] * 2, common(size) | given), encoding, size)


@pytest.mark.parametrize("encoding", VECTOR)
@pytest.mark.parametrize(("dtype", "reduction"), [(tl.bfloat16, "sum"), (tl.float32, "avg"), (tl.int64, "max")])
def test_two_shot(encoding, dtype, reduction):
    if encoding == "sentinel" and not dtype.is_floating():
        pytest.skip("not served")
    given = {"DT": dtype, "OP": reduction, "ITEM": dtype.primitive_bitwidth // 8, "ENC": encoding, "STEP": False}
    given |= {"NAP_NS": 0, "pieces": 1, "peers": peers(4), "nbytes": 1 << 18}
    check(compile_for(two_shot, [torch.int16] * 2, common(4) | given), encoding, 8)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("encoding", VECTOR)
def test_split(encoding, gathers):
    given = {"DT": tl.bfloat16, "OP": "sum", "ENC": encoding, "GATHERS": gathers, "ITER": 4, "NAP_NS": 100}
    given |= {
        "FIRST_NAP_NS": 500,
        "control": WORDS,
        "local": COUNTERS,
        "bases": WORDS,
        "nbytes": 1 << 19,
        "slots": 4096,
    }
    compiled = compile_for(split, [torch.int16] * 2, common(8) | given)
    check(compiled, encoding, 8)
    assert assembly(compiled).count("nanosleep") == 2


def test_probe():
    given = {"box": 0, "me": 0, "first": 1, "rounds": 10, "torn": WORDS, "fresh": WORDS, "N": 8, "BLOCK": 256}
    text = assembly(compile_for(probe.hammer, [peers(8)], given))
    assert PUSH in text
    assert POLL in text
