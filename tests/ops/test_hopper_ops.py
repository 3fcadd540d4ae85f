"""The algorithms for Hopper: by the executor on CPU ranks, on GPUs, and compiled."""

import re

import pytest
import torch
from jobs_hopper import refused, run

from iris_core.types import DeviceTarget, DeviceType, FusedRequest
from iris_gluon.gemm import GemmConfig
from iris_gluon.ops import operations
from iris_gluon.ops.kernels import await_product, push_product, put_product, reduce_product
from iris_triton.compile_only import assembly, compile_for

BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
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
    "reduce": (reduce_product, (BF16, BF16, BF16, I64, BF16, I64, 1, 1, 8192, 8192, 4096, 4096, 8192, 8192, 1024, 32,
                                64, 16, *END), {"FORM": "two_shot"}),
    "put": (put_product, (BF16, BF16, BF16, BF16, BF16, I32, I64, I64, 1, 1, 8192, 4096, 8192, 8192, 1, 1024, 32, 64,
                          *END), {"PUTTERS": 16, "BIAS": "rows"}),
    "await": (await_product, (BF16, BF16, BF16, BF16, BF16, I32, 1, 1, 8192, 4096, 8192, 8192, 1, 1024, 32, 64, *END),
              {"BIAS": "columns"}),
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(),
        GemmConfig(block_n=128, parts=1, stages=5),
        GemmConfig(block_m=64, num_warps=4, maxnreg=255),
        GemmConfig(block_m=64, block_n=128, parts=1, stages=5, num_warps=4, maxnreg=255),
    ],
    ids=["128x256", "128x128", "64x256", "64x128"],
)
def test_assembly(name, config, turned):
    kernel, arguments, constants = KERNELS[name]
    gathers = name in ("put", "await")
    constants = {**constants, "TURNED_B": turned} | ({} if gathers else {"TURNED_A": turned})
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    compiled = compile_for(kernel, arguments, {"SIZE": 8, **blocks, **constants, **config.options}, "sm_90")
    text = assembly(compiled)
    assert compiled.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in text
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", text)
    assert (re.search(r"st\.release\.sys\.global\.b64", text) is None) == (name == "await")
    if gathers:
        assert re.search(r"ld\.acquire\.sys\.global\.b32", text)
        assert "fence.proxy.async" in text
        assert re.search(r"atom\.global\.gpu\.acq_rel\.add\.[su]32", text)  # who has waited
    if name == "put":
        assert re.search(r"(atom|red)\.global\.sys\.release\.add\.[su]32", text)  # pieces that have arrived


# -- what `iris tune` measures ----------------------------------------------------------------------------------------
SHAPES = {  # shapes of A and of the output, on one of 8 ranks; B is K x N
    "matmul_reduce_scatter": ((8192, 3584), (1024, 8192)),
    "matmul_all_reduce": ((8192, 3584), (8192, 8192)),
    "matmul_all_gather": ((8192, 3584), (8192, 65536)),
    "all_gather_matmul": ((1024, 3584), (8192, 8192)),
}


@pytest.mark.parametrize("op", SHAPES)
def test_launches_that_are_worth_measuring(op):
    """The own choice, then others that it can make, none of them twice."""
    a, out = SHAPES[op]
    more = {"all_gather_matmul": {"gather_dim": 0}, "matmul_all_gather": {"gather_dim": 1}}.get(op, {})

    def asked(config):
        options = {"layout": "torch", "bias": "none", "config": config, "tf32": False, **more}
        return FusedRequest(
            op=op, m=8192, n=8192, k=3584, dtype="bfloat16", out_dtype="bfloat16", nbytes=8192 * 8192 * 2, rank=0,
            members=tuple(range(8)), target=DeviceTarget(DeviceType.CUDA, 0, "sm_90"), a_stride=(a[1], 1),
            b_stride=(8192, 1), out_stride=(out[1], 1), out_shape=out, bias_stride=None, reach_a=True, reach_out=True,
            aligned=(True, True, True, True), options=options,
        )  # fmt: skip

    for algorithm in (each for each in operations() if each.op == op and each.supports(asked({}))):
        offered = algorithm.tunings(asked({}))
        assert offered[0] == {}
        assert len(offered) >= 4
        assert all(algorithm.supports(asked(config)) for config in offered)
        cores = [algorithm._gemm(asked(config), 132) for config in offered]
        launches = {(core, tuple(sorted(config.items()))) for core, config in zip(cores, offered, strict=True)}
        assert len(launches) == len(offered)
        assert len(set(cores)) >= 2
