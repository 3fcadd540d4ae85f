"""Scripts in the manner of AMD's Iris: ctx.ccl with Config, ctx.ops and iris.ops."""

import pytest
import torch
import torch.distributed as dist

import iris_triton.as_iris
import iris
from iris.ccl import Config, ReduceOp
from iris.ccl.all_gather import all_gather
from iris_core.errors import GroupError

M, N = 24, 96
VARIANTS = ("atomic", "ring", "two_shot", "one_shot", "spinlock")


def _part(rank, shape=(M, N)):
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) % 61 + rank


def all_reduce(dtypes=(torch.float32, torch.bfloat16)):
    shmem = iris.iris(1 << 24)
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    config = Config(block_size_m=32, block_size_n=64, comm_sms=8, num_xcds=1, swizzle_size=2)
    for i, variant in enumerate(VARIANTS):
        dtype = dtypes[i % len(dtypes)]
        want = sum(_part(r).to(dtype).float() for r in range(world)).to(dtype)
        inp, out = shmem.empty((M, N), dtype=dtype), shmem.zeros((M, N), dtype=dtype)
        inp.copy_(_part(rank))
        config.all_reduce_variant = variant
        config.all_reduce_num_rings = 2 if variant == "ring" else 1
        config.all_reduce_distribution = i % 2
        shmem.barrier()
        workspace = shmem.ccl.all_reduce_preamble(out, inp, config=config)
        assert workspace.variant == variant
        again = shmem.ccl.all_reduce(out, inp, config=config, workspace=workspace)
        assert again is workspace
        assert again.shape == (M, N)
        assert torch.equal(out.cpu(), want), variant
        out.zero_()
        shmem.ccl.all_reduce(out, inp, op=ReduceOp.SUM, async_op=True, config=config)
        assert torch.equal(out.cpu(), want), variant  # on the current stream, whose order is enough to read it here
        shmem.barrier()
    shmem.barrier()


def gathers_and_scatters():
    """all_gather, all_to_all by columns, reduce_scatter by tiles; with Gluon's config where there is one."""
    shmem = iris.iris(1 << 24)
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    inp, out = shmem.zeros((M, N)), shmem.zeros((M * world, N))
    inp.copy_(_part(rank))
    want = torch.cat([_part(r) for r in range(world)])
    shmem.barrier()
    configs = (None, Config(all_gather_variant="partitioned", comm_sms=4 * world), Config(use_gluon=True))
    for turn, config in enumerate(configs):
        out.zero_()
        shmem.barrier()
        if turn == 1:
            all_gather(out, inp, shmem, config=config)
        else:
            shmem.ccl.all_gather(out, inp, config=config, async_op=turn == 0)
        shmem.barrier()
        assert torch.equal(out.cpu(), want), turn

    wide, swapped = shmem.zeros((M, N * world)), shmem.zeros((M, N * world))
    wide.copy_(_part(rank, (M, N * world)))
    shmem.barrier()
    shmem.ccl.all_to_all(swapped, wide)
    chunks = [_part(r, (M, N * world)).chunk(world, dim=1)[rank] for r in range(world)]
    assert torch.equal(swapped.cpu(), torch.cat(chunks, dim=1))

    # each rank has whole tiles of the sum at their places, nobody has a tile twice, and together they have all
    total, part = sum(_part(r) for r in range(world)), shmem.zeros((M, N))
    shmem.ccl.reduce_scatter(part, inp, config=Config(block_size_m=8, block_size_n=32))
    shmem.barrier()
    mine = part.cpu()
    assert torch.equal(torch.where(mine != 0, total, 0), mine)
    assert int((mine != 0).sum()) < M * N or world == 1
    pieces = shmem.zeros((M * world, N))
    shmem.ccl.all_gather(pieces, part)
    assert torch.equal(pieces.cpu().view(world, M, N).sum(0), total)
    shmem.barrier()


