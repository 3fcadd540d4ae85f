"""`ctx.ops.experts`: tokens to the ranks of their experts, and back, on exact data."""

import math
import random
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from jobs_ccl import late_inside
from jobs_common import place_in, unlike

from iris_core import Iris
from iris_core.nn import ExpertParallel, combine, dispatch
from iris_triton.collectives.experts import ExpertKernels


def layer_of(size, local, top_k, hidden, max_tokens, dtype, seed, turn):
    """What all members bring to a turn, and which number each expert multiplies by: small whole numbers."""
    drawn = torch.Generator().manual_seed(1000 * seed + turn)
    experts, members = int(size * local), []
    for member in range(size):
        n = int(torch.randint(0, max_tokens + 1, (), generator=drawn)) if (member + turn) % 3 else max_tokens
        x = torch.randint(-3, 4, (n, hidden), generator=drawn).to(torch.float32)
        score = torch.rand(n, experts, generator=drawn)
        score[:, 0] -= 2.0 * (turn % 2)  # an expert that gets few, in every other turn
        chosen = score.topk(top_k, dim=1).indices
        chosen[torch.rand(n, top_k, generator=drawn) < 0.1] = -1
        weights = torch.randint(1, 3, (n, top_k), generator=drawn).float()
        scales = torch.randint(1, 9, (n, 3), generator=drawn).float()
        members.append(SimpleNamespace(x=x.to(dtype), chosen=chosen, weights=weights, scales=scales))
    return members


def arrivals(members, expert):
    """The tokens of an expert, in the order of their members: (member, token) each."""
    return [(m, t) for m, each in enumerate(members) for t in range(len(each.x)) if expert in each.chosen[t].tolist()]


