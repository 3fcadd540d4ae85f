"""What the jobs share."""

import contextlib
import os


@contextlib.contextmanager
def environment(**variables):
    """Set variables of this process inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def soon(device):
    """A bound for waits that are going to fail, in seconds: as short as the compilation on another rank allows."""
    return "0.5" if device == "cpu" else "10"


def compile_together(ctx, launches):
    """Compile kernels that all ranks are going to launch: each on one rank, the others find it in Triton's cache.

    Worth while for many small kernels that are the same on all ranks, so the rank must not be a constexpr of theirs.
    On the CPU there is nothing to compile.

    Args:
        ctx: the context.
        launches: (kernel, positional arguments, keyword arguments), the same on all ranks.
    """
    if ctx.device == "cpu":
        return
    for index, (kernel, args, kwargs) in enumerate(launches):
        if index % ctx.num_ranks == ctx.cur_rank:
            compiled = kernel.warmup(*args, grid=(1,), **kwargs)
            _ = compiled.run  # some versions of Triton compile a launcher here
    ctx.barrier()
