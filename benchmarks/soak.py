"""Whether anything grows: allocations, contexts and collectives, again and again, on 2 ranks.

    python benchmarks/soak.py [--seconds 120] [--output benchmarks/results/soak.json]

On CPU ranks, and on 2 GPUs where there are any.  Each part ends after its number of turns or its share of the time,
whichever comes first; the counts say how far it came.  What a process holds is counted at intervals.  The first half of
the counts is the warm-up: kinds of calls that come late compile, too.  Something grows where the least of the last
quarter is more than the most of the third one: memory by more than `ROOM_KIB`, anything else at all.  Exit status 1:
something grows, or data is wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import iris_core
from iris_core.bench.results import Report, Result, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from iris_core import Iris

    Counts = list[dict[str, int]]

RESULTS = pathlib.Path(__file__).parent / "results"
RANKS, ROOM_KIB = 2, 512
SAMPLES = 8, 32  # at least, at most
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def held(device: str) -> dict[str, int]:
    """Count what this process holds."""
    import torch

    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    found = {
        "private_kib": int(lines["RssAnon"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(lines["Threads"]),
        "python_threads": threading.active_count(),
        "shared_mappings": pathlib.Path("/proc/self/maps").read_text().count("memfd:"),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["device_kib"] = (total - free) >> 10
    return found


# -- parts: each yields after a turn ----------------------------------------------------------------------------------
def allocations(chance: random.Random, open_one: Callable[[], Iris]) -> Iterator[None]:
    """Allocate and free at random, the same on all ranks."""
    live: list[Any] = []
    with open_one() as ctx:
        while True:
            if len(live) < 64 and chance.random() < 0.55:
                live.append(ctx.empty(chance.randrange(1, 20_000)))
            elif live:
                ctx.free(live.pop(chance.randrange(len(live))))
            if chance.random() < 0.02:
                ctx.barrier()  # what was freed can be used again
            yield


def contexts(chance: random.Random, open_one: Callable[[], Iris]) -> Iterator[None]:
    """Open a context, use it, and close it."""
    while True:
        with open_one() as ctx:
            x = ctx.full((100,), 1.0)
            ctx.ccl.all_reduce(x, x)
            if x.unique().tolist() != [RANKS]:
                raise AssertionError(f"all_reduce: {x.unique().tolist()}")
        yield


def collectives(chance: random.Random, open_one: Callable[[], Iris]) -> Iterator[None]:
    """Call collectives of changing kinds, and look at what they give."""
    import torch

    with open_one() as ctx:
        me = ctx.cur_rank
        while True:
            op, on_heap, later = chance.choice(OPS), chance.random() < 0.5, chance.random() < 0.3
            dtype, half = chance.choice([torch.float32, torch.bfloat16, torch.int32]), chance.choice([1, 100, 5000])
            new = ctx.full if on_heap else lambda size, value, **how: torch.full(size, value, device=ctx.device, **how)
            with ctx.scope():
                own = half if op == "all_gather" else half * RANKS
                x = new((own,), me + 1, dtype=dtype)
                y = new((half if op == "reduce_scatter" else half * RANKS,), 0, dtype=dtype)
                pair = (x,) if op == "broadcast" else (y, x)
                work = getattr(ctx.ccl, op)(*pair, async_op=later)
                if work is not None:
                    work.wait()
                sides = pair[0].unique().tolist()
            right = {"all_reduce": [3], "reduce_scatter": [3], "broadcast": [1]}.get(op, [1, 2])
            if sides != right:
                raise AssertionError(f"{op} of {half * RANKS} {dtype}: {sides}, not {right}")
            yield


# -- ranks ------------------------------------------------------------------------------------------------------------
PARTS = {allocations: (100_000, 0.1, 50), contexts: (1_000, 0.35, 1), collectives: (10_000, 0.55, 10)}
"""Most turns of each part, its share of the time, and its turns between two looks at the time."""


def soak(part: Callable[..., Iterator[None]], most: int, seconds: float, step: int, device: str) -> tuple[int, Counts]:
    """Do the turns of a part as one rank; returns how many, and what this process held at intervals."""
    from iris_core import Iris

    counts: Counts = []
    done, share, begin = 0, 0.0, time.monotonic()
    with Iris("1MiB", device=device) as control:
        turns = part(random.Random(1), lambda: Iris("16MiB", device=device))
        while share < 1 or len(counts) < SAMPLES[0]:
            for _ in range(step):
                next(turns)
            done += step
            share = control.broadcast(max(done / most, (time.monotonic() - begin) / seconds))
            if share * SAMPLES[1] >= len(counts):
                counts.append(held(device))
        turns.close()
    return done, counts


def growth(counts: Counts) -> dict[str, int]:
    """Return by how much the last quarter of the counts exceeds the third one."""
    part = len(counts) // 4
    before, after = counts[-2 * part : -part], counts[-part:]
    return {name: max(0, min(each[name] for each in after) - max(each[name] for each in before)) for name in counts[0]}


def judge(name: str, device: str, ranks: list[tuple[int, Counts]]) -> Result:
    """Make a result of what the ranks have counted."""
    done, rows = ranks[0][0], [growth(counts) for _, counts in ranks]
    counters: dict[str, float] = {"turns": done, "samples": len(ranks[0][1])}
    for what in rows[0]:
        counters[what] = max(counts[-1][what] for _, counts in ranks)
        counters[f"{what} grown"] = max(row[what] for row in rows)
    grown = [what for what in rows[0] if counters[f"{what} grown"] > (ROOM_KIB if what.endswith("_kib") else 0)]
    series = {what: [each[what] for _, counts in ranks[:1] for each in counts] for what in grown}
    error = "grows: " + ", ".join(f"{what}, of rank 0 {series[what]}" for what in grown) if grown else ""
    where = {"device": device}
    return Result(f"soak.{name}", "iris", where, len(ranks), calls=done, verified=True, counters=counters, error=error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each device")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="this one alone")
    parser.add_argument("--output", default=str(RESULTS / "soak.json"))
    asked = parser.parse_args(arguments)
    import torch

    about = describe()
    devices = [asked.device] if asked.device else ["cpu"] + ["cuda"] * (torch.cuda.device_count() >= RANKS)
    results = []
    for device in devices:
        for part, (most, share, step) in PARTS.items():
            ranks = iris_core.run(soak, RANKS, part, most, asked.seconds * share, step, device)
            results.append(judge(part.__name__, device, ranks))
    run = {"num_ranks": RANKS, "seconds": asked.seconds, "room_kib": ROOM_KIB}
    report = Report("soak", about, run, tuple(results))
    for each in results:
        figures = ", ".join(f"{name} {value:g}" for name, value in each.counters.items())
        print(f"{each.benchmark} on {each.params['device']}: {each.error or 'nothing grows'} ({figures})")
    print(f"written to {report.write(asked.output)}")
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
