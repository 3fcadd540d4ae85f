"""Which algorithm serves a request: the one that was named, a table's fastest, or the cheapest by its own estimate."""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from iris_core.dispatch import TF32, tables
from iris_core.dispatch.config import Config, FusedConfig, LaunchConfig
from iris_core.dispatch.requests import Request, nodes_of
from iris_core.dispatch.tables import HEAP, ORDINARY, Entry
from iris_core.errors import FAILURES, ArgumentError, SettingsError, UnsupportedError, error_text
from iris_core.logs import logger
from iris_core.protocols import Algorithm
from iris_core.types import Availability, FusedRequest, NormRequest, OperationRequest

_OURS = ("iris_core", "iris_triton", "iris_gluon")
_FEW = 6  # algorithms that are measured at a first call at most, beside those that always are
CLEARLY = 0.98
"""Another algorithm serves in graphs where it takes less than this part of the time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One algorithm for one request."""

    name: str  #: the algorithm
    provider: str  #: the plugin that offers it
    ok: bool  #: whether it can serve the request
    reason: str  #: why it cannot, or is chosen by name only
    seconds: float | None  #: what the nearest point of the tables says, if it `is_near`; else its estimate
    #: its line at the nearest point of the tables; one that is not near says which algorithm is faster than which, and
    #: not how long one takes
    entry: Entry | None = None
    is_near: bool = False  #: whether that point has the request's number of ranks and place, and nearly its size

    @property
    def measured(self) -> bool:
        """Whether Iris measured `seconds`; else they are a model's."""
        return self.entry is not None and self.entry.measured and self.is_near

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.name} ({self.provider}): no, {self.reason}"
        how = ("measured" if self.measured else "model") + (f"; {self.reason}" if self.reason else "")
        given = ""
        if self.entry is not None:
            given = "".join(f", {name}={value}" for name, value in self.entry.config.items())
            if self.entry.eager_seconds > self.entry.seconds:
                given += f", {self.entry.host_seconds * 1e6:.1f} us of the CPU"
            if not self.is_near:
                source = "measured" if self.entry.measured else "model"
                how += f"; {source} at {self.entry.where}: {self.entry.seconds * 1e6:.1f} us"
        return f"{self.name} ({self.provider}): {self.seconds * 1e6:.1f} us, {how}{given}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which algorithm serves a request, and why; `str()` of it is for reading."""

    op: str  #: the operation
    algorithm: str  #: what was chosen; empty if nothing can serve the request
    why: str  #: the reason
    candidates: tuple[Candidate, ...]  #: all algorithms for the operation

    def __str__(self) -> str:
        head = f"{self.op}: {self.algorithm or 'no algorithm'}, {self.why}"
        return "\n".join([head, *(f"  {candidate}" for candidate in self.candidates)])


_ANSWERS = {"supports": Availability, "cost": float | int, "tunings": list | tuple}
_MOST_TUNINGS = 6

_NEAR, _CLOSE, _FAR = 0.5, 1.0, 3.0
"""Powers of two by which each size of a measured point may differ from a request's: up to the first it says what is the
fastest, up to the second its configs serve, wherever tensors lie, and up to the third it is better than an estimate.
Of products with scales only M may: which N and K torch multiplies is a matter of remainders."""
_SAME, _TIED = 0.125, 0.95
"""Within _SAME powers of two a point says what is the fastest; farther, only if the second takes 1 / _TIED as long."""

_LEAST_NBYTES = 1 << 10  # smaller collectives take as long as one of this size
_SAME_SPEED = {"float16": "bfloat16", "bfloat16": "float16"}

Launch = tuple[str, Mapping[str, Any]]
"""An algorithm's name, and fields of its config."""


class Choice(NamedTuple):
    """What serves a request, with which fields of its config, and why; `in_graphs`: where one is captured."""

    name: str
    config: Mapping[str, Any]
    why: str
    in_graphs: Launch | None = None


