"""A benchmark in the manner of AMD's Iris: `python ported_bench.py --axis_n=256 --benchmark_out f.json`."""

import sys

import torch

import iris_triton.as_iris
import iris.bench as bench
from iris.ccl import Config


@bench.register
@bench.axis("num_ranks", [2])
@bench.axis("n", bench.power_of_two(8, 10))
@bench.axis("dtype", [torch.float32, torch.float16])
def gather(state, ctx):
    """All-gather of n x 8 elements."""
    n, dtype = state["n"], state["dtype"]
    if n == 512:
        state.skip("not this one")
    inp, out = ctx.zeros((n, 8), dtype=dtype), ctx.zeros((n * state["num_ranks"], 8), dtype=dtype)
    state.set_bytes(out.nbytes)
    state.add_counter("backend", len(ctx.plugin_names["backend"]))
    config = Config(block_size_m=64)
    ctx.ccl.all_reduce_preamble(inp, inp)
    state.exec(lambda: ctx.ccl.all_gather(out, inp, config=config), preamble_fn=lambda: out.zero_())


if __name__ == "__main__":
    sys.exit(bench.main())
