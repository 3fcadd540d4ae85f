"""A run of benchmarks: those without ranks in this process, the others on ranks that are started for them."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from iris_core.bench import machine
from iris_core.bench.registry import check_axes, find, load
from iris_core.bench.results import Report, Result
from iris_core.bench.runner import Runner
from iris_core.bench.timers import warm_clocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from iris_core.api import Iris
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

    chosen = list(benchmarks)
    check_axes(chosen, options.axes)
    about_machine = machine.describe()
    start = time.perf_counter()
    about_run: dict[str, Any] = {
        each: getattr(options, each) for each in ("num_ranks", "quick", "rounds", "batch_ms", "warm_ms")
    }
    here = Runner(SingleWorld(), None, options)
    results = {each.name: _all_points(here, each, options, shown=True) for each in chosen if not each.ranks}
    if on_ranks := [each for each in chosen if each.ranks]:
        found, facts = _run_on_ranks(on_ranks, options)
        results.update(found)
        about_run.update(facts)
    about_run["seconds"] = round(time.perf_counter() - start, 1)
    rows = tuple(result for benchmark in chosen for result in results[benchmark.name])
    return Report(name, about_machine, about_run, rows)


def run_with_each(benchmarks: Iterable[Benchmark], options: Sequence[RunOptions], *, name: str) -> Report:
    """Run benchmarks once with each of some options, which differ in the number of ranks; one report of all.

    What needs no ranks is run once.  The rest is as for `run`.
    """
    chosen = list(benchmarks)
    on_ranks = [each for each in chosen if each.ranks]
    return merged(
        [run(chosen, options[0], name=name), *(run(on_ranks, each, name=name) for each in options[1:] if on_ranks)]
    )


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

    module, _, name = options.context.partition(":")
    opened: type[Iris] = getattr(importlib.import_module(module), name)

    # Whatever holds this rank up, a driver call that does not return included: it says where, and ends.
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    try:
        for source in sources:
            load(source)
        chosen: dict[str, Any] = {"allocator": options.allocator, "backend": options.backend, "device": options.device}
        with opened(options.heap_size, **chosen) as ctx:
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


def _run_on_ranks(benchmarks: Sequence[Benchmark], options: RunOptions) -> tuple[dict[str, list[Result]], Any]:
    from iris_core.world.launch import run as start_ranks

    names = [each.name for each in benchmarks]
    sources = sorted({os.path.abspath(each.source) for each in benchmarks})
    # a wait inside a kernel that nobody ends must end all the same
    wanted = {"IRIS_DEVICE_TIMEOUT": str(options.device_timeout_s), **options.environ}
    environ = {variable: value for variable, value in wanted.items() if variable not in os.environ}
    # benchmarks compare with torch.distributed
    return start_ranks(
        run_on_this_rank, options.num_ranks, names, sources, options, environ=environ, torch_distributed=True
    )[0]


def _all_points(runner: Runner, benchmark: Benchmark, options: RunOptions, *, shown: bool) -> list[Result]:
    points = list(benchmark.points(options))
    return [
        result
        for params in (_with_progress(points, benchmark) if shown else points)
        for result in runner.point(benchmark, params)
    ]


def _with_progress(points: Sequence[dict[str, Any]], benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    """Yield the points, and show on stderr that they are being measured: a bar on a terminal, a line elsewhere."""
    if not sys.stderr.isatty():
        print(f"measuring {benchmark.name}: {benchmark.about}", file=sys.stderr, flush=True)
        yield from points
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(points, benchmark.name, console=Console(stderr=True))


def _clock_mhz(options: RunOptions) -> int | None:
    """The clock that the measurements ran at, as near as one can tell: again after the same warm-up."""
    import torch

    warm_clocks(options.warm_ms)
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # noqa: BLE001 - a fact for the report; it needs NVML, whose errors have no base that torch exports
        return None
