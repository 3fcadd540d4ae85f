"""What the members of a group compare before they launch: the call, what serves it, and whether all can.

What one member refuses, all refuse: the outcome of a check may depend on the rank, so it is exchanged where the members
exchange anyway, at the first call of a kind.  Later calls exchange nothing; a member that refuses one does so alone.
Where the others may know their call, and not come to compare it, no member waits long for them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from iris_core.dispatch.requests import config_text
from iris_core.dispatch.team import Step, StepsDifferError
from iris_core.errors import CollectiveTimeoutError, IrisError, PeerLostError, RankMismatchError, UnsupportedError
from iris_core.world.failures import failure_of, name_ranks, on_all_ranks, raise_described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.dispatch.choice import Choice, Launch, Settled
    from iris_core.dispatch.team import Team
    from iris_core.world import World

    Facts = Mapping[str, str]

_FROM_TABLES = (
    "\nWhere the caller has named no algorithm or config, measured tables do: all members need the same "
    "(<IRIS_CACHE_DIR>/ccl and <IRIS_CACHE_DIR>/ops)."
)

ABSENT_S = 10.0
"""Seconds for which a member waits for others that have launched this call before with another algorithm."""

MOST_KINDS = (1 << 15) - 1
"""Numbers of kinds that kernels can tell apart; afterwards they begin again at 1."""

_DESCRIBED = 4096
"""Kinds of a group that a message can describe: the latest ones."""


class Agreed:
    """Kinds of calls on which the members of groups have agreed, with a number each.

    Members agree on the same kinds in the same order, so the numbers are the same on all of them.  Nothing is ever
    forgotten, or a member could ask for an agreement in which the others take no part; a kind takes 100 bytes.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._begun: set[bytes] = set()
        self._counts: dict[tuple[int, ...], int] = {}
        self._latest: dict[tuple[int, ...], deque[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, members: tuple[int, ...], facts: Facts) -> int | None:
        """Return a kind's number; None if it was not agreed on."""
        return self._numbers.get(_digest(members, facts))

    def has_any(self, members: tuple[int, ...], begin: Facts) -> bool:
        """Whether there is a kind whose facts begin like this; see `add`."""
        return _digest(members, begin) in self._begun

    def next_number(self, members: tuple[int, ...]) -> int:
        """Draw a number; every member does."""
        count = self._counts[members] = self._counts.get(members, 0) + 1
        return (count - 1) % MOST_KINDS + 1

    def add(self, members: tuple[int, ...], facts: Facts, number: int, *begins: Facts) -> None:
        """Write down that the members have agreed; `begins` are parts of the facts that `has_any` finds it by."""
        self._numbers[_digest(members, facts)] = number
        self._begun.update(_digest(members, begin) for begin in begins)
        latest = self._latest.setdefault(members, deque(maxlen=_DESCRIBED))
        latest.append((number, ", ".join(f"{name} {value}" for name, value in facts.items())))

    def describe(self, members: tuple[int, ...], number: int) -> str:
        """Describe the kind that has a number."""
        latest = tuple(self._latest.get(members, ()))  # another thread may add to them
        texts = (text for found, text in reversed(latest) if found == number)
        return next(texts, "a call that is not known here")


def _digest(members: tuple[int, ...], facts: Facts) -> bytes:
    return hashlib.blake2b(repr((members, tuple(facts.items()))).encode(), digest_size=16).digest()


class Served(NamedTuple):
    """What serves a call, on all members alike; the request has their config, and the number of the kind of call."""

    algorithm: Any
    request: Any
    plan: Any
    team: Team
    in_graphs: Launch | None


class Members:
    """What this rank has agreed on with the members of groups.

    Args:
        world: the ranks of the heap.
        team: returns the team of some ranks, who are sure that all have the same in mind.
        failed: called with the members and an error, where this rank alone refuses a call.
    """

    def __init__(
        self,
        world: World,
        team: Callable[[tuple[int, ...]], Team],
        failed: Callable[[tuple[int, ...], Exception], None],
    ) -> None:
        self._world = world
        self._team = team
        self._failed = failed
        self._agreed = Agreed()
        self._left_out: dict[Any, dict[str, str]] = {}
        self._settled: dict[Any, Settled] = {}
        self._layouts: dict[Any, str] = {}

    def left_out(self, members: tuple[int, ...], shared: Facts) -> dict[str, str]:
        """Return algorithms for which there was no room when a kind was first called, on all members, with reasons.

        A member may plan a call again that others have kept, and has to come to the same algorithm.
        """
        return self._left_out.setdefault((members, *shared.values()), {})

    def knows(self, members: tuple[int, ...], shared: Facts) -> bool:
        """Whether the members have compared such a call before."""
        return self._agreed.has_any(members, shared)

    def settled(self, request: Any, shared: Facts, config: Any) -> Settled | None:
        """Return what was chosen for the first such call with tensors that lie alike; None before it.

        Measurements may be added later, and a member may plan a call again that others have kept.
        """
        return self._settled.get(_kind_of(request, shared, config))

    def remember(self, request: Any, shared: Facts, config: Any, settled: Settled) -> None:
        """Let all such calls be served alike; what is remembered first counts."""
        self._settled.setdefault(_kind_of(request, shared, config), settled)

    def gather(self, members: tuple[int, ...], shared: Facts, row: Any) -> list[Any]:
        """Compare a call that is new, and return what each member brings, in the group's order: what JSON can hold.

        Collective: every member calls it.
        """
        order = tuple(sorted(members))
        self._compare(members, shared["operation"], {**shared, "algorithm": "measured at the first call"})
        rows = self._world.subworld(order).all_gather_object(row)
        return [rows[order.index(rank)] for rank in members]

    def describe(self, members: tuple[int, ...], number: int) -> str:
        """Describe the kind of call that has a number."""
        return self._agreed.describe(members, number)

    def settle(
        self,
        members: tuple[int, ...],
        shared: Facts,
        choose: Callable[[dict[str, str]], Choice],
        prepare: Callable[[Any, Any, Team], Any],
        config: Any = None,
        within: Team | None = None,
    ) -> Served:
        """Choose an algorithm, agree on it and on what it launches with, and prepare it: on all members or on none.

        Collective, where such a call is new: every member comes here.

        Args:
            members: world ranks, in the group's order.
            shared: what must be equal on all of them, by name; "operation" is among it.
            choose: gets what was left out, and chooses.
            prepare: gets algorithm, request and team, and makes this member's plan.
            config: the caller's; an algorithm that it names is not replaced by another one.
            within: the team, where this is a part of what its members prepare.

        Raises:
            RankMismatchError: something differs; on all members.
            UnsupportedError, ArgumentError, ...: a member refused the call or could not prepare it; on all members.
        """
        op, left_out, kind = shared["operation"], self.left_out(members, shared), (members, *shared.values())
        while True:
            try:
                algorithm, why, request, in_graphs = choose(left_out)
            except Exception as error:  # noqa: BLE001 - of a plugin, of any kind; raised again, on all members
                self.refuse(members, op, lambda: shared, error, within)
            facts = {**shared, "algorithm": algorithm.name, "config": config_text(request.options["config"])}
            before, layout = self._layouts.get(kind, ""), _layout_of(request)
            number, is_new = self._number(members, op, facts, within, layout, before)
            team = self._team(members)
            request = replace(request, options={**request.options, "kind": number})
            try:
                make = partial(prepare, algorithm, request, team)
                plan = _prepare_alike(team, f"{algorithm.name!r} for {op}", make) if is_new else make()
                break
            except UnsupportedError as error:  # there is no room for it
                named = config is not None and config.named(op)[0] is not None
                if named or not (is_new or team.size == 1):
                    raise
                left_out[algorithm.name] = str(error).partition("\n")[0]
                team.warn_once(f"{op} does without algorithm {algorithm.name!r}", left_out[algorithm.name])
        if is_new:
            self._agreed.add(members, facts, number, shared, {"operation": op})
            self._layouts[kind] = f"{algorithm.name!r} with {layout}"
        if config is None or config.named(op)[0] is None:
            self.remember(request, shared, config, (algorithm.name, request.options["config"], why, in_graphs))
        return Served(algorithm, request, plan, team, in_graphs)

    def agree(self, members: tuple[int, ...], facts: dict[str, str]) -> None:
        """Compare with the other members what must be equal, once: RankMismatchError on all if something differs."""
        number, is_new = self._number(members, facts["operation"], facts)
        if is_new:
            self._agreed.add(members, facts, number, {"operation": facts["operation"]})

    def refuse(
        self,
        members: tuple[int, ...],
        op: str,
        shared: Callable[[], Facts],
        error: Exception,
        within: Team | None = None,
    ) -> NoReturn:
        """Raise this member's error, on all members that compare such a call.

        Collective where no call of this operation was agreed on; where one was, the others may know theirs, and this
        member waits for none: those that come to compare, or to another exchange, learn that it has refused.

        `shared` returns what `settle` gets, or raises where the call does not even have that.
        """
        known = False
        with contextlib.suppress(Exception):  # whatever else is wrong with the call, `error` says what is
            known = self._agreed.has_any(members, shared())
        if known or len(members) == 1:
            self._failed(members, error)
            raise error
        timeout_s = 0.0 if self._agreed.has_any(members, {"operation": op}) else None
        try:
            self._compare(members, op, {}, within, error, timeout_s=timeout_s)
        except (CollectiveTimeoutError, PeerLostError) as absent:
            if timeout_s is not None:
                self._failed(members, error)
            raise error from (absent if timeout_s is None else None)  # what is wrong here is what the caller must know
        raise AssertionError("members compared a call that one of them refused")

    def _number(
        self,
        members: tuple[int, ...],
        op: str,
        facts: dict[str, str],
        within: Team | None = None,
        layout: str = "",
        before: str = "",
    ) -> tuple[int, bool]:
        """Return a kind's number, and whether the members have just compared it.

        `layout` is that of this member's tensors, on which the choice of the algorithm depends; `before` says what has
        served such a call before, if anything: the others may go on with that.
        """
        known = self._agreed.number(members, facts)
        if known is not None or len(members) == 1:
            return known or 0, False
        try:
            self._compare(members, op, facts, within, layout=layout, timeout_s=ABSENT_S if before else None)
        except CollectiveTimeoutError as absent:
            if not before:
                raise
            raise RankMismatchError(
                f"{op}: {facts['algorithm']!r} serves this rank's call, with {layout}; on all members such a call was "
                f"served by {before}. {name_ranks(absent.missing_ranks).capitalize()} did not come to compare, and may "
                "wait in a kernel for this rank: tensors must have equal strides on all members, and be aligned alike; "
                "or name the algorithm in the config"
            ) from absent
        return self._agreed.next_number(members), True

    def _compare(
        self,
        members: tuple[int, ...],
        op: str,
        facts: Facts,
        within: Team | None = None,
        error: Exception | None = None,
        layout: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Compare with the other members what must be equal, the order of the group first; all raise what one does.

        Members that name the group in different orders find each other: they meet in the order of ranks.
        """
        if within is not None:
            within.ask(f"the {op} that is a part of another operation")
        order = tuple(sorted(members))
        world = self._world.subworld(order)
        refusal = None if error is None else failure_of(error)
        group = f"ranks {', '.join(map(str, members))}"
        everyone = world.compare_calls({"refusal": refusal, "strides": layout, "group": group, **facts}, timeout_s)
        refusals = [row.pop("refusal") for row in everyone]
        if any(refusals):
            if error is not None and all(each == refusals[0] for each in refusals):
                raise error
            raise_described(refusals, error, "refused the call", IrisError, order)
        layouts = [row.pop("strides") for row in everyone]
        names = dict.fromkeys(name for row in everyone for name in row)
        differing = [name for name in names if len({row.get(name) for row in everyone}) > 1]
        if not differing:
            return

        def by_rank(texts: list[str]) -> str:
            return "; ".join(f"{text} on rank {rank}" for rank, text in zip(order, texts, strict=True))

        lines = [f"  {name}: {by_rank([row.get(name, 'absent') for row in everyone])}" for name in differing]
        hint = _FROM_TABLES if {"algorithm", "config"}.intersection(differing) else ""
        if "algorithm" in differing and len(set(layouts)) > 1:
            hint = f"\nIt depends on how tensors lie: {by_rank(layouts)}"
        raise RankMismatchError(f"{op}: the members of the group call differently:\n" + "\n".join(lines) + hint)


def _kind_of(request: Any, shared: Facts, config: Any) -> tuple[Any, ...]:
    in_gluon = config is not None and config.use_gluon
    return request.members, *shared.values(), _layout_of(request), in_gluon


def _layout_of(request: Any) -> str:
    """What the choice of an algorithm may depend on, and members need not have alike."""
    found = {
        name: request.options.get(name, getattr(request, name, None))
        for name in ("in_stride", "out_stride", "a_stride", "b_stride", "aligned")
    }
    return ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)


def _prepare_alike(team: Team, what: str, make: Callable[[], Any]) -> Any:
    """Make a plan on all members, or raise on all of them; `make` may ask for regions of the team."""

    def tell(error: Exception | None) -> list[bool]:
        if isinstance(error, StepsDifferError):
            steps = error.steps
        else:
            steps = team.tell_step(Step.PREPARED if error is None else Step.FAILED)
        bad = Step.FAILED if Step.FAILED in steps else Step.ASKS  # those that asked in vain did so for others' failures
        return [step != bad for step in steps]

    return on_all_ranks(team.world, f"could not prepare {what}", make, IrisError, team.members, tell)
