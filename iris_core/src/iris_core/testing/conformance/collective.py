"""Conformance of collectives: what they say of themselves, and calls of every kind on the ranks of each tier."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from iris_core.device.targets import device_targets
from iris_core.dispatch.requests import REDUCING
from iris_core.settings import ORDINARY_CHECKS
from iris_core.testing.conformance import collective_jobs as jobs
from iris_core.testing.conformance import stack_jobs
from iris_core.testing.conformance.collective_jobs import OPS, Case, cases
from iris_core.testing.conformance.plugin import PluginConformance, RankPool, needs, no_problems
from iris_core.types import Availability, CollectiveRequest, DeviceTarget, DeviceType, PluginInfo, PluginKind
from iris_core.world.launch import RankError

_ALL_CASES_S = 300.0  # a kernel may have to be compiled for each
_GROUP_SIZES = (1, 2, 3, 8)
_NUM_BYTES = tuple(4**exponent for exponent in range(3, 15))


class CollectiveConformance(PluginConformance):
    """Tests of a collective, which make every call that its `supports` accepts."""

    kind = PluginKind.COLLECTIVE
    allocator: ClassVar[str] = "auto"  #: name of the allocator, as for `Iris(allocator=...)`
    backend: ClassVar[str] = "auto"  #: name of the backend
    #: half-precision numbers are added up in single precision, as they should; False allows a rounding at each step
    accumulates_in_float32: ClassVar[bool] = True

    @pytest.fixture
    def collective(self, created: Any) -> Any:
        """Return a collective as the core creates it, on a device of this machine, without a world."""
        assert created.op in OPS, f"the kit knows {', '.join(OPS)} and not {created.op!r}"
        assert created.name == created.name.strip() != ""
        return created

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest, info: PluginInfo) -> stack_jobs.Setup:
        """Return the setup of each tier."""
        where = self.ranks_of(request.param, [info])
        return stack_jobs.Setup(self.allocator, self.backend, *where, info.name, in_float32=self.accumulates_in_float32)

    def test_host_supports_always_answers(self, collective: Any) -> None:
        """An Availability, twice the same, with a reason for "no"; what it cannot know is not accepted and ignored."""
        for request, can_know in self._requests(collective.op):
            answer = collective.supports(request)
            assert isinstance(answer, Availability), request
            assert answer == collective.supports(request), request
            assert answer.ok != bool(answer.reason.strip()), f"{answer} to {request}"
            assert can_know or not answer, f"it cannot know what this is, and accepts it: {request}"

    def test_host_supports_something(self, collective: Any, info: PluginInfo) -> None:
        """On each type of device that it names, an everyday call."""
        for device in info.devices:
            requests = [Case(collective.op).request(0, range(size), DeviceTarget(device)) for size in _GROUP_SIZES]
            answers = [collective.supports(request) for request in requests]
            assert any(answers), f"on {device}: {answers[1].reason}"

    def test_host_cost_is_positive_and_grows(self, collective: Any, target: DeviceTarget) -> None:
        """Seconds for every request that it supports; more bytes never cost less."""
        for size, reduction in itertools.product(_GROUP_SIZES, ("", "sum", "max")):
            costs = []
            for nbytes in _NUM_BYTES:
                case = Case(collective.op, shape=(nbytes // 4,), reduction=reduction)
                request = case.request(0, range(size), target)
                if collective.supports(request):
                    costs.append(cost := collective.cost(request))
                    assert 0 < cost < math.inf, f"{nbytes} bytes, {size} ranks"
                    assert cost == collective.cost(request)
            assert costs == sorted(costs), f"{size} ranks: more bytes cost less"

    @pytest.mark.parametrize("promise", jobs.PROMISES)
    def test_world_calls(self, collective: Any, pool: RankPool, world: stack_jobs.Setup, promise: str) -> None:
        """Every shape, element type, reduction, root and place of the tensors keeps each promise; an everyday plan call
        after call, whoever is late, and whoever writes its next input at once.

        results: what torch gives, also in place.  agreement: where all ranks get the same, they get the same bits.
        input: it is only read.  surroundings: memory beside the tensors, and between the elements of strided ones,
        stays as it is.  work: a handle that was waited for says so.  memory: all that a call needs was made by
        `prepare`.  bits: those of torch in the group's order, if the algorithm reduces and says `deterministic = True`.
        """
        found: list[list[jobs.Outcome]] = []
        for size in {1, world.ranks}:
            of = dataclasses.replace(world, ranks=size)
            calls = tuple(each for each in cases(collective.op, size) if self._answer(collective, each, of))
            found += _run(pool, of, calls) if calls else []
        needs(found, self._answer(collective, Case(collective.op), world).reason)
        said = [outcome[promise] for outcomes in found for outcome in outcomes if promise in outcome]
        needs(said, f"this operation or this algorithm does not promise {promise}")
        no_problems(said)

    def test_world_is_ordered(self, collective: Any, pool: RankPool, world: stack_jobs.Setup) -> None:
        """The checker (docs/checking.md), if the backend has one, finds nothing on CPU ranks, whoever is late."""
        needs(world.device == "cpu", "the checker watches CPU ranks")
        try:
            _run(pool, dataclasses.replace(world, check=ORDINARY_CHECKS), (self._usual(collective, world),))
        except RankError as error:
            needs("UnsupportedError: IRIS_CHECK=" not in str(error), "the backend has no checker")
            raise

    def test_world_plans_do_not_pile_up(self, collective: Any, pool: RankPool, world: stack_jobs.Setup) -> None:
        """Preparing the same call again finds the memory of a plan that is gone, or the memory that all plans share."""
        for blocks in pool.run(jobs.on_rank, world.ranks, world, jobs.prepare_again, self._usual(collective, world), 4):
            assert len(set(blocks[1:])) == 1, f"blocks on the heap after each plan: {blocks}"

    def test_world_of_a_group(self, collective: Any, pool: RankPool, world: stack_jobs.Setup, tmp_path: Any) -> None:
        """The first and the last rank are a group; the others are not waited for, and their tensors are left alone."""
        needs(world.ranks >= 3, f"needs 3 ranks, this tier has {world.ranks}")
        case = self._usual(collective, world, members=(0, world.ranks - 1))
        no_problems(pool.run(jobs.on_rank, world.ranks, world, jobs.call_in_group, case, str(tmp_path)))

    def _requests(self, op: str) -> Iterator[tuple[CollectiveRequest, bool]]:
        """Return requests, also such as no core would make, and whether an algorithm can know what they mean."""
        strange: list[dict[str, Any]] = [{"dtype": "no_such_dtype"}, {"dtype": ""}]
        strange += [{"op": each} for each in (*OPS, "no_such_operation", "") if each != op]
        settings = {"layout": "no_such_layout", "config": {"no_such_setting": 1}, "reduction": "no_such_reduction"}
        for size, device in itertools.product(_GROUP_SIZES, DeviceType):
            made = [each.request(size - 1, range(size), DeviceTarget(device)) for each in cases(op, size)]
            made += [dataclasses.replace(made[-1], shape=each, nbytes=1 << 42) for each in ((), (1 << 40,))]
            yield from ((each, True) for each in made)
            yield from ((dataclasses.replace(made[0], **each), False) for each in strange)
            for name in settings.keys() - (() if op in REDUCING else {"reduction"}):
                yield dataclasses.replace(made[0], options={**made[0].options, name: settings[name]}), False

    def _answer(self, collective: Any, case: Case, setup: stack_jobs.Setup) -> Any:
        """Return what all members say to a call."""
        members = case.members or range(setup.ranks)
        targets = [device_targets(setup.device, member)[0] for member in members]
        answers = [collective.supports(case.request(rank, members, each)) for rank, each in enumerate(targets)]
        assert len({answer.ok for answer in answers}) == 1, f"{case}: members answer differently: {answers}"
        return answers[0]

    def _usual(self, collective: Any, setup: stack_jobs.Setup, **changes: Any) -> Case:
        """Return an everyday call; the test is skipped where it is not supported."""
        case = Case(collective.op, **changes)
        needs(answer := self._answer(collective, case, setup), f"{case}: {answer.reason}")
        return case


@functools.lru_cache(maxsize=4)
def _run(pool: RankPool, setup: stack_jobs.Setup, chosen: tuple[Case, ...]) -> Any:
    """Call the cases once; several tests look at the same outcomes, by rank and case."""
    return pool.run(jobs.on_rank, setup.ranks, setup, jobs.call, chosen, timeout_s=_ALL_CASES_S)
