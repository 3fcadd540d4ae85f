"""How the ranks make sure that their heaps are the same, and find the first call that differs when they are not.

Every rank keeps a history of its symmetric calls and a digest chained over it.  At a step that all ranks take together
(`Step`) they compare digests in one small exchange.  If all agree, the free lists are equal everywhere.  If not, they
exchange the recent part of their histories and every rank raises the same SymmetryError.
"""

from __future__ import annotations

import enum
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from iris_core.errors import SymmetryError
from iris_core.world.failures import name_ranks, raise_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.world import World

HISTORY_LENGTH = 256
"""Calls that are kept to explain a difference."""

CANNOT_IMPORT = "cannot import the tensor that was passed to as_symmetric"
"""What ranks cannot do where one cannot go on, for messages."""

Label = tuple[Any, ...]
"""What a block was made by: name of the function and its arguments; formatted only when somebody looks."""


class Op(enum.IntEnum):
    """What a rank does or did; the first three make up the history, the others are steps taken together."""

    ALLOCATE = 1
    FREE = 2
    IMPORT = 3
    BARRIER = 4
    REFRESH = 5


class Call(NamedTuple):
    """One entry of a history; `before` is the digest of everything that came earlier."""

    number: int
    op: int
    nbytes: int
    alignment: int
    offset: int
    label: Label
    before: int

    def describe(self) -> str:
        """Say in words what the call was."""
        if self.op == Op.ALLOCATE:
            where = f"at offset {self.offset}" if self.offset >= 0 else "which finds no free block"
            return f"{format_label(self.label)}, {self.nbytes} bytes aligned to {self.alignment}, {where}"
        if self.op == Op.FREE:
            return f"free of {format_label(self.label)} at offset {self.offset}"
        if self.op == Op.IMPORT:
            return format_label(self.label)
        return "barrier()" if self.op == Op.BARRIER else "refresh_peer_access()"


class Report(NamedTuple):
    """What one rank brought to a step.

    Attributes:
        op: the step itself.
        calls: length of its history.
        digest: digest of its history.
        nbytes: size asked for, for steps that allocate.
        alignment: alignment asked for, for steps that allocate.
        ok: 0 if its local part of the step failed.
        dirty: 1 if its allocator has something new for the peers.
        num_dropped: how many blocks it has dropped since the last step.
        num_idle: how many of the freed blocks, the oldest first, its streams no longer use.
        signature: what else must be equal, for steps that say so themselves.
        floor: where the lowest region of a group begins on it, for steps that free and allocate.
    """

    op: int
    calls: int
    digest: int
    nbytes: int
    alignment: int
    ok: int
    dirty: int
    num_dropped: int
    num_idle: int
    signature: int
    floor: int


