"""Programs of all ranks put their nodes into one list on rank 0, at the same time and without a lock.

atomic_xchg stores a value and returns the one that was there, and nobody comes between the two.  A program exchanges
the list's head for its own node and so learns which node comes next: no two learn the same.  (It is the first step of
the queue lock of Mellor-Crummey and Scott, "Algorithms for scalable synchronization", 1991.)

    python examples/06_atomic_xchg.py [ranks]
"""

import itertools
import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

NODES = 50  # of each rank
END = -1


@triton.jit
def push(head, following, context, WORLD: tl.constexpr):
    """Program p of rank r adds node r * programs + p."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    node = ctx.rank * tl.num_programs(0) + tl.program_id(0)
    # relaxed: the exchange hands over nothing but the number; the list is read behind a barrier
    next_node = ctx.atomic_xchg(head, node, 0, sem="relaxed")
    ctx.store(following + node, next_node, 0)


def main():
    with iris_core.Iris(heap_size="1MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        head = ctx.full((1,), END, dtype=torch.int32)
        following = ctx.full((world * NODES,), END, dtype=torch.int32)
        ctx.barrier()
        push[(NODES,)](head, following, ctx.get_device_context(), WORLD=world)
        ctx.barrier()
        if rank != 0:
            return f"rank {rank} of {world} on {ctx.device} pushed {NODES} nodes"
        links, node, nodes = following.tolist(), head.item(), []
        while node != END and len(nodes) <= len(links):
            nodes.append(node)
            node = links[node]
        assert sorted(nodes) == list(range(world * NODES)), "a node is lost, or in the list twice"
        changes = sum(a // NODES != b // NODES for a, b in itertools.pairwise(nodes))
        return f"rank 0 of {world} on {ctx.device}: {len(nodes)} nodes in one list, which changes ranks {changes} times"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
