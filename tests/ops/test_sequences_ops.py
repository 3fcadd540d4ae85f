"""Many calls one after the other, in groups, beside each other, in graphs; calls that are refused."""

import re
import time
from functools import partial

import pytest
import torch
from jobs_ccl import on_heap
from jobs_common import said_by, unlike
from jobs_ops import Tensors, call, verify
from jobs_sequences import back_to_back, captured, in_groups
from ops_cases import OPS, SEVERAL, Case, algorithms, dims, kinds
from rank_counts import rank_counts

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.ops import FusedConfig, FusedWorkspace

ENGINES = {
    "all_gather_matmul": ["copy_engine_push"],
    "matmul_all_reduce": ["copy_engine"],
    "matmul_reduce_scatter": ["copy_engine"],
}
"""Algorithms that use the copy engine."""

SHAPES = ((1, 3, 5), (17, 20, 33), (33, 40, 16))

IN_GROUPS = (
    Case("all_gather_matmul", "copy_engine_push", (6, 20, 17), dim=0, bias="columns"),
    Case("matmul_reduce_scatter", "copy_engine", (6, 20, 17), bias="rows"),
)
"""What any group is to serve, beside random calls."""


def random_case(generator, size):
    """A call, the same on every rank that has the same generator."""
    op = generator.choice(OPS)
    dim = generator.choice(dims(op))
    engines = ENGINES.get(op, []) if dim in (0, None) else []
    algorithm = generator.choice((*algorithms(op, size), *(engines if size > 1 else [])))
    config = SEVERAL if algorithm not in ("unfused", *engines, None) and generator.random() < 0.6 else {}
    return Case(
        op, algorithm, generator.choice(SHAPES), generator.choice(("float32", "bfloat16")),
        place=generator.choice(("heap", "ordinary", "gaps")), out_place=generator.choice(("heap", "ordinary")),
        bias=generator.choice(("", "columns")), dim=dim, config=config,
    )  # fmt: skip


def workspaces(device):
    """A workspace knows its last call, is used again, and lets go of what it has."""
    with Iris("8MiB", device=device) as ctx:
        case = Case("all_gather_matmul", "fetch" if ctx.num_ranks > 1 else "unfused", (20, 24, 32), dim=0)
        other, mine = Case("matmul_all_reduce", "unfused", (4, 4, 4)), FusedWorkspace()
        tensors, others = (Tensors(ctx, each, ctx.cur_rank, ctx.num_ranks) for each in (case, other))
        operands = tensors.out, tensors.a, tensors.b, None, FusedConfig(algorithm=case.algorithm), mine
        prepared = ctx.ops.all_gather_matmul_preamble(*operands, gather_dim=0)

        called = case.op, (20 * ctx.num_ranks, 24, 32), torch.float32, ctx.num_ranks
        assert prepared is mine
        assert mine.matches(*called)
        plan = next(iter(mine.calls.values())).plan
        for turn in range(3):
            tensors.fill(turn)
            assert call(ctx, case, tensors, workspace=mine) is mine
            assert verify(case, tensors, turn) == []
        (kept,) = mine.calls.values()
        assert kept.plan is plan
        assert (mine.aux_buffer is not None, mine.locks is not None) == (True, case.algorithm == "fetch")
        others.fill(0)
        call(ctx, other, others, workspace=mine)
        assert (mine.operation, len(mine.calls), mine.matches(*called)) == ("matmul_all_reduce", 2, False)
        own = call(ctx, other, others)
        assert own is call(ctx, other, others) is not mine
        assert own.variant == "unfused"
        with Iris("1MiB", device=device) as second:
            of_another = unlike((".*another context", lambda: call(second, other, others, workspace=mine)))
            mine.reset()
            call(second, other, others, workspace=mine)
            assert (of_another, verify(other, others), len(mine.calls)) == ([], [], 1)
            second.barrier()
        assert (bool(mine.calls), bool(mine.prepared), mine.owner) == (False, False, None)
        tensors.fill(5)
        call(ctx, case, tensors, workspace=mine)
        assert verify(case, tensors, 5) == []
        ctx.barrier()
    assert unlike((".*closed", lambda: call(ctx, case, tensors, workspace=mine))) == []


@on_heap("24MiB", packets=True)
def again_after_resets(ctx, case):
    """The epochs begin again, and what programs have sent each other before must not count."""
    tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
    for turn in range(4):
        tensors.fill(turn)
        call(ctx, case, tensors)
        assert verify(case, tensors, turn) == []
        ctx.ccl.reset()


