"""What divides models: tokens to experts and back, heads instead of tokens, attention to a divided cache.

    python benchmarks/models.py [--ranks N] [--quick] [--only experts] [--axis tokens=128]

One process per GPU; medians of rounds in which all take turns, every result compared in the timed configuration.

experts: 256 experts, top 8, rows of 7168 elements: "dispatch" of 8-bit floats with a scale for every 128 of them, and
"turn", the combine of bfloat16 results behind it; of "iris merged", ranks send one sum of a token's results.  "nccl"
sends the same rows with the numbers that the host asks for (torch.distributed.all_to_all_single), eagerly, as it has
to.  Targets for 128 tokens of each rank: 1.3 times what the rows take at 370 GB/s, and 6 us for each way; a quarter of
NCCL's time.  For 4096 tokens: 330 GB/s.  Bytes are those of a row for each choice of another rank's expert, also where
one row is sent for several choices.
ulysses: 32 heads of 128 elements, bfloat16, divided instead of tokens; "ccl" is ctx.ccl.all_to_all of as many bytes,
"nccl" the one of NCCL with the copies that it needs.  Target: 0.9 of "ccl".
flash_decode: 32 heads of queries, 8 of keys, 128 elements, a cache of 4096 tokens on each rank.  "alone" attends to
this rank's part, "alone+ccl" adds an all_reduce of as many bytes as the result has.  Target: the time of "alone+ccl".

On CPU ranks (--device cpu) the same code runs with tiny shapes, with gloo for NCCL; the times say nothing then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ccl_peers import OFF

from iris_core import bench

if TYPE_CHECKING:
    from iris_core import Iris
    from iris_core.bench import RunOptions, State

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
LINK, WAY_US, OVER_BOUND, LEAST_GB_PER_S = 370e9, 6.0, 1.3, 330
DECODED, SCALED, SPOILED = 128, 128, 96.0


def timers(state: State, *, eager: bool = True) -> list[tuple[str | None, str]]:
    """The timers of this machine, and what they add to a provider's name."""
    if not state.on_gpu:
        return [(None, "")]
    return [("graph", ""), ("events", " eager")] if eager else [("graph", "")]


# -- experts ----------------------------------------------------------------------------------------------------------
def tokens(options: RunOptions) -> list[int]:
    """Tokens of a rank."""
    if options.device == "cpu":
        return [8]
    return [DECODED] if options.quick else [DECODED, 4096]


