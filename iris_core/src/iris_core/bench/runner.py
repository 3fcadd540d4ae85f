"""Measuring on one rank: declare, call once, verify, measure in turn, verify again, gather.

All ranks make the same exchanges in the same order, whatever they find: a wrong result on one rank is known to all
before any of them goes on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.bench.once import SingleCalls
from iris_core.bench.state import Provider, SkipPoint, State
from iris_core.bench.summary import Measured, Times, skipped_point, summarize
from iris_core.bench.timers import GPU_TIMERS, MAX_GRAPH_CALLS, Batch, make_batch, synchronize, warm_clocks
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.api import Iris
    from iris_core.bench.options import RunOptions
    from iris_core.bench.registry import Benchmark
    from iris_core.bench.results import Result
    from iris_core.world import World

MAX_UNITS = 100_000
"""Bound of the repetitions in one round, for calls that take next to nothing."""


@dataclass
class _Candidate:
    """A provider on its way through the phases, on this rank."""

    provider: Provider
    batch: Batch | None = None
    units: int = 1
    seconds: float = 0.0  # of one call, roughly
    times: Times = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def on_gpu(self) -> bool:
        return self.provider.timer in GPU_TIMERS


class Runner:
    """Measures benchmarks on this rank.

    Collective: every rank of the world makes one and calls `point` with the same benchmarks and parameters.

    Args:
        world: the ranks, for exchanges.
        ctx: the open context that benchmarks get; None for benchmarks without ranks.
        options: of the run.
        on_measured: called after each measurement with the names of benchmark and provider, in the order of measuring.
    """

    def __init__(
        self,
        world: World,
        ctx: Iris | None,
        options: RunOptions,
        on_measured: Callable[[str, str], None] | None = None,
    ) -> None:
        self._world = world
        self._ctx = ctx
        self._options = options
        self._on_measured = on_measured
        self._on_gpu = ctx is not None and ctx.device.startswith("cuda")

    def point(self, benchmark: Benchmark, params: Mapping[str, Any]) -> list[Result]:
        """Measure all providers of a benchmark at one point of its axes.

        Returns:
            One result for each provider, the same on every rank but for counters, which are the rank's own.

        Raises:
            BenchmarkError: the declaration is wrong, or differs between ranks.
        """
        num_ranks = 0 if self._ctx is None else self._world.world_size
        state = State(benchmark.name, params, on_gpu=self._on_gpu, rounds=self._options.rounds)
        state.warmup = state.warmup if self._options.warmup is None else self._options.warmup
        state.repeat = self._options.repeat
        with contextlib.ExitStack() as stack:
            if self._ctx is not None:
                stack.enter_context(self._ctx.scope())
            stack.callback(state.close)
            reason = self._declare(benchmark, state)
            if reason is not None:
                results = [skipped_point(state, num_ranks, reason)]
            else:
                measured = self._measure(state)
                counters = {name: float(v() if callable(v) else v) for name, v in state.counters.items()}
                results = summarize(state, measured, num_ranks, counters)
        if self._ctx is not None:
            self._ctx.barrier()  # what the scope freed is free now; waits that timed out are raised here
        return results

    # -- phases -------------------------------------------------------------------------------------------------------
    def _declare(self, benchmark: Benchmark, state: State) -> str | None:
        """Call the benchmark function; returns the reason where it skips the point."""
        reason = None
        try:
            benchmark.function(state, self._ctx)
            state.check()
        except SkipPoint as skip:
            reason = str(skip)
        mine = (
            reason,
            state.rounds,
            state.repeat,
            state.warmup,
            [(p.name, p.timer, p.operations, p.skipped, p.before is not None) for p in state.providers.values()],
        )
        everyone = self._world.all_gather_object(mine)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise BenchmarkError(
                    f"benchmark {state.benchmark!r} at {state.params} is not declared alike on all ranks: "
                    f"rank 0 has {everyone[0]}, rank {rank} has {theirs}"
                )
        return reason

    def _measure(self, state: State) -> dict[str, Measured]:
        candidates = [_Candidate(each) for each in state.providers.values() if not each.skipped]
        try:
            self._call_once(candidates, state)
            self._verify(candidates, state)
            if any(each.on_gpu for each in candidates):
                warm_clocks(self._options.warm_ms)
            self._measure_in_turn(candidates, state)
            return self._gather(candidates)
        finally:
            for each in candidates:
                if each.batch is not None:
                    each.batch.close()

    def _call_once(self, candidates: list[_Candidate], state: State) -> None:
        """Call eagerly, so that kernels are compiled before anything is captured; a second time to see how long."""
        for each in candidates:
            if each.provider.timer == "reported":
                continue  # such a call may take seconds, and its batch needs neither of the two
            call = each.provider.call
            if call is not None and each.provider.before is not None:
                barrier, before = functools.partial(self._finish, each), each.provider.before
                each.batch = SingleCalls(call, barrier, before, warmup=state.warmup, on_gpu=each.on_gpu)
                call = each.batch.once
            for _ in range(2):
                self._prepare(each)
                start = time.perf_counter()
                if call is not None:
                    call()
                self._wait_for_device(each)
                each.seconds = time.perf_counter() - start
                self._world.barrier()
        self._agree_on_seconds(candidates)
        for each in candidates:
            if each.batch is not None:
                continue
            fitting = math.ceil(self._batch_s / each.seconds) if each.seconds else 1
            calls = min(MAX_GRAPH_CALLS, state.repeat or fitting)
            each.batch = make_batch(
                each.provider.timer, each.provider.call, warmup=state.warmup, align=self._align, graph_calls=calls
            )
            if each.provider.timer == "graph" and each.provider.call is None:
                each.batch.calls_per_unit = calls  # the other ranks' graph

    def _verify(self, candidates: list[_Candidate], state: State) -> None:
        """Run each provider as it will be timed, check its data on all ranks, and choose the size of its batch."""
        for each in candidates:
            assert each.batch is not None
            if each.provider.timer == "reported":
                each.units = state.repeat or 1
                if each.provider.check is not None:
                    self._prepare(each)
                    each.batch.once()
                    self._finish(each)
                    self._check(each)
                continue
            self._prepare(each)
            if each.provider.timer == "graph":
                each.batch.once()  # the first replay is slow, because the graph goes to the device with it
            start = time.perf_counter()
            each.batch.once()
            each.seconds = time.perf_counter() - start
            self._finish(each)
            self._check(each)
        self._agree_on_errors(candidates)
        self._agree_on_seconds(candidates)
        for each in candidates:
            if each.provider.timer == "reported":
                continue
            assert each.batch is not None
            if state.repeat is not None:
                each.units = math.ceil(state.repeat / each.batch.calls_per_unit)
            elif each.seconds:
                each.units = max(1, min(MAX_UNITS, math.ceil(self._batch_s / each.seconds)))

    def _measure_in_turn(self, candidates: list[_Candidate], state: State) -> None:
        """Measure every provider once in each round; the round's first provider changes, so that none has an order."""
        right = [each for each in candidates if not each.error]
        for number in range(state.rounds):
            first = number % len(right) if right else 0
            for each in right[first:] + right[:first]:
                assert each.batch is not None
                self._prepare(each)
                seconds = each.batch.time(each.units)
                if each.provider.call is not None:
                    each.times.append(seconds / each.provider.operations)
                self._finish(each)
                if self._on_measured is not None:
                    self._on_measured(state.benchmark, each.name)
                if number == state.rounds - 1:
                    self._check(each)
        self._agree_on_errors(candidates)

    def _gather(self, candidates: list[_Candidate]) -> dict[str, Measured]:
        everyone = self._world.all_gather_object([each.times for each in candidates])
        checked = self._world.all_gather_object([each.provider.check is not None for each in candidates])
        measured = {}
        for index, each in enumerate(candidates):
            assert each.batch is not None
            measured[each.name] = Measured(
                times=[ranks[index] for ranks in everyone],
                calls=each.units * each.batch.calls_per_unit,
                verified=not each.error and any(ranks[index] for ranks in checked),
                error=each.error,
            )
        return measured

    # -- steps --------------------------------------------------------------------------------------------------------
    @property
    def _batch_s(self) -> float:
        return self._options.batch_ms / 1e3

    def _prepare(self, each: _Candidate) -> None:
        """Spoil the output on every rank, then begin together; all earlier calls have ended on all ranks."""
        if each.provider.prepare is not None:
            each.provider.prepare()
        self._finish(each)

    def _finish(self, each: _Candidate) -> None:
        """Wait for this rank's device, then for the other ranks."""
        self._wait_for_device(each)
        self._world.barrier()

    def _wait_for_device(self, each: _Candidate) -> None:
        if each.on_gpu:
            synchronize()

    def _check(self, each: _Candidate) -> None:
        """Note what is wrong with the data on this rank."""
        if each.provider.check is None:
            return
        try:
            answer = each.provider.check()
        except AssertionError as error:
            each.error = str(error).strip() or "an assertion of the check failed"
        else:
            if answer is not None and not answer:
                each.error = "the data is wrong"

    def _agree_on_errors(self, candidates: list[_Candidate]) -> None:
        everyone = self._world.all_gather_object([each.error for each in candidates])
        for index, each in enumerate(candidates):
            wrong = {rank: texts[index] for rank, texts in enumerate(everyone) if texts[index]}
            if len(everyone) == 1 or not wrong:
                continue
            rank, text = min(wrong.items())
            each.error = text if text.startswith("rank ") else f"rank {rank}: {text}"

    def _agree_on_seconds(self, candidates: list[_Candidate]) -> None:
        everyone = self._world.all_gather_object([each.seconds for each in candidates])
        for index, each in enumerate(candidates):
            each.seconds = max(ranks[index] for ranks in everyone)

    def _align(self) -> None:
        """Put a barrier of the devices on the stream: behind it they go on within microseconds of each other."""
        if self._ctx is not None and self._ctx.num_ranks > 1:
            self._ctx.device_barrier()
