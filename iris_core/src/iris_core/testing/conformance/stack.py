"""Conformance of a stack: an allocator and a backend together, kernels on several ranks.

The same tests run in three tiers: ranks on the CPU, one rank on a GPU, several ranks on GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest

from iris_core.errors import PluginError
from iris_core.registry import Registry
from iris_core.testing.conformance import jobs
from iris_core.testing.conformance.plugin import shared_pool
from iris_core.types import DeviceType, PluginKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from iris_core.testing.conformance.jobs import Seen
    from iris_core.testing.pool import RankPool


class Programs(Protocol):
    """What a module of programs offers: four functions that launch kernels of the backend's language on one rank.

    Collective: every rank calls them, with symmetric tensors.  Waits of a kernel give up after `timeout_s`, and it goes
    on: a lost signal is to be a wrong result and not a rank that hangs.  The kernels call the device functions that
    `ctx.backend.device_api()` gives, so that these are what is tested.
    """

    def ring(
        self,
        ctx: Any,
        source: torch.Tensor,
        target: torch.Tensor,
        found: torch.Tensor,
        flag: torch.Tensor,
        value: int,
        timeout_s: float,
    ) -> None:
        """Put `source` to the next rank's `target`, set its `flag` to `value`, wait for the own flag to reach `value`.

        Then, in the same kernel, copy the own `target` to `found` by plain loads and stores.
        source, target, found: int32[n]; flag: int64[1].
        """

    def all_to_all(self, ctx: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Store row p of `source` to row `rank` of rank p's `target`.  int32[world_size, n] each."""

    def add(self, ctx: Any, counter: torch.Tensor, num_programs: int) -> None:
        """Let `num_programs` programs per peer add rank + 1 to every rank's `counter` (int64[1]) atomically."""

    def meet(
        self, ctx: Any, slots: torch.Tensor, found: torch.Tensor, flags: torch.Tensor, value: int, timeout_s: float
    ) -> None:
        """Store `value` to slots[rank] of every rank, pass the device barrier, copy the own `slots` to `found`.

        Ends with another barrier.  slots, found: int64[world_size]; flags: int64[world_size + 1], for the barrier.
        """


class StackConformance:
    """Tests of an allocator and a backend together.

    Attributes:
        allocator: name of the allocator, as for `Iris(allocator=...)`.
        backend: name of the backend.
        programs: module that satisfies `Programs`.
        num_ranks: ranks of the CPU tier, and at most so many GPUs of the last tier.
        numel: elements of the messages; not a multiple of a block.
        timeout_s: bound of the waits in kernels.

    Example:
        >>> class TestMine(StackConformance):
        ...     allocator = "mine"
        ...     backend = "triton"
    """

    allocator: ClassVar[str]
    backend: ClassVar[str]
    programs: ClassVar[str] = "iris_core.testing.conformance.triton_programs"
    num_ranks: ClassVar[int] = 3
    numel: ClassVar[int] = 1003
    timeout_s: ClassVar[float] = 20.0

    gpus_of_tier: ClassVar[Mapping[str, int]] = {"host": 0, "gpu": 1, "gpus": 2}
    """GPUs that each tier needs at least; `iris_core.testing.gpu_tiers` reads it."""

    @pytest.fixture
    def pool(self) -> RankPool:
        """Rank processes; one pool serves all suites of a test run."""
        return shared_pool()

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest) -> tuple[jobs.Stack, int]:
        """The stack and the number of ranks of each tier."""
        tier: str = request.param
        device = "cpu" if tier == "host" else "cuda"
        reason = self._why_not(tier)
        if reason:
            pytest.skip(reason)
        stack = jobs.Stack(self.allocator, self.backend, self.programs, device, self.timeout_s)
        if tier == "gpus":
            import torch

            return stack, min(torch.cuda.device_count(), self.num_ranks)
        return stack, self.num_ranks if tier == "host" else 1

    # -- tests --------------------------------------------------------------------------------------------------------
    def test_world_ring_put_with_signal(self, pool: RankPool, world: tuple[jobs.Stack, int]) -> None:
        """After its signal a message is there whole; the receiver reads it in the same kernel."""
        stack, ranks = world
        turns = min(ranks, 2)
        results = pool.run(jobs.ring, ranks, stack, self.numel, turns)
        for turn in range(turns):
            expected = [_data((rank - 1) % ranks, turn, self.numel) for rank in range(ranks)]
            found = [data + _words([turn + 1]) for data in expected]  # and the flag
            self._check([result[turn] for result in results], expected, found)

    def test_world_all_to_all_store(self, pool: RankPool, world: tuple[jobs.Stack, int]) -> None:
        """Every row arrives at its rank, first and last element included."""
        stack, ranks = world
        results = pool.run(jobs.all_to_all, ranks, stack, self.numel)
        expected = [b"".join(_data(sender, rank, self.numel) for sender in range(ranks)) for rank in range(ranks)]
        self._check(results, expected)

    def test_world_atomics_sum(self, pool: RankPool, world: tuple[jobs.Stack, int]) -> None:
        """No addition of programs of all ranks to the same word is lost."""
        stack, ranks = world
        programs = 17
        total = programs * sum(range(1, ranks + 1))
        results = pool.run(jobs.add, ranks, stack, programs)
        self._check(results, [_words([total])] * ranks)

    def test_world_barrier(self, pool: RankPool, world: tuple[jobs.Stack, int]) -> None:
        """Behind a device barrier everybody's stores are there, whoever is late, also when it is used again."""
        stack, ranks = world
        turns = ranks
        results = pool.run(jobs.meet, ranks, stack, turns)
        for turn in range(turns):
            everyone = _words([1000 * (turn + 1) + rank for rank in range(ranks)])
            self._check([result[turn] for result in results], [everyone] * ranks, [everyone] * ranks)

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _check(self, results: Sequence[Seen], expected: Sequence[bytes], found: Sequence[bytes] = ()) -> None:
        """Compare what each rank has, what the others see of it, and what its kernel saw."""
        for rank, seen in enumerate(results):
            assert seen.own == expected[rank], f"memory of rank {rank}"
            for peer, content in enumerate(seen.peers):
                assert content == expected[peer], f"memory of rank {peer}, as rank {rank} sees it"
            if found:
                assert seen.local == found[rank], f"what the kernel of rank {rank} found"

    def _why_not(self, tier: str) -> str:
        """The reason why a tier cannot run here, or an empty string."""
        import torch

        if tier == "host":
            wanted = DeviceType.CPU
        else:
            wanted = DeviceType.HIP if torch.version.hip else DeviceType.CUDA
        registry = Registry()
        for kind, name in ((PluginKind.ALLOCATOR, self.allocator), (PluginKind.BACKEND, self.backend)):
            try:
                info = registry.load(registry.resolve(kind, name)).info
            except PluginError as error:
                pytest.fail(str(error))
            if info is None or wanted not in info.devices:
                return f"{kind} {name!r} does not work on {wanted}"
        needed = self.gpus_of_tier[tier]
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return "" if present >= needed else f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {present}"


def _data(rank: int, turn: int, numel: int) -> bytes:
    return bytes(jobs.source_data(rank, turn, numel).numpy().tobytes())


def _words(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)