def groups():
    shmem = iris.iris(1 << 22)
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    evens = list(range(0, world, 2))
    group = dist.new_group(evens)
    out, inp = shmem.zeros(4, 4), shmem.full((4, 4), float(rank + 1))
    shmem.barrier()
    assert tuple(iris.ccl.extract_group_info(None, shmem)) == (rank, rank, world, 0, 1)
    if rank in evens:
        info = tuple(iris.ccl.extract_group_info(group, shmem))
        assert info == (evens.index(rank), rank, len(evens), 0, 2 if len(evens) > 1 else 1)
        shmem.ccl.all_reduce(out, inp, group=group)
        assert out[0, 0] == sum(r + 1 for r in evens)
    else:
        with pytest.raises(GroupError):
            shmem.ccl.all_reduce(out, inp, group=group)
    shmem.barrier()


def _operand(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def fused():
    """Methods and functions, by the argument names of AMD's Iris, with FusedConfig, workspaces and preambles."""
    shmem = iris.iris(1 << 24)
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    m, n, k = 32 * world, 32, 64 * world
    config = iris.ops.FusedConfig(block_size_m=32, block_size_n=32, block_size_k=32, num_xcds=1, group_size_m=2)

    def on_heap(tensor):
        there = shmem.empty(tuple(tensor.shape), dtype=tensor.dtype)
        there.copy_(tensor)
        return there

    def check(found, want):
        torch.testing.assert_close(found.cpu(), want, rtol=1e-2, atol=0.1)

    A, B = on_heap(_operand(rank, m, k)), on_heap(_operand(99, k, n))
    products = [_operand(r, m, k) @ _operand(99, k, n) for r in range(world)]
    shmem.barrier()
    for variant in ("two_shot", "one_shot", "atomic"):
        C = shmem.zeros((m, n))
        config.all_reduce_variant = variant
        workspace = iris.ops.matmul_all_reduce_preamble(shmem, C, A, B, config)
        workspace = iris.ops.matmul_all_reduce(shmem, C, A, B, False, config, workspace)
        assert workspace.operation == "matmul_all_reduce"
        assert workspace.matches("matmul_all_reduce", (m, n, k), torch.float32, world)
        check(C, sum(products))
    C.zero_()
    shmem.ops.matmul_all_reduce(output_tensor=C, A=A, B=B, async_op=True)
    check(C, sum(products))
    shmem.barrier()

    bias = _operand(5, n).to(shmem.device)
    shards = [_operand(40 + r, m, k // world) for r in range(world)]
    shard, wide = on_heap(shards[rank]), shmem.zeros((m * world, n))
    gathered, ops = torch.cat(shards, dim=1) @ _operand(99, k, n), iris.ops
    shmem.barrier()
    ops.all_gather_matmul_preamble(shmem, shard, B, None)
    ops.all_gather_matmul_hbm_buffer_preamble(shmem, shard, B, config)
    ops.matmul_all_gather_preamble(shmem, A, B, config)
    for out, call, want in (
        (C, lambda: ops.all_gather_matmul(shmem, C, shard, B, bias), gathered + bias.cpu()),
        (C, lambda: ops.all_gather_matmul_hbm_buffer(shmem, C, shard, B, bias, num_fetch_sms=1), gathered + bias.cpu()),
        (C, lambda: shmem.ops.all_gather_matmul(output_tensor=C, A_sharded=shard, B=B), gathered),
        (wide, lambda: ops.matmul_all_gather(shmem, wide, A, B), torch.cat(products)),
    ):
        out.zero_()
        call()
        check(out, want)

    C, pieces = shmem.zeros((m, n)), shmem.zeros((m * world, n))
    shmem.barrier()
    assert shmem.ops.explain("matmul_reduce_scatter", C, A, B).algorithm
    iris.ops.matmul_reduce_scatter_preamble(shmem, C, A, B, None)
    iris.ops.matmul_reduce_scatter(shmem, C, A, B, config=iris.ops.FusedConfig(block_size_m=16, block_size_n=16))
    shmem.ccl.all_gather(pieces, C)
    check(pieces.view(world, m, n).sum(0), sum(products))
    assert int((C != 0).sum()) < m * n or world == 1
    shmem.barrier()
