"""Kernels of the examples compile for GPUs: GEMMs with the tiles that they have there, the others as they are run."""

import re

import jobs_examples
import pytest
import torch
import triton
from tables import table

from iris_triton.testing.compile_only import assembly, compile_for

EXAMPLES = jobs_examples.EXAMPLES
TARGETS = ("sm_90", "gfx942")
SHARED_MEMORY = {"sm_90": 227 << 10, "gfx942": 64 << 10}  # bytes that a program can have
PRODUCTS = {"sm_90": "wgmma", "gfx942": "v_mfma"}
RELEASE = {
    ("sm_90", "gpu"): r"st\.release\.gpu\.global",
    ("sm_90", "sys"): r"st\.release\.sys\.global",
    ("gfx942", "gpu"): r"buffer_wbl2 sc1[\s\S]*global_atomic_swap",
    ("gfx942", "sys"): r"buffer_wbl2 sc0 sc1[\s\S]*global_atomic_swap",
}
ACQUIRE = {
    ("sm_90", "gpu"): r"ld\.acquire\.gpu\.global",
    ("sm_90", "sys"): r"ld\.acquire\.sys\.global",
    ("gfx942", "gpu"): r"buffer_inv sc1",
    ("gfx942", "sys"): r"buffer_inv sc0 sc1",
}
WIDE = {"sm_90": r"st\.global\.v4\.b32", "gfx942": r"global_(load|store)_dwordx4"}

AS_RUN = {
    "01_load.py": 1, "03_all_load.py": 1, "04_all_store.py": 1, "05_atomic_add.py": 1, "06_atomic_xchg.py": 1,
    "10_message_passing_load_store.py": 2, "11_message_passing_put.py": 2, "12_message_passing_context.py": 1,
}  # fmt: skip
"""And on how many ranks."""

GEMMS = sorted(path.name for path in EXAMPLES.glob("[23]*.py") if "gemm_options" in path.read_text())

VALUES = {
    **dict.fromkeys(("a", "b", "c", "slab", "shard"), torch.bfloat16),
    **dict.fromkeys(("parts", "inbox"), torch.float32),
    **dict.fromkeys(("ready", "arrived", "computed", "summed", "finished"), torch.int32),
    **dict.fromkeys(("M", "N", "K"), 4096), **dict.fromkeys(("stride_am", "stride_bk", "stride_cm"), 4096),
    **dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1), **dict.fromkeys(("context", "locks"), torch.int64),
    "turn": 3, "computing": 116, "sending": 16,
}  # fmt: skip
"""Arguments of the kernels, by name: rows as long as on GPUs, where one may be rank 7 of 8."""


def kernels_of(name):
    """The kernels that an example launches."""
    module = jobs_examples.load(EXAMPLES / name)
    functions = [value for value in vars(module).values() if isinstance(value, triton.runtime.JITFunction)]
    launched = re.findall(r"^ +(\w+)\[", (EXAMPLES / name).read_text(), re.M)
    return module, [function for function in functions if function.__name__ in launched]


def compile_gemm(name, module, kernel, target):
    tools = module.__dict__["gemm_options"].__globals__
    options = tools["AMD_OPTIONS" if target.startswith("gfx") else "NVIDIA_OPTIONS"]
    given = {key: value for key, value in options.items() if key in kernel.arg_names or key.startswith("num_")}
    if "WORLD" in kernel.arg_names:
        given["WORLD"] = 8
    types = {**VALUES, **({"c": torch.float32} if "atomics" in name else {})}
    return compile_for(kernel, [types[arg] for arg in kernel.arg_names if arg not in given], given, target)


def cases():
    """Every GEMM for one of the targets; for the other one with --exhaustive."""
    every = [(i + j, name, target) for i, name in enumerate(GEMMS) for j, target in enumerate(TARGETS)]
    return [pytest.param(name, target, marks=[pytest.mark.exhaustive] * (k % 2)) for k, name, target in every]


@table(("name", "target"), cases())
def test_gemms(name, target):
    module, kernels = kernels_of(name)
    texts = []
    for kernel in kernels:
        compiled = compile_gemm(name, module, kernel, target)
        assert compiled.metadata.shared <= SHARED_MEMORY[target]
        texts.append(assembly(compiled))
    assert len(texts) == len(re.findall(r"^@triton.jit", (EXAMPLES / name).read_text(), re.M))
    text = "\n".join(texts)
    assert PRODUCTS[target] in text
    assert "atomics" in name or re.search(WIDE[target], text)
    source = (EXAMPLES / name).read_text()
    if "ctx.signal" in source:
        scope = "gpu" if 'scope="gpu"' in source else "sys"
        assert re.search(RELEASE[target, scope], text)
        assert re.search(ACQUIRE[target, scope], text)


@table("name", AS_RUN)
def test_the_others(pool, name):
    compiled = pool.run(jobs_examples.compile_too, AS_RUN[name], str(EXAMPLES / name), TARGETS)
    launched = set(re.findall(r"^ +(\w+)\[", (EXAMPLES / name).read_text(), re.M))
    assert {pair for pairs in compiled for pair in pairs} == {(each, target) for each in launched for target in TARGETS}


def test_every_example_of_a_kernel_is_compiled():
    """13 and 24 are made of functions of iris_gluon, which are compiled in its own tests."""
    names = {path.name for path in EXAMPLES.glob("[012]*.py")} | {"30_all_gather_gemm_push.py"}
    assert names - set(GEMMS) - set(AS_RUN) == {
        "02_store.py", "07_memory.py", "13_message_passing_gluon.py", "24_gluon_gemm_all_scatter.py",
    }  # fmt: skip
