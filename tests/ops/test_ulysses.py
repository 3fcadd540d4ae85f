"""`ctx.ops.ulysses`: one dimension divided among ranks instead of another one."""

import functools

import pytest
import torch
from jobs_common import place_in, unlike

from iris_core import Iris
from iris_core.nn import ulysses

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


def refused():
    """What is wrong with what is refused, on both ranks; a right call behind is right."""
    with Iris("4MiB", device="cpu") as ctx:
        x, out = torch.ones(2, 4, 6), torch.empty(2, 8, 3)
        call = functools.partial(ctx.ops.ulysses, scatter_dim=2, gather_dim=1)
        wrong = unlike(
            ("ArgumentError: .*must be two", lambda: call(out, x, scatter_dim=1)),
            ("ArgumentError: .*2 ranks must divide", lambda: call(out, x[:, :, :5])),
            (r"ArgumentError: .*the output must be \(2, 8, 3\)", lambda: call(out[:1], x)),
            (r"ArgumentError: .*the output must be \(4, 4, 3\)", lambda: call(x, x, gather_dim=0)),
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


def test_what_is_refused(pool):
    assert pool.run(refused, 2) == [[]] * 2
