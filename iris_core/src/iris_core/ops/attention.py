"""`ctx.ops.flash_decode` and `ctx.ops.ring_attention`: attention to keys and values that are divided among ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from iris_core.device.targets import on_device
from iris_core.dispatch.bind import Binder
from iris_core.dispatch.requests import check_strided, name_all, name_of
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops import unfused_attention
from iris_core.ops.made import RESULTS, Made
from iris_core.types import Group

_WIDE_NBYTES = 256  # of a head's elements; with more of them, tiles have fewer rows
_FLOAT32, _INT64 = torch.float32, torch.int64


def _check_heads(what: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *positive: int) -> None:
    if min(heads, kv_heads, head_dim, *positive) < 1 or heads % kv_heads:
        raise ArgumentError(f"{what}: {heads} heads must be a multiple of {kv_heads} key heads, and all sizes positive")
    if dtype not in RESULTS:
        raise UnsupportedError(f"{what}: computes {name_all(RESULTS)}, not {name_of(dtype)}")


class FlashDecode(Made):
    """Attention of a new token of each sequence to keys and values that are spread over the members of a group.

    Each member attends to its part of the cache, and the partial results of all are added up on each (Dao et al.,
    Flash-Decoding for long-context inference, 2023); all members get the same bits.

    Collective: every member makes it, with equal arguments, and calls it equally often.

    Stream: the current one, the same in all calls, and the host waits for nothing: once called, it can be captured.

    On several nodes torch computes and `ctx.ccl` exchanges; then lengths are looked at by the host.

    Args:
        batch: sequences.
        heads, kv_heads: heads of queries, a multiple of those of keys.
        head_dim: elements of a head; it takes as long as the next power of two, 16 or more.
        dtype: of q, k and v: bfloat16, float16 or float32.
        scale: of the scores; 1 / sqrt(head_dim) by default.
        pieces: programs that share a key head of a sequence on one rank; by default so many that all have work.
        group: the ranks; see `iris_core.ops.api.Operations`.

    Raises:
        ArgumentError: a number makes no sense.
        UnsupportedError: there is no such dtype, or no memory.
        CapabilityError: the backend has no kernels for it.
        RankMismatchError: the members give different arguments.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     decode = ctx.ops.flash_decode(1, 2, 1, 16, dtype=torch.float32)
        ...     k, v = torch.zeros(1, 1, 8, 16), torch.arange(8.0).view(1, 1, 8, 1).repeat(1, 1, 1, 16)
        ...     print(decode(torch.ones(1, 2, 16), k, v, torch.tensor([5], dtype=torch.int32))[0, :, 0].tolist())
        [2.0, 2.0]
    """

    _unfused = unfused_attention.Decode

    def __init__(
        self, binder: Binder, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        scale: float | None, pieces: int | None, group: Group,
    ) -> None:  # fmt: skip
        with self._agreement("flash_decode", locals()) as members:
            _check_heads(self._name, heads, kv_heads, head_dim, dtype, batch, 1 if pieces is None else pieces)
        self.batch, self.heads, self.kv_heads, self.head_dim, self.dtype = batch, heads, kv_heads, head_dim, dtype
        self.scale, inbox = head_dim**-0.5 if scale is None else scale, (2, len(members), batch * heads)
        self._decode = self._kernels_for(SimpleNamespace(**self._facts), {
            "inbox": ((*inbox, head_dim), _FLOAT32), "inbox_sums": ((*inbox, 2), _FLOAT32),
            "arrived": ((len(members), batch * kv_heads), _INT64),
        })  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor | None = None) -> Tensor:
        """Return softmax(scale * q k^T) v over the keys of all members: (batch, heads, head_dim).

        Args:
            q: (batch, heads, head_dim), contiguous and the same on all members.
            k, v: (batch, kv_heads, capacity, head_dim), the last dimension dense: this member's part of the cache, of
                any capacity.
            lengths: int32 (batch,) on the device: how many of this member's keys each sequence has, from 0 to the
                capacity; others are reported, as DeviceError of the next call of a collective, and nothing beyond it
                is read.  A sequence without any key on any member gets zeros.
            out: where to, as q; new by default.  It may be q.

        Raises:
            ArgumentError: shapes or dtypes do not fit; before anything is launched, and on this member alone.
            TypeError: an argument is no tensor; likewise.
        """
        check_strided("flash_decode", "k", k)
        queries, own = (self.batch, self.heads, self.head_dim), (self.dtype,)
        cache = (self.batch, self.kv_heads, k.shape[2] if k.ndim == 4 else "capacity", self.head_dim)
        wanted = {
            "q": (q, queries, own), "k": (k, cache, own), "v": (v, cache, own),
            "out": (q if out is None else out, queries, own), "lengths": (lengths, (self.batch,), (torch.int32,)),
        }  # fmt: skip
        self._check_each("flash_decode", wanted, rows=("k", "v"))
        if out is not None:
            others = {"q": q, "k": k, "v": v, "lengths": lengths}
            if out.data_ptr() == q.data_ptr():
                del others["q"]
            self._check_apart("flash_decode", out, others)
        out = torch.empty_like(q) if out is None else out
        with on_device(self._binder.target):
            self._decode(q, k, v, lengths, out, self.scale)
        return out


class RingAttention(Made):
    """Attention over a sequence that is divided among the members of a group; keys and values travel round the ring.

    See Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.  No member holds more
    than three blocks of keys and values.  With gradients: `iris_core.nn.ring_attention`.

    Collective, Stream: as with `FlashDecode`.

    Args:
        heads, kv_heads: heads of queries, a multiple of those of keys; each times the sequences of a batch.
        length: tokens of the whole sequence; a member has room for `rows` = ceil(length / members) of them.
        head_dim, dtype, scale, group: as for `FlashDecode`.
        causal: a query sees the keys up to its own place.
        striped: member r has the tokens r, r + members, ..., and not rows * r, rows * r + 1, ...: with `causal`, all
            then have as much to do (Brandon et al., Striped Attention, 2023).
        gradients: have memory for `gradients`, too.

    Raises: as `FlashDecode`.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     attend = ctx.ops.ring_attention(1, 1, 4, 16, dtype=torch.float32, causal=True)
        ...     q, v = torch.zeros(1, 4, 16), torch.arange(4.0).view(1, 4, 1).repeat(1, 1, 16)
        ...     out, lse = attend(q, q, v)
        ...     print(out[0, :, 0].tolist())
        [0.0, 0.5, 1.0, 1.5]
    """

    _unfused = unfused_attention.Ring

    def __init__(
        self, binder: Binder, heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype,
        scale: float | None, causal: bool, striped: bool, gradients: bool, group: Group,
    ) -> None:  # fmt: skip
        with self._agreement("ring_attention", locals()) as members:
            _check_heads(self._name, heads, kv_heads, head_dim, dtype, length)
        self.rows, self.dtype, self.striped = -(-length // len(members)), dtype, striped
        self.scale, self.has_gradients = head_dim**-0.5 if scale is None else scale, gradients
        self._queries, self._keys = (heads, self.rows, head_dim), (kv_heads, self.rows, head_dim)
        block = 64 if self._binder.gpu is not None and head_dim * dtype.itemsize <= _WIDE_NBYTES else 32
        ring, words = (2, *self._keys), {"full": ((kv_heads,), _INT64), "free": ((kv_heads, 2), _INT64)}
        shared = {"ring_k": (ring, dtype), "ring_v": (ring, dtype), **words}
        if gradients:
            tiles = ((kv_heads, -(-self.rows // block)), _INT64)
            shared |= {"back_k": (ring, dtype), "back_v": (ring, dtype), "came": tiles, "taken": tiles}
            shared |= {"ring_dk": (ring, _FLOAT32), "ring_dv": (ring, _FLOAT32)}
            shared |= {f"back_{name}": each for name, each in words.items()}
        place: dict[str, Any] = {"length": length, "block": block, "shape": self._queries, "kv_heads": kv_heads}
        self._kernels = self._kernels_for(SimpleNamespace(causal=causal, striped=striped, **place), shared)

    def part(self, whole: Tensor) -> Tensor:
        """Return this member's part of (heads, length, head_dim), filled up with zeros to `rows` tokens.  Local."""
        me, size = self._members.index(self._binder.rank), len(self._members)
        mine = whole[:, me::size] if self.striped else whole[:, me * self.rows : (me + 1) * self.rows]
        return torch.nn.functional.pad(mine, (0, 0, 0, self.rows - mine.shape[1]))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return this member's rows of softmax(scale * q k^T) v, and the logarithms of the sums of exp(scale * q k^T).

        The second ones are float32 (heads, rows).  Rows beyond the sequence are undefined in both.

        Args:
            q: (heads, rows, head_dim), contiguous: this member's tokens, as `part` gives them.
            k, v: (kv_heads, rows, head_dim), contiguous.
            out: where to, as q, and not q; new by default.

        Raises:
            ArgumentError: shapes or dtypes do not fit; before anything is launched, and on this member alone.
            TypeError: an argument is no tensor; likewise.
        """
        self._check(q, k, v, out=q if out is None else out)
        if out is not None:
            self._check_apart("ring_attention", out, {"q": q, "k": k, "v": v})
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(self._queries[:2], dtype=_FLOAT32, device=q.device)
        with on_device(self._binder.target):
            self._kernels.forward(q, k, v, out, lse, self.scale)
        return out, lse

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, zeros beyond the sequence; those of k and v travel round the ring.

        Weights are computed again (Dao et al., FlashAttention, 2022), sums are float32, in the order of the ring.

        Args:
            grad: the gradient of `out`.
            q, k, v, out, lse: of the call.

        Raises:
            ArgumentError: shapes or dtypes do not fit, or it was made without `gradients`.
        """
        if not self.has_gradients:
            raise ArgumentError("ring_attention: it was made without memory for gradients; pass gradients=True")
        self._check(q, k, v, out=out, grad=grad, lse=lse)
        delta = (grad.float() * out.float()).sum(-1)
        dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
        with on_device(self._binder.target):
            self._kernels.gradients(q, k, v, grad, lse, delta, dq, dk, dv, self.scale)
        return dq, dk, dv

    def _check(self, q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> None:
        wanted: dict[str, Any] = {"q": (q, self._queries, (self.dtype,))}
        wanted |= {name: (each, self._keys, (self.dtype,)) for name, each in (("k", k), ("v", v))}
        wanted |= {name: (each, self._queries, (self.dtype,)) for name, each in others.items()}
        if "lse" in others:
            wanted["lse"] = others["lse"], self._queries[:2], (_FLOAT32,)
        self._check_each("ring_attention", wanted)
