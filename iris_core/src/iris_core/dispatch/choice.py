"""Which algorithm serves a request: the one that was named, a table's fastest, or the cheapest by its own estimate."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from iris_core.errors import FAILURES, ArgumentError, UnsupportedError, error_text
from iris_core.logs import logger
from iris_core.types import Availability

if TYPE_CHECKING:
    from iris_core.dispatch.config import LaunchConfig
    from iris_core.dispatch.tables import Entry, Tables
    from iris_core.protocols import Algorithm
    from iris_core.types import CollectiveRequest, FusedRequest

    Request = CollectiveRequest | FusedRequest

FEW = 3
"""Algorithms that are measured at a first call at most, beside those that always are."""

CLEARLY = 0.95
"""Another algorithm serves in graphs where it takes less than this part of the time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one algorithm for one request.

    Attributes:
        name: the algorithm.
        provider: the plugin that offers it.
        ok: whether it can serve the request.
        reason: why it cannot.
        seconds: what the nearest point of the tables says, if it `is_near`; else its estimate.
        entry: its line at the nearest point of the tables; one that is not near says which algorithm is faster than
            which, and not how long one takes.
        is_near: whether that point has the request's number of ranks and place, and nearly its size.
        measured_only: it is chosen by measurements and by name only.
        repeatable: whether its results are the same from run to run.
        tunings: fields of `Config` that are worth measuring for the request, the algorithm's own choice ({}) first.
    """

    name: str
    provider: str
    ok: bool
    reason: str
    seconds: float | None
    entry: Entry | None = None
    is_near: bool = False
    measured_only: bool = False
    tunings: tuple[Mapping[str, Any], ...] = ()
    repeatable: bool = True

    @property
    def measured(self) -> bool:
        """Whether Iris measured `seconds`; else they are a model's."""
        return self.entry is not None and self.entry.measured and self.is_near

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of `Config` that its table names."""
        return self.entry.config if self.entry is not None and self.is_near else {}

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.name} ({self.provider}): no, {self.reason}"
        assert self.seconds is not None
        how = "measured" if self.measured else "model"
        if self.entry is None and self.measured_only:
            how += "; only by name until measured"
        elif self.entry is not None and not self.is_near:
            source = "measured" if self.entry.measured else "model"
            how += f"; {source} at {self.entry.where}: {self.entry.seconds * 1e6:.1f} us"
        given = "".join(f", {name}={value}" for name, value in self.config.items())
        return f"{self.name} ({self.provider}): {self.seconds * 1e6:.1f} us, {how}{given}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which algorithm serves a request, and why; `str()` of it is for reading.

    Attributes:
        op: the operation.
        algorithm: what was chosen; empty if nothing can serve the request.
        why: the reason.
        candidates: all algorithms for the operation.
    """

    op: str
    algorithm: str
    why: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        head = f"{self.op}: {self.algorithm or 'no algorithm'}, {self.why}"
        return "\n".join([head, *(f"  {candidate}" for candidate in self.candidates)])


def _is_seconds(answer: Any) -> bool:
    return isinstance(answer, numbers.Real) and not isinstance(answer, bool) and float(answer) >= 0


_IS_RIGHT: Mapping[str, Callable[[Any], bool]] = {
    "supports": lambda answer: isinstance(answer, Availability),
    "cost": _is_seconds,
    "host_seconds": _is_seconds,
    "tunings": lambda answer: isinstance(answer, list | tuple) and all(isinstance(each, Mapping) for each in answer),
}
"""Whether what an algorithm says is of the right kind."""


class Choice(NamedTuple):
    """The algorithm that serves a request, and why; the request has the config that was measured.

    `in_graphs` serves it where a graph is captured, if that is another one.
    """

    algorithm: Algorithm[Any]
    why: str
    request: Any
    in_graphs: Launch | None = None


Launch = tuple[str, Mapping[str, Any]]
"""An algorithm's name, and fields of its config."""

Settled = tuple[str, Mapping[str, Any], str, Launch | None]
"""An algorithm's name, fields of its config, why it was chosen, and what serves in graphs, if that is another one."""


