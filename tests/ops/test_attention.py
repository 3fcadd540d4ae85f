"""Sequences that are divided among ranks: `ctx.ops.flash_decode`, `ctx.ops.ring_attention`, `ctx.ops.ulysses`."""

import functools
import time
from functools import partial

import pytest
import torch
from jobs_ccl import late_inside
from jobs_common import place_in, unlike

from iris_core import Iris
from iris_core.nn import ring_attention, ulysses

UNITS = {"float32": 4e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Of the sums of absolute values: what weights and results may lose when they are rounded."""


def weights_of(q, k, causal=False):
    """softmax(q k^T / sqrt(head_dim)) with key heads for groups of heads; zeros where there is no key."""
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1)


def assert_near(name, got, want, bound):
    """No element of a result is further away than it may be."""
    error = (got.detach().double().cpu() - want.detach()).abs()
    wrong = ~(error <= bound + 1e-30)
    assert not wrong.any(), (name, int(wrong.sum()), error[wrong].max().item())


def decodes(device, group, case, turns):
    """Tokens of sequences that are spread over the members, each late at random."""
    with Iris("16MiB", device=device) as ctx:
        me, size, late = place_in(ctx, group)
        if me is None:
            return
        batch, heads, kv_heads, dim, capacity, dtype, pieces = case
        dtype, unit = getattr(torch, dtype), UNITS[dtype]
        decode = ctx.ops.flash_decode(batch, heads, kv_heads, dim, dtype=dtype, pieces=pieces, group=group)
        drawn, outs, wants = torch.Generator().manual_seed(3), [], []
        for turn in range(turns):
            q = torch.randn(batch, heads, dim, generator=drawn).to(dtype)
            k, v = (torch.randn(size, batch, capacity, kv_heads, dim, generator=drawn).to(dtype) for _ in range(2))
            lengths = torch.randint(0, capacity + 1, (size, batch), generator=drawn, dtype=torch.int32)
            lengths[turn % size] = 0  # on one member there is no key, and of one sequence on none
            lengths[:, turn % batch] *= turn % 3 > 0
            mine = [each[me].to(ctx.device).transpose(1, 2) for each in (k, v)]  # with strides
            mine = mine if turn % 2 else [each.contiguous() for each in mine]
            time.sleep(late.choice([0, 0, 0.02]))
            given = q.to(ctx.device, copy=True)
            outs.append(decode(given, *mine, lengths[me].to(ctx.device), given if turn % 2 else None))
            for b in range(batch):
                parts = [[each[m, b, : lengths[m, b]] for m in range(size)] for each in (k, v)]
                keys, values = (torch.cat(each).transpose(0, 1).double() for each in parts)
                weights = weights_of(q[b].double()[:, None], keys)[:, 0]
                values = values.repeat_interleave(heads // kv_heads, 0)
                want, bound = (torch.einsum("hk,hkd->hd", weights, each) for each in (values, values.abs()))
                wants.append((turn, b, want, unit * bound))
        for turn, b, want, bound in wants:
            assert_near((turn, b), outs[turn][b], want, bound)
        bits = torch.stack(outs).view(torch.uint8)
        of_all = bits.new_empty(size, *bits.shape)
        ctx.ccl.all_gather(of_all, bits, group)
        assert (of_all == bits).all()


def rings(device, group, case, turns):
    """Outputs and gradients of layers of attention that share a ring, each rank late at random."""
    with Iris("16MiB", device=device) as ctx:
        me, _, late = place_in(ctx, group)
        if me is None:
            return
        heads, kv_heads, length, dim, dtype, causal, striped = case
        dtype, unit = getattr(torch, dtype), UNITS[dtype]
        how = {"dtype": dtype, "causal": causal, "striped": striped, "group": group, "gradients": True}
        ring = ctx.ops.ring_attention(heads, kv_heads, length, dim, **how)
        drawn, made = torch.Generator().manual_seed(4), []
        is_mine = ring.part(torch.ones(heads, length, dim)) > 0
        for _ in range(turns):
            sizes = heads, kv_heads, kv_heads, heads
            wholes = [torch.randn(n, length, dim, generator=drawn).to(dtype) for n in sizes]
            parts = [ring.part(each).to(ctx.device).requires_grad_() for each in wholes[:3]]
            time.sleep(late.choice([0, 0, 0.02]))
            out = ring_attention(ring, *parts)
            _, lse = ring(*(each.detach() for each in parts))
            made.append((wholes, parts, out, lse))
        for wholes, _, out, _ in reversed(made):  # other calls lie between a forward pass and its backward pass
            time.sleep(late.choice([0, 0, 0.02]))
            out.backward(ring.part(wholes[3]).to(ctx.device))
        for turn, (wholes, parts, out, lse) in enumerate(made):
            q, k, v, grad = (each.double().requires_grad_() for each in wholes)
            times, scale = heads // kv_heads, dim**-0.5
            weights, values = weights_of(q, k, causal), v.repeat_interleave(times, 0)
            want = weights @ values
            want.backward(grad)
            with torch.no_grad():
                keys = k.repeat_interleave(times, 0)
                each_row = (grad.abs() * (weights @ values.abs())).sum(-1)[..., None]
                most = weights * (grad.abs() @ values.abs().mT + each_row)
                bounds = most @ keys.abs() * scale, most.mT @ q.abs() * scale, weights.mT @ grad.abs()
                logs = (q @ keys.mT * scale).masked_fill(weights == 0, float("-inf")).logsumexp(-1)
            pairs = [("out", out, want, weights @ values.abs())]
            pairs += [
                (name, x.grad, y.grad, bound.view(len(y), -1, length, dim).sum(1))
                for name, x, y, bound in zip("qkv", parts, (q, k, v), bounds, strict=True)
            ]
            for name, got, exact, bound in pairs:
                mine = is_mine[: len(got)]
                exact, bound = ring.part(exact.detach()), unit * ring.part(bound.detach())
                got = got.detach().cpu()
                assert_near((turn, name), got[mine], exact[mine], bound[mine])
                assert name == "out" or not got[~mine].any(), (turn, name, "beyond the sequence")
            mine = is_mine[:, :, 0]
            assert_near((turn, "lse"), lse.cpu()[mine], ring.part(logs[..., None])[:, :, 0][mine], 1e-5)


def refused():
    with Iris("4MiB", device="cpu") as ctx:
        decode, ring, one = ctx.ops.flash_decode, ctx.ops.ring_attention, ctx.cur_rank
        wrong = unlike(
            ("ArgumentError: must be: heads", lambda: decode(1, 3, 2, 16)),
            ("ArgumentError: products.sizes", lambda: decode(1, 2, 2, 16 - 16 * one)),  # one of the ranks
            ("UnsupportedError: .*int32", lambda: decode(1, 2, 2, 16, dtype=torch.int32)),
            ("RankMismatchError", lambda: decode(1 + one, 2, 2, 16)),
            ("ArgumentError", lambda: ring(2, 1, 0, 16)),
            ("RankMismatchError", lambda: ring(2, 1, 8, 16, causal=one == 0)),
            ("UnsupportedError", lambda: ring(2, 1, 1 << 22, 16)),
        )
        made, q = decode(1, 2, 1, 16), torch.ones(1, 2, 16, dtype=torch.bfloat16)
        k, n = torch.ones(1, 1, 5, 16, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)
        rows = ring(2, 1, 8, 16)
        x = torch.ones(2, rows.rows, 16, dtype=torch.bfloat16)
        wrong += unlike(
            (r"ArgumentError: .*\bv\b.* \(1, 1, 5, 16\)", lambda: made(q, k, k[:, :, :4], n)),
            (r"ArgumentError: .*\bv\b.* \(1, 1, 5, 16\)", lambda: made(q, k, k.sum(), n)),
            ("ArgumentError: products.gaps", lambda: made(q, k.mT.contiguous().mT, k, n)),
            (r"ArgumentError: .*lengths.* \(1,\), int32", lambda: made(q, k, k, n.long())),
            ("TypeError: must be: lengths", lambda: made(q, k, k, [1])),
            ("TypeError: must be: q", lambda: rows([1], x, x)),
            (r"ArgumentError: .*\bk\b.* \(1, 4, 16\)", lambda: rows(x, x, x)),
            ("ArgumentError: .*out and v share", lambda: made(q, k, kv := k.clone(), n, kv[0, :, :2])),
            ("ArgumentError: .*out and q share", lambda: rows(x, x[:1], x[:1], x)),
            ("ArgumentError: .*gradients=True",
             lambda: rows.gradients(x, x, x[:1], x[:1], x, x[:, :, 0].float())),
            ("ArgumentError: .*gradient", lambda: made(q.clone().requires_grad_(), k, k, n)),
        )  # fmt: skip
    return wrong + unlike(("HeapClosedError", lambda: made(q, k, k, n)))


def too_long(device):
    """What is wrong where a sequence of rank 0 has more keys than its cache, or less than none."""
    wrong = []
    with Iris("4MiB", device=device) as ctx:
        decode = ctx.ops.flash_decode(1, 2, 1, 16, dtype=torch.float32)
        q, kv = torch.ones(1, 2, 16, device=ctx.device), torch.rand(2, 1, 1, 5, 16, device=ctx.device)
        for length, counted in ((6, 5), (-1, 0)):
            mine = [3] * 2 if ctx.cur_rank else (length, counted)
            given = [torch.tensor([each], dtype=torch.int32, device=ctx.device) for each in mine]
            outs = [torch.zeros_like(q) for _ in given]
            said = rf"DeviceError: .*sequence 0 has {length} keys on rank 0, where there is room for 5"
            wrong += unlike(("", partial(decode, q, *kv, given[0], outs[0])), (said, ctx.barrier))
            decode(q, *kv, given[1], outs[1])
            wrong += [] if torch.equal(*outs) else [(length, outs)]
    return wrong


# sequences, heads, key heads, elements of a head, keys of a rank at most, dtype, pieces
DECODES = [
    (3, None, (3, 6, 2, 16, 70, "float32", 3)),  # groups of three heads
    (4, [3, 1, 0], (2, 4, 4, 32, 40, "bfloat16", 1)),  # a piece for each
    (1, None, (2, 20, 1, 64, 90, "float16", None)),  # more heads than a tile
    (2, None, (2, 4, 2, 80, 40, "bfloat16", 2)),
    (3, None, (1, 2, 1, 5, 40, "float32", 3)),  # columns of tiles are left
]
# heads, key heads, tokens, elements of a head, dtype, causal, striped
RINGS = [
    (3, None, (2, 2, 75, 16, "float32", False, False)), (4, [3, 1, 0], (4, 2, 97, 16, "float32", True, False)),
    (1, None, (2, 1, 70, 32, "bfloat16", True, True)),
    (2, None, (2, 1, 2, 16, "float16", True, False)),  # a member without tokens
    (3, None, (1, 1, 64, 16, "float32", False, True)),  # exactly a tile
    (3, None, (2, 1, 70, 24, "float32", True, False)), (2, None, (1, 1, 40, 80, "bfloat16", False, False)),
]  # fmt: skip


@pytest.mark.parametrize(("job", "turns", "num_ranks", "group", "case"), [
    *((decodes, 4, *each) for each in DECODES), *((rings, 2, *each) for each in RINGS),
])  # fmt: skip
def test_results(pool, device, job, turns, num_ranks, group, case):
    assert pool.run(job, num_ranks, device, group, case, turns) == [None] * num_ranks


DECODE_SMALL, RING_SMALL = (1, 2, 1, 16, 40, "float32", 2), (1, 1, 45, 16, "float32", False, False)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("job", "case", "turns"), [(decodes, DECODE_SMALL, 4), (rings, RING_SMALL, 2)])
def test_programs_that_are_late(pool, tmp_path, job, case, turns, num_ranks):
    args = str(tmp_path / "changes"), 0.1, job, "cpu", None, case, turns
    assert pool.run(late_inside, num_ranks, *args) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sequences_that_are_too_long(pool, device, num_ranks):
    assert pool.run(too_long, num_ranks, device) == [[]] * num_ranks


SHAPE = (2, 12, 24, 5)
"""Of the whole: batch, tokens, heads, elements."""


def there_and_back(device, group, dims, dtype):
    """Both ways, and gradients, are right on numbers that say where they belong."""
    tokens, heads = dims
    with Iris("8MiB", device=device) as ctx:
        me, size, _ = place_in(ctx, group)
        if me is None:
            return
        whole = torch.arange(torch.Size(SHAPE).numel()).view(SHAPE).to(getattr(torch, dtype))
        mine, wanted = (whole.chunk(size, dim)[me].contiguous().to(ctx.device) for dim in (tokens, heads))
        for turn in range(3):
            x, out, back = mine + turn, torch.empty_like(wanted), torch.empty_like(mine)
            if turn == 1:  # strides of any kind
                x = x.transpose(0, 3).contiguous().transpose(0, 3)
            ctx.ops.ulysses(out, x, scatter_dim=heads, gather_dim=tokens, group=group)
            ctx.ops.ulysses(back, out, scatter_dim=tokens, gather_dim=heads, group=group, async_op=True).wait()
            assert torch.equal(out, wanted + turn), turn
            assert torch.equal(back, mine + turn), turn
        x = mine.float().requires_grad_()
        (ulysses(ctx, x, heads, tokens, group=group) * wanted.float()).sum().backward()
        assert torch.equal(x.grad, mine.float())


def refused_by_ulysses():
    """What is wrong with what is refused, on both ranks; a right call behind is right."""
    with Iris("4MiB", device="cpu") as ctx:
        x, out = torch.ones(2, 4, 6), torch.empty(2, 8, 3)
        call = functools.partial(ctx.ops.ulysses, scatter_dim=2, gather_dim=1)
        wrong = unlike(
            ("ArgumentError: products.dims", lambda: call(out, x, scatter_dim=1)),
            (r"ArgumentError: .*scatter_dim=3 .* -3 to 2", lambda: call(out, x, scatter_dim=3)),
            ("ArgumentError: .*gather_dim=-4", lambda: ulysses(ctx, x, 0, -4)),
            ("ArgumentError: .*scatter_dim=1.0", lambda: ulysses(ctx, x, (1, 1.0)[ctx.cur_rank], 1)),
            ("TypeError: must be: x", lambda: call(out, [1])),
            ("ArgumentError: ccl.operations", lambda: ctx.ops.bind("ulysses", out, x, scatter_dim=2, gather_dim=1)),
            ("ArgumentError: products.divide", lambda: call(out, x[:, :, :5])),
            (r"ArgumentError: .*output.* \(2, 8, 3\)", lambda: call(out[:1], x)),
            (r"ArgumentError: .*output.* \(4, 4, 3\)", lambda: call(x, x, gather_dim=0)),
        )
        ctx.ops.ulysses(out, x, scatter_dim=-1, gather_dim=-2)
        assert (out == 1).all()
    return wrong


@pytest.mark.parametrize(("num_ranks", "group", "dims", "dtype"), [
    (1, None, (1, 2), "float32"), (2, None, (1, 2), "bfloat16"), (3, None, (1, 2), "float32"),
    (4, [3, 1, 0], (1, -2), "int32"), (2, None, (2, 1), "float32"), (2, None, (1, 0), "float32"),
    pytest.param(4, None, (1, 2), "float32", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_there_and_back(pool, device, num_ranks, group, dims, dtype):
    assert pool.run(there_and_back, num_ranks, device, group, dims, dtype) == [None] * num_ranks


@pytest.mark.parametrize("job", [refused, refused_by_ulysses])
def test_what_is_refused(pool, job):
    assert pool.run(job, 2) == [[]] * 2
