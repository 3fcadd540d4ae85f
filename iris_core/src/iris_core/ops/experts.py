"""`ctx.ops.experts`: a group of ranks that divide the experts of a layer, and pass tokens to them and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from iris_core.device.targets import on_device
from iris_core.dispatch.bind import Binder
from iris_core.dispatch.requests import check_strided, name_all, name_of
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops.made import RESULTS, Made
from iris_core.types import Group

_ROW_NBYTES = 16
SENT, RETURNED = 1, 2
"""Places in a group's state of the turns in which tokens were sent, and results given back."""


class Workspace(SimpleNamespace):
    """Memory that the kernels of a group work with; `iris_triton.collectives.experts` says how.

    Attributes:
        world, size, me: ranks of the context, members of the group, and this rank's number among them.
        experts, local, held: of all members, of each one up to the last ones, and of this one.
        top_k, scales, capacity: choices of each token, float32 scales of each row, and rows that a member may get.
        most_slots: choices that a member brings to a turn, at most.
        units: multiprocessors of the device.
        members, context: int32[size], their ranks, -1 of those that are gone; the context tensor.
        others: inbox, inbox_scales, origin, listed, shares, back, table, published, arrived, returned, first, state
            and done are tensors of the kernels, by the names that these have for them.
    """

    units: int
    back: torch.Tensor


@dataclass(eq=False)
class Turn:
    """One dispatch, until its results are combined."""

    group: ExpertGroup = field(repr=False)  #: whose turn it is
    chosen: torch.Tensor = field(repr=False)  #: as it was given
    weights: torch.Tensor | None = field(repr=False)  #: likewise; None where the tokens were multiplied by them
    numbers: torch.Tensor = field(repr=False)  #: each choice's number among those of its expert
    counts: torch.Tensor  #: int32 (experts of this rank,), on the device: tokens of each
    #: int32 (experts of this rank + 1,): the row of each one's first token, and the end; as grouped products take them
    offsets: torch.Tensor
    once: bool = field(repr=False)  #: whether a token of this rank was sent once for all its experts of another one
    scales_of_rows: torch.Tensor | None = None  #: float32 (rows, scales), where the group has scales
    #: where rows came from, and which are of one token, with their weights, if it was kept
    places: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    merged: bool = field(default=False, repr=False)  #: whether one sum for each rank comes back
    #: what makes `iris_core.nn.combine` backwards come before `dispatch`, if that began the turn
    link: torch.Tensor | None = field(default=None, repr=False)


class Dispatched(NamedTuple):
    """Arrived tokens: `rows` is (capacity, hidden), those of this rank's experts one expert after the other.

    Those of an expert are in the order of the ranks that they came from, and of these ranks' tokens.  Rows from
    `turn.offsets[-1]` on are undefined; 0 where rows were kept.  `counts` is `turn.counts`.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    turn: Turn


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous matrix, or a copy, as words of 32 bits: contiguous ones may begin within a word."""
    if x.stride(0) != x.shape[1]:  # of at most one row
        x = x.as_strided(x.shape, (x.shape[1], 1))
    begins_within = x.storage_offset() * x.element_size() % 4 or x.data_ptr() % 4
    return x.clone() if begins_within else x