class History:
    """A rank's symmetric calls: their number, a digest of all, and the last few in full.

    The digest is Python's hash of a tuple of integers, which does not depend on PYTHONHASHSEED, chained call by call.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.digest = 0
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=HISTORY_LENGTH)

    def record(self, op: int, nbytes: int, alignment: int, offset: int, label: Label) -> None:
        """Add a call."""
        before = self.digest
        self.calls = number = self.calls + 1
        self.digest = hash((before, op, nbytes, alignment, offset))
        self._recent.append((number, op, nbytes, alignment, offset, label, before))  # a Call, made only when read

    def recent(self) -> list[Call]:
        """The calls that are kept, oldest first."""
        return [Call(*entry) for entry in self._recent]


def agree(
    world: World,
    history: History,
    op: Op,
    *,
    nbytes: int = 0,
    alignment: int = 0,
    label: Label = (),
    ok: bool = True,
    dirty: bool = False,
    num_dropped: int = 0,
    num_idle: int = 0,
    signature: int = 0,
    floor: int = 0,
) -> list[Report]:
    """Take a step together and compare histories.

    Collective: every rank calls it.  One exchange when all agree.

    Args:
        world: the ranks.
        history: this rank's history.
        op: the step.
        nbytes: size asked for, for steps that allocate.
        alignment: alignment asked for, for steps that allocate.
        label: what asks for it, for messages.
        ok: whether this rank's part of the step has worked so far.
        dirty: whether this rank's allocator has something new for the peers.
        num_dropped: how many blocks this rank has dropped since the last step.
        num_idle: how many of the freed blocks, the oldest first, this rank's streams no longer use.
        signature: what else must be equal; the caller compares it.
        floor: where the lowest region of a group begins on this rank, for steps that free and allocate.

    Returns:
        Every rank's report, by rank.

    Raises:
        SymmetryError: the histories or the steps differ; raised on every rank, naming the first differing call.
        CollectiveTimeoutError: a rank did not arrive in time.
        PeerLostError: a rank's process has ended.
    """
    mine = Report(
        op, history.calls, history.digest, nbytes, alignment, ok, dirty, num_dropped, num_idle, signature, floor
    )
    reports = [Report(*row) for row in world.all_gather_ints(mine)]
    if all(report[:5] == mine[:5] for report in reports):
        return reports
    # what this rank is about to do stands for its next call, so that "barrier here, zeros() there" reads like any other
    now = Call(history.calls + 1, op, nbytes, alignment, -1, label, history.digest)
    recent = [*history.recent(), now]
    everyone = world.all_gather_object([call._replace(label=(format_label(call.label),)) for call in recent])
    raise SymmetryError(explain_difference([[Call(*call) for call in row] for row in everyone]))


class Passed(NamedTuple):
    """A tensor that a rank passes to a call of all ranks.

    Attributes:
        offset: where it lies on the heap; -1 if it does not.
        shape: its sizes.
        stride: its strides in elements, or those that it will have on the heap.
        dtype: its type, as text.
    """

    offset: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        where = f"on the heap at offset {self.offset}" if self.offset >= 0 else "not on the heap"
        return f"{self.dtype.removeprefix('torch.')} of shape {self.shape}, strides {self.stride}, {where}"

    def signature(self) -> int:
        """The same number for tensors that fit together.  Strides along which nobody moves do not count."""
        moves = 0 not in self.shape
        stride = [step if moves and size > 1 else 0 for size, step in zip(self.shape, self.stride, strict=True)]
        # numbers only: the hash of text differs between processes
        return hash((self.offset, *self.shape, *stride, len(stride), zlib.crc32(self.dtype.encode())))


def agree_on_tensor(world: World, history: History, label: Label, tensor: Passed, error: Exception | None) -> None:
    """Make sure that as_symmetric can go on with the same kind of tensor on every rank.

    Collective: every rank calls it.  One exchange when all agree.

    Args:
        world: the ranks.
        history: this rank's history.
        label: the call.
        tensor: what this rank passes; of no account if there is an error.
        error: why this rank cannot go on.

    Raises:
        SymmetryError: the tensors do not fit together, or the histories or steps differ; the same on every rank.
        HeapError: a rank cannot go on; see `raise_failure` for the kinds.
    """
    reports = agree(
        world, history, Op.IMPORT, label=label, ok=error is None, signature=0 if error else tensor.signature()
    )
    raise_failure(world, error, [report.ok for report in reports], CANNOT_IMPORT)
    if len({report.signature for report in reports}) == 1:
        return
    groups: dict[str, list[int]] = {}
    for rank, passed in enumerate(world.all_gather_object(str(tensor))):
        groups.setdefault(passed, []).append(rank)
    listed = "\n".join(f"  {name_ranks(ranks)}: {passed}" for passed, ranks in groups.items())
    raise SymmetryError(
        f"as_symmetric: the ranks' tensors do not fit together:\n{listed}\nAll ranks must pass tensors of the same "
        "shape, strides and dtype, and either all of them lie on the heap already, at the same offset, or none does"
    )


def explain_difference(tails: Sequence[Sequence[Call]]) -> str:
    """Say in which call the ranks' histories differ first.

    Args:
        tails: per rank the recent calls, oldest first; the last one is what the rank is doing now.
    """
    advice = (
        "All ranks must make the same allocations and frees in the same order: look for one inside `if rank == ...`, "
        "or for sizes that differ by rank."
    )
    first = max(tail[0].number for tail in tails)
    last = max(tail[-1].number for tail in tails)
    by_number = [{call.number: call for call in tail} for tail in tails]
    befores = {calls[first].before for calls in by_number if first in calls}
    if len(befores) > 1 or any(first not in calls for calls in by_number):
        return (
            f"the ranks' heaps have diverged: their histories differ already before call {first}, and only the last "
            f"{HISTORY_LENGTH} calls are kept. Call barrier() more often to find the place. {advice}"
        )
    for number in range(first, last + 1):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, calls in enumerate(by_number):
            groups.setdefault(calls[number][1:5] if number in calls else (), []).append(rank)
        if len(groups) > 1:
            lines = []
            for ranks in groups.values():
                call = by_number[ranks[0]].get(number)
                lines.append(f"  {name_ranks(ranks)}: {call.describe() if call else 'no such call'}")
            return f"the ranks' heaps have diverged at call {number}:\n" + "\n".join(lines) + f"\n{advice}"
    raise AssertionError("explain_difference was called with equal histories")


def format_label(label: Label) -> str:
    """Write a label as the call it stands for: ("zeros", (4,), torch.float32) -> "zeros((4,), float32)"."""
    if len(label) <= 1:
        return label[0] if label else "allocation"
    name, *args = label
    return f"{name}({', '.join(_plain(arg) for arg in args)})"


def _plain(arg: object) -> str:
    if isinstance(arg, tuple):
        inner = ", ".join(map(str, arg))
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    return str(arg).removeprefix("torch.")
