"""Kernels of collectives and fused operations that must compile for every GPU, and what must be in their assembly."""

import torch

from iris_core.types import CompileCase, DeviceType
from iris_triton.collectives import experts
from iris_triton.collectives.parts.barrier import barrier_alone, enter_alone
from iris_triton.collectives.parts.side import await_word
from iris_triton.collectives.pull import pull
from iris_triton.collectives.pull_reduce import pull_reduce
from iris_triton.collectives.push import push
from iris_triton.collectives.send_recv import move
from iris_triton.collectives.two_shot import two_shot
from iris_triton.gemm.fetch_product import fetch_product
from iris_triton.gemm.flash_decode import flash_decode
from iris_triton.gemm.matmul_reduce import matmul_reduce
from iris_triton.gemm.parts.sum_slots import sum_slots
from iris_triton.gemm.push_product import push_product
from iris_triton.gemm.reduce_norm import norm_one_shot, norm_two_shot
from iris_triton.gemm.ring_attention import ring_attention, ring_gradients

CUDA, HIP = DeviceType.CUDA, DeviceType.HIP
_I64, _U8 = torch.int64, torch.uint8
_SIZE = 4
_ADDRESS = 1 << 40
_ONE, _MATRIX = (1,), (33, 70)
RELEASE = {CUDA: r"st\.release\.sys\.global\.b64", HIP: r"(global|flat)_atomic_swap_x2"}
ACQUIRE = {CUDA: r"ld\.acquire\.sys\.global\.b64", HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}
WIDE_LOAD = {CUDA: r"ld\.global(\.L1::\w+)?\.v4\.b32", HIP: r"(global|flat|buffer)_load_dwordx4"}
WIDE_STORE = {CUDA: r"st\.global(\.L1::\w+)?\.v4\.b32", HIP: r"(global|flat|buffer)_store_dwordx4"}
_END = (0, _ADDRESS)  # timeout, status
_PLAIN = (*_END, None, None, 0, 0, 0, 0)  # and no scales
_PRODUCT = {CUDA: r"wgmma\.mma_async|mma\.sync", HIP: r"v_mfma"}
_COPIES = {CUDA: r"cp\.async\.c[ag]\.shared\.global.*, 0x10", HIP: r"(global|flat|buffer)_load_(lds_)?dwordx4"}
_WORD = {CUDA: r"ld\.acquire\.sys\.global\.b32", HIP: r"global_(load_dword|atomic_add) .* sc1"}
_STORE = {CUDA: r"st\.global", HIP: r"(global|flat|buffer)_store_(short|dword)"}


def case(name, kernel, args, kwargs, patterns, **options):
    """A case whose assembly has these patterns, each one given for both vendors."""
    expect = {kind: tuple(pattern[kind] for pattern in patterns) for kind in (CUDA, HIP)}
    return CompileCase(name, kernel, args, kwargs, options, expect=expect)