class Chooser:
    """The algorithms of one context, the first of each name; `unusable` are plugins that brought none, with reasons.

    If the context is `deterministic`, only algorithms that promise the bits of reductions serve them.
    """

    def __init__(
        self, algorithms: Iterable[Algorithm[Any]], tables: Tables, unusable: Iterable[tuple[str, str]], *,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self._deterministic = deterministic
        self._by_op: dict[str, dict[str, Algorithm[Any]]] = {}
        for each in algorithms:
            self._by_op.setdefault(each.op, {}).setdefault(each.name, each)
        self.tables = tables
        self._missing = "".join(f"\n  {label}: {reason}" for label, reason in unusable)
        self._reported: set[tuple[str, str]] = set()

    def choose(
        self, request: Request, config: LaunchConfig | None, left_out: Mapping[str, str] = {},
        settled: Choice | None = None,
    ) -> Choice:  # fmt: skip
        """Return what serves a request (see `of`), and why; UnsupportedError or ArgumentError if nothing does.

        Those that were left out, for these reasons, are only chosen by name; what the members have settled at an
        earlier call of the kind serves where it can.
        """
        known = self._by_op.get(request.op, {})
        if config is not None and (named := config.named(request.op))[0] is not None:
            return self._named(request, config, *named)

        def serves(name: str, given: Mapping[str, Any]) -> bool:
            return name in known and bool(self._supports(known[name], with_config(request, given), config, left_out))

        if settled is not None and serves(*settled[:2]):
            return settled
        found = self._nearest(request)
        if serving := [each for each in found.entries if serves(each.algorithm, each.config)]:
            best = min(serving, key=attrgetter("eager_seconds"))
            captured = serving[0] if serving[0].seconds < CLEARLY * best.seconds else best
            in_graphs = None if captured is best else (captured.algorithm, captured.config)
            return Choice(best.algorithm, best.config, found.reason, in_graphs)
        free = {name: each for name, each in known.items() if not _is_by_name(each, request)}
        answers = {name: self._supports(each, request, config, left_out) for name, each in free.items()}
        if usable := [name for name, answer in answers.items() if answer]:
            if self.is_fixed(request):
                return Choice(usable[0], {}, "the first one that promises its bits")
            cheapest = min(usable, key=lambda name: known[name].cost(request))
            return Choice(cheapest, {}, "the cheapest by its model" if len(usable) > 1 else "the only one that can")
        by_name = {name: each for name, each in known.items() if name not in free}  # asked for the message only
        answers |= {name: self._supports(each, request, config, left_out) for name, each in by_name.items()}
        if able := [name for name, answer in answers.items() if answer]:
            raise UnsupportedError(
                f"{request.op}: {', '.join(able)} can serve this call, but only where they were measured on such a "
                "device: name one with Config(algorithm=...), or measure (docs/collectives.md)"
            )
        listed = "".join(f"\n  {name}: {answer.reason}" for name, answer in answers.items())
        raise UnsupportedError(
            f"no algorithm can serve this {request.op} of {request.dtype} {request.shape} on "
            f"{request.group_size} ranks:{listed or ' the backend offers none'}{self._missing}"
        )

    def _named(self, request: Request, config: LaunchConfig, name: str | None, by: str) -> Choice:
        known = self._by_op.get(request.op, {})
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ArgumentError(f"{request.op}: there is no algorithm {name!r}; there are {listed}{self._missing}")
        if not (answer := self._supports(known[name], request, config, {})):
            raise UnsupportedError(f"{request.op}: algorithm {name!r} cannot serve this call: {answer.reason}")
        return Choice(name, {}, f"named by {by}={name!r}")

    def of(self, chosen: Choice, request: Request) -> tuple[Any, Any]:
        """Return the algorithm that was chosen, and the request with its config."""
        return self._by_op[request.op][chosen.name], with_config(request, chosen.config)

    def contenders(self, request: Request, config: LaunchConfig | None, *, few: bool) -> list[Launch]:
        """Return the launches that are worth measuring: all that serve a request.

        If they are to be `few`: those that took up to twice as long as the best at the nearest point, which may be of
        tensors that others serve, and those whose estimate is up to twice the smallest one, in turn, `_FEW` at most;
        and all that are `always_measured`.  The best two at that point are measured without its configs, too.
        """
        if self.is_fixed(request):
            return []
        known = self._by_op.get(request.op, {}).items()
        usable = {name: each for name, each in known if self._supports(each, request, config, {})}
        if not few:
            return [(name, {}) for name in usable]
        entries = [each for each in self.tables.nearest(request).entries if each.algorithm in usable]
        costs = {name: each.cost(request) for name, each in usable.items()}
        always = [name for name, each in usable.items() if getattr(each, "always_measured", False)]
        near = [each.algorithm for each in entries if each.seconds <= 2 * entries[0].seconds]
        cheap = sorted((name for name in costs if costs[name] <= 2 * min(costs.values())), key=costs.__getitem__)
        in_turn = dict.fromkeys(chain.from_iterable(zip_longest(near, cheap)))
        best = [name for name in in_turn if name is not None and name not in always][:_FEW]
        configs = {each.algorithm: each.config for each in reversed(entries)}
        launches: list[Launch] = [(name, configs.get(name, {})) for name in (*best, *always)]
        return launches + [(name, {}) for name in near[:2] if configs[name]]

    def explain(
        self, request: Request, config: LaunchConfig | None, left_out: Mapping[str, str] = {},
        settled: Choice | None = None,
    ) -> Explanation:  # fmt: skip
        """Return what `choose` would return, and what it knows of all the others."""
        try:
            chosen, _, why, captured = self.choose(request, config, left_out, settled)
            why += f"; in graphs {captured[0]}" if captured else ""
        except (UnsupportedError, ArgumentError) as error:
            chosen, why = "", str(error).partition("\n")[0]
        found = self._nearest(request)
        tabled = {entry.algorithm: entry for entry in reversed(found.entries)}
        candidates = []
        for name, each in self._by_op.get(request.op, {}).items():
            answer = self._supports(each, request, config, left_out)
            entry = tabled.get(name) if answer else None
            seconds, reason = (each.cost(request), "") if answer else (None, answer.reason)
            if is_near := entry is not None and found.is_near:
                seconds = entry.seconds
            elif answer and entry is None and _is_by_name(each, request):
                reason = "only by name until measured"
            candidates.append(Candidate(name, each.info.name, answer.ok, reason, seconds, entry, is_near))
        return Explanation(request.op, chosen, why, tuple(candidates))

    def is_ours(self, request: Request, name: str) -> bool:
        """Whether an algorithm comes with Iris, with all of which its tables were measured; a plugin's does not."""
        return type(self._by_op[request.op][name]).__module__.partition(".")[0] in _OURS

    def is_fixed(self, request: Request) -> bool:
        """Whether neither times nor memory may decide on the algorithm: two that promise bits would differ in them."""
        return isinstance(request, OperationRequest) and self.promises(request)

    def promises(self, request: Request) -> bool:
        """Whether a request reduces over members, in a context that promises its bits."""
        return self._deterministic and "reduce" in request.op and request.group_size > 1

    def _nearest(self, request: Request) -> Found:
        return Found() if self.is_fixed(request) else self.tables.nearest(request)

    def _supports(
        self, algorithm: Algorithm[Any], request: Request, config: LaunchConfig | None, left_out: Mapping[str, str]
    ) -> Availability:
        """Whether an algorithm can serve a request; not, if it cannot say so, or not what it takes."""
        if algorithm.name in left_out:
            return Availability.no(left_out[algorithm.name])
        if config is not None and config.use_gluon and algorithm.info.name != "gluon":
            return Availability.no("it is not written in Gluon, and Config(use_gluon=True) wants that")
        if len(nodes := nodes_of(request)) > 1 and getattr(algorithm, "spans_nodes", False) is not True:
            where = " and ".join([", ".join(map(str, nodes[:-1])), str(nodes[-1])])
            return Availability.no(f"its kernels reach ranks of one node only, and this group is on nodes {where}")
        if self.promises(request) and getattr(algorithm, "deterministic", False) is not True:
            return Availability.no(
                "it does not promise its bits, and this context wants that of reductions (deterministic=True, "
                "IRIS_DETERMINISTIC or torch.use_deterministic_algorithms)"
            )
        scales = getattr(request, "scales", "none")
        if scales != "none" and scales not in getattr(algorithm, "scaled", ()):
            return Availability.no(f"it takes no scales of {scales}")
        answer, problem = self._ask(algorithm, "supports", request)
        if answer:
            _, problem = self._ask(algorithm, "cost", request)
        return Availability.no(problem) if problem else answer

    def _ask(self, algorithm: Any, question: str, request: Request) -> tuple[Any, str]:
        """Return what an algorithm answers; or None and what is wrong with that, with a warning once."""
        try:
            answer = getattr(algorithm, question)(request)
            if isinstance(answer, _ANSWERS[question]) and _is_possible(request, answer):
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
        """Return the configs that an algorithm offers for a request, its own choice ({}) first."""
        algorithm = self._by_op[request.op][name]
        offered = self._ask(algorithm, "tunings", request)[0] if hasattr(algorithm, "tunings") else None
        return tuple(offered or ({},))


def _is_possible(request: Request, answer: Any) -> bool:
    """Whether an answer is no negative time, and no more or other configs than may be."""
    if not isinstance(answer, list | tuple):
        return isinstance(answer, Availability) or answer >= 0
    kind = FusedConfig if isinstance(request, FusedRequest) else Config
    try:
        return len(answer) <= _MOST_TUNINGS and all("algorithm" not in each and kind(**each) for each in answer)
    except (TypeError, ArgumentError):
        return False


def _is_by_name(algorithm: Any, request: Request) -> bool:
    """Whether an algorithm is for names and measurements only; none is where few can serve: between nodes."""
    return getattr(algorithm, "measured_only", False) is True and len(nodes_of(request)) < 2


def with_config(request: Any, fields: Mapping[str, Any]) -> Any:
    """Return the request with what was measured as the best, where the caller has no wish of their own."""
    if not fields:
        return request
    config = {**fields, **request.options.get("config", {})}
    return replace(request, options={**request.options, "config": config})


# -- tables -----------------------------------------------------------------------------------------------------------
class Found(NamedTuple):
    """The measured point that is the nearest to a request: its entries, the fastest first; none if all are far.

    It `is_near` if sizes, place and number of ranks are those of the request, or nearly so; `apart` says how nearly, in
    powers of two.
    """

    entries: tuple[Entry, ...] = ()
    is_near: bool = False
    apart: float = 0.0

    def decides(self, names: Iterable[str]) -> bool:
        """Whether the fastest of some algorithms here is sure to be nearly the fastest at the request's size."""
        times = sorted(each.seconds for each in self.entries if each.algorithm in names)
        if not (times and self.is_near and self.entries[0].measured):
            return False
        return self.apart <= _SAME or len(times) == 1 or times[0] < _TIED * times[1]

    @property
    def reason(self) -> str:
        """Why its first entry is taken, for people."""
        first = self.entries[0]
        how = "measured as the fastest" if first.measured else "the fastest by the model"
        where = "" if self.is_near else f" at {first.where}"
        source = f"in {first.source}" if first.source else "here"
        return f"{how}{where} {source}" + (f" ({first.note})" if first.note else "")


def size_of(request: Request) -> tuple[int, ...] | None:
    """Return the size by which a request is looked up, the same on all members.

    None where members cannot know each other's sizes: all_to_all with split sizes.
    """
    if isinstance(request, FusedRequest):
        return request.shape
    if request.options.get("uneven"):
        return None
    has_all = request.op == "scatter" and request.rank == request.options.get("root")
    return (max(request.nbytes // (request.group_size if has_all else 1), _LEAST_NBYTES),)


def place_of(request: Request) -> str:
    """Return "heap", "ordinary", or which of the tensors that all members have is on the heap: "input" or "output"."""
    if isinstance(request, FusedRequest):
        on_heap = request.reach_a if request.op == "all_gather_matmul" else request.reach_out
        return HEAP if on_heap or request.op == "matmul_reduce_scatter" else ORDINARY
    if isinstance(request, NormRequest):
        return HEAP if request.direct_in else ORDINARY
    has_in, has_out = request.op not in ("broadcast", "scatter"), request.op not in ("broadcast", "gather", "reduce")
    into, out = request.direct_in or not has_in, request.direct_out or not has_out
    return {(True, True): HEAP, (False, False): ORDINARY, (True, False): "input", (False, True): "output"}[into, out]


def dtypes_of(request: Request) -> tuple[str, ...]:
    """Return the names of element types whose entries speak for a request, the best one first.

    Its own, with what is scaled, or TF32; then the other type of 16 bits, which takes as long; then any.
    """
    scales = getattr(request, "scales", "none")
    own = request.dtype if scales == "none" else f"{request.dtype} {scales}"
    own = TF32 if request.options.get("tf32") else own
    return (own, *([_SAME_SPEED[own]] if own in _SAME_SPEED else []), tables.ANY_DTYPE)


def entry_for(request: Request, algorithm: str, config: Any, seconds: float, host_seconds: float) -> Entry:
    """Return the line of a request that an algorithm has served; the request has a size."""
    size, place, dim = size_of(request), place_of(request), request.options.get("gather_dim")
    assert size is not None
    of: Any = {"group_size": request.group_size, "num_nodes": len(nodes_of(request)) or 1, "host_seconds": host_seconds}
    return Entry(request.op, dtypes_of(request)[0], size, algorithm, seconds, place, dim, config, **of)


def file_name(device: str, group_size: int) -> str:
    """Return the name of the file of a table."""
    return f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{group_size}.json"


def _may_be_of(device: str, name: str) -> bool:
    """Whether a file may have measurements of a device: it is not named as that of another one."""
    number = re.fullmatch(r".+-([0-9]+)\.json", name)
    return name.endswith(".json") and (number is None or name == file_name(device, int(number[1])))


def _by_point(entries: Iterable[Entry]) -> dict[tuple[Any, ...], list[Entry]]:
    points: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        points.setdefault((entry.group_size, entry.source, *entry.point), []).append(entry)
    return points


class Tables:
    """The tables of a device, from folders that need not exist; the first table of a point counts.

    `cache` is the first folder, where new measurements are kept.
    """

    def __init__(self, cache: Path, shipped: Iterable[Path], device: str) -> None:
        self._cache, self._device, self._keeps = cache, device, True
        self._points: dict[tuple[Any, ...], list[Entry]] = {}
        for folder in (cache, *shipped):
            try:
                paths = sorted(path for path in folder.iterdir() if _may_be_of(device, path.name))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                text = "tables in %s are left out: %s. IRIS_CACHE_DIR names another folder"
                logger.warning(text, folder, error.strerror)
                continue
            for path in paths:
                try:
                    if (table := tables.read_table(path)).device == device:
                        self._points |= _by_point(table.entries)
                except SettingsError as error:  # measurements are advice: without them the model decides
                    logger.warning("a table is left out: %s", error)

    def add(self, entries: Sequence[Entry], *, write: bool) -> None:
        """Add what this process has measured at a point, before all files; `write` also keeps it in the cache."""
        points = _by_point(entries)  # assigned at once: another thread may look
        self._points = points | {key: each for key, each in self._points.items() if key not in points}
        if not write:
            return
        size = entries[0].group_size
        path = self._cache / file_name(self._device, size)
        old: Sequence[Entry] = ()
        try:
            with contextlib.suppress(SettingsError):  # there is none; or it is damaged, as was said when it was read
                old = tables.read_table(path).entries
            tables.write_table(path, self._device, size, old, entries)
        except OSError as error:
            if self._keeps:
                logger.warning("what was measured is not kept: %s", error)
            self._keeps = False

    def nearest(self, request: Request) -> Found:
        """Return the measured point that is the nearest to a request: in ranks first, then place, dtype and sizes."""
        size, dtypes, place = size_of(request), dtypes_of(request), place_of(request)
        kind = request.op, request.options.get("gather_dim"), max(1, len(nodes_of(request)))
        is_scaled = getattr(request, "scales", "none") != "none"
        near: list[tuple[tuple[Any, ...], bool, list[Entry]]] = []
        for entries in self._points.values() if size and all(size) else ():
            first = entries[0]
            its_kind = first.op, first.gather_dim, first.num_nodes
            if its_kind != kind or first.dtype not in dtypes or len(first.size) != len(size or ()):
                continue
            apart = [abs(math.log2(mine / its)) for mine, its in zip(size or (), first.size, strict=True)]
            octaves = abs(math.log2(first.group_size / request.group_size))
            if max(apart) <= _FAR:
                elsewhere = octaves, first.place != place
                is_other = max(apart) > _NEAR or (is_scaled and max(apart[1:]) > 0)
                key = *elsewhere, is_other, dtypes.index(first.dtype), math.hypot(*apart)
                near.append((key, octaves == 0 and max(apart) <= _CLOSE, entries))
        if not near:
            return Found()
        (*apart_from, _, distance), keeps_configs, entries = min(near, key=itemgetter(0))
        rows = entries if keeps_configs else [replace(each, config={}) for each in entries]
        return Found(tuple(sorted(rows, key=lambda entry: entry.seconds)), not any(apart_from), distance)
