"""From a call to a launch: the request, the choice of an algorithm, its plan, and the order on streams."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
PRODUCTS = ("matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")
PLAIN = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
TF32 = "tf32"
"""Operations of `ctx.ccl` and products of `ctx.ops`, with their element types; TF32 is float32 where it is allowed."""
