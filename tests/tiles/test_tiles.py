"""Tiles and views of one rank, and tile-level collectives between ranks, also in a row, late and in vain."""

import re

import jobs_tiles as jobs
import pytest
import torch
import triton
import triton.language as tl
from gluon_kernels import said_by_the_compiler
from jobs_common import unlike
from jobs_tiles import LAUNCHES, OPS, RAISED, WITH_LOCKS, Case, call, default_layout
from rank_counts import rank_counts
from tables import says, table
from triton.experimental import gluon

import iris_gluon.interpreter
from iris_core import Iris
from iris_gluon import IrisDeviceCtx
from iris_triton import DeviceContext, interpreter, tiles, x
from iris_triton.testing.languages import in_gluon

M, N, BM, BN = 11, 21, 4, 8


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


@triton.jit
def add_twice(
    inp, out, M: tl.constexpr, N: tl.constexpr, in_m: tl.constexpr, in_n: tl.constexpr, out_m, out_n,
    BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Copy and add tiles, through those ways to their addresses that no collective takes; some sizes are constants."""
    layout: tl.constexpr = default_layout([BM, BN], vector=2)
    view = tiles.make_tensor_view(inp, M, N, in_m, in_n)
    for i in range(view.number_of_tiles(BM, BN)):
        pid_m, pid_n = i // tl.cdiv(N, BN), i % tl.cdiv(N, BN)
        rm, rn, mask = tiles.compute_tile_indices(pid_m, pid_n, M, N, BM, BN, layout)
        here, there = tiles.compute_tile_offsets(rm, rn, in_m, in_n, out_m, out_n)
        # the same tile, seen from one tile further on, where a mask of the source is needed
        place = tiles.TileView(pid_m, pid_n, BM, BN, layout)
        ptr, _ = view.offset(BM, BN).offset_tile_ptr(place, -BM, -BN)
        first = tiles.TensorView(tiles.offset_ptr(out, out_m, out_n, offset_m=1, offset_n=2), M, N, out_m, out_n)
        to, mask = first.offset_tile_ptr(place, offset_m=-1, offset_n=-2, src_mask=mask)
        tl.store(to, tl.load(ptr, mask=mask), mask=mask)
        to, mask = tiles.tile_ptr(out, M, N, out_m, out_n, pid_m, pid_n, BM, BN, layout)
        tl.store(to, tl.load(out + there, mask=mask) + tl.load(inp + here, mask=mask), mask=mask)


KERNELS = [add_twice, in_gluon(add_twice, default_layout=iris_gluon.default_layout)]


@pytest.mark.parametrize("kernel", KERNELS, ids=["triton", "gluon"])
def test_every_way_to_a_tile(kernel):
    plain, transposed = torch.arange(float(M * N)).view(M, N), torch.arange(float(2 * M * N)).view(2 * N, M)[::2].t()
    for inp in (plain, transposed):
        whole = torch.full((M + 2, N + 3), -1.0)
        out = whole[:M, :N]
        kernel[(1,)](inp, out, M, N, *inp.stride(), *out.stride(), BM=BM, BN=BN)
        assert torch.equal(out, 2 * inp)
        assert (whole[M:] == -1).all()
        assert (whole[:, N:] == -1).all()


@triton.jit
def transform(out, count: tl.constexpr, dies: tl.constexpr, chunk: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out + pid, tiles.chiplet_transform_chunked(pid, count, dies, chunk))


@table("count, dies, chunk", [(70, 8, 4), (12, 3, 1), (7, 1, 3)])
def test_chunks_stay_on_a_die(count, dies, chunk):
    """Programs of one die take chunks of neighbours; those after the last whole round stay."""
    out, numbers = torch.zeros(count, dtype=torch.int32), torch.arange(count)
    transform[(count,)](out, count, dies, chunk)
    whole = count // (dies * chunk) * dies * chunk
    dealt = numbers[:whole].view(-1, dies, chunk).transpose(1, 2).flatten()
    assert out.tolist() == [*dealt.tolist(), *range(whole, count)]


@triton.jit
def wrong(what: tl.constexpr, data, locks, context, W: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, W)
    view = tiles.make_tensor_view(data, 8, 8, 8, 1)
    place = tiles.TileView(0, 0, 8, 8)
    tile = tiles.Tile(0, 0, 8, 8, place.partial(view))
    if what == "dim":
        ctx.all_gather(tile, view, 2)
    elif what == "shape":
        ctx.all_gather(tiles.Tile(0, 0, 16, 8, place.partial(view)), view, 0)
    elif what == "no locks":
        ctx.all_reduce(tile, view, view, config=tiles.AllReduceConfig("two_shot"))
    elif what == "ring without locks":
        x.all_reduce_ring(tile, view, view, ctx)
    else:
        call(ctx, what, tile, place, view, view, locks, ctx.rank, W, 0)


@gluon.jit
def without_layout(context, data):
    ctx = IrisDeviceCtx.initialize(context)
    ctx.gather(tiles.TileView(0, 0, 8, 8), tiles.make_tensor_view(data, 8, 8, 8, 1), 0)


F32, I32 = torch.float32, torch.int32


@table("what, dtype, locks, key", [
    ("dim", F32, I32, "dim"), ("shape", F32, I32, "block"), ("tree", F32, I32, "variant"),
    ("no locks", F32, I32, "locks"), ("ring without locks", F32, I32, "ring"),
    ("ring", torch.float8_e5m2, torch.int64, "sums"),
    ("atomic", torch.int8, I32, "adds"), ("spinlock", F32, F32, "of a spinlock"), ("ring", F32, I32, "of a ring"),
    ("one_shot", F32, torch.uint8, "made"), ("reduce_scatter", F32, F32, "made"),
])  # fmt: skip
def test_mistakes_are_found_by_the_compiler(what, dtype, locks, key):
    assert re.search(says(f"tiles.{key}"), said_by_the_compiler(wrong, what, dtype, locks, torch.int64, 2))


def test_a_tile_without_data_needs_a_layout_in_gluon():
    assert re.search(says("tiles.layout"), said_by_the_compiler(without_layout, torch.int64, F32))


def test_number_of_words_which_the_host_checks():
    of, words = (9, 33, 8, 16), {"two_shot": 6 * 19, "spinlock": 6, "atomic": 0}
    assert {variant: tiles.lock_words(*of, 8, variant) for variant in words} == words
    with Iris("1MiB", device="cpu") as ctx:
        locks, many = tiles.make_locks(ctx, *of), ctx.zeros(60, dtype=torch.int64)
        tiles.check_locks(ctx, locks, *of)
        tiles.check_locks(ctx, ctx.zeros(6, dtype=torch.int32), *of, "spinlock")
        assert unlike(
            ("ValueError: tiles.variant", lambda: tiles.lock_words(*of, 8, "tree")),
            ("ValueError: .*0", lambda: tiles.lock_words(9, 33, 8, 0, 8)),
            ("ValueError: tiles.words", lambda: tiles.check_locks(ctx, locks, 10, 33, 4, 16)),
            ("ValueError: tiles.dtype", lambda: tiles.check_locks(ctx, many.int(), *of)),
            ("ValueError: .*contiguous", lambda: tiles.check_locks(ctx, many[::2], *of)),
            ("NotOnHeapError", lambda: tiles.check_locks(ctx, locks.clone(), *of)),
        ) == []  # fmt: skip


LANGUAGES = ["triton", "gluon"]
DTYPES = ["float32", "float16", "bfloat16", "int32"]
RANKS = [2, 3, 4, 8, 1]

MIXED = [
    Case("one_shot", "float32", src_dtype="bfloat16", dst_dtype="bfloat16"),
    Case("two_shot", "bfloat16", src_dtype="float32", dst_dtype="bfloat16"),
    Case("ring", "bfloat16", src_dtype="float32", dst_dtype="bfloat16"),
    Case("ring", "float32", src_dtype="float16", dst_dtype="float32"),
    Case("atomic", "bfloat16", dst_dtype="float32"),
    Case("spinlock", "float16", dst_dtype="float32"),
    Case("ring", "float32", in_place=True),
    *(Case(op, "int8", dst_dtype="int32") for op in ("two_shot", "ring")),
]
"""Tensors of different types."""


def cases_of(language, ranks, device="cpu"):
    """Every operation once; together they get every dtype and form.

    On 8 ranks each language has half of them, and on 4 CPU ranks the other half.  On some numbers of ranks, kernels
    raise flags as in AMD's Iris, an int32 for each tile, or tensors differ in type.
    """
    cases = []
    for i, op in enumerate(OPS):
        mine = i % 2 == LANGUAGES.index(language)
        if (ranks == 8 and not mine) or (ranks == 4 and mine and device == "cpu"):
            continue
        turn = RANKS.index(ranks) + i + 2 * LANGUAGES.index(language)
        form = "memory" if op in WITH_LOCKS and turn % 3 == 1 else "tile"
        in_place = op in RAISED and turn % 3 != 1 and turn % 2 == 0
        cases.append(Case(op, DTYPES[turn % 4], form, strided=turn % 2 == 1, in_place=in_place))
    if ranks in (2, 3) or (ranks == 4 and device != "cpu"):
        cases += [Case(op, DTYPES[(ranks + i) % 4], form="raised", strided=i % 2 == 1) for i, op in enumerate(RAISED)]
    if ranks == 3:
        cases += [case for case in MIXED if language == "triton" or case.op == "ring"]
    return cases


def check(sums, cases):
    """Where all ranks get the same, they have the same bytes."""
    assert len(sums[0]) == LAUNCHES * len(cases)
    for i, case in enumerate(cases):
        if case.op in ("one_shot", "two_shot", "owner", "ring", "all_gather_rows", "all_gather_columns"):
            first, *others = (one[i * LAUNCHES : (i + 1) * LAUNCHES] for one in sums)
            assert others == [first] * len(others), case
            assert len(set(first)) == LAUNCHES  # the data did change


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, seldom=[2, 4, 8]))
@pytest.mark.parametrize("language", LANGUAGES)
def test_launches_in_a_row(pool, language, num_ranks, device):
    cases = cases_of(language, num_ranks, device)
    check(pool.run(jobs.run_cases, num_ranks, language, cases, device, timeout_s=300.0), cases)


@pytest.mark.parametrize("num_ranks", [3])
def test_no_kernel_waits_for_one_that_has_not_begun(pool, num_ranks, device):
    for op in ["two_shot", "reduce_scatter", "spinlock", "atomic"]:
        assert all(pool.run(jobs.one_after_the_other, num_ranks, "triton", op, device))


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2]))
@pytest.mark.parametrize("language", LANGUAGES)
def test_algorithms_may_share_their_locks(pool, language, num_ranks, device):
    """Their calls are counted with 64 bits; numbers are those of variants."""
    ops = ["one_shot", "two_shot", 3, "ring", "owner", 2, 1, "two_shot", "ring", "one_shot"]
    for wrong, stamp in pool.run(jobs.sequence, num_ranks, language, ops, device, 2**31 - 32):
        assert wrong == []
        assert stamp >> 3 == 2**28 - 4 + len(ops)


def test_a_wait_in_vain_ends_and_is_reported(pool, device):
    for op in ["one_shot", "two_shot", "ring", "spinlock"]:
        (text, untouched), (other, _) = pool.run(jobs.nobody_else_calls, 2, "triton", op, device)
        assert "rank 0" in text
        kind, _, said = text.partition(": ")
        assert (kind, other) == ("DeviceTimeoutError", f"DeviceTimeoutError: rank 0 has reported: {said}")
        assert untouched or op != "spinlock"  # what the lock protects stays as it is


def test_mistakes_are_found_by_the_executor(pool):
    mistakes = [("all_to_all", "float32", 11), ("ring", "bfloat16", 0)]
    texts = ["AssertionError: .*columns", "AssertionError: .*memory"]
    for said in pool.run(jobs.mistaken, 2, "triton", mistakes):
        assert all(re.search(text, line, re.DOTALL) for text, line in zip(texts, said, strict=True)), said


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("language", LANGUAGES)
def test_fifty_replays_of_a_graph(pool, language, num_ranks):
    how = ["one_shot", "two_shot", "owner", "ring"], "cuda", 0, 50
    for wrong, stamp in pool.run(jobs.sequence, num_ranks, language, *how, timeout_s=300.0):
        assert (wrong, stamp >> 3) == ([], 4 * 51)
