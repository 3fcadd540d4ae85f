"""Rank jobs of test_experts: tokens go to experts and back, on exact data."""

import random
import time
from types import SimpleNamespace
from unittest import mock

import torch
from jobs_nodes import refusal

from iris_core import Iris
from iris_triton.collectives.experts import ExpertKernels


def layer(size, local, top_k, hidden, max_tokens, dtype, seed, turn):
    """What all members bring to a turn, and which number each expert multiplies by: small whole numbers."""
    drawn = torch.Generator().manual_seed(1000 * seed + turn)
    experts, members = size * local, []
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


def passes(device, group, case, turns):
    """What is wrong with turns of random tokens, where ranks are late at random."""
    wrong = []
    with Iris("64MiB", device=device) as ctx:
        everyone = group or list(range(ctx.num_ranks))
        if ctx.cur_rank not in everyone:
            return wrong
        me, size, late = everyone.index(ctx.cur_rank), len(everyone), random.Random(ctx.cur_rank)
        local, top_k, hidden, most, dtype, scales = case
        dtype = getattr(torch, dtype)
        experts = ctx.ops.experts(most, hidden, size * local, top_k=top_k, dtype=dtype, scales=scales, group=group)
        for turn in range(turns):
            members = layer(size, local, top_k, hidden, most, dtype, len(everyone), turn)
            mine = members[me]
            x, weights, chosen = (each.to(ctx.device) for each in (mine.x, mine.weights, mine.chosen))
            chosen = chosen.int() if turn % 2 else chosen
            given = mine.scales.to(ctx.device) if scales else None
            time.sleep(late.choice([0, 0, 0.01]))
            rows, counts, state = experts.dispatch(x, chosen, weights if turn % 3 else None, scales=given)
            time.sleep(late.choice([0, 0, 0.01]))
            y = torch.zeros(rows.shape, dtype=experts.result, device=ctx.device)
            for number in range(local):
                wanted = arrivals(members, me * local + number)
                begin, end = state.offsets[number : number + 2].tolist()
                if counts[number] != len(wanted) or end - begin != len(wanted):
                    wrong.append((turn, "counts", number, counts.tolist(), state.offsets.tolist(), len(wanted)))
                    continue
                if wanted:
                    there = torch.stack([members[m].x[t].float() for m, t in wanted])
                    if not torch.equal(rows[begin:end].float().cpu(), there):
                        wrong.append((turn, "rows", number))
                    if scales:
                        there = torch.stack([members[m].scales[t] for m, t in wanted])
                        if not torch.equal(state.scales_of_rows[begin:end].cpu(), there):
                            wrong.append((turn, "scales", number))
                y[begin:end] = rows[begin:end].float() * (me * local + number + 1)
            out = experts.combine(y, state)
            factor = (mine.chosen + 1).float() * (mine.weights if turn % 3 else 1)  # 0 for no choice
            total = mine.x.float() * factor.sum(1, keepdim=True)
            if not torch.equal(out.float().cpu(), total.to(experts.result).float()):
                wrong.append((turn, "combined", (out.float().cpu() - total).abs().max().item()))
    return wrong


def refused():
    """What is refused, and by whom."""
    with Iris("16MiB", device="cpu") as ctx:
        make = ctx.ops.experts
        said = [
            refusal(lambda: make(4, 16, 3, top_k=1)),
            refusal(lambda: make(4, 5, 2, top_k=1)),
            refusal(lambda: make(4, 16, 2, top_k=3)),
            refusal(lambda: make(4, 16, 2, top_k=1, result=torch.int32)),
            refusal(lambda: make(4, 16 + 16 * ctx.cur_rank, 2, top_k=1)),
            refusal(lambda: make(1 << 20, 1 << 16, 2, top_k=1)),
        ]
        group = make(4, 16, 2, top_k=1)
        x, chosen = torch.ones(2, 16, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        said += [
            refusal(lambda: group.dispatch(x.float(), chosen)),
            refusal(lambda: group.dispatch(torch.ones(5, 16, dtype=torch.bfloat16), chosen)),
            refusal(lambda: group.dispatch(x, chosen.t().expand(2, 2))),
            refusal(lambda: group.dispatch(x, chosen, scales=torch.ones(2, 1))),
        ]
        first = group.dispatch(x, chosen)
        group.dispatch(x, chosen)
        said.append(refusal(lambda: group.combine(first.rows, first.turn)))
    return [*said, refusal(lambda: group.dispatch(x, chosen))]


def replays(turns):
    """Whether turns that a graph replays are right, where each rank's device rests before some of them."""
    with Iris("64MiB", device="cuda") as ctx:
        size, me, wrong = ctx.num_ranks, ctx.cur_rank, []
        local, top_k, hidden, most = 3, 2, 64, 20
        experts = ctx.ops.experts(most, hidden, size * local, top_k=top_k)
        x = torch.zeros(most, hidden, dtype=torch.bfloat16, device=ctx.device)
        chosen = torch.full((most, top_k), -1, device=ctx.device)
        factors = torch.arange(1, local + 1, device=ctx.device) + me * local

        def step():
            rows, _, state = experts.dispatch(x, chosen)
            place = torch.searchsorted(state.offsets[1:], torch.arange(len(rows), device=ctx.device), right=True)
            return experts.combine(rows * factors[place.clamp(max=local - 1)][:, None].bfloat16(), state)

        step()
        torch.cuda.synchronize()
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        late = random.Random(me)
        for turn in range(turns):
            mine = layer(size, local, top_k, hidden, most, torch.bfloat16, 5, turn)[me]
            n = len(mine.x)
            x[:n].copy_(mine.x)
            chosen.fill_(-1)
            chosen[:n].copy_(mine.chosen)
            if late.random() < 0.2:
                torch.cuda._sleep(int(late.random() * 2e6))
            graph.replay()
            total = mine.x.float() * (mine.chosen + 1).sum(1, keepdim=True)
            if not torch.equal(out[:n].float().cpu(), total.bfloat16().float()):
                wrong.append(turn)
        ctx.barrier()
        return wrong


def unawaited(case):
    """Pass tokens without waiting for any."""
    with mock.patch.object(ExpertKernels, "receive"):
        passes("cpu", None, case, 3)
