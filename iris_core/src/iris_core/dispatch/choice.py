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


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one algorithm for one request.

    Attributes:
        name: the algorithm.
        provider: the plugin that offers it.
        ok: whether it can serve the request.
        reason: why it cannot.
        seconds: what a table says of as many ranks; else its estimate.
        entry: the line of a table that speaks of the request; one of another number of ranks (`borrowed_from`) says
            which algorithm is faster than which, and not how long one takes.
        measured_only: it is chosen by tables and by name only.
        repeatable: whether its results are the same from run to run.
        tunings: fields of `Config` that are worth measuring for the request, the algorithm's own choice ({}) first.
    """

    name: str
    provider: str
    ok: bool
    reason: str
    seconds: float | None
    entry: Entry | None = None
    measured_only: bool = False
    tunings: tuple[Mapping[str, Any], ...] = ()
    repeatable: bool = True

    @property
    def measured(self) -> bool:
        """Whether Iris measured `seconds`, with as many ranks; else they are a model's."""
        return self.entry is not None and self.entry.measured and self.entry.borrowed_from is None

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of `Config` that its table names."""
        return self.entry.config if self.entry is not None else {}

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.name} ({self.provider}): no, {self.reason}"
        assert self.seconds is not None
        how = "measured" if self.measured else "model"
        if self.entry is None and self.measured_only:
            how += "; only by name until measured"
        elif self.entry is not None and self.entry.borrowed_from is not None:
            source = "measured" if self.entry.measured else "model"
            how += f"; {source} with {self.entry.borrowed_from} ranks: {self.entry.seconds * 1e6:.1f} us"
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
    """What serves a request, and why; the request has the config that the table names."""

    algorithm: Algorithm[Any]
    why: str
    request: Any


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
        self._tables = tables
        self._unusable = tuple(unusable)
        self._reported: set[tuple[str, str]] = set()

    def choose(
        self, request: Request, config: LaunchConfig | None, left_out: Mapping[str, str] | None = None
    ) -> Choice:
        """Return the algorithm that serves a request, and why.

        What is `left_out`, with the reason, is not chosen unless it is named.

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
        answers = {
            each: Availability.no(left_out[each]) if each in left_out else self._supports(algorithm, request, config)
            for each, algorithm in known.items()
        }
        for entry in self._measured(request):
            if entry.algorithm in left_out:
                continue
            wish = _with_config(request, entry)
            if entry.algorithm in known and self._supports(known[entry.algorithm], wish, config):
                return Choice(known[entry.algorithm], entry.reason, wish)
        usable = [each for each, answer in answers.items() if answer]
        if not usable:
            listed = "".join(f"\n  {name}: {answer.reason}" for name, answer in answers.items())
            raise UnsupportedError(
                f"no algorithm can serve this {request.op} of {request.dtype} {request.shape} on "
                f"{request.group_size} ranks:{listed or ' the backend offers none'}{self._missing()}"
            )
        modelled = [each for each in usable if not getattr(known[each], "measured_only", False)]
        if not modelled:
            raise UnsupportedError(
                f"{request.op}: {', '.join(usable)} can serve this call, but only where they were measured on such a "
                "device: name one with Config(algorithm=...), or measure (docs/collectives.md)"
            )
        cheapest = min(modelled, key=lambda each: known[each].cost(request))
        why = "the cheapest by its model" if len(modelled) > 1 else "the only one that can"
        return Choice(known[cheapest], why, request)

    def _measured(self, request: Request) -> list[Entry]:
        """What the tables say, the fastest first: a call takes at least as long as it takes the CPU to ask for it.

        Tables are measured in graphs; whether a call will be captured is not known when its algorithm is chosen.
        """
        entries = self._tables.lookup(request)
        costs = {
            name: self._ask(each, "host_seconds", request)[0] or 0.0
            for name, each in self._by_op.get(request.op, {}).items()
            if hasattr(each, "host_seconds")
        }
        if not costs:
            return entries
        return sorted(entries, key=lambda entry: max(entry.seconds, costs.get(entry.algorithm, 0.0)))

    def explain(
        self, request: Request, config: LaunchConfig | None, left_out: Mapping[str, str] | None = None
    ) -> Explanation:
        """Return what `choose` would return, and what it knows of all the others."""
        left_out = left_out or {}
        try:
            algorithm, why, _ = self.choose(request, config, left_out)
            chosen = algorithm.name
        except (UnsupportedError, ArgumentError) as error:
            chosen, why = "", str(error).partition("\n")[0]
        tabled = {entry.algorithm: entry for entry in reversed(self._tables.lookup(request))}
        candidates = []
        for name, each in self._by_op.get(request.op, {}).items():
            answer = Availability.no(left_out[name]) if name in left_out else self._supports(each, request, config)
            entry = tabled.get(name) if answer else None
            own = entry is not None and entry.borrowed_from is None
            seconds = entry.seconds if entry is not None and own else each.cost(request) if answer else None
            candidates.append(
                Candidate(
                    name=name,
                    provider=each.info.name,
                    ok=answer.ok,
                    reason=answer.reason,
                    seconds=seconds,
                    entry=entry,
                    measured_only=getattr(each, "measured_only", False),
                    tunings=self._tunings(each, request) if answer else (),
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

    def _tunings(self, algorithm: Algorithm[Any], request: Request) -> tuple[Mapping[str, Any], ...]:
        if not hasattr(algorithm, "tunings"):
            return ({},)
        return tuple(self._ask(algorithm, "tunings", request)[0] or ({},))

    def _missing(self) -> str:
        return "".join(f"\n  {label}: {reason}" for label, reason in self._unusable)


def _with_config(request: Any, entry: Entry) -> Any:
    """The request, with what was measured as the best where the caller has no wish of his own."""
    if not entry.config:
        return request
    config = {**entry.config, **request.options.get("config", {})}
    return replace(request, options={**request.options, "config": config})
