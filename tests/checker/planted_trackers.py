"""Mistakes that others have made between February and September 2026, reduced from reports on public trackers.

The names are repository and number; only what the report says about order and addresses is kept.  See `corpus`.
"""

import re

import torch
from corpus import N, flags, given, heap, kernel, launch, local, marks_in_kernel, out, registry

CASES, case, planted = registry()


def tracked(*rows):
    """Enter what reports say, "owner/repository#number: text", by repository and number."""
    for report, *row in rows:
        name = re.match(r"[^/]*/([^:]*):", report)[1]
        planted((re.sub("[^a-z0-9]", "_", name.lower()), report, *row))


def programs(count, **arguments):
    """Programs of one rank that share `data` and a flag."""
    return {"ranks": 1, "programs": count, "data": heap(N), "flag": flags(), **arguments}


SIGNAL, WAIT = "ctx.signal(flag + RANK, 1, peer)", "ctx.wait(flag + peer, 1)"
STAGED = f"""
tl.store(data + i, x)  # A
{SIGNAL}
{WAIT}
tl.store(out + i, ctx.load(data + i, peer))  # B
"""
HELD = {"data": heap(N), "flag": flags(2)}
RELAXED_SIGNAL = "ctx.signal(flag + RANK, 1, peer, sem='relaxed')"
tracked(
    ("vllm-project/vllm#57059: the start barrier of the custom all_reduce on ROCm is relaxed on both sides.", STAGED,
     {SIGNAL: RELAXED_SIGNAL, WAIT: "ctx.wait(flag + peer, 1, sem='relaxed')"}, HELD),
    ("ROCm/aiter#3290: ready is signalled before the stores of the producer are visible outside of its GPU.",
     STAGED.replace(SIGNAL, f"fence('sys')\n{RELAXED_SIGNAL}"), {"fence('sys')": "fence('gpu')"}, HELD),
    ("ROCm/aiter#4812: a relaxed store, and a relaxed load whose scope is one GPU, publish the input.", STAGED,
     {SIGNAL: f"{RELAXED_SIGNAL}  # A", WAIT: "ctx.wait(flag + peer, 1, sem='relaxed', scope='gpu')  # B"}, HELD),
    ("ROCm/aiter#4786: flags that other GPUs write are read with the scope of one GPU.", STAGED,
     {SIGNAL: f"{SIGNAL}  # A", WAIT: "ctx.wait(flag + peer, 1, scope='gpu')  # B"}, HELD),
)  # fmt: skip

END = "ctx.signal(flag + 2 + RANK, 1, peer)\nctx.wait(flag + 2 + peer, 1)"
ONE_STAGE = f"{SIGNAL}\n{WAIT}\ntl.store(out + i, ctx.load(data + i, peer))  # A"
NEXT = "tl.store(data + i, 3.0)  # B"


def one_stage(ctx, bug):
    data, flag = heap(N)(ctx), flags(4)(ctx)
    ctx.barrier()
    launch(ctx, kernel(ONE_STAGE if bug else f"{ONE_STAGE}\n{END}", "data", "flag", "out"), data, flag, out(ctx))
    return data


@case()
def aiter_3515(ctx, bug):
    """ROCm/aiter#3515: the kernel ends while a peer still reads its input, which the next kernel overwrites."""
    launch(ctx, kernel(NEXT, "data"), one_stage(ctx, bug))
    ctx.barrier()


@case()
def aiter_4082(ctx, bug):
    """ROCm/aiter#4082: a collective returns, and the caller fills the input that peers still read."""
    data = one_stage(ctx, bug)
    data.fill_(float("nan"))  # B
    ctx.barrier()


CASES["aiter_3515"].marks.update(A=marks_in_kernel(ONE_STAGE)["A"], B=marks_in_kernel(NEXT)["B"])
CASES["aiter_4082"].marks.update(A=marks_in_kernel(ONE_STAGE)["A"])

tracked(
    ("ROCm/aiter#3288: products that run at the same time count their arrived parts with one counter.", """
gemm, part = pid % 2, pid // 2
tl.store(data + (2 * gemm + part) * N + i, x)  # A
arrived = tl.atomic_add(flag + gemm, 1)
if arrived == 1:
    for k in range(2):
        tl.store(out + gemm * N + i, tl.load(data + (2 * gemm + k) * N + i))  # B
""", {"flag + gemm": "flag"}, programs(4, data=heap(4 * N), flag=flags(2), out=local(2 * N))),
    ("triton-lang/triton#10594: the owner of a lock takes an earlier contribution for the one that it waits for.", """
for tile in range(1, 4):
    if pid == 0:
        ctx.wait(flag, tile, scope="gpu")
        tl.store(out + i, tl.load(data + tile * N + i))  # B
    else:
        tl.store(data + tile * N + i, x)  # A
        tl.atomic_add(flag, 1)
""", {"flag, tile,": "flag, 1,"}, programs(2, data=heap(4 * N))),
    ("ROCm/tritonBLAS#61: a lock is reset by a plain store, with no fence before it is looked at.",
     "if pid == 0:\n    tl.atomic_xchg(flag, 0)\nelse:\n    tl.atomic_add(flag, 1)  # B",
     {"tl.atomic_xchg(flag, 0)": "tl.store(flag, 0)  # A"}, programs(2)),
)  # fmt: skip

