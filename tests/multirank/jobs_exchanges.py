"""Rank jobs: exchanges between hosts, and ranks that are in different ones."""

import torch
import torch.distributed as dist

from iris_core import Iris
from iris_core.bootstrap import connect
from iris_core.errors import ArgumentError, RankMismatchError


def exchanges():
    """All kinds, small and large; what was wrong."""
    world = connect(None, 10.0)
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    for number in (0, 1, 14, 15, 40):
        rows = world.all_gather_ints([rank - (1 << 62)] * number)
        if rows != [(r - (1 << 62),) * number for r in range(size)]:
            wrong.append(f"{number} integers: {rows}")
    for length in (0, 90, 112, 113, 5000):
        if world.all_gather_object("\xff" * (length + rank)) != ["\xff" * (length + r) for r in range(size)]:
            wrong.append(f"objects of {length}")
        if world.broadcast_object(b"\0" * length + bytes([rank]), size - 1) != b"\0" * length + bytes([size - 1]):
            wrong.append(f"broadcast of {length}")
    world.barrier()
    world.close()
    return wrong


def out_of_step(pair):
    """What ranks are told that are in different exchanges; afterwards they can go on."""
    world = connect(None, 10.0)
    calls = {
        "two": lambda: world.all_gather_ints([1, 2]),
        "three": lambda: world.all_gather_ints([1, 2, 3]),
        "object": lambda: world.all_gather_object("x" * 500),
        "broadcast": lambda: world.broadcast_object("x", 0),
        "barrier": world.barrier,
    }
    said = "nothing"
    try:
        calls[pair[dist.get_rank() % 2]]()
    except RankMismatchError as error:
        said = str(error)
    after = world.all_gather_object(dist.get_rank())
    world.close()
    return said, after


def after_an_error():
    """One rank fails before a call and goes on to a barrier, while the others wait for it in the call."""
    with Iris("1MiB", device="cpu") as ctx:
        odd = ctx.cur_rank == 1
        a, b, out = torch.ones(8, 8), torch.ones(8, 8), ctx.zeros(8, 8)
        said = []
        try:
            if odd:
                raise ArgumentError("it has failed here")
            ctx.ops.matmul_all_reduce(out, a, b)
        except (ArgumentError, RankMismatchError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if odd:
            try:
                ctx.barrier()
            except RankMismatchError as error:
                said.append(str(error))
        ctx.barrier()
        ctx.ops.matmul_all_reduce(out, a, b)
        ctx.barrier()
        return said, out.unique().tolist()
