"""Attention of ranks on several nodes, which kernels do not reach: by torch, with collectives between the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from iris_core.errors import ArgumentError

_ROWS = 256
"""Queries whose scores are in memory at a time."""


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), zeros where both are -inf."""
    return (scores - lse).exp().nan_to_num(0.0)


def _attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values, zeros where all scores are -inf, and the logarithms of the sums of exponents."""
    lse = scores.logsumexp(-1)
    return _weights(scores, lse[..., None]) @ values, lse


class Decode:
    """What `FlashDecode` calls there: all members get the partial results of all, and add up the same numbers.

    Collective: every member makes it, and calls it.  `space` has the facts of `FlashDecode`.
    """

    def __init__(self, ccl: Any, members: Sequence[int], space: Any) -> None:
        self._ccl, self._members = ccl, members

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, scale: float) -> None:
        (batch, heads, dim), (_, kv_heads, room, _) = q.shape, k.shape
        is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_captured and not ((lengths >= 0) & (lengths <= room)).all():
            raise ArgumentError(f"flash_decode: lengths {lengths.tolist()} are not from 0 to {room}")
        scores = (q.float() * scale).view(batch, kv_heads, heads // kv_heads, dim) @ k.float().mT
        is_there = torch.arange(room, device=q.device) < lengths[:, None]
        part, lse = _attend(scores.masked_fill(~is_there[:, None, None], -math.inf), v.float())
        own = torch.cat([part, lse[..., None]], -1).view(batch, heads, dim + 1)
        everyone = own.new_empty(len(self._members), *own.shape)
        self._ccl.all_gather(everyone, own, self._members)
        weights = everyone[..., dim:].softmax(0).nan_to_num(0.0)
        out.copy_((everyone[..., :dim] * weights).sum(0))


class Ring:
    """What `RingAttention` calls there: blocks go to the next member while this one attends to those that it has.

    Collective: every member makes it, and calls it.  `space` has `length`, `causal`, `striped` and `shape`, which is
    (heads, rows, head_dim), and `kv_heads`.
    """

    def __init__(self, ccl: Any, members: Sequence[int], space: Any) -> None:
        self._ccl, self._members, self._space = ccl, members, space
        self._me, self._size = space.me, len(members)

    def _begin(self, given: Tensor) -> tuple[Any, Tensor]:
        """Begin to send a tensor to the next member; return the handle, and what comes from the one before."""
        to, of, came = [0] * self._size, [0] * self._size, torch.empty_like(given)
        to[(self._me + 1) % self._size] = of[(self._me - 1) % self._size] = given.numel()
        splits = {"input_split_sizes": to, "output_split_sizes": of}
        return self._ccl.all_to_all(came.view(-1), given.view(-1), self._members, async_op=True, **splits), came

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield keys and values of all members, (key heads, 1, rows, head_dim) in float32, and whose they are."""
        block = torch.stack([k, v])
        for step in range(self._size):
            handle, following = self._begin(block) if step < self._size - 1 else (None, block)
            yield (self._me - step) % self._size, *block.float()[:, :, None]
            if handle is not None:
                handle.wait()
            block = following

    def _places(self, member: int, device: torch.device) -> Tensor:
        """Return which tokens of the sequence a member has."""
        rows = torch.arange(self._space.shape[1], device=device)
        return rows * self._size + member if self._space.striped else rows + member * len(rows)

    def _scores(self, q: Tensor, k: Tensor, owner: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield which rows, and their scores, -inf where a query does not see a key or is beyond the sequence."""
        mine, keys = self._places(self._me, q.device)[:, None], self._places(owner, q.device)
        is_seen = (mine < self._space.length) & (keys < self._space.length)
        is_seen &= (keys <= mine) | (not self._space.causal)
        for begin in range(0, len(mine), _ROWS):
            rows = slice(begin, begin + _ROWS)
            yield rows, (q[:, :, rows] @ k.mT).masked_fill(~is_seen[rows], -math.inf)

    def _grouped(self, x: Tensor) -> Tensor:
        """Return (key heads, heads of each, rows, ...) of (heads, rows, ...), in float32."""
        return x.float().view(self._space.kv_heads, -1, *x.shape[1:])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        queries = self._grouped(q) * scale
        total, sums = torch.zeros_like(queries), torch.full_like(queries[..., 0], -math.inf)
        for owner, keys, values in self._blocks(k, v):
            for rows, scores in self._scores(queries, keys, owner):
                part, of_part = _attend(scores, values)
                both = torch.logaddexp(sums[:, :, rows], of_part)
                for each, of_each in ((total[:, :, rows], sums[:, :, rows]), (part, of_part)):
                    each *= _weights(of_each, both)[..., None]
                total[:, :, rows] += part
                sums[:, :, rows] = both
        out.copy_(total.view(q.shape))
        lse.copy_(sums.view(lse.shape))

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, scale: float,
    ) -> None:  # fmt: skip
        queries, grads = self._grouped(q), self._grouped(grad)
        sums, deltas = (self._grouped(each)[..., None] for each in (lse, delta))
        of_q = torch.zeros_like(queries)
        handle: Any = None
        came: Any = None
        for owner, keys, values in self._blocks(k, v):
            of_k, of_v = own = keys.new_zeros(2, *k.shape)
            for rows, scores in self._scores(queries * scale, keys, owner):
                weights = _weights(scores, sums[:, :, rows])
                changes = weights * (grads[:, :, rows] @ values.mT - deltas[:, :, rows]) * scale
                of_q[:, :, rows] += changes @ keys
                of_k += (changes.mT @ queries[:, :, rows]).sum(1)
                of_v += (weights.mT @ grads[:, :, rows]).sum(1)
            if handle is not None:  # these gradients travel with the block
                handle.wait()
                own += came
            handle, came = self._begin(own)
        handle.wait()
        dq.copy_(of_q.view(q.shape))
        for mine, each in zip((dk, dv), came, strict=True):
            mine.copy_(each)
