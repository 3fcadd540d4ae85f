"""Fixtures of the tests of iris_core.bench."""

from __future__ import annotations

import dataclasses

import pytest

from iris_core.bench import RunOptions, registry
from iris_core.bench.runner import Runner
from iris_core.world import SingleWorld

QUICK = RunOptions(rounds=3, batch_ms=0.2, warm_ms=1.0)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "BENCHMARKS", {})


@pytest.fixture
def measure():
    """Register a function without ranks and measure it at one point in a world of one; options can be changed."""

    def run(function, params=None, *, world=None, **options):
        registry.register(ranks=False)(function)
        (benchmark,) = [each for each in registry.registered() if each.function is function]
        runner = Runner(world or SingleWorld(), None, dataclasses.replace(QUICK, **options))
        return runner.point(benchmark, params or {})

    return run


@pytest.fixture
def by_provider(measure):
    """As `measure`; results by provider."""
    return lambda *args, **kwargs: {result.provider: result for result in measure(*args, **kwargs)}
