"""Copy engines inside kernels: there are none, and this is what functions of theirs do."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def quiet(copy_engine_ctx, to_rank):
    """Wait for what copy engines still have to send to a rank: nothing, since `put` stores by itself.

    Args:
        copy_engine_ctx: what `ctx.get_copy_engine_ctx()` returns, which is None.
        to_rank: the rank.
    """
    tl.static_assert(
        copy_engine_ctx is None,
        "quiet: there are no copy engines inside kernels here; pass what ctx.get_copy_engine_ctx() returns, None. "
        "On the host, ctx.ccl has algorithms of copy engines.",
    )
