"""Conformance of a stack: an allocator and a backend together, kernels on several ranks.

The same tests run in three tiers: ranks on the CPU, one rank on a GPU, several ranks on GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from iris_core.errors import IrisError
from iris_core.testing.conformance import device_functions, stack_jobs
from iris_core.testing.conformance.plugin import OnRanks, installed_plugin
from iris_core.types import PluginKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.testing.pool import RankPool

    World = tuple[stack_jobs.Stack, int]

_CALLS_S = 120.0  # for all device functions, where no wait reaches its bound; on a GPU they are compiled


class StackConformance(OnRanks):
    """Tests of an allocator and a backend together.

    Attributes:
        allocator: name of the allocator, as for `Iris(allocator=...)`.
        backend: name of the backend.
        programs: module of programs, which docs/conformance_kit.md describes.
        num_ranks: ranks of the CPU tier, and the most GPUs of the last tier.
        timeout_s: bound of the waits in kernels.

    Example:
        >>> class TestMine(StackConformance):
        ...     allocator = "mine"
        ...     backend = "triton"
    """

    allocator: ClassVar[str]
    backend: ClassVar[str]
    programs: ClassVar[str] = "iris_triton.testing.kit_programs"
    timeout_s: ClassVar[float] = 20.0

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest) -> World:
        """The stack and the number of ranks of each tier."""
        named = (PluginKind.ALLOCATOR, self.allocator), (PluginKind.BACKEND, self.backend)
        plugins = [installed_plugin(*each) for each in named]
        device, ranks = self.ranks_of(request.param, [each.info for each in plugins if each.info is not None])
        return stack_jobs.Stack(self.allocator, self.backend, self.programs, device, self.timeout_s), ranks

    def _judge(self, pool: RankPool, world: World, job: Callable[..., Any], *arguments: Any) -> None:
        """Run a job on the ranks; fail with what is wrong, skip what the backend need not have."""
        stack, ranks = world
        problems = [each for on_rank in self._run(pool, ranks, job, stack, *arguments) for each in on_rank]
        assert not problems, "\n".join(problems)

    def _run(self, pool: RankPool, ranks: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        results = pool.run(job, ranks, *arguments)
        for lacking in results:
            if isinstance(lacking, str):
                pytest.skip(f"backend {self.backend!r} has no {lacking}")
        return results

    @pytest.mark.parametrize("name", device_functions.NAMES)
    def test_world_device_function(self, pool: RankPool, world: World, name: str) -> None:
        """Each function of `device_api()`, with and without a mask, changes what it should on the rank that it should.

        Atomics return the old values, and lose no update of concurrent programs; signals set and add, and data put
        before them is visible after them; waits end when their comparison holds and not before; after a barrier, also
        of a group and also a repeated one, the stores of all members are visible, whoever is late.
        """
        self._judge_call(pool, *world, "function", name)

    @pytest.mark.parametrize("name", device_functions.NAMES)
    def test_world_device_method(self, pool: RankPool, world: World, name: str) -> None:
        """The same of DeviceContext's methods."""
        self._judge_call(pool, *world, "method", name)

    def test_world_wait_that_gives_up(self, pool: RankPool, world: World) -> None:
        """The launch raises DeviceTimeoutError, or the next barrier does, once."""
        self._judge(pool, _bounded(world, 0.5), stack_jobs.give_up)

    # -- what a backend may have besides ------------------------------------------------------------------------------
    def test_world_device_barrier_of_the_host(self, pool: RankPool, world: World) -> None:
        """After `ctx.device_barrier()` all writes are visible, whoever is late; a group waits for its members only."""
        self._judge(pool, world, stack_jobs.device_barrier)

    def test_world_self_test_passes(self, pool: RankPool, world: World) -> None:
        """Every operation on every pair of ranks is judged, and nothing is wrong; each step was announced."""
        stack, ranks = world
        results = self._run(pool, ranks, stack_jobs.self_test, stack)
        checks = [check for on_rank, _, _ in results for check in on_rank]
        wrong = [problem for _, _, problems in results for problem in problems]
        assert wrong + [check for check in checks if check.problem] == []
        pairs = {(rank, peer) for rank in range(ranks) for peer in range(ranks) if rank != peer} or {(0, 0)}
        ops = {check.op for check in checks}
        assert ops, "the self-test says nothing"
        for op in ops:
            assert {(check.rank, check.peer) for check in checks if check.op == op} >= pairs, f"pairs of {op}"
        for rank, (_, announced, _) in enumerate(results):
            assert ops <= set(announced), f"operations that rank {rank} has announced"

    def _judge_call(self, pool: RankPool, stack: stack_jobs.Stack, ranks: int, form: str, name: str) -> None:
        found = _calls(pool, stack, ranks, form)
        if isinstance(found, Exception):
            raise found
        if isinstance(found[0], str):
            pytest.skip(f"backend {self.backend!r} has no {found[0]}: it has the functional API only")
        problems = [problem for on_rank in found for problem in on_rank[name]]
        assert not problems, "\n".join(problems)


@functools.cache
def _calls(pool: RankPool, stack: stack_jobs.Stack, ranks: int, form: str) -> list[Any] | IrisError:
    """Return the problems of all device functions; their calls run together, in the first test that needs one."""
    try:
        return pool.run(device_functions.call_all, ranks, stack, form, timeout_s=_CALLS_S + 12 * stack.timeout_s)
    except IrisError as error:  # of a rank that raised, ended, or never came back
        return error


def _bounded(world: World, seconds: float) -> World:
    """A world whose waits take no longer."""
    stack, ranks = world
    return dataclasses.replace(stack, timeout_s=min(stack.timeout_s, seconds)), ranks
