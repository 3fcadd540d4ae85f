"""A run of benchmarks: those without ranks in this process, the others on ranks that are started for them."""

from __future__ import annotations

import faulthandler
import os
import pkgutil
import sys
import time
from typing import TYPE_CHECKING, Any

from iris_core.bench import machine
from iris_core.bench.registry import check_axes, find, load
from iris_core.bench.results import Report, Result
from iris_core.bench.runner import Runner
from iris_core.bench.timers import warm_clocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from iris_core.bench.registry import Benchmark, RunOptions


def run(benchmarks: Iterable[Benchmark], options: RunOptions, *, name: str = "benchmarks") -> Report:
    """Run benchmarks and return their results.

    Those without ranks run in this process.  For the others `options.num_ranks` processes are started, which open one
    context and go through all of them.  A provider whose data was wrong has an error in the report instead of numbers.

    Raises:
        BenchmarkError: a benchmark is declared wrongly, or the options name an axis that none has.
        RankError: a rank raised; the others were ended.
        PeerLostError: a rank's process ended, by `options.limit_s` for example.
    """
    from iris_core.world import SingleWorld
    from iris_core.world.launch import run as start_ranks

    chosen = list(benchmarks)
    check_axes(chosen, options.axes)
    about_machine = machine.describe()
    start = time.perf_counter()
    about_run = {each: getattr(options, each) for each in ("num_ranks", "quick", "rounds", "batch_ms", "warm_ms")}
    here = Runner(SingleWorld(), None, options)
    results = {each.name: _all_points(here, each, options, shown=True) for each in chosen if not each.ranks}
    if on_ranks := [each for each in chosen if each.ranks]:
        sources = sorted({os.path.abspath(each.source) for each in on_ranks})
        variables = {"IRIS_DEVICE_TIMEOUT": str(options.device_timeout_s), **options.environ}
        environ = {variable: value for variable, value in variables.items() if variable not in os.environ}
        ranks = options.num_ranks, [each.name for each in on_ranks], sources, options
        found, facts = start_ranks(run_on_this_rank, *ranks, environ=environ, torch_distributed=True)[0]
        results |= found
        about_run |= facts
    about_run["seconds"] = round(time.perf_counter() - start, 1)
    rows = tuple(result for benchmark in chosen for result in results[benchmark.name])
    return Report(name, about_machine, about_run, rows)


def merged(reports: Sequence[Report]) -> Report:
    """Return one report of several runs on this machine."""
    first = reports[0]
    if len(reports) == 1:
        return first
    about = {**first.run, "num_ranks": sorted({each.run["num_ranks"] for each in reports})}
    about["seconds"] = round(sum(each.run["seconds"] for each in reports), 1)
    return Report(first.name, first.machine, about, tuple(row for each in reports for row in each.results))


def run_on_this_rank(
    names: Sequence[str], sources: Sequence[str], options: RunOptions
) -> tuple[dict[str, list[Result]], dict[str, Any]]:
    """Run benchmarks with ranks, as one of them.

    Collective: every rank of the world calls it with the same arguments, names of benchmarks and their files.  Returns
    results by benchmark, and facts about the run: plugins, device, clocks.
    """
    from iris_core.world import connect

    # A rank that is held up, by a driver call that does not return for example, prints where it is, and ends.
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    try:
        for source in sources:
            load(source)
        chosen: dict[str, Any] = {"allocator": options.allocator, "backend": options.backend, "device": options.device}
        with pkgutil.resolve_name(options.context)(options.heap_size, **chosen) as ctx:
            world = connect(None, ctx.settings.barrier_timeout)
            try:
                facts: dict[str, Any] = {**ctx.plugin_names, "device": ctx.device.partition(":")[0]}
                facts["device_timeout_s"] = ctx.settings.device_timeout
                runner, shown = Runner(world, ctx, options), ctx.cur_rank == 0
                results = {name: _all_points(runner, find(name), options, shown=shown) for name in names}
                if facts["device"] == "cuda":
                    facts["sm_clock_mhz"] = world.all_gather_object(_clock_mhz(options))
                return results, facts
            finally:
                world.close()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _all_points(runner: Runner, benchmark: Benchmark, options: RunOptions, *, shown: bool) -> list[Result]:
    if shown:
        print(f"measuring {benchmark.name}: {benchmark.about}", file=sys.stderr, flush=True)
    return [result for params in benchmark.points(options) for result in runner.point(benchmark, params)]


def _clock_mhz(options: RunOptions) -> int | None:
    """The clock that the measurements ran at, as near as one can tell: again after the same warm-up."""
    import torch

    warm_clocks(options.warm_ms)
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # noqa: BLE001 - a fact for the report; it needs NVML, whose errors have no base that torch exports
        return None