class Chooser:
    """The algorithms of one context, and plugins that should have brought some, with the reason why they did not.

    Of two algorithms with one name for one operation, the first counts.
    """

    def __init__(
        self, algorithms: Iterable[Algorithm[Any]], tables: Tables, unusable: Iterable[tuple[str, str]]
    ) -> None:
        self._by_op: dict[str, dict[str, Algorithm[Any]]] = {}
        for each in algorithms:
            self._by_op.setdefault(each.op, {}).setdefault(each.name, each)
        self.tables = tables
        self._unusable = tuple(unusable)
        self._reported: set[tuple[str, str]] = set()

    def choose(
        self,
        request: Request,
        config: LaunchConfig | None,
        left_out: Mapping[str, str] | None = None,
        settled: Settled | None = None,
    ) -> Choice:
        """Return the algorithm that serves a request, and why.

        Args:
            request: the call.
            config: the caller's; None for none.
            left_out: algorithms that are not chosen unless they are named, with the reason.
            settled: what the members have chosen for such calls before; used where it can serve this one.

        Raises:
            UnsupportedError: none does, or the one that was named does not; with the reasons.
            ArgumentError: the one that was named does not exist, or is named twice.
        """
        left_out = left_out or {}
        known = self._by_op.get(request.op, {})
        name, by = config.named(request.op) if config is not None else (None, "")
        if name is not None and config is not None and config.use_gluon and by != "algorithm":
            in_gluon = (each.name for each in known.values() if name in getattr(each, "variants", ()))
            name = next(in_gluon, name)
        if name is not None:
            if name not in known:
                raise ArgumentError(
                    f"{request.op}: there is no algorithm {name!r}; there are {', '.join(known) or 'none'}"
                    + self._missing()
                )
            answer = self._supports(known[name], request, config)
            if not answer:
                raise UnsupportedError(f"{request.op}: algorithm {name!r} cannot serve this call: {answer.reason}")
            return Choice(known[name], f"named by {by}={name!r}", request)
        found = self.tables.nearest(request)
        serving = [
            each
            for each in found.entries
            if each.algorithm in known
            and each.algorithm not in left_out
            and self._supports(known[each.algorithm], with_config(request, each.config), config)
        ]
        if settled is not None and settled[0] in known and settled[0] not in left_out:
            name, given, why, in_graphs = settled
            if self._supports(known[name], wish := with_config(request, given), config):
                return Choice(known[name], why, wish, in_graphs)
        if serving:
            best = min(serving, key=lambda each: self.seconds(request, each.algorithm, each.seconds))
            captured = serving[0] if serving[0].seconds < CLEARLY * best.seconds else best
            in_graphs = None if captured is best else (captured.algorithm, captured.config)
            return Choice(known[best.algorithm], found.reason, with_config(request, best.config), in_graphs)
        answers: dict[str, Availability] = {}
        for by_name in (False, True):  # those that must be measured or named are asked for the message only
            for name, each in known.items():
                if getattr(each, "measured_only", False) is by_name:
                    no = name in left_out
                    answers[name] = Availability.no(left_out[name]) if no else self._supports(each, request, config)
            usable = [name for name, answer in answers.items() if answer]
            if usable and not by_name:
                cheapest = min(usable, key=lambda name: known[name].cost(request))
                why = "the cheapest by its model" if len(usable) > 1 else "the only one that can"
                return Choice(known[cheapest], why, request)
        if usable:
            raise UnsupportedError(
                f"{request.op}: {', '.join(usable)} can serve this call, but only where they were measured on such a "
                "device: name one with Config(algorithm=...), or measure (docs/collectives.md)"
            )
        listed = "".join(f"\n  {name}: {answer.reason}" for name, answer in answers.items())
        raise UnsupportedError(
            f"no algorithm can serve this {request.op} of {request.dtype} {request.shape} on "
            f"{request.group_size} ranks:{listed or ' the backend offers none'}{self._missing()}"
        )

    def seconds(self, request: Request, name: str, seconds: float) -> float:
        """Return how long a call by an algorithm takes that takes a device some seconds.

        Devices are measured without the CPU.  Outside of graphs a call takes at least as long as the CPU needs for it.
        """
        algorithm = self._by_op.get(request.op, {}).get(name)
        if algorithm is None or not hasattr(algorithm, "host_seconds"):
            return seconds
        return max(seconds, self._ask(algorithm, "host_seconds", request)[0] or 0.0)

    def contenders(self, request: Request, config: LaunchConfig | None, *, few: bool) -> list[Launch]:
        """Return the launches that are worth measuring for a request that no measured point is near to.

        They are all that serve it and whose results are `repeatable`; if they are to be `few`: those that took up to
        twice as long as the best at the nearest point, then those whose estimate is up to twice the smallest one, `FEW`
        at most; and all that are `always_measured`.
        """
        known = self._by_op.get(request.op, {})
        usable = {name: each for name, each in known.items() if self._supports(each, request, config)}
        usable = {name: each for name, each in usable.items() if getattr(each, "repeatable", True)}
        if not few:
            return [(name, {}) for name in usable]
        entries = [each for each in self.tables.nearest(request).entries if each.algorithm in usable]
        names = [each.algorithm for each in entries if each.seconds <= 2 * entries[0].seconds]
        costs = {name: each.cost(request) for name, each in usable.items()}
        names += sorted((name for name in costs if costs[name] <= 2 * min(costs.values())), key=costs.__getitem__)
        always = [name for name, each in usable.items() if getattr(each, "always_measured", False)]
        best = [name for name in dict.fromkeys(names) if name not in always][:FEW]
        configs = {each.algorithm: each.config for each in reversed(entries)}
        return [(name, configs.get(name, {})) for name in (*best, *always)]

    def explain(
        self,
        request: Request,
        config: LaunchConfig | None,
        left_out: Mapping[str, str] | None = None,
        settled: Settled | None = None,
    ) -> Explanation:
        """Return what `choose` would return, and what it knows of all the others."""
        left_out = left_out or {}
        try:
            algorithm, why, *_ = self.choose(request, config, left_out, settled)
            chosen = algorithm.name
        except (UnsupportedError, ArgumentError) as error:
            chosen, why = "", str(error).partition("\n")[0]
        found = self.tables.nearest(request)
        tabled = {entry.algorithm: entry for entry in reversed(found.entries)}
        candidates = []
        for name, each in self._by_op.get(request.op, {}).items():
            answer = Availability.no(left_out[name]) if name in left_out else self._supports(each, request, config)
            entry = tabled.get(name) if answer else None
            near = entry is not None and found.is_near
            candidates.append(
                Candidate(
                    name=name,
                    provider=each.info.name,
                    ok=answer.ok,
                    reason=answer.reason,
                    seconds=entry.seconds if entry is not None and near else each.cost(request) if answer else None,
                    entry=entry,
                    is_near=near,
                    measured_only=getattr(each, "measured_only", False),
                    tunings=self.tunings(request, name) if answer else (),
                    repeatable=getattr(each, "repeatable", True),
                )
            )
        return Explanation(request.op, chosen, why, tuple(candidates))

    def _supports(self, algorithm: Algorithm[Any], request: Request, config: LaunchConfig | None) -> Availability:
        """Whether an algorithm can serve a request; not, if it cannot say so, or not what it takes."""
        if config is not None and config.use_gluon and algorithm.info.name != "gluon":
            return Availability.no("it is not written in Gluon, and Config(use_gluon=True) wants that")
        answer, problem = self._ask(algorithm, "supports", request)
        if answer:
            _, problem = self._ask(algorithm, "cost", request)
        return Availability.no(problem) if problem else answer

    def _ask(self, algorithm: Algorithm[Any], question: str, request: Request) -> tuple[Any, str]:
        """Return what an algorithm answers; or None and what is wrong with that, with a warning once."""
        try:
            answer = getattr(algorithm, question)(request)
            if _IS_RIGHT[question](answer):
                return answer, ""
            problem = f"its `{question}` returned {reprlib.repr(answer)}"
        except FAILURES as error:
            problem = f"its `{question}` raised {error_text(error)}"
        plugin, name = algorithm.info.name, algorithm.name
        if (request.op, name) not in self._reported:
            self._reported.add((request.op, name))
            way = f"update the plugin, or block it with IRIS_BLOCK={plugin}"
            logger.warning("%s: algorithm %r of %r cannot be asked: %s; %s", request.op, name, plugin, problem, way)
        return None, problem

    def tunings(self, request: Request, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return the configs that an algorithm offers for a request."""
        algorithm = self._by_op[request.op][name]
        if not hasattr(algorithm, "tunings"):
            return ({},)
        return tuple(self._ask(algorithm, "tunings", request)[0] or ({},))

    def _missing(self) -> str:
        return "".join(f"\n  {label}: {reason}" for label, reason in self._unusable)


def with_config(request: Any, fields: Mapping[str, Any]) -> Any:
    """Return the request with what was measured as the best, where the caller has no wish of their own."""
    if not fields:
        return request
    config = {**fields, **request.options.get("config", {})}
    return replace(request, options={**request.options, "config": config})