class Tokens:
    """This rank's tokens and their experts; a token's results are the token itself, so it comes back as it was."""

    def __init__(self, ctx: Iris, number: int, hidden: int, experts: int, top_k: int) -> None:
        drawn = torch.Generator().manual_seed(ctx.cur_rank)
        device, self.size, self.top_k, self.local = ctx.device, ctx.num_ranks, top_k, experts // ctx.num_ranks
        self.x = torch.randint(-7, 8, (number, hidden), generator=drawn).float().to(FP8).to(device)
        self.scales = torch.rand(number, hidden // SCALED, generator=drawn).to(device)
        self.chosen = torch.rand(number, experts, generator=drawn).topk(top_k).indices.int().to(device)
        self.weights = torch.full((number, top_k), 1 / top_k, device=device)
        self.group = ctx.ops.experts(
            number, hidden, experts, top_k=top_k, dtype=FP8, result=BF16, scales=hidden // SCALED
        )
        self.out = torch.empty(number, hidden, dtype=BF16, device=device)
        self.rows, _, self.turn = self.dispatch()
        self.arrived = int(self.turn.offsets[-1])
        self.want = self.rows[: self.arrived].clone()
        self.results = torch.zeros(self.rows.shape, dtype=BF16, device=device)
        self.results[: self.arrived] = self.want.to(BF16)
        away = number * top_k * (self.size - 1) / self.size  # choices of other ranks' experts, about
        self.sent_nbytes = int(away * hidden * (1 + 4 / SCALED)), int(away * hidden * 2)

    def dispatch(self) -> tuple[torch.Tensor, torch.Tensor, object]:
        return self.group.dispatch(self.x, self.chosen, self.weights, scales=self.scales)

    def there_and_back(self) -> None:
        _, _, turn = self.dispatch()
        self.group.combine(self.results, turn, self.out)

    def there_and_merged(self) -> None:
        _, _, turn = self.dispatch()
        self.group.combine(self.results, turn, self.out, merged=True)

    def has_arrived(self) -> bool:
        return torch.equal(self.rows[: self.arrived].view(torch.uint8), self.want.view(torch.uint8))

    def is_back(self) -> bool:
        return torch.equal(self.out, self.x.to(BF16))

    def spoil(self) -> None:
        self.rows.view(torch.uint8).fill_(1)
        self.out.fill_(SPOILED)

    # -- the same by torch.distributed
    def send_by_peer(self) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        flat = self.chosen.flatten()
        order = flat.argsort(stable=True)
        given = torch.bincount(flat // self.local, minlength=self.size)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        gives, takes = given.tolist(), taken.tolist()
        for each in (self.x.view(torch.uint8), self.scales):
            rows = each[order // self.top_k]
            got = rows.new_empty(sum(takes), rows.shape[1])
            dist.all_to_all_single(got, rows, takes, gives)
            self.by_peer = got if each is not self.scales else self.by_peer
        return order, gives, takes, self.by_peer

    def there_and_back_by_peer(self) -> None:
        order, gives, takes, got = self.send_by_peer()
        back = torch.empty(len(order), got.shape[1], dtype=BF16, device=got.device)
        dist.all_to_all_single(back, got.view(FP8).to(BF16), gives, takes)
        results = torch.empty_like(back)
        results[order] = back
        weighted = results.view(*self.chosen.shape, -1).float() * self.weights[..., None]
        self.out.copy_(weighted.sum(1))

    def peer_has_sent(self) -> bool:
        return len(self.by_peer) == self.arrived


@bench.register
@bench.axis("tokens", tokens)
@bench.axis("what", ["dispatch", "turn"])
def experts(state: State, ctx: Iris) -> None:
    """Tokens to their experts, and back."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    state.resources.enter_context(ctx.scope())
    sizes = (7168, 256, 8) if state.on_gpu else (256, 8, 2)
    each, goes_back = Tokens(ctx, state["tokens"], *sizes), state["what"] == "turn"
    nbytes = sum(each.sent_nbytes[: 1 + goes_back])
    state.set_bytes(nbytes)
    ours, theirs = (
        (each.there_and_back, each.there_and_back_by_peer) if goes_back else (each.dispatch, each.send_by_peer)
    )
    for timer, suffix in timers(state):
        if timer:
            state.set_timer(timer)
        check = each.is_back if goes_back else each.has_arrived
        checks = {"check": check, "prepare": each.spoil, "baseline": "nccl"}
        state.provider(f"iris{suffix}", ours, **checks)
        if goes_back:
            state.provider(f"iris merged{suffix}", each.there_and_merged, **checks)
    check = each.is_back if goes_back else each.peer_has_sent
    state.provider("nccl", theirs, check=check, prepare=each.spoil)
    if not state.on_gpu:
        return
    if state["tokens"] == DECODED:
        bound_us = OVER_BOUND * nbytes / LINK * 1e6 + WAY_US * (1 + goes_back)
        state.target("iris", "time_us", at_most=bound_us)
        state.target("iris", "ratio", at_least=4.0)
    else:
        state.target("iris", "gb_per_s", at_least=LEAST_GB_PER_S)


# -- heads instead of tokens ------------------------------------------------------------------------------------------
def all_tokens(options: RunOptions) -> list[int]:
    """Tokens of the whole sequence."""
    if options.device == "cpu":
        return [16]
    return [8192] if options.quick else [2048, 8192, 32768]


@bench.register
@bench.axis("tokens", all_tokens)
@bench.axis("place", ["ordinary", "heap"])
def ulysses(state: State, ctx: Iris) -> None:
    """From all heads of some tokens to some heads of all tokens."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    if size < 2:
        state.skip("needs two ranks or more")
    state.resources.enter_context(ctx.scope())
    heads, dim = (32, 128) if state.on_gpu else (2 * size, 16)
    length = state["tokens"] // size
    make = ctx.empty if state["place"] == "heap" else torch.empty
    x, out = (
        make(shape, dtype=BF16, device=ctx.device)
        for shape in ((length, heads, dim), (state["tokens"], heads // size, dim))
    )
    drawn = torch.randint(-9, 10, (state["tokens"], heads, dim), generator=torch.Generator().manual_seed(1)).to(BF16)
    x.copy_(drawn[rank * length : (rank + 1) * length])
    want = drawn[:, rank * heads // size : (rank + 1) * heads // size].to(ctx.device)
    flat_x, flat_out = torch.ones_like(x), torch.empty_like(out)
    state.set_bytes(x.nbytes, bus_factor=(size - 1) / size)

    def by_nccl() -> None:
        parts = x.view(length, size, heads // size, dim).transpose(0, 1).contiguous()
        dist.all_to_all_single(out, parts.view(out.shape))

    def is_right() -> bool:
        return torch.equal(out, want)

    def spoil() -> None:
        out.fill_(SPOILED)

    checks = {"check": is_right, "prepare": spoil}
    for timer, suffix in timers(state):
        if timer:
            state.set_timer(timer)
        ours = lambda: ctx.ops.ulysses(out, x, scatter_dim=1, gather_dim=0)
        state.provider(f"iris{suffix}", ours, **checks, baseline=f"ccl{suffix}")
        flat = lambda: ctx.ccl.all_to_all(flat_out.view(-1), flat_x.view(-1))
        state.provider(f"ccl{suffix}", flat, check=None)
        state.provider(f"nccl{suffix}", by_nccl, **checks, peer=True)
    if state.on_gpu:
        state.target("iris", "ratio", at_least=0.9)


# -- attention to a divided cache -------------------------------------------------------------------------------------
def sequences(options: RunOptions) -> list[int]:
    """Sequences of a batch."""
    if options.device == "cpu":
        return [2]
    return [8] if options.quick else [1, 8, 64]


@bench.register
@bench.axis("batch", sequences)
def flash_decode(state: State, ctx: Iris) -> None:
    """A new token of each sequence, and the keys of all ranks."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    state.resources.enter_context(ctx.scope())
    batch, (heads, kv_heads, dim, length) = state["batch"], (32, 8, 128, 4096) if state.on_gpu else (4, 2, 16, 24)
    drawn = torch.Generator().manual_seed(2)
    q = torch.randn(batch, heads, dim, generator=drawn).to(ctx.device, BF16)
    k, v = (
        torch.randn(ctx.num_ranks, batch, kv_heads, length, dim, generator=drawn).to(ctx.device, BF16) for _ in range(2)
    )
    lengths = torch.full((batch,), length, dtype=torch.int32, device=ctx.device)
    mine, out, total = (k[ctx.cur_rank].clone(), v[ctx.cur_rank].clone()), torch.empty_like(q), torch.empty_like(q)
    together = ctx.ops.flash_decode(batch, heads, kv_heads, dim, dtype=BF16)
    alone = ctx.ops.flash_decode(batch, heads, kv_heads, dim, dtype=BF16, group=[ctx.cur_rank])
    keys, values = (each.permute(1, 2, 0, 3, 4).reshape(batch, kv_heads, -1, dim).float() for each in (k, v))
    scores = torch.einsum("bhgd,bhtd->bhgt", q.float().view(batch, kv_heads, -1, dim), keys) * dim**-0.5
    want = torch.einsum("bhgt,bhtd->bhgd", scores.softmax(-1), values).reshape(q.shape)
    del k, v, keys, values, scores
    state.set_bytes(2 * mine[0].nbytes)

    def is_right() -> bool:
        return torch.allclose(out.float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))

    def alone_and_reduced() -> None:
        alone(q, *mine, lengths, total)
        ctx.ccl.all_reduce(total, total)

    for timer, suffix in timers(state):
        if timer:
            state.set_timer(timer)
        ours = lambda: together(q, *mine, lengths, out)
        spoil = lambda: out.fill_(SPOILED)
        state.provider(f"iris{suffix}", ours, check=is_right, prepare=spoil, baseline=f"alone+ccl{suffix}")
        state.provider(f"alone+ccl{suffix}", alone_and_reduced, check=None)
        state.provider(f"alone{suffix}", lambda: alone(q, *mine, lengths, total), check=None)
    if state.on_gpu:
        state.target("iris", "ratio", at_least=1.0)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="triton",
    heap_size="4GiB",
    environ=OFF,
    on_cpu={"heap_size": "48MiB"},
    results="results/models-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
