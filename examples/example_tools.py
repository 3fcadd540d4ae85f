"""What several examples share: a tile of a product, the order of tiles, sizes by device, a second stream, a stopwatch.

The GEMM examples differ in what they do with a finished tile; how a tile is computed is here.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl


# -- in kernels -------------------------------------------------------------------------------------------------------
@triton.jit
def place_tile(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile, counted in tiles.

    Goes down GROUP rows of tiles, then one column to the right, so that programs that run at the same time read few
    rows of A and few columns of B, which then stay in the cache (the order of Triton's tutorial on matmul).
    """
    per_group = GROUP * tiles_n
    first = number // per_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + number % per_group % height, number % per_group // height


@triton.jit
def multiply_tile(
    a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return a tile of A @ B, float32[BLOCK_M, BLOCK_N]; what lies beyond the matrices counts as 0.

    Args:
        a, b: pointers to M x K and K x N elements with any strides.
        row, column: which tile, counted in tiles.
    """
    i = row * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = column * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a_row = a + i.to(tl.int64) * stride_am
    b_column = b + j.to(tl.int64) * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a_row + k.to(tl.int64)[None, :] * stride_ak, mask=(i < M) & (k[None, :] < K), other=0.0)
        b_tile = tl.load(b_column + k.to(tl.int64)[:, None] * stride_bk, mask=(k[:, None] < K) & (j < N), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    return acc


# -- on the host ------------------------------------------------------------------------------------------------------
def on_gpu(ctx) -> bool:
    """Whether the ranks compute on GPUs."""
    return torch.device(ctx.device).type == "cuda"


CPU_OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 2}  # small tiles show more of an example
NVIDIA_OPTIONS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
AMD_OPTIONS = {**NVIDIA_OPTIONS, "num_stages": 2}  # there is less shared memory


def gemm_options(ctx) -> dict[str, int]:
    """Tile sizes and options of a GEMM kernel for this rank's device."""
    if not on_gpu(ctx):
        return CPU_OPTIONS
    return AMD_OPTIONS if torch.version.hip else NVIDIA_OPTIONS


def num_tiles(m: int, n: int, options: dict[str, int]) -> int:
    """How many tiles cover an m x n matrix."""
    return triton.cdiv(m, options["BLOCK_M"]) * triton.cdiv(n, options["BLOCK_N"])


def num_programs(ctx) -> int:
    """As many programs as certainly run at the same time: one for each multiprocessor."""
    return ctx.get_cu_count() if on_gpu(ctx) else 6


def num_senders(ctx) -> int:
    """How many of them send, where some do nothing else; a few fill the links."""
    return max(ctx.get_cu_count() // 8, 1) if on_gpu(ctx) else 2


def whole_numbers(ctx, rows: int, columns: int, seed: int) -> torch.Tensor:
    """A bfloat16 matrix of small whole numbers: float32 adds their products up exactly, in whatever order."""
    numbers = torch.randint(-2, 3, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return numbers.to(ctx.device, torch.bfloat16)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What torch says that A @ B is, in float32."""
    return a.float() @ b.float()


@contextlib.contextmanager
def beside(ctx):
    """What is launched `with` the value of this block runs on a second stream, beside what is launched outside of it.

        with beside(ctx) as second:
            compute[grid](...)
            with second:
                send[grid](...)

    The second stream begins when what was launched before the block is done, and what is launched behind the block
    waits for both.  On the CPU a launch ends when its kernel does, so there the two run one after the other.
    """
    if not on_gpu(ctx):
        yield contextlib.nullcontext()
        return
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    second.wait_stream(first)
    yield torch.cuda.stream(second)
    first.wait_stream(second)


def timing(ctx, call, *, flops: float = 0.0, nbytes: float = 0.0, calls: int = 20) -> str:
    """Return "; 123 us, 45 TFLOP/s" for one of `calls` calls in a row; nothing on the CPU, whose times mean nothing.

    Collective: every rank calls it.

    Args:
        ctx: the open Iris.
        call: what is timed; every rank's call waits for the other ranks, or needs none.
        flops: floating-point operations of this rank.
        nbytes: bytes that this rank receives or sends.
        calls: how many.
    """
    if not on_gpu(ctx):
        return ""
    for _ in range(3):
        call()
    ctx.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    ctx.barrier()
    us = start.elapsed_time(end) * 1e3 / calls
    return (
        f"; {us:.1f} us"
        + (f", {flops / us / 1e6:.0f} TFLOP/s" if flops else "")
        + (f", {nbytes / us / 1e3:.1f} GB/s" if nbytes else "")
    )
