"""Self-test that `iris doctor` runs in a process of its own: one rank, one kernel, on the CPU.

    python -m iris_triton.selftest

Prints one line; exit status 0 means that a kernel stored through the symmetric heap and the result is right.
"""

# mypy: ignore-errors

import sys

import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris


@triton.jit
def double(source, target, rank: tl.constexpr, heap_bases, BLOCK: tl.constexpr):
    """Store twice the source into the target on this very rank, through address translation."""
    offsets = tl.arange(0, BLOCK)
    iris.store(target + offsets, tl.load(source + offsets) * 2, rank, rank, heap_bases)


def main() -> int:
    """Run the self-test in a world of one; 0 if the result is right, 1 otherwise."""
    with Iris(heap_size="16MiB", device="cpu") as ctx:
        source = ctx.arange(64, dtype=torch.float32)
        target = ctx.zeros(64, dtype=torch.float32)
        double[(1,)](source, target, ctx.cur_rank, ctx.get_heap_bases(), BLOCK=64)
        ctx.barrier()
        if not torch.equal(target, source * 2):
            print(f"a kernel on the symmetric heap computed {target.tolist()}, not twice 0 to 63", file=sys.stderr)
            return 1
    print(f"a Triton {triton.__version__} kernel stored through the symmetric heap of one rank on the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