@on_heap("24MiB", packets=True, IRIS_DEVICE_TIMEOUT="1")
def one_is_missing(ctx, case):
    """Programs without packets wait for those that wait for the packets of rank 1."""
    tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
    call(ctx, case, tensors)
    ctx.barrier()
    if ctx.cur_rank != 1:
        call(ctx, case, tensors)
    time.sleep(3)


@on_heap("24MiB", packets=True)
def far_apart(ctx):
    """Elements of a row with more than 2**31 others between the first and the last one."""
    memory, config = torch.empty(70_000_000 * 32, dtype=torch.bfloat16), FusedConfig(algorithm="packets")
    far = memory.as_strided((ctx.num_ranks, 32), (1, 70_000_000))
    near, matrix = torch.ones(1, 32, dtype=far.dtype), torch.ones(32, 32, dtype=far.dtype)
    ctx.ops.matmul_all_reduce(far[:1], near, matrix, config=config)
    wrong = far[0] != 32 * ctx.num_ranks
    out = torch.empty(far.shape, dtype=far.dtype)
    ctx.ops.all_gather_matmul(out, far[:1].fill_(1), matrix, config=config, gather_dim=0)
    wrong |= (out != 32).any(0)
    ctx.ops.matmul_all_gather(far, near, matrix, config=config)
    return int((wrong | (far != 32).any(0)).sum())


@on_heap("1MiB", packets=True, IRIS_SYSTEM_SIZE="1MiB")
def no_room_for_packets(ctx):
    """What is refused, and whether the heap is as it was: a part of a mailbox would be of no use."""
    product = torch.zeros(128, 4096), torch.ones(128, 16), torch.ones(16, 4096)
    rows = [torch.ones(64, 8192, dtype=torch.bfloat16) for _ in range(4)]
    small = torch.zeros(1, 64), torch.ones(1, 16), torch.ones(16, 64)
    ctx.ops.matmul_all_reduce(*small, config=FusedConfig(algorithm="packets"))  # there is a mailbox, a small one
    before = ctx.stats().largest_free
    said = [
        said_by(ctx.ops.matmul_all_reduce, *product, config=FusedConfig(algorithm="packets")),
        said_by(ctx.ops.all_reduce_rms_norm, *rows[:3], rows[3][0], config=Config(algorithm="sentinel_one_shot")),
    ]
    return [each.partition(":")[0] for each in said], before - ctx.stats().largest_free


def without_gradients(device):
    """Products of parameters in no_grad: also in a thread of the context, or bound there and called elsewhere."""
    with Iris("8MiB", device=device) as ctx:
        how = {"device": ctx.device, "requires_grad": True}
        a, b, bias = torch.ones(8, 8, **how), torch.ones(8, 8, **how), torch.ones(8, **how)
        for name in ("unfused", None):
            config, outs = FusedConfig(algorithm=name), [torch.zeros(8, 8, device=ctx.device) for _ in range(4)]
            product = partial(ctx.ops.matmul_all_reduce, A=a, B=b, bias=bias, config=config)
            with torch.no_grad():
                product(outs[0])
                work = product(outs[1], async_op=True)
                product(outs[2])  # behind it
                work.wait()
                bound = ctx.ops.bind("matmul_all_reduce", outs[3], a, b, bias, config=config)
            bound()
            assert [each.unique().tolist() for each in outs] == [[8.0 * ctx.num_ranks + 1]] * 4
            assert not any(each.requires_grad for each in outs)


def without_room(device, deterministic):
    """A product too large for the heap: the library takes what needs less and has the same bits, if anything."""
    with Iris("1MiB", device=device, deterministic=deterministic) as ctx:
        a, b = torch.ones(1024, 8, device=ctx.device), torch.ones(8, 4096, device=ctx.device)
        out = torch.zeros(1024, 4096, device=ctx.device)
        config = None if deterministic else FusedConfig(algorithm="two_shot")
        call = partial(ctx.ops.matmul_all_reduce, out, a, b)
        assert unlike(*[("UnsupportedError: products.no room", lambda: call(config=config))] * 2) == []
        if not deterministic:
            call()
        assert out.unique().tolist() == [8.0 * ctx.num_ranks * (not deterministic)]
        ctx.barrier()