def _collective_cases():
    dense = {"SIZE": _SIZE, "IN_DIMS": 0, "OUT_DIMS": 0}
    shared = dense | {"STAGED": False, "SHARED": True, "STRIDING": False}
    staged = dense | {"STAGED": True, "SHARED": False, "STRIDING": False}
    direct = dense | {"DIRECT": True, "IN_STAGED": False}
    copied = dense | {"DIRECT": False, "IN_STAGED": True}
    stored = dense | {"DIRECT": True, "SHARDED": True, "TILES": True}
    plain = (_ONE, _ONE, _ONE, _ONE)
    strided = (_MATRIX, (140, 2), _MATRIX, (1, 33))
    parts = (1, 1, 100, 100, 100, 100, -1)
    moved = (_I64, _U8, None, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    split = (_I64, _U8, _I64, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    reduced = (_I64, _U8, _I64, 1, 1, 1, 4000, 4000, 0, 4000, 0, _ADDRESS)
    mailed = (_I64, _U8, _I64, 1, 2, 4096, 40_000, 2, 1024, 0, _ADDRESS)
    pushed = (_I64, _U8, _I64, 1, 1, 1, 4000, 1 << 62, 0, _ADDRESS)
    halved = (_I64, _U8, _I64, 1, 1, 1, 4000, 500, 500, 0, _ADDRESS)
    sized = (*moved, *plain, _SIZE, "staged", False, 0, 0, 2048, _I64, _I64, 100, 100, 100)
    tile = (70, 32, 64, 2, 2, 4)
    matrices = {"SIZE": _SIZE, "IN_DIMS": 2, "OUT_DIMS": 2}
    spread = matrices | {"DIRECT": False, "SHARDED": True, "TILES": True}
    bf16, f32 = torch.bfloat16, torch.float32
    return [
        _case("pull-direct", pull, (bf16, bf16, *moved, *plain), dense, SOURCE="direct", SHARED=True, BLOCK=4096),
        _case("pull-strided", pull, (f32, f32, *split, *strided), matrices, wide=False,
              SOURCE="staged", SHARED=False, BLOCK=2048),
        _case("pull-device-sizes", pull, (f32, f32, *sized), {}),
        _case("reduce-staged", pull_reduce, (f32, f32, *reduced, *plain, None), staged, OP="avg", BLOCK=2048),
        _case("reduce-tiles", pull_reduce, (f32, f32, *reduced, *plain, tile), shared | {"STRIDING": True}, wide=False,
              OP="max", BLOCK=2048),
        _case("two-shot-direct", two_shot, (bf16, bf16, *halved, *plain), direct, OP="sum", BLOCK=4096),
        _case("two-shot-staged", two_shot, (f32, f32, *halved, *plain), copied, OP="avg", BLOCK=2048),
        _case("push-tiles", push, (f32, f32, *pushed, *plain), stored, more=(WIDE_STORE,), BLOCK=2048),
        _case("push-staged", push, (bf16, bf16, *pushed, *strided), spread, wide=False, BLOCK=4096),
        _case("barrier", barrier_alone, (_I64, _I64, 1, 1, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("enter-alone", enter_alone, (_I64, _I64, 1, 1, 1, None, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("enter-at", enter_alone, (_I64, _I64, 1, 1, 1, f32, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("send", move, (bf16, *mailed, _ONE, _ONE), {}, SENDS=True, PARTS=16, DIMS=0, BLOCK=4096),
        _case("receive", move, (bf16, *mailed, _MATRIX, (140, 2)), {}, wide=False,
              SENDS=False, PARTS=16, DIMS=2, BLOCK=4096),
    ]  # fmt: skip


def _case(name, kernel, args, common, *, wide=True, more=(), **constants):
    patterns = [RELEASE, ACQUIRE, *([WIDE_LOAD] if wide else []), *more]
    return case(f"collective-{name}", kernel, args, {**common, **constants}, patterns, num_warps=8)


def compile_cases():
    bf16, f32, f8 = torch.bfloat16, torch.float32, torch.float8_e5m2
    wide = {"A_ALIGNED": True, "B_ALIGNED": True}
    both = {"B_ALIGNED": True, "OUT_ALIGNED": True}
    reduced = wide | {"OUT_ALIGNED": True}
    plain = (8192, 8192, 4096, 4096, 1, 8192, 1, 8192, 1, 1, 8, 32, 64)  # sizes, strides, tiles, tiles of an owner
    weight = (8192, 8192, 4096, 4096, 1, 1, 4096, 8192, 1, 1, 8, 32, 64)  # B transposed
    odd = (8190, 8195, 4097, 4097, 1, 8195, 1, 8195, 1, 1, 8, 32, 64)
    shard = (1024, 8192, 4096, 4096)  # rows, columns of B, columns, stride of rows
    rest = (8192, 1, 8192, 1, 1, 8, 32)  # strides of B, of the output, of the bias; tiles
    small = {"BM": 32, "BN": 32, "BK": 32, "EVEN_K": False}
    return [
        *_collective_cases(),
        _product("reduce-two-shot", matmul_reduce, (bf16, bf16, bf16, bf16, _I64, bf16, _I64, 1, 1, *plain, *_PLAIN),
              reduced, FORM="two_shot", BIAS="columns"),
        _product("reduce-tiles", matmul_reduce, (f32, f32, f32, None, _I64, f32, _I64, 1, 1, *odd, *_PLAIN),
              dict.fromkeys(reduced, False), wide=False, FORM="tiles", BIAS="none", **small),
        _product("push", push_product, (bf16, bf16, bf16, None, _I64, _I64, 1, 1, *plain[:8], *plain[9:12], *_PLAIN),
              wide, DIM=0, BIAS="none"),
        _product("fetch", fetch_product,
              (bf16, bf16, bf16, None, bf16, _I64, _I64, _I64, 1, 1, *shard, 4096, *rest, *_PLAIN),
              both, DIM=0, BIAS="none", FETCHERS=16),
        _product("reduce-scaled-rows", matmul_reduce,
              (bf16, f8, f8, bf16, _I64, bf16, _I64, 1, 1, *weight, *_END, f32, f32, 1, 0, 0, 1),
              reduced, FORM="rows", BIAS="columns", SCALES="rows", BK=128),
        _product("fetch-scaled-blocks", fetch_product,
              (bf16, f8, f8, None, f8, _I64, _I64, _I64, 1, 1, *shard, 4096, 1, 4096, *rest[2:], *_END,
               f32, f32, 32, 1, 1, 32),
              both, DIM=0, BIAS="none", FETCHERS=16, SCALES="blocks", BK=128),
        _sum("rows", (bf16, bf16, bf16, _I64, _I64, 1, 1, 1024, 8184, 1024, 0, 8184, 1, 1, 8, *_END),
             FORM="rows", BIAS="columns"),
        _sum("two-shot", (bf16, None, bf16, _I64, _I64, 1, 1, 1024, 8184, 1024, 1024, 8184, 1, 0, 8, *_END),
             FORM="two_shot", BIAS="none"),
        case("operation-await-word", await_word, (torch.int32, 1, 1, *_END), {}, [_WORD], num_warps=1),
        *_norm_cases(),
        *_expert_cases(),
        *_attention_cases(),
    ]  # fmt: skip


def _norm_cases():
    """Kernels of `all_reduce_rms_norm`: rows of 8192 elements, to 16 and to 8 bits, and of 33."""
    bf16, f32, fp8 = torch.bfloat16, torch.float32, torch.float8_e5m2
    end = (1e-6, 57344.0, *_END)
    shots = {
        "one-shot": (norm_one_shot, (_I64, bf16, _I64, _I64, 1, 1, 1), (64,), {"EACH": 2}),
        "two-shot": (norm_two_shot, (_I64, bf16, _I64, 1, 1, 1), (4, 1 << 17), {}),
    }
    return [
        case(
            f"operation-norm-{shot}-{kind}", kernel,
            (out, bf16, bf16, weight, scales, *team, 16, hidden, *numbers, *end),
            {"SIZE": 4, "ALIGNED": hidden > 33, "BLOCK": block, **more}, (RELEASE, ACQUIRE, store), num_warps=8,
        )
        for shot, (kernel, team, numbers, more) in shots.items()
        for kind, out, weight, scales, hidden, block, store in (
            ("plain", bf16, bf16, None, 8192, 8192, WIDE_STORE), ("fp8", fp8, f32, f32, 8192, 8192, WIDE_STORE),
            ("odd", bf16, bf16, None, 33, 64, _STORE),
        )
    ]  # fmt: skip


def _expert_cases():
    """Kernels of `ctx.ops.experts`: 8-bit tokens of 7168 elements with scales, results in bfloat16."""
    i32, i64, f32, bf16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
    group = {"WORLD": 4, "SIZE": 4}
    shape = group | {"EXPERTS": 250, "LOCAL": 64}
    late, few = {"EARLY": False}, {"SCALES": 0, "LOCAL": 6}
    rows = {"SCALES": 56, "LANES": 64, "BLOCK": 2048, **late}
    several = {"TOP_K": 8, "CHOICES": 8, "MOST": 8}
    flags = (i64, i32, i64, i32)  # of senders, and programs that are done, the turn, the members
    arguments = {
        "count": (
            (i64, i32, 1024, i32, i64, i32, i32, i32, 9216, i64, i32, 1, i64),
            shape | {"LANES": 4, "WIDTH": 64, "BLOCK": 4096} | late, (_STORE, RELEASE, ACQUIRE),
        ),
        "send": (
            (i32, f32, i64, f32, i32, i32, 9216, i32, f32, i32, i32, f32, *flags, 1, 1024, 1024, 1792, i64),
            shape | rows | several | {"WEIGHTED": False, "SHARED": True, "ONCE": True, "WAITS": True},
            (RELEASE, WIDE_STORE, ACQUIRE),
        ),
        "send weighted": (
            (bf16, f32, i64, f32, i32, i32, 9216, bf16, f32, i32, i32, f32, *flags, 1, 1024, 1024, 7168, i64),
            shape | rows | several | {"WEIGHTED": True, "SHARED": False, "ONCE": False, "WAITS": False} | few,
            (RELEASE, _STORE),
        ),
        "spread": ((i32, f32, i32, i32, 58, 1792), rows | {"MOST": 8}, (WIDE_STORE,)),
        "meet": ((i64, i64, i32, 1, i64), group, (RELEASE, ACQUIRE)),
        "receive": ((i64, i64, i32, 1, i64), group | {"PLACE": 1}, (ACQUIRE,)),
        "give_back": (
            (i32, i32, i32, 58, i32, *flags, 1, 1024, 3584, i64), group | {"WAITS": True, "BLOCK": 2048} | late,
            (RELEASE, WIDE_STORE, ACQUIRE),
        ),
        "merge_back": (
            (bf16, i32, i32, f32, i32, 58, bf16, *flags, 1, 1024, 7168, i64),
            group | {"MOST": 8, "WAITS": True, "BLOCK": 1024} | late, (RELEASE, _STORE, ACQUIRE),
        ),
        **{f"gather {merged}": (
            (bf16, bf16, i64, f32, i32, 128, 7168), {
                "EXPERTS": 250, "LOCAL": 64, "TOP_K": 8, "CHOICES": 8, "WEIGHTED": not merged, "MERGED": merged,
                "BLOCK": 1024,
            } | late, (_STORE,),
        ) for merged in (False, True)},
        "weigh": (
            (bf16, bf16, i64, f32, i32, 1024, 7168), {"EXPERTS": 250, "LOCAL": 64, "TOP_K": 8, "BLOCK": 1024}, (_STORE,)
        ),
    }  # fmt: skip
    return [
        case(f"experts-{name}".replace(" ", "-"), getattr(experts, name.split()[0]), *how, num_warps=4)
        for name, how in arguments.items()
    ]


def _attention_cases():
    """Kernels of `ctx.ops.flash_decode` and `ctx.ops.ring_attention`: heads of 128 elements, or of 96."""
    i32, i64, f32, bf16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
    place = (i32, i64, 1)  # members, context, this rank's number
    ring = dict.fromkeys(("WORLD", "SIZE", "GROUP", "SENDERS"), 4) | {"CAUSAL": True, "STRIPED": True}
    ring |= {"BLOCK": 64, "BLOCK_COPY": 1024}
    numbers = (*place, 32, 2048, 8190, 0.1)
    decode = {"WORLD": 4, "SIZE": 4, "GROUP": 4, "PIECES": 8, "BLOCK_H": 16, "BLOCK_KEYS": 64}
    cases = (
        (flash_decode, (
            bf16, bf16, bf16, i32, bf16, f32, f32, i32, f32, f32, i64, i64, *place, 0.1, 32, 8, 4096,
            *(4194304, 524288, 128) * 2,
        ), decode, 4, 3),
        (ring_attention, (bf16, bf16, bf16, bf16, f32, f32, f32, bf16, bf16, i64, i64, i64, *numbers), ring, 4, 2),
        (ring_gradients, (
            bf16, bf16, bf16, bf16, f32, f32, bf16, bf16, bf16, f32, bf16, bf16, f32, f32, *(i64,) * 5, *numbers
        ), ring, 8, 2),
    )  # fmt: skip
    return [
        case(
            f"operation-{kernel.__name__.replace('_', '-')}{'' if dim == 128 else f'-{dim}'}", kernel, args,
            kwargs | {"HEAD_DIM": dim}, (_PRODUCT, RELEASE, ACQUIRE), num_warps=warps, num_stages=stages,
        )
        for kernel, args, kwargs, warps, stages in cases
        for dim in ((96,) if kernel is ring_gradients else (128, 96))
    ]  # fmt: skip


def _sum(name, args, **constants):
    constants |= {"SIZE": 4, "SLOTS_WIDE": True, "OUT_WIDE": True, "BM": 2, "BN": 1024}
    return case(f"operation-sum-{name}", sum_slots, args, constants, (WIDE_LOAD, WIDE_STORE), num_warps=4)


def _product(name, kernel, args, common, *, wide=True, **constants):
    tiles = {"BM": 64, "BN": 64, "BK": 64, "GROUP": 8, "EVEN_K": True, "PRECISION": "ieee"}
    loads = {"A_CACHE": "", "B_CACHE": "", "STAGES": 2, "XCDS": 1, "CHUNK": 1, "SCALES": "none"}
    product = [] if args[1] is torch.float32 else [_PRODUCT]  # of float32 there is no such instruction on NVIDIA
    patterns = [*product, RELEASE, ACQUIRE, *([_COPIES, WIDE_STORE] if wide else [])]
    constants = {"SIZE": 4, **tiles, **loads, **common, **constants}
    return case(f"operation-{name}", kernel, args, constants, patterns, num_warps=4)
