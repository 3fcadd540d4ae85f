"""The heap frees: by hand, by scope, and by forgetting a tensor on every rank.

Prints how many bytes are allocated at each step.

    python examples/07_memory.py
"""

import torch

from iris_core import Iris


def main() -> list[int]:
    allocated = []
    with Iris(heap_size="16MiB", device="cpu") as ctx:

        def note() -> None:
            allocated.append(ctx.stats().allocated)

        x = ctx.zeros(1024, dtype=torch.float32)
        note()
        with ctx.scope() as scope:
            ctx.empty(1 << 20)  # freed at the end of the block
            y = scope.keep(ctx.ones(1024, dtype=torch.float32))
        note()
        ctx.free(x)
        note()
        del y  # reclaimed once every rank has dropped it, at a barrier
        ctx.barrier()
        note()
    assert allocated == [4096, 8192, 4096, 0]
    return allocated


if __name__ == "__main__":
    print(main())