def refused(device):
    """What is wrong with what wrong calls say; nothing is launched, so right ones still work afterwards."""
    with Iris("8MiB", device=device) as ctx:
        ops, size = ctx.ops, ctx.num_ranks
        a, b, out, part = ctx.ones(6 * size, 4), ctx.ones(4, 6), ctx.zeros(6 * size, 6), ctx.zeros(6, 6)
        grad = torch.ones(4, 6, device=ctx.device, requires_grad=True)
        halves, f8, f8z = torch.zeros(6, dtype=torch.half), torch.float8_e4m3fn, torch.float8_e4m3fnuz
        buffer, pairs = (torch.zeros(n, device=ctx.device) for n in (64 * (6 * size + 1), 48 * size))
        spread, column = (buffer.as_strided((6 * size, 4), (64, 1), begin) for begin in (0, 8))
        pairs = pairs.view(6 * size, 4, 2)
        negated, plain = torch.view_as_complex(pairs).conj().imag, pairs[..., 1]
        assert negated.is_neg()
        assert plain.stride() == negated.stride()
        total = ops.matmul_all_reduce
        reduce, scatter = partial(total, out), partial(ops.matmul_reduce_scatter, part)
        before, gather = partial(ops.all_gather_matmul, out, a[:6], b), partial(ops.all_gather_matmul, out)
        rows, columns, scaled = ctx.ones(6 * size), ctx.ones(6), partial(reduce, a.to(f8), b.to(f8))
        of_rows, of_blocks = partial(scaled, a_scales=rows), partial(scaled, a_scales=rows[:, None])
        two_shot, of = partial(FusedConfig, algorithm="two_shot"), FusedConfig
        total(spread, column, b[:, :4])  # between each other's rows they share nothing
        total(column, plain, b[:, :4])
        reduce(a, b)
        reduce(a, b, ctx.zeros(6))
        scaled(a_scales=rows, b_scales=columns)
        wrong = unlike(
            (r"ArgumentError: matmul_all_reduce: .*\(12, 6\)", lambda: total(out[:5], a, b)),
            ("ArgumentError: products.columns", lambda: reduce(a[:, :3], b)),
            ("ArgumentError: must be: A", lambda: reduce(a[0], b)),
            ("ArgumentError: products.empty", lambda: reduce(a[:, :0], b[:0])),
            ("ArgumentError: products.dtypes", lambda: reduce(a, b.half())),
            ("ArgumentError: products.dtype of output", lambda: total(out.half(), a, b)),
            ("UnsupportedError: .*int32", lambda: total(*(x.int() for x in (out, a, b)))),
            (r"ArgumentError: .*\(6,\), \(1, 6\) or \(12, 1\)", lambda: reduce(a, b, ctx.zeros(5))),
            ("ArgumentError: products.dtype of bias", lambda: reduce(a, b, halves.to(ctx.device))),
            ("ArgumentError: share: output and A", lambda: reduce(out[:, :4], b)),
            ("ArgumentError: .*torch.no_grad", lambda: reduce(a, grad)),
            ("TypeError: .*FusedConfig", lambda: reduce(a, b, config=Config())),
            ("TypeError: .*FusedWorkspace", lambda: reduce(a, b, workspace={})),
            ("UnsupportedError: .*num_fetch_sms", lambda: reduce(a, b, config=two_shot(num_fetch_sms=8))),
            ("UnsupportedError: .*block_size_m", lambda: reduce(a, b, config=two_shot(block_size_m=48))),
            ("ArgumentError: products.rows", lambda: scatter(a[:-1], b)),
            (r"ArgumentError: .* \(6, 6\)", lambda: ops.matmul_reduce_scatter(out, a, b)),
            ("ArgumentError: products.tiles", lambda: scatter(a, b, layout="tiles")),
            ("ArgumentError: products.layout", lambda: scatter(a, b, layout="columns")),
            ("ArgumentError: products.fit", before),
            ("ArgumentError: must be: gather_dim", lambda: before(gather_dim=2)),
            (".*num_sms", lambda: before(gather_dim=0, config=of(algorithm="fetch", num_sms=2, num_fetch_sms=2))),
            ("ArgumentError: products.scales", of_rows),
            ("ArgumentError: must be: b_scales", lambda: of_rows(b_scales=columns.half())),
            (r"ArgumentError: .*\(12, 1\), .* \(1, 1\)", lambda: scaled(a_scales=rows[:5], b_scales=columns)),
            ("ArgumentError: products.floats", lambda: reduce(a, b, a_scales=rows, b_scales=columns)),
            ("UnsupportedError: .*gather_dim=0",
             lambda: gather(a[:, :2].to(f8), b.to(f8), a_scales=rows, b_scales=columns)),
            ("UnsupportedError: .*block_size_k",
             lambda: of_blocks(b_scales=ctx.ones(1, 1), config=two_shot(block_size_k=256))),
            # the same kinds of calls, which are known now
            ("ArgumentError: share: output and A",
             lambda: total(spread, buffer.as_strided((6 * size, 4), (64, 1), 64), b[:, :4])),
            (".*lazily negated", lambda: total(column, negated, b[:, :4])),
            ("ArgumentError: share: output and B", lambda: reduce(a, out[:4])),
            ("ArgumentError: share: output and bias", lambda: reduce(a, b, out[0])),
            ("ArgumentError: share: output and a_scales", lambda: scaled(a_scales=out.view(-1)[:12], b_scales=columns)),
            ("UnsupportedError: products.unlike floats", lambda: reduce(a.to(f8), b.to(f8z))),
        )  # fmt: skip
        scatter(a, b)
        ctx.barrier()
        assert part.unique().tolist() == [4.0 * size]
        with torch.no_grad():
            reduce(a, grad)
        assert total(out[:0], a[:0], b).operation == ""
        said = str(ops.explain("all_gather_matmul", out, a[:6], b, gather_dim=0))
        ctx.barrier()
    return wrong + unlike(("HeapClosedError", lambda: reduce(a, b))), said


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    how = [[3, 1], [2, 0, 3], [2], [1, 3, 0, 2]], 4, IN_GROUPS, random_case, "triton"
    assert pool.run(in_groups, num_ranks, device, *how) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, seldom=[2]))
