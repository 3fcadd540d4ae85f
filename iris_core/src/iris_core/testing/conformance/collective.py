"""Conformance of collectives: what they say of themselves, and calls of every kind on ranks.

As the stack suite, the calls run in three tiers: ranks on the CPU, one rank on a GPU, several ranks on GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from iris_core.protocols import Collective
from iris_core.testing.conformance import collective_jobs as jobs
from iris_core.testing.conformance.collective_cases import (
    DTYPES,
    IN_PLACE,
    OPS,
    REDUCING,
    REPLICATED,
    SHAPES,
    Case,
    cases,
    expected,
    source,
    tolerance,
    usual,
)
from iris_core.testing.conformance.plugin import PluginConformance, member_problems
from iris_core.types import Availability, CollectiveRequest, DeviceTarget, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping, Sequence

    from iris_core.registry import PluginRecord
    from iris_core.testing.conformance.collective_jobs import Outcome, Setup
    from iris_core.testing.conformance.plugin import Registered
    from iris_core.testing.pool import RankPool

World = tuple["Setup", int]

_ALL_CASES_S = 300.0  # a kernel may have to be compiled for each
_GROUP_SIZES = (1, 2, 3, 8)
_NUM_BYTES = tuple(4**exponent for exponent in range(3, 15))


class CollectiveConformance(PluginConformance):
    """Tests of a collective.

    A subclass gives the plugin's name.  What the collective's `supports` refuses, it need not be able to do; the
    tests call everything else.

    Attributes:
        name: name of the plugin.
        allocator: name of the allocator, as for `Iris(allocator=...)`.
        backend: name of the backend.
        num_ranks: ranks of the CPU tier, and at most so many GPUs of the last tier.
        accumulates_in_float32: half-precision numbers are added up in single precision, as they should; False allows
            a rounding at each step.

    Example:
        >>> class TestMine(CollectiveConformance):
        ...     name = "mine"
    """

    kind = PluginKind.COLLECTIVE
    allocator: ClassVar[str] = "auto"
    backend: ClassVar[str] = "auto"
    num_ranks: ClassVar[int] = 3
    accumulates_in_float32: ClassVar[bool] = True

    gpus_of_tier: ClassVar[Mapping[str, int]] = {"host": 0, "gpu": 1, "gpus": 2}
    """GPUs that each tier needs at least; Iris's own suite reads it (`tests/support/gpu_tiers.py`)."""

    # -- fixtures -----------------------------------------------------------------------------------------------------
    @pytest.fixture
    def collective(self, registered: Registered, target: DeviceTarget) -> Any:
        """A collective as the core creates it, on a device of this machine, without a world."""
        collective = self.create(registered, target)
        assert collective.op in OPS, f"the kit knows {', '.join(OPS)} and not {collective.op!r}"
        return collective

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest, info: PluginInfo, installed: PluginRecord) -> World:
        """What runs on ranks, and on how many, in each tier."""
        tier: str = request.param
        gpu = DeviceType.HIP if torch.version.hip else DeviceType.CUDA
        wanted = DeviceType.CPU if tier == "host" else gpu
        if wanted not in info.devices:
            pytest.skip(f"{info.name!r} does not work on {wanted}")
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        needed = self.gpus_of_tier[tier]
        if present < needed:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {present}")
        setup = jobs.Setup(info.name, self.allocator, self.backend, "cpu" if tier == "host" else "cuda")
        return setup, {"host": self.num_ranks, "gpu": 1, "gpus": min(present, self.num_ranks)}[tier]

    # -- static tier --------------------------------------------------------------------------------------------------
    def test_static_protocol(self, collective: Any, info: PluginInfo) -> None:
        """Every member of the protocol is there, called with the protocol's parameter names in their order."""
        assert member_problems(collective, Collective) == []
        assert collective.info == info
        assert collective.name == collective.name.strip() != ""

    # -- host tier: what it says of itself ----------------------------------------------------------------------------
    def test_host_supports_always_answers(self, collective: Any) -> None:
        """Whatever is asked for: an Availability, twice the same, and a reason with every "no"."""
        for request in self._requests(collective.op):
            answer = collective.supports(request)
            assert isinstance(answer, Availability), request
            assert answer == collective.supports(request), request
            assert answer.ok or answer.reason.strip(), f"no reason why it cannot do {request}"
            assert not (answer.ok and answer.reason), request

    def test_host_supports_something(self, collective: Any, info: PluginInfo) -> None:
        """On each type of device that it names, an everyday call."""
        for device in info.devices:
            answers = [self._ask(collective, usual(collective.op), size, device) for size in _GROUP_SIZES]
            assert any(answers), f"on {device}: {answers[1].reason}"

    def test_host_supports_refuses_what_it_cannot_know(self, collective: Any, target: DeviceTarget) -> None:
        """Nothing is accepted and ignored: no other operation, element type, reduction, layout or setting."""
        request = usual(collective.op).request(0, range(2), target)
        other = next(op for op in OPS if op != collective.op)
        options = request.options
        strange = {
            "an operation": dataclasses.replace(request, op="no_such_operation"),
            f"the operation {other}": dataclasses.replace(request, op=other),
            "an element type": dataclasses.replace(request, dtype="no_such_dtype"),
            "a layout": dataclasses.replace(request, options={**options, "layout": "no_such_layout"}),
            "a setting": dataclasses.replace(request, options={**options, "config": {"no_such_setting": 1}}),
        }
        if collective.op in REDUCING:
            strange["a reduction"] = dataclasses.replace(request, options={**options, "reduction": "no_such"})
        accepted = [name for name, each in strange.items() if collective.supports(each)]
        assert not accepted, f"it accepts {', '.join(accepted)} that it cannot know"

    def test_host_cost_is_positive_and_grows(self, collective: Any, target: DeviceTarget) -> None:
        """Seconds for every request that it supports; more bytes never cost less."""
        for size, reduction in itertools.product(_GROUP_SIZES, ("", "sum", "max")):
            costs = []
            for nbytes in _NUM_BYTES:
                case = Case(collective.op, shape=(nbytes // 4,), reduction=reduction)
                request = case.request(0, range(size), target)
                if collective.supports(request):
                    cost = collective.cost(request)
                    assert math.isfinite(cost), f"{nbytes} bytes, {size} ranks"
                    assert cost > 0, f"{nbytes} bytes, {size} ranks"
                    assert cost == collective.cost(request)
                    costs.append(cost)
            assert costs == sorted(costs), f"{size} ranks: more bytes cost less"

    # -- world tier: calls --------------------------------------------------------------------------------------------
    def test_world_results(self, collective: Any, pool: RankPool, world: World) -> None:
        """Every shape, element type, reduction, root and place of the tensors gives what torch gives."""
        setup, ranks = world
        for size in sorted({1, ranks}):
            for case, outcomes in self._outcomes(collective, pool, setup, size):
                self._judge(case, 0, [rows[0] for rows in outcomes])

    def test_world_ranks_agree(self, collective: Any, pool: RankPool, world: World) -> None:
        """Where all ranks get the same, they get the same bits."""
        setup, ranks = world
        if collective.op not in REPLICATED:
            pytest.skip(f"{collective.op} gives every rank something of its own")
        for case, outcomes in self._outcomes(collective, pool, setup, ranks):
            assert len({rows[0].digest for rows in outcomes}) == 1, f"{case}: the ranks' results differ"

    def test_world_input_is_only_read(self, collective: Any, pool: RankPool, world: World) -> None:
        """Afterwards, every input is what it was."""
        setup, ranks = world
        for case, outcomes in self._outcomes(collective, pool, setup, ranks):
            changed = [rank for rank, rows in enumerate(outcomes) if rows[0].source_changed]
            assert not changed, f"{case}: the inputs of ranks {changed} have changed"

    def test_world_nothing_else_is_written(self, collective: Any, pool: RankPool, world: World) -> None:
        """Memory beside the tensors, and between the elements of strided ones, stays as it is."""
        setup, ranks = world
        for case, outcomes in self._outcomes(collective, pool, setup, ranks):
            changed = [rank for rank, rows in enumerate(outcomes) if rows[0].neighbours_changed]
            assert not changed, f"{case}: memory beside the tensors of ranks {changed} has changed"

    def test_world_work_is_done_after_waiting(self, collective: Any, pool: RankPool, world: World) -> None:
        """A handle that was waited for says so."""
        setup, ranks = world
        for case, outcomes in self._outcomes(collective, pool, setup, ranks):
            assert not any(rows[0].not_done for rows in outcomes), f"{case}: wait() returned, is_completed() is False"

    def test_world_again_with_ranks_that_are_late(self, collective: Any, pool: RankPool, world: World) -> None:
        """A plan serves call after call, whoever is late, and whoever writes its next input at once."""
        setup, ranks = world
        case = self._usual(collective, setup, range(ranks))
        outcomes = pool.run(jobs.call, ranks, setup, [case], 2 * ranks)
        for turn in range(2 * ranks):
            self._judge(case, turn, [rows[0][turn] for rows in outcomes])

    def test_world_in_place(self, collective: Any, pool: RankPool, world: World) -> None:
        """Input and output may share memory as in torch, where `supports` says so."""
        setup, ranks = world
        if collective.op not in IN_PLACE:
            pytest.skip(f"torch has no {collective.op} in place")
        case = self._usual(collective, setup, range(ranks), in_place=True)
        outcomes = pool.run(jobs.call, ranks, setup, [case], 2)
        for turn in range(2):
            self._judge(case, turn, [rows[0][turn] for rows in outcomes])

    def test_world_a_launch_allocates_nothing(self, collective: Any, pool: RankPool, world: World) -> None:
        """All memory that a call needs was made by `prepare`."""
        setup, ranks = world
        case = self._usual(collective, setup, range(ranks))
        for rank, rows in enumerate(pool.run(jobs.call, ranks, setup, [case], 3)):
            assert [each.blocks for each in rows[0]] == [0, 0, 0], f"rank {rank}: blocks on the heap"
            assert [each.peak_nbytes for each in rows[0]] == [0, 0, 0], f"rank {rank}: bytes of the heap, for a while"

    def test_world_plans_do_not_pile_up(self, collective: Any, pool: RankPool, world: World) -> None:
        """Preparing the same call again finds the memory of a plan that is gone, or the memory that all plans share."""
        setup, ranks = world
        case = self._usual(collective, setup, range(ranks))
        for blocks in pool.run(jobs.prepare_again, ranks, setup, case, 4):
            assert len(set(blocks[1:])) == 1, f"blocks on the heap after each plan: {blocks}"

    def test_world_of_a_group(self, collective: Any, pool: RankPool, world: World, tmp_path: pathlib.Path) -> None:
        """The first and the last rank are a group; the others are not waited for, and their tensors are left alone."""
        setup, ranks = world
        if ranks < 3:
            pytest.skip(f"needs 3 ranks, this tier has {ranks}")
        members = (0, ranks - 1)
        case = self._usual(collective, setup, members, members=members)
        results = pool.run(jobs.call_in_group, ranks, setup, case, str(tmp_path))
        for rank, (_, disturbed) in enumerate(results):
            assert not disturbed, f"something was written to the tensors of rank {rank}, which is no member"
        for turn in range(2):
            self._judge(case, turn, [results[member][0][turn] for member in members])

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _requests(self, op: str) -> Iterator[CollectiveRequest]:
        """Requests of every kind, also such as no core would make."""
        for size, device in itertools.product(_GROUP_SIZES, DeviceType):
            target = DeviceTarget(device)
            for case in cases(op, size):
                yield case.request(size - 1, range(size), target)
        for shape, dtype in itertools.product((*SHAPES, (), (1 << 40,)), (*DTYPES, "no_such_dtype", "")):
            for name in (*OPS, "no_such_operation", ""):
                yield CollectiveRequest(name, shape, dtype, 1 << 42, 0, 2, DeviceTarget(DeviceType.CPU))

    def _ask(self, collective: Any, case: Case, size: int, device: DeviceType) -> Availability:
        answer: Availability = collective.supports(case.request(0, range(size), DeviceTarget(device)))
        return answer

    def _target(self, setup: Setup, rank: int) -> DeviceTarget:
        from iris_core.device.targets import device_targets

        return device_targets(setup.device, rank)[0]

    def _supported(self, collective: Any, case: Case, setup: Setup, members: Sequence[int]) -> Availability:
        """Whether all members say yes; the first "no" if not."""
        targets = [self._target(setup, member) for member in members]
        answers = [collective.supports(case.request(rank, members, each)) for rank, each in enumerate(targets)]
        return next((answer for answer in answers if not answer), Availability.yes())

    def _usual(self, collective: Any, setup: Setup, group: Sequence[int], **changes: Any) -> Case:
        """An everyday call; the test is skipped where it is not supported."""
        case = usual(collective.op, **changes)
        answer = self._supported(collective, case, setup, group)
        if not answer:
            pytest.skip(f"{case}: {answer.reason}")
        return case

    def _outcomes(
        self, collective: Any, pool: RankPool, setup: Setup, ranks: int
    ) -> Iterator[tuple[Case, list[list[Outcome]]]]:
        """Call every case that is supported; yields it with the outcomes by rank and turn."""
        op, group = collective.op, range(ranks)
        found = [each for each in cases(op, ranks) if self._supported(collective, each, setup, group)]
        chosen = tuple(dict.fromkeys(found))
        if not chosen:
            pytest.skip(f"{ranks} ranks: {self._supported(collective, usual(op), setup, group).reason}")
        results = _run(pool, setup, chosen, ranks)
        for index, case in enumerate(chosen):
            yield case, [rows[index] for rows in results]

    def _judge(self, case: Case, turn: int, outcomes: Sequence[Outcome]) -> None:
        """Compare the ranks' results of one call with what they should be."""
        size = len(outcomes)
        inputs = [source(case, rank, turn, size) for rank in range(size)]
        wanted = expected(case, inputs)
        exact = case.op not in REDUCING or not inputs[0].is_floating_point()
        allowed = [] if exact else tolerance(case, inputs, in_float32=self.accumulates_in_float32)
        for rank, outcome in enumerate(outcomes):
            what = f"{case}, call {turn}: rank {rank} of {size}"
            if not case.has_output(rank):
                assert outcome.out is None
                continue
            assert outcome.out is not None
            dtype, right = inputs[0].dtype, wanted[rank]
            raw = torch.frombuffer(bytearray(outcome.out or b"?"), dtype=torch.uint8)[: len(outcome.out)]
            found = raw.view(dtype).reshape(case.output_shape(size))
            if exact:  # bytes, for numbers may be NaN
                differs = _bytes(found) != _bytes(right.to(dtype))
                wrong = differs.reshape(found.numel(), dtype.itemsize).any(1)
            else:
                wrong = ~((found.double() - right).abs() <= allowed[rank]).flatten()
            places = wrong.nonzero().flatten().tolist()
            assert not places, f"{what}: {len(places)} of {wrong.numel()} are wrong, the first at {places[0]}"


@functools.lru_cache(maxsize=4)
def _run(pool: RankPool, setup: Setup, chosen: tuple[Case, ...], ranks: int) -> list[list[list[Outcome]]]:
    """Call the cases once; several tests look at the same outcomes."""
    return pool.run(jobs.call, ranks, setup, chosen, 1, timeout_s=_ALL_CASES_S)


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
