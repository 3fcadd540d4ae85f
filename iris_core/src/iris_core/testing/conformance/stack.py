"""Conformance of a stack: an allocator and a backend together, kernels on the ranks of each tier."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest

from iris_core.diagnosis import PairCheck
from iris_core.testing.conformance import plugin_jobs, stack_jobs
from iris_core.testing.conformance.plugin import OnRanks, RankPool, needs, no_problems
from iris_core.types import PluginKind

_CALLS_S = 120.0  # for all device functions, where no wait reaches its bound; on a GPU they are compiled


class StackConformance(OnRanks):
    """Tests of an allocator and a backend together."""

    allocator: ClassVar[str]  #: name of the allocator, as for `Iris(allocator=...)`
    backend: ClassVar[str]  #: name of the backend
    #: module of programs, which docs/conformance_kit.md describes
    programs: ClassVar[str] = "iris_triton.testing.kit_programs"
    timeout_s: ClassVar[float] = 20.0  #: bound of the waits in kernels

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest) -> stack_jobs.Setup:
        """Return the stack of each tier."""
        named = (PluginKind.ALLOCATOR, self.allocator), (PluginKind.BACKEND, self.backend)
        infos = [plugin_jobs.installed(*each)[1].plugin.iris_plugin_info() for each in named]
        where = self.ranks_of(request.param, infos)
        return stack_jobs.Setup(self.allocator, self.backend, *where, self.programs, self.timeout_s)

    def _run(self, pool: RankPool, stack: stack_jobs.Setup, part: str, job: Any, *how: str) -> list[Any]:
        """Run a job on the ranks, and return what is wrong; skip what needs a part that the backend need not have."""
        bound_s = _CALLS_S + 12 * self.timeout_s
        found = pool.run(stack_jobs.on_rank, stack.ranks, stack, part, job, *how, timeout_s=bound_s)
        needs(part not in found, f"backend {self.backend!r} has no {part}")
        return found

    def test_world_device_functions(self, pool: RankPool, world: stack_jobs.Setup) -> None:
        """Each function of `device_api()`, with and without a mask, changes what it should on the rank that it should.

        Atomics return the old values, and lose no update of concurrent programs; signals set and add, and data put
        before them is visible after them; waits end when their comparison holds and not before; after a barrier, also
        of a group and also a repeated one, the stores of all members are visible, whoever is late.  What is wrong is
        said of all functions: each sentence begins with the function's name.
        """
        no_problems(*self._run(pool, world, "", stack_jobs.call_all, "function"))

    def test_world_device_methods(self, pool: RankPool, world: stack_jobs.Setup) -> None:
        """The same of DeviceContext's methods."""
        no_problems(*self._run(pool, world, "DeviceContext", stack_jobs.call_all, "method"))

    def test_world_wait_that_gives_up(self, pool: RankPool, world: stack_jobs.Setup) -> None:
        """The launch raises DeviceTimeoutError, or the next barrier does, once."""
        bounded = dataclasses.replace(world, timeout_s=min(self.timeout_s, 0.5))
        no_problems(*self._run(pool, bounded, "DeviceContext", stack_jobs.give_up))  # only methods know where to report

    def test_world_device_barrier_of_the_host(self, pool: RankPool, world: stack_jobs.Setup) -> None:
        """After `ctx.device_barrier()` all writes are visible, whoever is late; a group waits for its members only."""
        no_problems(*self._run(pool, world, "device_barrier", stack_jobs.call_all, "host"))

    def test_world_self_test_passes(self, pool: RankPool, world: stack_jobs.Setup) -> None:
        """Every operation on every pair of ranks is judged, and nothing is wrong; each step was announced."""
        results = self._run(pool, world, "self_test", stack_jobs.self_test)
        checks = [check for on_rank, _ in results for check in on_rank]
        assert [check for check in checks if not isinstance(check, PairCheck) or check.problem] == []
        ops = {check.op for check in checks}
        assert ops, "the self-test says nothing"
        pairs = set(itertools.permutations(range(world.ranks), 2)) or {(0, 0)}
        assert {(op, *pair) for op in ops for pair in pairs} <= {(each.op, each.rank, each.peer) for each in checks}
        assert all(ops <= set(announced) for _, announced in results), f"not all ranks have announced {ops}"