def test_back_to_back_with_changing_data(pool, num_ranks, device):
    cases = [Case(op, algorithm, (17, 20, 33), dim=dim) for op, algorithm, dim in kinds(num_ranks)]
    cases, calls = (cases, 24) if device == "cpu" else (None, 300)  # there, random ones
    job = partial(back_to_back, slow=True, draw=random_case, cases=cases, backend="triton")
    assert pool.run(job, num_ranks, device, calls, 12, timeout_s=300.0) == [[]] * num_ranks


PROGRAMS = {"num_sms": 4, "block_size_n": 64, "block_size_k": 16}


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    *((job, n, ()) for job in (without_gradients, workspaces) for n in (1, 2)),
    *((without_room, 2, (deterministic,)) for deterministic in (False, True)),
    (again_after_resets, 2, (Case("matmul_all_reduce", "packets", (4, 64, 256), config=PROGRAMS),)),
    (again_after_resets, 2, (Case("all_gather_matmul", "packets", (4, 256, 256), dim=0, config=PROGRAMS),)),
])  # fmt: skip
def test_no_grad_workspaces_resets_and_little_room(pool, job, num_ranks, device, args):
    assert pool.run(job, num_ranks, device, *args) == [None] * num_ranks


def test_a_late_packet_names_its_sender(pool):
    case = Case("all_gather_matmul", "packets", (4, 256, 64), dim=0, config=PROGRAMS)
    for text in pool.run(partial(said_by, one_is_missing), 3, "cpu", case):
        assert re.search(r"DeviceTimeoutError: .*\brank 1\b", text)


def test_packets_without_room_leave_the_heap_alone(pool):
    assert pool.run(no_room_for_packets, 2, "cpu") == [(["UnsupportedError"] * 2, 0)] * 2


def test_packets_of_elements_that_are_far_apart(pool):
    assert pool.run(far_apart, 2, "cpu") == [0, 0]


def test_refused_calls(pool, device):
    for wrong, explained in pool.run(refused, 2, device):
        assert wrong == []
        text = "all_gather_matmul: \\w+, the cheapest by its model\n  unfused .*us, model\n  fetch .*\n  copy_engine"
        assert re.match(text, explained, re.DOTALL)


@pytest.mark.slow
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [
        Case(op, algorithm, (130, 264, 96), "bfloat16", place=place, out_place=place, dim=dim, bias="columns")
        for op in OPS
        for algorithm in (*algorithms(op, num_ranks), *ENGINES.get(op, ()))
        for dim in (dims(op)[:1] if algorithm in ENGINES.get(op, ()) else dims(op))
        for place in ("heap", "ordinary")
    ] + [Case(op, "packets", (8, 264, 192), "bfloat16", dim=dims(op)[0], bias="columns") for op in OPS]
    found = pool.run(captured, num_ranks, "cuda", cases, 50, "", 10, "triton", timeout_s=500.0)
    assert found == [[]] * num_ranks
