"""Agreement of a group's members before a launch: on the call, on the algorithm, and on whether all can prepare it.

If one member refuses, all refuse: the outcome of a check may depend on the rank, so it is exchanged where the members
exchange anyway, at the first call of a kind.  Later calls exchange nothing; a member that refuses one does so alone.
Where the others may have agreed on their call before, and so do not compare it, no member waits long for them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from iris_core.device.context_words import KIND_BITS
from iris_core.dispatch.choice import Choice
from iris_core.dispatch.team import Step, StepsDifferError, Team
from iris_core.errors import CollectiveTimeoutError, IrisError, PeerLostError, RankMismatchError
from iris_core.world import World
from iris_core.world.failures import differences, failure_of, name_ranks, on_all_ranks, raise_described

Facts = Mapping[str, str]

_FROM_TABLES = (
    "\nWhere the caller has named no algorithm or config, measured tables do: all members need the same "
    "(<IRIS_CACHE_DIR>/ccl and <IRIS_CACHE_DIR>/ops)."
)

ABSENT_S = 10.0
"""Seconds for which a member waits for others that have launched this call before with another algorithm."""

_MOST_KINDS = (1 << KIND_BITS) - 1  # numbers that kernels can tell apart; afterwards they begin again at 1
_DESCRIBED = 4096  # kinds of a group that a message can describe: the latest ones


def _digest(members: tuple[int, ...], facts: Facts) -> bytes:
    return hashlib.blake2b(repr((members, tuple(facts.items()))).encode(), digest_size=16).digest()


class Members:
    """Teams, and the requests that this rank has compared with their members, numbered in the same order on all.

    Entries are never dropped, else a member could start a comparison in which the others take no part.

    One is for the calls of programs; each team whose calls have parts for some of its members has one for these, so
    that a part may run beside the calls of other groups, in whatever order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.teams: dict[tuple[int, ...], Team] = {}
        self._numbers: dict[bytes, int] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        self._latest: dict[tuple[int, ...], deque[tuple[int, str]]] = {}
        self._left_out: dict[Any, dict[str, str]] = {}
        self._settled: dict[Any, Choice] = {}
        self.served_by: dict[Any, str] = {}

    def knows(self, members: tuple[int, ...], begin: Facts) -> bool:
        """Whether the members have agreed on such a request; `begin` is the operation, or all shared facts."""
        return _digest(members, begin) in self._numbers

    def add(self, members: tuple[int, ...], facts: Facts, number: int, *begins: Facts) -> None:
        """Remember that the members have agreed; `begins` are parts of the facts that `knows` finds it by."""
        self._numbers.update((_digest(members, each), number) for each in (facts, *begins))
        latest = self._latest.setdefault(members, deque(maxlen=_DESCRIBED))
        latest.append((number, ", ".join(f"{name} {value}" for name, value in facts.items())))

    def describe(self, members: tuple[int, ...], number: int) -> str:
        """Describe the request that has a number."""
        latest = tuple(self._latest.get(members, ()))  # another thread may add to them
        texts = (text for found, text in reversed(latest) if found == number)
        return next(texts, "a call that is not known here")

    def earlier(self, request: Any, shared: Facts, config: Any) -> tuple[dict[str, str], Choice | None]:
        """Return for which algorithms memory was exhausted, on all members, and the choice at the first such call.

        A member may plan a call that others have kept, again or for tensors that lie otherwise: it must choose alike.
        """
        left_out = self._left_out.setdefault((request.members, *shared.values()), {})
        return left_out, self._settled.get(_kind_of(request, shared, config))

    def remember(self, request: Any, shared: Facts, config: Any, settled: Choice) -> None:
        """Keep the choice for all such calls, whatever is measured later; the first one that is kept counts."""
        self._settled.setdefault(_kind_of(request, shared, config), settled)

    def forget(self, request: Any, shared: Facts, config: Any) -> None:
        """Forget the choice for such calls, which all members cannot serve so."""
        self._settled.pop(_kind_of(request, shared, config), None)

    def gather(self, members: tuple[int, ...], shared: Facts, row: Any, within: Team | None = None) -> list[Any]:
        """Compare a call that is new, and return each member's row (JSON), in the group's order.

        Collective: every member calls it.
        """
        order = tuple(sorted(members))
        self.compare(members, {"algorithm": "that of the first member", **shared}, within)
        rows = self.world.subworld(order).all_gather_object(row)
        return [rows[order.index(rank)] for rank in members]

    def agree(self, members: tuple[int, ...], facts: dict[str, str]) -> None:
        """Compare facts that must be equal on all members, once: RankMismatchError on all if one differs."""
        number, is_new = self.number(members, facts)
        if is_new:
            self.add(members, facts, number, {"operation": facts["operation"]})

    def refuse(
        self, members: tuple[int, ...], op: str, shared: Facts, error: Exception, within: Team | None = None
    ) -> NoReturn:
        """Raise this member's error, on all members that compare such a call.

        Collective where no call of this operation was agreed on; where one was, the others may not compare theirs, and
        this member waits for none: those that compare a call of this operation learn that it has refused.

        `shared` are the facts of the call; none if it does not even have these.
        """
        if self.knows(members, shared) or len(members) == 1:
            raise error
        timeout_s = 0.0 if self.knows(members, {"operation": op}) else None
        try:
            self.compare(members, {"operation": op}, within, error, timeout_s=timeout_s)
        except (CollectiveTimeoutError, PeerLostError, RankMismatchError) as other:
            if timeout_s is None and isinstance(other, RankMismatchError):
                raise
            raise error from (other if timeout_s is None else None)  # what is wrong here is what the caller must know
        raise AssertionError("members compared a call that one of them refused")

    def number(
        self, members: tuple[int, ...], facts: Facts, within: Team | None = None, layout: str = "", before: str = ""
    ) -> tuple[int, bool]:
        """Return a request's number, and whether the members have just compared it.

        `layout` is that of this member's tensors, on which the choice of the algorithm depends; `before` names the
        algorithm of such calls before, if there were any: the others may go on with that.
        """
        known = self._numbers.get(_digest(members, facts))
        if known is not None or len(members) == 1:
            return known or 0, False
        try:
            self.compare(members, facts, within, layout=layout, timeout_s=ABSENT_S if before else None)
        except CollectiveTimeoutError as absent:
            if not before:
                raise
            raise RankMismatchError(
                f"{facts['operation']}: {facts['algorithm']!r} serves this rank's call, with {layout}; on all members "
                f"such a call was served by {before}. {name_ranks(absent.missing_ranks).capitalize()} did not come to "
                "compare, and may wait in a kernel for this rank: tensors must have equal strides on all members, and "
                "be aligned alike; or name the algorithm in the config"
            ) from absent
        self._counts[members] = number = self._counts.get(members, 0) % _MOST_KINDS + 1
        return number, True

    def compare(
        self, members: tuple[int, ...], facts: Facts, within: Team | None = None, error: Exception | None = None, *,
        layout: str = "", timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Compare facts that must be equal on all members, the order of the group first; all raise an error of one.

        Members that name the group in different orders find each other: they exchange in the order of ranks.
        """
        if within is not None:
            within.ask(f"the {facts['operation']} that is a part of another operation")
        order = tuple(sorted(members))
        refusal = None if error is None else failure_of(error)
        row = {"refusal": refusal, "strides": layout, "group": name_ranks(members), **facts}
        everyone = self.world.subworld(order).compare_calls(row, timeout_s)
        refusals, layouts = ([row.pop(name) for row in everyone] for name in ("refusal", "strides"))
        if any(refusals):
            if error is not None and all(each == refusals[0] for each in refusals):
                raise error
            raise_described(refusals, error, "refused the call", IrisError, order)
        if not (differing := differences(everyone, order)):
            return
        hint = _FROM_TABLES if differing.keys() & {"algorithm", "config"} else ""
        if "algorithm" in differing and (lie := differences([{"": each} for each in layouts], order)):
            hint = f"\nIt depends on how tensors lie: {lie['']}"
        problem = f"{facts['operation']}: the members of the group call differently:"
        raise RankMismatchError("\n  ".join([problem, *map(": ".join, differing.items())]) + hint)


def _kind_of(request: Any, shared: Facts, config: Any) -> tuple[Any, ...]:
    return request.members, *shared.values(), config is not None and config.use_gluon


def layout_of(request: Any) -> str:
    """Describe how tensors lie: the choice of an algorithm may depend on it, and members need not have it alike."""
    names = "in_stride", "out_stride", "a_stride", "b_stride", "aligned"
    found = {name: request.options.get(name, getattr(request, name, None)) for name in names}
    return ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)


def prepare_alike(team: Team, what: str, make: Callable[[], Any]) -> Any:
    """Make a plan on all members, or raise on all of them; `make` may ask for regions of the team."""

    def exchange(error: Exception | None) -> list[bool]:
        if isinstance(error, StepsDifferError):
            steps = error.steps
        else:
            steps = team.tell_step(Step.PREPARED if error is None else Step.FAILED)
        bad = Step.FAILED if Step.FAILED in steps else Step.ASKS  # those that asked in vain did so for others' failures
        return [step != bad for step in steps]

    return on_all_ranks(team.world, f"could not prepare {what}", make, IrisError, team.members, exchange)
