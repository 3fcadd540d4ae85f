"""The algorithms for Hopper: by the executor on CPU ranks, on GPUs, and compiled."""

import re

import pytest
import torch
from jobs_hopper import refused, run

from iris_gluon.gemm import GemmConfig
from iris_gluon.ops.kernels import fetch_product, push_product, reduce_product
from iris_triton.compile_only import assembly, compile_for

BF16, I64 = torch.bfloat16, torch.int64
END = (0, 1 << 40)  # timeout, status


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.multigpu(4))])
def test_operations(pool, num_ranks, device):
    if device == "cpu" and num_ranks > 2:
        pytest.skip("the executor computes every warp: two ranks are enough on a CPU")
    for wrong in pool.run(run, num_ranks, device, 2, timeout_s=300.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2])
def test_refused_calls(pool, num_ranks, device):
    for said in pool.run(refused, num_ranks, device):
        texts = {
            "float32": "its core multiplies bfloat16 and float16, not float32",
            "every other": "TMA needs dense rows, or columns, of B",
            "expanded": "TMA needs dense rows, or columns, of B",
            "odd": "TMA needs dense rows, or columns, of B",
            "rows": "a member's 24 rows must be a multiple of the 64 rows",
            "tiles": "members own rows, not runs of tiles",
            "block": "block_n 64, 128 or 256",
            "columns": "it gathers rows of A",
            "few": "num_sms must be the larger number",
        }
        assert said.keys() == texts.keys()
        assert {name: said[name] for name, text in texts.items() if text not in said[name]} == {}


KERNELS = {
    "push": (push_product, (BF16, BF16, BF16, BF16, I64, I64, 1, 1, 1000, 8192, 4096, 4096, 8192, 8192, 1, 8, 32, 64,
                            *END), {"DIM": 1, "BIAS": "columns"}),
    "reduce": (reduce_product, (BF16, BF16, BF16, BF16, I64, BF16, I64, 1, 1, 8192, 8192, 4096, 4096, 8192, 8192, 1, 1,
                                1024, 32, 64, *END), {"FORM": "two_shot", "BIAS": "columns", "OUT_WIDE": True}),
    "fetch": (fetch_product, (BF16, BF16, BF16, BF16, I64, I64, I64, 1, 1, 8192, 4096, 8192, 8192, 1, 1024, 32, 64,
                              *END), {"FETCHERS": 16, "BIAS": "rows"}),
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("config", [GemmConfig(), GemmConfig(block_n=128, parts=1, stages=5)], ids=["256", "128"])
def test_assembly(name, config, turned):
    kernel, arguments, constants = KERNELS[name]
    constants = {**constants, "TURNED_B": turned} | ({} if name == "fetch" else {"TURNED_A": turned})
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    compiled = compile_for(kernel, arguments, {"SIZE": 8, **blocks, **constants, **config.options}, "sm_90")
    text = assembly(compiled)
    assert compiled.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in text
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", text)
    assert re.search(r"st\.release\.sys\.global\.b64", text)
    if name == "reduce":
        assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", text)
    if name == "fetch":
        assert re.search(r"ld\.acquire\.gpu\.global\.b64", text)
        assert text.index("fence.proxy.async") > 0
