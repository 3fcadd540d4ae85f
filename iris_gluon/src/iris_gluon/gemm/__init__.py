"""GEMM in Gluon: a persistent core for Hopper that fused kernels build on."""

from iris_core.protocols import FusedOperation
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.launch import GemmConfig, choose_config
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.sinks import AddBias, StoreTile

__all__ = ["AddBias", "GemmConfig", "RowGroups", "StoreTile", "choose_config", "multiply_tiles"]


def operations() -> list[FusedOperation]:
    """Return the algorithms for `ctx.ops`; imports them only now."""
    from iris_gluon.gemm.gather_product import HopperGather
    from iris_gluon.gemm.push_product import HopperPush
    from iris_gluon.gemm.reduce_product import HopperReduce

    return [
        HopperReduce("matmul_reduce_scatter", "hopper_push"),
        HopperPush("matmul_all_gather", "hopper_push"),
        HopperGather("all_gather_matmul", "hopper_copy_engine_push", barriers=1),
    ]