def passes(device, group, case, turns, gone=()):
    """What is wrong with turns of random tokens, where ranks are late at random; some are gone half-way."""
    wrong = []
    with Iris("64MiB", device=device) as ctx:
        me, size, late = place_in(ctx, group)
        if me is None:
            return wrong
        local, top_k, hidden, most, dtype, scales = case
        dtype = getattr(torch, dtype)
        block = math.ceil(int(size * local) / size)
        experts = ctx.ops.experts(most, hidden, int(size * local), top_k=top_k, dtype=dtype, scales=scales, group=group)
        for turn in range(turns):
            members = layer_of(size, local, top_k, hidden, most, dtype, size, turn)
            if gone and turn == turns // 2:
                if me in gone:
                    break
                experts.leave_out([(group or range(size))[each] for each in gone])
            if gone and turn >= turns // 2:
                for number, each in enumerate(members):
                    each.chosen[torch.isin(each.chosen // block, torch.tensor(gone))] = -1
                    each.chosen = each.chosen[:0] if number in gone else each.chosen
                    each.x = each.x[: len(each.chosen)]
            mine = members[me]
            x, weights, chosen = (each.to(ctx.device) for each in (mine.x, mine.weights, mine.chosen))
            chosen = chosen.where(chosen >= 0, (-1, experts.experts, 1 << 32)[turn % 3])  # no expert's numbers
            chosen = chosen.int() if turn % 2 else chosen
            given = mine.scales.to(ctx.device) if scales else None
            time.sleep(late.choice([0, 0, 0.01]))
            rows, counts, state = experts.dispatch(x, chosen, weights if (turn + me) % 3 else None, scales=given)
            time.sleep(late.choice([0, 0, 0.01]))
            y = torch.zeros(rows.shape, dtype=experts.result, device=ctx.device)
            for number in range(len(counts)):
                wanted = arrivals(members, me * block + number)
                begin, end = state.offsets[number : number + 2].tolist()
                if counts[number] != len(wanted) or end - begin != len(wanted):
                    wrong.append((turn, "counts", number, counts.tolist(), state.offsets.tolist(), len(wanted)))
                    continue
                there = {"rows": ([members[m].x[t].float() for m, t in wanted], rows)}
                if scales:
                    there["scales"] = [members[m].scales[t] for m, t in wanted], state.scales_of_rows
                for name, (parts, found) in there.items():
                    if wanted and not torch.equal(found[begin:end].float().cpu(), torch.stack(parts)):
                        wrong.append((turn, name, number))
                y[begin:end] = rows[begin:end].float() * (me * block + number + 1)
            out = experts.combine(y, state, merged=turn % 2 == 0)
            factor = (mine.chosen + 1).float() * (mine.weights if (turn + me) % 3 else 1)  # 0 for no choice
            total = mine.x.float() * factor.sum(1, keepdim=True)
            if not torch.equal(out.float().cpu(), total.to(experts.result).float()):
                wrong.append((turn, "combined", (out.float().cpu() - total).abs().max().item()))
    return wrong


def reference(members, factors, grads):
    """Gradients by torch of each member's x and weights, and of the factors, by which experts multiply twice."""
    whole = factors.clone().requires_grad_()
    found = []
    for each, grad in zip(members, grads, strict=True):
        x, weights = each.x.float().clone().requires_grad_(), each.weights.clone().requires_grad_()
        chosen, is_one = each.chosen.clamp(min=0), (each.chosen >= 0).float()
        out = x
        for _ in range(2):
            out = (out[:, None] * whole[chosen] * (weights * is_one)[:, :, None]).sum(1)
        (out * grad).sum().backward()
        found.append((out.detach(), x.grad, weights.grad))
    return found, whole.grad


def differentiates(device, group, case, turns):
    """What is wrong with gradients of two layers of a group; ranks are late, and in each turn one needs none."""
    wrong = []
    with Iris("64MiB", device=device) as ctx:
        me, size, late = place_in(ctx, group)
        if me is None:
            return wrong
        local, top_k, hidden, most, dtype, _ = case
        dtype = getattr(torch, dtype)
        number_of_all = int(size * local)
        block = math.ceil(number_of_all / size)
        tokens = ctx.ops.experts(most, hidden, number_of_all, top_k=top_k, dtype=dtype, group=group)
        for turn in range(turns):
            members = layer_of(size, local, top_k, hidden, most, dtype, size, turn)
            drawn = torch.Generator().manual_seed(turn)
            factors = torch.randint(1, 3, (number_of_all, hidden), generator=drawn).float()
            grads = [torch.randint(-1, 2, each.x.shape, generator=drawn).float() for each in members]
            for each in members:
                each.x.clamp_(-1, 1)
            found, of_factors = reference(members, factors, grads)
            given = factors[me * block : (me + 1) * block], members[me].x, members[me].weights
            own, x, weights = (each.to(ctx.device).requires_grad_(me != turn % size) for each in given)
            chosen = members[me].chosen.to(ctx.device)
            out = x
            for _ in range(2):
                time.sleep(late.choice([0, 0, 0.01]))
                rows, _, state = dispatch(tokens, out, chosen.int() if turn % 2 else chosen, weights)
                number = torch.searchsorted(state.offsets[1:], torch.arange(len(rows), device=ctx.device), right=True)
                time.sleep(late.choice([0, 0, 0.01]))
                factor = own[number.clamp(max=len(own) - 1)] if len(own) else own.sum()
                out = combine((rows * factor).to(dtype), state)
            tokens.dispatch(x.detach(), chosen)  # another turn before the backward pass
            out.backward(grads[me].to(ctx.device, dtype))
            grad = own.grad, of_factors[me * block : (me + 1) * block]
            pairs = zip((out, x.grad, weights.grad), found[me], strict=True)
            for name, (got, want) in zip(("out", "x", "weights", "factors"), (*pairs, grad), strict=True):
                if me == turn % size and name != "out":
                    wrong += [(turn, name, "needless")] if got is not None else []
                elif not torch.equal(got.detach().float().cpu(), want):
                    wrong.append((turn, name, (got.detach().float().cpu() - want).abs().max().item()))
    return wrong


def keeps(device, turns=0):
    """What is wrong with turns that are kept, and combined in another order, twice, and by halves; and of repeats."""
    wrong, turns = [], turns or (2 if device == "cpu" else 4)
    with Iris("64MiB", device=device) as ctx:
        size, me, late = ctx.num_ranks, ctx.cur_rank, random.Random(ctx.cur_rank)
        local, top_k, hidden, most = 2, 2, 32, 9
        tokens = ctx.ops.experts(most, hidden, size * local, top_k=top_k, dtype=torch.float32)

        def begin(turn, **how):
            mine = layer_of(size, local, top_k, hidden, most, torch.float32, 7, turn)[me]
            x, chosen, weights = (each.to(ctx.device) for each in (mine.x, mine.chosen, mine.weights))
            time.sleep(late.choice([0, 0, 0.01]))
            weighted = mine.x * (mine.weights * (mine.chosen >= 0)).sum(1, keepdim=True)
            return tokens.send(x, chosen, weights, **how), weighted

        for turn in range(turns):
            first, want = begin(2 * turn)
            first = tokens.receive(first, keep=True)
            sent, later = begin(2 * turn + 1, weighted=(turn + me) % 2 == 1)
            tokens.send_back(2 * first.rows, first.turn)  # while the second one's tokens are under way
            time.sleep(late.choice([0, 0, 0.01]))
            second = tokens.receive(sent)
            got = [(tokens.receive_back(first.turn), 2 * want)]
            got += [(tokens.combine(second.rows.clone(), second.turn, merged=True), later)]
            got += [(tokens.combine(3 * first.rows, first.turn, merged=True), 3 * want)]
            time.sleep(late.choice([0, 0, 0.01]))
            wrong += [(turn, place) for place, (a, b) in enumerate(got) if not torch.equal(a.cpu(), b)]
        few, beside = ctx.ops.experts(8, 256, 2 * size, top_k=4, dtype=torch.float32), ctx.zeros(1 << 14)
        chosen = torch.zeros(8, 4, dtype=torch.int32, device=ctx.device)  # which 2 experts of rank 0 have no room for
        wrong += unlike(
            ("", lambda: few.dispatch(torch.ones(8, 256, device=ctx.device), chosen)),
            ("DeviceError: experts: token . of rank . names an expert of rank 0 twice", ctx.barrier),
        )
        wrong += ["overwritten"] * bool(beside.any())
    return wrong


def refused():
    with Iris("16MiB", device="cpu") as ctx:
        make, ring = ctx.ops.experts, ctx.ops.ring_attention
        wrong = unlike(
            ("ArgumentError: products.bytes", lambda: make(4, 5, 2, top_k=1)),
            ("UnsupportedError: .*int32", lambda: make(4, 16, 2, top_k=1, result=torch.int32)),
            ("ArgumentError: .*max_tokens", lambda: make(8 / 2, 16, 2, top_k=1)),
            ("ArgumentError: .*max_tokens", lambda: make([4, torch.tensor(4)][ctx.cur_rank], 16, 2, top_k=1)),
            ("ArgumentError: must be: dtype", lambda: make(4, 16, 2, top_k=1, dtype="bf16")),
            ("ArgumentError: must be: max_tokens", lambda: make(None, 16, 2, top_k=1)),
            ("ArgumentError: must be: scale", lambda: ring(2, 1, 8, 16, dtype=torch.float32, scale="x")),
            ("UnsupportedError", lambda: make(1 << 20, 1 << 16, 2, top_k=1)),
        )
        group = make(4, 16, 2, top_k=1)
        with torch.inference_mode():
            small = make(4, 16, 2, top_k=1, result=torch.float32)
        x, chosen = torch.ones(2, 16, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)

        def within(rows, counts, offsets):  # results that are contiguous, and begin within a word
            return torch.cat([rows[0, :1], 2 * rows.flatten()])[1:].view_as(rows)

        double = ExpertParallel(group, within)  # a layer without weights
        for each in (x, torch.ones(33, dtype=torch.bfloat16)[1:].view(2, 16), x.new_ones(1, 17)[:, :16]):
            assert (double(each, chosen[: len(each)]) == 2).all()
        assert "experts=2, hidden=16, top_k=1" in repr(double)
        first = group.dispatch(x, chosen)
        kept = [group.dispatch(x, chosen, keep=True) for _ in range(2)][1]
        wrong += unlike(
            ("ArgumentError: products.layer", lambda: make(4, 16, 2, top_k=1 + 2 * ctx.cur_rank)),
            ("RankMismatchError: .*result: bfloat16 on rank 0; float32 on",  # as `group` and `small` have it
             lambda: make(4, 16, 2, top_k=1, result=(torch.bfloat16, torch.float32)[ctx.cur_rank])),
            (r"ArgumentError: .*\bx\b.* \(2, 16\), bfloat16", lambda: group.dispatch(x.float(), chosen)),
            (r"ArgumentError: .*\bx\b.* \(n, 16\).* \(32,\)", lambda: group.dispatch(x.view(32), chosen)),
            ("TypeError: must be: chosen", lambda: group.dispatch(x, chosen.tolist())),
            ("ArgumentError", lambda: group.dispatch(torch.ones(5, 16, dtype=torch.bfloat16), chosen)),
            ("ArgumentError", lambda: group.dispatch(x, chosen.t().expand(2, 2))),
            ("ArgumentError", lambda: group.dispatch(x, chosen, scales=torch.ones(2, 1))),
            ("ArgumentError: products.another call", lambda: group.combine(first.rows, first.turn)),
            ("ArgumentError: products.members", lambda: group.leave_out([ctx.cur_rank])),
            ("", lambda: group.send_back(kept.rows, kept.turn)),
            ("ArgumentError: products.not received", lambda: group.send_back(kept.rows, kept.turn)),
            ("ArgumentError: .*weighted", lambda: group.dispatch(x, chosen, weighted=True)),
            ("ArgumentError: products.another group", lambda: small.combine(kept.rows, kept.turn)),
            ("ArgumentError: products.gradients", lambda: dispatch(small, x, chosen)),
            ("TypeError: must be: turn", lambda: group.combine(kept.rows, None)),
            (r"ArgumentError: .*chosen \(1, 1\).* x \(2, 16\)", lambda: double(x, chosen[:1])),
            ("", lambda: small.leave_out([1 - ctx.cur_rank])),
        )  # fmt: skip
    return wrong + unlike(("HeapClosedError", lambda: group.dispatch(x, chosen)))


def replays(turns):
    """Whether forward and backward passes that a graph replays are right, where a device rests before some of them."""
    with Iris("64MiB", device="cuda") as ctx:
        size, me, wrong, n = ctx.num_ranks, ctx.cur_rank, [], 20
        local, top_k, hidden, bf16 = 3, 2, 64, torch.bfloat16
        tokens = ctx.ops.experts(n, hidden, size * local, top_k=top_k)
        x = torch.zeros(n, hidden, dtype=bf16, device=ctx.device, requires_grad=True)
        weights = torch.zeros(n, top_k, device=ctx.device, requires_grad=True)
        chosen = torch.full((n, top_k), -1, device=ctx.device)
        factors = torch.arange(1, local + 1, device=ctx.device) + me * local

        def multiply(rows, counts, offsets):
            place = torch.searchsorted(offsets[1:], torch.arange(len(rows), device=ctx.device), right=True)
            return rows * factors[place.clamp(max=local - 1)][:, None].bfloat16()

        layer, stream = ExpertParallel(tokens, multiply), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(x, chosen, weights).sum().backward()
        torch.cuda.synchronize()
        ctx.barrier()
        x.grad = weights.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = layer(x, chosen, weights)
            out.sum().backward()
        for turn in range(turns):
            mine = layer_of(size, local, top_k, hidden, n, bf16, 5, turn)[me]
            whole = torch.zeros(n, hidden), torch.zeros(n, top_k), torch.full((n, top_k), -1)
            with torch.no_grad():
                given = mine.x, mine.weights, mine.chosen
                for to, all_of_it, part in zip((x, weights, chosen), whole, given, strict=True):
                    all_of_it[: len(part)] = part  # the others have no choice
                    to.copy_(all_of_it)
            for each in (x, weights):
                each.grad.zero_()
            if me == turn % size:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            factor = (whole[2] + 1).float()  # 0 for no choice
            total = (whole[1] * factor).sum(1, keepdim=True)
            right = whole[0] * total, total.expand(n, hidden), whole[0].sum(1, keepdim=True) * factor
            for name, got, want in zip(("out", "x", "weights"), (out, x.grad, weights.grad), right, strict=True):
                if not torch.equal(got.float().cpu(), want.to(got.dtype).float()):
                    wrong.append((turn, name))
        ctx.barrier()
        return wrong


def all_jobs(case):
    return [*passes("cpu", None, case, 2), *differentiates("cpu", None, case, 1), *keeps("cpu", 2)]


def unawaited(case):
    dispatch, give_back = ExpertKernels.dispatch, ExpertKernels.give_back
    with (
        mock.patch.object(ExpertKernels, "dispatch", lambda *given: dispatch(*given[:-1], False)),
        mock.patch.object(ExpertKernels, "give_back", lambda *given: give_back(*given[:-1], False)),
    ):
        passes("cpu", None, case, 2)


def unmet():
    """Give results back twice in a turn, whether or not those of the first time are used."""
    with mock.patch.object(ExpertKernels, "meet"):
        keeps("cpu", 2)


exhaustive = pytest.mark.exhaustive
# experts of a rank on average, choices, elements, most tokens, dtype, scales
ONE, MANY, FP8 = (1, 1, 32, 5, "float32", 0), (2, 4, 1200, 9, "bfloat16", 0), (3, 2, 48, 30, "float8_e4m3fn", 3)
UNEVEN = (1.5, 3, 48, 7, "float32", 3)  # of 2 ranks one has 2 and one has 1; of 3 ranks two have 2


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    (passes, 2, (None, ONE, 3)), (passes, 4, ([3, 1, 0], MANY, 3)), (passes, 3, (None, FP8, 3)),
    (differentiates, 3, (None, ONE, 2)), (differentiates, 4, ([3, 1, 0], MANY, 2)),
    (passes, 4, ([2, 0, 3, 1], MANY, 4, (0, 3))),  # two are gone half-way
    *((passes, n, (None, UNEVEN, 3)) for n in (2, 3)), (differentiates, 3, (None, UNEVEN, 2)),
    (keeps, 3, ()), pytest.param(keeps, 2, (), marks=exhaustive(device="cpu")),
])  # fmt: skip
def test_tokens_reach_their_experts_and_come_back(pool, device, job, num_ranks, args):
    assert pool.run(job, num_ranks, device, *args) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=exhaustive)])
def test_programs_that_are_late(pool, tmp_path, num_ranks):
    case = 2, 2, 16, 3, "float32", 0
    args = str(tmp_path / "changes"), 0.05, all_jobs, case
    assert pool.run(late_inside, num_ranks, *args) == [[]] * num_ranks


def test_what_is_refused(pool):
    assert pool.run(refused, 2) == [[]] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool, num_ranks):
    assert pool.run(replays, num_ranks, 200) == [[]] * num_ranks