tracked(
    ("vllm-project/vllm#34991: every program stores all starts of experts, and reads back its own.", """
sums = tl.cumsum(i, 0)
tl.store(data + pid, tl.sum(tl.where(i == pid, sums, 0)))
tl.store(out + pid, tl.load(data + pid))  # B
""", {"data + pid, tl.sum(tl.where(i == pid, sums, 0)))": "data + i, sums)  # A B"}, programs(4, data=flags(N))),
)  # fmt: skip
READY = "while tl.atomic_add(flag, 0) == 0: pass"
tracked(
    ("sgl-project/sglang#32467: slots are initialised by one warp while others publish their results there.", f"""
if pid == 0:
    tl.store(data + i, 0)  # A
    tl.atomic_xchg(flag, 1)
{READY}
tl.store(data + pid, pid)  # B
""", {READY: ""}, programs(4, data=flags(N))),
)  # fmt: skip
ALL_READ = READY.replace("== 0", "< 3")
tracked(
    ("NVIDIA/TensorRT-LLM#18338: a bracket of a top-k is rewritten while slower warps still read it.", f"""
tl.store(out + pid * N + i, tl.load(data + i))  # A
tl.atomic_add(flag, 1)
if pid == 0:
    {ALL_READ}
    tl.store(data + i, 1.0)  # B
""", {ALL_READ: ""}, programs(3, out=local(3 * N))),
)  # fmt: skip
STORE = "tl.store(data + i, x)  # A"
HANDED_OVER = f"""
if pid == 0:
    {STORE}
    tl.atomic_xchg(flag, 1)
else:
    {READY}
    tl.store(out + i, tl.load(data + i))  # B
"""
tracked(
    ("NVIDIA/TensorRT-LLM#14668: the launch of a dependent kernel is triggered before the stores that it reads.",
     HANDED_OVER, {f"{STORE}\n    tl.atomic_xchg(flag, 1)": f"tl.atomic_xchg(flag, 1)\n    {STORE}"}, programs(2)),
    ("NVIDIA/TensorRT-LLM#14245: a copy on another stream recycles a slot of the cache that kernels still read.", f"""
if pid == 0:
    tl.store(out + i, tl.load(data + i))  # A
    tl.atomic_xchg(flag, 1)
else:
    {READY}
    tl.store(data + i, 2.0)  # B
""", {READY: ""}, programs(2)),
)  # fmt: skip

tracked(
    ("NVIDIA/nccl#2365: the fields of a task are published by a plain store of its flag.", HANDED_OVER,
     {"tl.atomic_xchg(flag, 1)": "tl.store(flag, 1)  # A", READY: f"{READY}  # B"}, programs(2)),
    ("NVIDIA/Megatron-LM#7263: a table is cleared after the fence behind which peers write their parts into it.", f"""
tl.store(data + i, -1)  # A
{SIGNAL}
{WAIT}
ctx.store(data + i, i, peer)  # B
""", {f"tl.store(data + i, -1)  # A\n{SIGNAL}": f"{SIGNAL}\ntl.store(data + i, -1)  # A"},
     given(data=flags(N), flag=flags(2))),
)  # fmt: skip


def slots(ctx):
    """Slots of which all but eight have been written."""
    made = ctx.empty(N, dtype=torch.int32)
    made[: N - 8].fill_(1)
    return made


ALONE = {"ranks": 1, "kind": "bounds"}
tracked(
    ("sgl-project/sglang#24850: slots of tokens beyond those that have arrived are read, which were not written.",
     "tl.store(out + i, tl.load(data + i, mask=i < N - 8, other=-1))  # B", {"N - 8": "N"}, given(ranks=1,
     kind="uninitialised", data=slots)),
    ("vllm-project/vllm#42684: a kernel for logits takes rows for dense that have more columns in memory.",
     "tl.store(out + i, tl.load(data + pid * stride + i))  # B", None, given(**ALONE, programs=2,
     data=lambda ctx: ctx.zeros((2, N + 16))[:, :N], stride=(N + 16, N))),
    ("vllm-project/vllm#47303: the last tile along K reads scales without a mask.",
     "tl.store(out + i, tl.load(data + i, mask=i < N - 5, other=0))  # B", {", mask=i < N - 5, other=0": ""},
     given(**ALONE, data=lambda ctx: ctx.zeros((2, N))[0, : N - 5])),
    ("NVIDIA/Megatron-LM#7103: the mask of heads is made of places in the block, and holds against their number.", """
first, head = pid * 4, tl.arange(0, 4)
mask = first + head < 6
tl.store(data + (first + head)[:, None] * N + tl.arange(0, N), 1.0, mask=mask[:, None])  # B
""", {"mask = first + head": "mask = head"}, given(**ALONE, programs=2, data=lambda ctx: ctx.zeros((8, N))[:6])),
    ("triton-lang/triton#10489: a row times a stride does not fit int32, and becomes negative.",
     "tl.store(out + i, tl.load(data + (row.to(tl.int64) * stride) % (4 * N) + i))  # B",
     {"(row.to(tl.int64) * stride) % (4 * N)": "row * stride"},
     given(ranks=1, kind="wrapped", data=heap(4, N), row=3 << 14, stride=(1 << 16) + N)),
)  # fmt: skip
