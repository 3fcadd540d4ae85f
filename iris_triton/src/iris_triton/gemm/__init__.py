"""Algorithms for `ctx.ops` (see docs/ops.md).  Imports nothing until a backend asks for them."""

from pathlib import Path

from iris_core.protocols import FusedOperation, NormOperation

TABLES = Path(__file__).parent / "tables"  # that come with these algorithms, measured ones and models


def operations() -> list[FusedOperation | NormOperation]:
    """Return the algorithms."""
    from iris_core.dispatch import PRODUCTS
    from iris_triton.gemm.copy_engine_product import CopyEngineGather, CopyEngineReduce
    from iris_triton.gemm.fetch_product import Fetch
    from iris_triton.gemm.matmul_reduce import Reduce
    from iris_triton.gemm.packet_norm import PacketNorm
    from iris_triton.gemm.packet_product import PacketProduct
    from iris_triton.gemm.push_product import Push
    from iris_triton.gemm.reduce_norm import ReduceNorm

    return [
        Reduce("matmul_all_reduce", "two_shot", barriers=3),
        Reduce("matmul_reduce_scatter", "push"),
        Push("matmul_all_gather", "push"),
        Fetch("all_gather_matmul", "fetch", barriers=3),
        CopyEngineGather("all_gather_matmul", "copy_engine_push"),
        CopyEngineReduce("matmul_reduce_scatter", "copy_engine"),
        CopyEngineReduce("matmul_all_reduce", "copy_engine"),
        *(PacketProduct(op, "packets") for op in PRODUCTS),
        PacketNorm(1, 1 << 20),
        PacketNorm(2, 32 << 20),
        ReduceNorm("one_shot", 1 << 20),
        ReduceNorm("two_shot", 32 << 20),
    ]
