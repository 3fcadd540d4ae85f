"""Mistakes that others have made between February and September 2026, reduced from reports on public trackers.

The names are repository and number; only what the report says about order and addresses is kept.  See `corpus`.
"""
# mypy: ignore-errors

import re

import torch
import triton
import triton.language as tl
from corpus import N, flags, heap, launch, local, out, registry
from planted_messages import fence_of

import iris_triton as iris

CASES, case, planted = registry()


def tracked(report, *what, **how):
    """Enter what a report says, "owner/repository#number: text", by repository and number."""
    name = re.match(r"[^/]*/([^:]*):", report)[1]
    planted(re.sub("[^a-z0-9]", "_", name.lower()), report, *what, **how)


# -- the barrier at the start of an all_reduce ------------------------------------------------------------------------
@triton.jit
def staged(
    context, staging, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr,
    SEND: tl.constexpr = "release", RECEIVE: tl.constexpr = "acquire", SCOPE: tl.constexpr = "sys",
    FENCE: tl.constexpr = ""
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    peer = 1 - RANK
    tl.store(staging + i, i.to(tl.float32))  # A vllm_57059 aiter_3290 aiter_4812 aiter_4786
    if FENCE:
        fence_of(FENCE)
    ctx.signal(flag + RANK, 1, peer, sem=SEND)  # A aiter_4812 aiter_4786
    ctx.wait(flag + peer, 1, sem=RECEIVE, scope=SCOPE)  # B aiter_4812 aiter_4786
    tl.store(out + i, ctx.load(staging + i, peer))  # B vllm_57059 aiter_3290 aiter_4812 aiter_4786


STAGED = staged, heap(N), flags(2), out
RELAXED = {"SEND": ("release", "relaxed"), "RECEIVE": ("acquire", "relaxed")}
tracked(
    "vllm-project/vllm#57059: the start barrier of the custom all_reduce on ROCm is relaxed on both sides.",
    *STAGED, **RELAXED,
)  # fmt: skip
tracked(
    "ROCm/aiter#3290: ready is signalled before the stores of the producer are visible outside of its GPU.",
    *STAGED, SEND="relaxed", FENCE=("sys", "gpu"),
)  # fmt: skip
tracked(
    "ROCm/aiter#4812: a relaxed store, and a relaxed load whose scope is one GPU, publish the input.",
    *STAGED, SCOPE=("sys", "gpu"), **RELAXED,
)  # fmt: skip
tracked(
    "ROCm/aiter#4786: flags that other GPUs write are read with the scope of one GPU.", *STAGED,
    SCOPE=("sys", "gpu"),
)  # fmt: skip


# -- the barrier at the end -------------------------------------------------------------------------------------------
@triton.jit
def one_stage(
    context, data, flag, out, turn, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, ENDS: tl.constexpr
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    peer = 1 - RANK
    ctx.signal(flag + RANK, turn, peer)
    ctx.wait(flag + peer, turn)
    total = ctx.load(data + i, peer)  # A aiter_3515 aiter_4082
    tl.store(out + i, total)
    if ENDS:
        ctx.signal(flag + 2 + RANK, turn, peer)
        ctx.wait(flag + 2 + peer, turn)


@triton.jit
def next_kernel(data, N: tl.constexpr):
    tl.store(data + tl.arange(0, N), 3.0)  # B aiter_3515


def _one_stage(ctx, ends):
    data, flag = heap(N)(ctx), flags(4)(ctx)
    ctx.barrier()
    launch(ctx, one_stage, data, flag, out(ctx), 2, ENDS=ends)
    return data


@case()
def aiter_3515(ctx, bug):
    """ROCm/aiter#3515: the kernel ends while a peer still reads its input, which the next kernel overwrites."""
    data = _one_stage(ctx, not bug)
    launch(ctx, next_kernel, data)
    ctx.barrier()


@case()
def aiter_4082(ctx, bug):
    """ROCm/aiter#4082: a collective returns, and the caller fills the input that peers still read."""
    data = _one_stage(ctx, not bug)
    data.fill_(float("nan"))  # B aiter_4082
    ctx.barrier()


# -- split and stream K -----------------------------------------------------------------------------------------------
@triton.jit
def split_k(partial, counter, out, N: tl.constexpr, BUG: tl.constexpr):
    gemm, part = tl.program_id(0) % 2, tl.program_id(0) // 2
    i = tl.arange(0, N)
    tl.store(partial + (2 * gemm + part) * N + i, i.to(tl.float32))  # A aiter_3288
    arrived = tl.atomic_add(counter if BUG else counter + gemm, 1)
    if arrived == 1:
        for k in range(2):
            tl.store(out + gemm * N + i, tl.load(partial + (2 * gemm + k) * N + i))  # B aiter_3288


tracked(
    "ROCm/aiter#3288: products that run at the same time count their arrived parts with one counter.",
    split_k, heap(4 * N), flags(2), local(2 * N), ranks=1, programs=4,
)  # fmt: skip


@triton.jit
def stream_k(
    context, partial, lock, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for tile in range(1, 4):
        if tl.program_id(0) == 0:
            ctx.wait(lock, 1 if BUG else tile, scope="gpu")
            tl.store(out + i, tl.load(partial + tile * N + i))  # B triton_10594
        else:
            tl.store(partial + tile * N + i, i.to(tl.float32))  # A triton_10594
            tl.atomic_add(lock, 1)


tracked(
    "triton-lang/triton#10594: the owner of a lock takes an earlier contribution for the one that it waits for.",
    stream_k, heap(4 * N), flags(), out, ranks=1, programs=2,
)  # fmt: skip


@triton.jit
def reset_lock(lock, BUG: tl.constexpr):
    if tl.program_id(0) == 0:
        if BUG:
            tl.store(lock, 0)  # A tritonblas_61
        else:
            tl.atomic_xchg(lock, 0)
    else:
        tl.atomic_add(lock, 1)  # B tritonblas_61


tracked(
    "ROCm/tritonBLAS#61: a lock is reset by a plain store, with no fence before it is looked at.",
    reset_lock, flags(), ranks=1, programs=2,
)  # fmt: skip


# -- programs of one kernel -------------------------------------------------------------------------------------------
@triton.jit
def scatter(starts, out, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    pid = tl.program_id(0)
    sums = tl.cumsum(i, 0)
    if BUG:
        tl.store(starts + i, sums)  # A B vllm_34991
    else:
        tl.store(starts + pid, tl.sum(tl.where(i == pid, sums, 0)))
    tl.store(out + pid, tl.load(starts + pid))  # B vllm_34991


tracked(
    "vllm-project/vllm#34991: every program stores all starts of experts, and reads back its own.",
    scatter, flags(N), out, ranks=1, programs=4,
)  # fmt: skip


@triton.jit
def plan(slots, ready, N: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(slots + tl.arange(0, N), 0)  # A sglang_32467
        tl.atomic_xchg(ready, 1)
    if not BUG:
        while tl.atomic_add(ready, 0) == 0:
            pass
    tl.store(slots + pid, pid)  # B sglang_32467


tracked(
    "sgl-project/sglang#32467: slots are initialised by one warp while others publish their results there.",
    plan, flags(N), flags(), ranks=1, programs=4,
)  # fmt: skip


@triton.jit
def bracket(bounds, read, out, N: tl.constexpr, BUG: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, N)
    tl.store(out + pid * N + i, tl.load(bounds + i))  # A tensorrt_llm_18338
    tl.atomic_add(read, 1)
    if pid == 0:
        if not BUG:
            while tl.atomic_add(read, 0) < 3:
                pass
        tl.store(bounds + i, 1.0)  # B tensorrt_llm_18338


tracked(
    "NVIDIA/TensorRT-LLM#18338: a bracket of a top-k is rewritten while slower warps still read it.",
    bracket, heap(N), flags(), local(3 * N), ranks=1, programs=3,
)  # fmt: skip


@triton.jit
def dependent(data, flag, out, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        if BUG:
            tl.atomic_xchg(flag, 1)
        tl.store(data + i, i.to(tl.float32))  # A tensorrt_llm_14668
        if not BUG:
            tl.atomic_xchg(flag, 1)
    else:
        while tl.atomic_add(flag, 0) == 0:
            pass
        tl.store(out + i, tl.load(data + i))  # B tensorrt_llm_14668


tracked(
    "NVIDIA/TensorRT-LLM#14668: the launch of a dependent kernel is triggered before the stores that it reads.",
    dependent, heap(N), flags(), out, ranks=1, programs=2,
)  # fmt: skip


@triton.jit
def migrate(slot, released, out, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(out + i, tl.load(slot + i))  # A tensorrt_llm_14245
        tl.atomic_xchg(released, 1)
    else:
        if not BUG:
            while tl.atomic_add(released, 0) == 0:
                pass
        tl.store(slot + i, 2.0)  # B tensorrt_llm_14245


tracked(
    "NVIDIA/TensorRT-LLM#14245: a copy on another stream recycles a slot of the cache that kernels still read.",
    migrate, heap(N), flags(), out, ranks=1, programs=2,
)  # fmt: skip


# -- publishing -------------------------------------------------------------------------------------------------------
@triton.jit
def task(fields, used, out, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(fields + i, i.to(tl.float32))  # A nccl_2365
        if BUG:
            tl.store(used, 1)  # A nccl_2365
        else:
            tl.atomic_xchg(used, 1, sem="release")
    else:
        while tl.atomic_add(used, 0, sem="acquire") == 0:  # B nccl_2365
            pass
        tl.store(out + i, tl.load(fields + i))  # B nccl_2365


tracked(
    "NVIDIA/nccl#2365: the fields of a task are published by a plain store of its flag.",
    task, heap(N), flags(), out, ranks=1, programs=2,
)  # fmt: skip


@triton.jit
def routing(context, table, ready, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    peer = 1 - RANK
    if not BUG:
        tl.store(table + i, -1)
    ctx.signal(ready + RANK, 1, peer)
    if BUG:
        tl.store(table + i, -1)  # A megatron_lm_7263
    ctx.wait(ready + peer, 1)
    ctx.store(table + i, i, peer)  # B megatron_lm_7263


tracked(
    "NVIDIA/Megatron-LM#7263: a table is cleared after the fence behind which peers write their parts into it.",
    routing, flags(N), flags(2),
)  # fmt: skip


# -- what a kernel touches --------------------------------------------------------------------------------------------
@triton.jit
def padding(slots, out, count, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    mask = i < N if BUG else i < count
    tl.store(out + i, tl.load(slots + i, mask=mask, other=-1))  # B sglang_24850


@case(ranks=1, kind="uninitialised")
def sglang_24850(ctx, bug):
    """sgl-project/sglang#24850: slots of tokens beyond those that have arrived are read, which nobody has written."""
    slots = ctx.empty(N, dtype=torch.int32)
    slots[: N - 8].fill_(1)
    launch(ctx, padding, slots, out(ctx), N - 8, BUG=bug)


@triton.jit
def rows(logits, out, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(logits + tl.program_id(0) * stride + i))  # B vllm_42684


tracked(
    "vllm-project/vllm#42684: a kernel for logits takes rows for dense that have more columns in memory.",
    rows, lambda ctx: ctx.zeros((2, N + 16))[:, :N], out, (N + 16, N), ranks=1, kind="bounds", programs=2,
)  # fmt: skip


@triton.jit
def scales(scale, out, columns, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    if BUG:
        tl.store(out + i, tl.load(scale + i))  # B vllm_47303
    else:
        tl.store(out + i, tl.load(scale + i, mask=i < columns, other=0))


tracked(
    "vllm-project/vllm#47303: the last tile along K reads scales without a mask.",
    scales, lambda ctx: ctx.zeros((2, N))[0, : N - 5], out, N - 5, ranks=1, kind="bounds",
)  # fmt: skip


@triton.jit
def heads(data, count, N: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    head = tl.arange(0, BLOCK)
    mask = (head if BUG else first + head) < count
    tl.store(data + (first + head)[:, None] * N + tl.arange(0, N), 1.0, mask=mask[:, None])  # B megatron_lm_7103


tracked(
    "NVIDIA/Megatron-LM#7103: the mask of heads is made of places in the block, and holds against their number.",
    heads, lambda ctx: ctx.zeros((8, N))[:6], 6, ranks=1, kind="bounds", programs=2, BLOCK=4,
)  # fmt: skip


@triton.jit
def far_row(data, out, row, stride, N: tl.constexpr, BUG: tl.constexpr):
    i = tl.arange(0, N)
    offset = row * stride if BUG else (row.to(tl.int64) * stride) % (4 * N)
    tl.store(out + i, tl.load(data + offset + i))  # B triton_10489


tracked(
    "triton-lang/triton#10489: a row times a stride does not fit int32, and becomes negative.",
    far_row, heap(4, N), out, 3 << 14, (1 << 16) + N, ranks=1, kind="wrapped",
)  # fmt: skip