class ExpertGroup(Made):
    """Ranks that divide the experts of a layer (MoE): member r has the experts r * n to r * n + n - 1.

    n is experts / size, rounded up: the last members may have fewer, or none, and `local` says how many this one has.

    Collective: every member makes it, with equal arguments, and calls its methods equally often in the same order.

    Stream: all runs on the current stream, the same one in all calls, and the host waits for nothing.  How many tokens
    go where is known to the devices alone, so that all of it can be captured in a graph, once it was called before; a
    graph begins with a dispatch.  A turn is `dispatch` and, if its results are wanted, `combine`; the next dispatch may
    overwrite the rows of the one before, if they are not kept.  To do something else while tokens are under way, call
    `send` and `receive` instead of `dispatch`, and `send_back` and `receive_back` instead of `combine`.

    No token is dropped: there is memory for the worst case, size * max_tokens * min(top_k, n) rows, as long as the
    context is open.  Layers may share a group.  Nothing is recorded for gradients: see `iris_core.nn`.

    Args:
        max_tokens: tokens that a member brings to a turn, at most.
        hidden: elements of a token; 16 bytes or a multiple.
        experts: of all members together.
        top_k: experts of a token.
        dtype: of tokens.
        result: of the experts' results: bfloat16, float16 or float32; by default `dtype`, of 8-bit floats bfloat16.
        scales: float32 scales that go with each token, such as one for every 128 elements of 8-bit floats; 0 for none.
        group: the ranks; see `iris_core.ops.api.Operations`.

    Raises:
        ArgumentError: a number makes no sense.
        UnsupportedError: there is no such result, no memory, or the ranks are on several nodes.
        CapabilityError: the backend has no kernels for it.
        RankMismatchError: the members give different arguments.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> with Iris("4MiB", device="cpu") as ctx:
        ...     experts = ctx.ops.experts(8, 16, 2, top_k=1, dtype=torch.float32)
        ...     x, chosen = torch.ones(3, 16), torch.tensor([[1], [0], [1]])
        ...     rows, counts, turn = experts.dispatch(x, chosen)
        ...     print(counts.tolist(), experts.combine(2 * rows, turn)[:, 0].tolist())
        [1, 2] [2.0, 2.0, 2.0]
    """

    def __init__(
        self, binder: Binder, max_tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype,
        result: torch.dtype | None, scales: int, group: Group,
    ) -> None:  # fmt: skip
        result = result or (dtype if dtype in RESULTS else torch.bfloat16)
        with self._agreement("experts", locals()) as members:
            size, slots = len(members), max_tokens * top_k
            if not min(max_tokens, hidden, top_k, experts) > 0 or scales < 0 or top_k > experts:
                raise ArgumentError(
                    f"experts: max_tokens={max_tokens}, hidden={hidden}, experts={experts}, top_k={top_k} and "
                    f"scales={scales} make no layer"
                )
            if hidden * min(dtype.itemsize, result.itemsize) % _ROW_NBYTES:
                rows = f"rows of {hidden} {name_of(dtype)}"
                raise ArgumentError(f"experts: {rows} are no multiple of {_ROW_NBYTES} bytes")
            if result not in RESULTS:
                raise UnsupportedError(f"experts: results are {name_all(RESULTS)}, not {name_of(result)}")
            if size * slots > 1 << 31:
                raise ArgumentError(f"experts: {size} times {slots} choices are more than 32 bits can count")
        self.hidden, self.dtype, self.result = hidden, dtype, result
        self.max_tokens, self.experts, self.top_k = max_tokens, experts, top_k
        local = -(-experts // size)
        self.local = len(range(experts)[members.index(self._binder.rank) * local :][:local])
        self._gone = set[int]()
        self._latest: Turn | None = None  # the last dispatch
        self._returning: Turn | None = None  # what is given back, but not received
        self._has_returned = False  # whether results were given back since all members were done with those before
        most, int32, int64 = min(top_k, local), torch.int32, torch.int64
        capacity, device = size * max_tokens * most, self._binder.target.torch_device
        own = {"first": (size * local, int32), "done": (1, int32), "state": (3, int64)}
        zeros: dict[str, Any] = {name: torch.zeros(n, dtype=of, device=device) for name, (n, of) in own.items()}
        zeros |= {"experts": experts, "local": local, "held": self.local}
        self._lists = most > 1  # a token may have several experts of a member
        self._space = Workspace(top_k=top_k, scales=scales, most_slots=slots, capacity=capacity, **zeros)
        self._kernels = self._kernels_for(self._space, {
            "inbox": ((capacity, hidden), dtype), "inbox_scales": ((capacity, scales), torch.float32),
            "origin": ((capacity,), int32), "listed": ((capacity, most), int32),
            "shares": ((capacity,), torch.float32),
            "back": ((slots, hidden), result), "table": ((2, size, size * local), int32),
            "published": ((size,), int64), "arrived": ((size,), int64), "returned": ((size,), int64),
        })  # fmt: skip

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Do without some ranks from now on: nothing is sent to them, no member waits for them, their experts are gone.

        A choice of one of their experts is no choice.  What a graph has captured follows, too.  Turns that were neither
        combined nor kept end here.  It does not find out who is gone: a wait for a rank that does not come ends with a
        report after IRIS_DEVICE_TIMEOUT, which `ctx.ccl.reset` or the next call of a collective takes up.

        Every other member calls it with the same ranks, before the same turn.

        Args:
            ranks: of the world; members, but not this one.

        Raises:
            ArgumentError: one of them is no member, or this rank.
        """
        members, space = self._members, self._space
        if wrong := [each for each in ranks if each not in members or each == self._binder.rank]:
            raise ArgumentError(f"leave_out: {wrong} are no other members of the group of ranks {list(members)}")
        self._binder.open()
        self._gone |= set(ranks)
        left = [-1 if each in self._gone else each for each in members]
        space.members.copy_(torch.tensor(left, dtype=torch.int32))
        self._latest = self._returning = None

    # -- to the experts -----------------------------------------------------------------------------------------------
    def dispatch(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None = None, *,
        scales: torch.Tensor | None = None, weighted: bool = False, keep: bool = False,
    ) -> Dispatched:  # fmt: skip
        """Give each token to its experts' ranks, and get those of this rank's experts.

        Args:
            x: (n, hidden), n up to `max_tokens`, also 0, and another one on each member.
            chosen: int32 or int64 (n, top_k), different experts for each token; a number that is no expert's, such as
                -1, is no choice.  A token with more choices of a member than that has experts is reported, a
                DeviceError of later calls.
            weights: float32 (n, top_k), for `combine`; None for 1.
            scales: float32 (n, scales of the group).
            weighted: multiply by the weights what goes to the experts, instead of what comes back.
            keep: copy what arrives, so that neither rows nor the turn end with the next dispatch.

        All are contiguous and on the device, and chosen and weights stay as they are until `combine`.

        Raises:
            ArgumentError: shapes or dtypes do not fit; before anything is launched, and on this member alone.
            TypeError: an argument is no tensor; likewise.
        """
        return self._received(self._send(x, chosen, weights, scales, weighted, waits=True), keep)

    def send(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None = None, *,
        scales: torch.Tensor | None = None, weighted: bool = False,
    ) -> Turn:  # fmt: skip
        """Begin a dispatch; `receive` ends it."""
        return self._send(x, chosen, weights, scales, weighted, waits=False)

    def _send(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None,
        weighted: bool, *, waits: bool,
    ) -> Turn:  # fmt: skip
        space, device = self._space, self._binder.target.torch_device
        check_strided("dispatch", "x", x)
        if x.ndim != 2:
            raise ArgumentError(f"dispatch: x must be (n, {self.hidden}), not {tuple(x.shape)}")
        n, slots = x.shape[0], (x.shape[0], self.top_k)
        wanted: dict[str, Any] = {
            "x": (x, (n, self.hidden), (self.dtype,)), "chosen": (chosen, slots, (torch.int32, torch.int64))
        }  # fmt: skip
        if weights is not None:
            wanted["weights"] = weights, slots, (torch.float32,)
        if scales is not None:
            wanted["scales"] = scales, (n, space.scales), (torch.float32,)
        if n > self.max_tokens:
            raise ArgumentError(f"dispatch: {n} tokens are more than max_tokens={self.max_tokens}")
        if (scales is None) != (space.scales == 0):
            raise ArgumentError(f"dispatch: the group has {space.scales} scales for each token, this call has others")
        if weighted and (weights is None or self.dtype not in RESULTS):
            raise ArgumentError(
                f"dispatch: weighted takes weights, and no tokens of {name_of(self.dtype)} without them"
            )
        self._check_each("dispatch", wanted)
        counts, offsets = (torch.empty(self.local + k, dtype=torch.int32, device=device) for k in (0, 1))
        numbers = torch.empty(slots, dtype=torch.int32, device=device)
        rows_scales = space.inbox_scales if space.scales else None
        once = not weighted and self._lists
        turn = Turn(self, chosen, None if weighted else weights, numbers, counts, offsets, once, rows_scales)
        with on_device(self._binder.target):
            self._kernels.dispatch(turn, _whole(x), scales, weights, weighted, waits)
        self._latest, self._has_returned = turn, self._returning is not None
        return turn

    def receive(self, turn: Turn, *, keep: bool = False) -> Dispatched:
        """Let the stream wait for what the members have sent, and return it."""
        self._check_turn("receive", turn, self._latest)
        with on_device(self._binder.target):
            self._kernels.receive(self._space.arrived, SENT)
        return self._received(turn, keep)

    def _received(self, turn: Turn, keep: bool) -> Dispatched:
        space = self._space
        if self._lists:
            with on_device(self._binder.target):
                self._kernels.spread(turn)
        if not keep:
            return Dispatched(space.inbox, turn.counts, turn)
        with on_device(self._binder.target):
            words = space.inbox.view(torch.int32)  # what is there may be no number
            is_row = torch.arange(len(words), device=words.device)[:, None] < turn.offsets[-1]
            turn.places = tuple(each.clone() for each in (space.origin, space.listed, space.shares))
            turn.scales_of_rows = space.inbox_scales.clone() if space.scales else None
            return Dispatched(torch.where(is_row, words, 0).view(self.dtype), turn.counts, turn)

    # -- and back -----------------------------------------------------------------------------------------------------
    def combine(
        self, y: torch.Tensor, turn: Turn, out: torch.Tensor | None = None, *, merged: bool = False
    ) -> torch.Tensor:
        """Give results back to the tokens' ranks, and return the weighted sum of each token's: (n, hidden).

        Sums are made in float32, in the order of the choices.

        Args:
            y: (capacity, hidden) of dtype `result`, contiguous: the results of `rows`, each in its token's row.
            turn: the latest one, or one that was kept.
            out: where to; new by default.
            merged: on all members alike: let each rank add up the results that it has of a token, and send their sum,
                rounded to `result`: fewer bytes.  There is no `results_of` it.  Not of tokens that were `weighted`,
                which come one by one.

        Raises:
            ArgumentError: shapes or dtypes do not fit, or another dispatch came after this turn's, which was not kept.
        """
        self._check_results(y, turn)
        out = self._place_of_sums(turn, out)
        self._send_back(y, turn, merged, waits=True)
        return self._sums(turn, out)

    def send_back(self, y: torch.Tensor, turn: Turn, *, merged: bool = False) -> None:
        """Begin a combine; `receive_back` ends it."""
        self._check_results(y, turn)
        self._send_back(y, turn, merged, waits=False)

    def _check_results(self, y: torch.Tensor, turn: Turn) -> None:
        self._check_turn("combine", turn, self._latest, is_kept=True)
        if self._returning is not None:
            raise ArgumentError("send_back: the results that were sent before are not received yet")
        self._check_each("combine", {"y": (y, tuple(self._space.inbox.shape), (self.result,))})

    def _send_back(self, y: torch.Tensor, turn: Turn, merged: bool, *, waits: bool) -> None:
        turn.merged, y = merged and self._lists, _whole(y)
        with on_device(self._binder.target):
            if self._has_returned:
                self._kernels.meet()
            self._kernels.give_back(turn, y, waits)
        self._returning, self._has_returned = turn, True

    def receive_back(self, turn: Turn, out: torch.Tensor | None = None) -> torch.Tensor:
        """Let the stream wait for the results, and return their sums."""
        self._check_turn("receive_back", turn, self._returning)
        out = self._place_of_sums(turn, out)
        with on_device(self._binder.target):
            self._kernels.receive(self._space.returned, RETURNED)
        return self._sums(turn, out)

    def _place_of_sums(self, turn: Turn, out: torch.Tensor | None) -> torch.Tensor:
        shape = (turn.chosen.shape[0], self.hidden)
        if out is None:
            out = torch.empty(shape, dtype=self.result, device=turn.chosen.device)
        self._check_each("combine", {"out": (out, shape, RESULTS)})
        return out

    def _sums(self, turn: Turn, out: torch.Tensor) -> torch.Tensor:
        with on_device(self._binder.target):
            self._kernels.gather(turn, out)
        self._returning = None
        return out

    def results_of(self, turn: Turn) -> torch.Tensor:
        """Return what the last `combine` got: (n, top_k, hidden), each choice's result; the next one overwrites it.

        What stands for no choice is undefined.
        """
        return self._space.back[: turn.chosen.numel()].view(*turn.chosen.shape, self.hidden)

    def weight_gradients(self, grad: torch.Tensor, results: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return float32 (n, top_k): the product of each choice's result and its token's row of `grad`; 0 for none.

        Local: nothing is communicated.

        Args:
            grad: (n, hidden).
            results: (n, top_k, hidden), see `results_of`.
            turn: whose choices they are.
        """
        n, results_of = turn.chosen.shape[0], (*turn.chosen.shape, self.hidden)
        wanted = {"grad": (grad, (n, self.hidden), RESULTS), "results": (results, results_of, RESULTS)}
        self._check_each("weight_gradients", wanted)
        out = torch.empty(n, self.top_k, dtype=torch.float32, device=grad.device)
        with on_device(self._binder.target):
            self._kernels.weigh(turn, grad, results, out)
        return out

    def _check_turn(self, what: str, turn: Turn, latest: Turn | None, *, is_kept: bool = False) -> None:
        self._binder.open()
        if not isinstance(turn, Turn):
            raise TypeError(f"{what}: turn must be that of a dispatch, not {type(turn).__name__}")
        if turn.group is not self or not (turn is latest or (is_kept and turn.places is not None)):
            raise ArgumentError(
                f"{what}: another call of this group came after this turn's, which was not kept, or it is another's"
            )
