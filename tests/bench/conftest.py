"""Fixtures of the tests of iris_core.bench, and other ranks for tests that have none."""

import dataclasses

import pytest

from iris_core.bench import RunOptions, registry
from iris_core.bench.runner import Runner
from iris_core.world import World

QUICK = RunOptions(rounds=3, batch_ms=0.2, warm_ms=1.0)


class PretendedWorld(World):
    """A world in which every other rank says what this one says, changed by `others`."""

    def __init__(self, world_size, others=lambda rank, obj: obj):
        super().__init__()
        self.world_size = world_size
        self._others = others

    def all_gather_object(self, obj):
        return [obj, *(self._others(rank, obj) for rank in range(1, self.world_size))]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "BENCHMARKS", {})


@pytest.fixture
def measure():
    """Measure a function at one point, without ranks in a world of one by default; options can be changed."""

    def run(function, params=None, *, world=None, ctx=None, **options):
        runner = Runner(world or World(), ctx, dataclasses.replace(QUICK, **options))
        return runner.point(registry.Benchmark("test.f", function, ranks=ctx is not None), params or {})

    return run
