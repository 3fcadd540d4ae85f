"""Conformance of a stack: an allocator and a backend together, kernels on several ranks.

The same tests run in three tiers: ranks on the CPU, one rank on a GPU, several ranks on GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest
import torch

from iris_core.errors import IrisError, PluginError
from iris_core.registry import Registry
from iris_core.testing.conformance import device_functions, device_jobs, stack_jobs
from iris_core.testing.conformance.plugin import shared_pool
from iris_core.types import DeviceType, PluginKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    World = tuple[stack_jobs.Stack, int]

    from iris_core.testing.conformance.device_jobs import Calls
    from iris_core.testing.conformance.stack_jobs import Seen
    from iris_core.testing.pool import RankPool


_CALLS_S = 120.0  # for all device functions, where no wait reaches its bound; on a GPU they are compiled


class Programs(Protocol):
    """What a module of programs offers: functions that launch kernels of the backend's language on one rank.

    Collective: every rank calls them, with symmetric tensors.  Waits of a kernel give up after `timeout_s`, and it goes
    on: a lost signal is to be a wrong result and not a rank that hangs.  The kernels call the device functions that
    `ctx.backend.device_api()` gives, so that these are what is tested.

    Arguments that several programs have:
        form: "function", to call the device functions of `device_api()`; or "method", to call the methods of its
            DeviceContext, whose waits are bounded by IRIS_DEVICE_TIMEOUT instead of `timeout_s`.  A backend without a
            DeviceContext is never asked for methods.
        name: of the device function.
        lanes: int32[n] whose zeros are masked off; None for a call without a mask.  n is a power of two, one block.
        peer: the rank whose memory is accessed.
    """

    def ring(
        self, ctx: Any, source: Tensor, target: Tensor, found: Tensor, flag: Tensor, value: int, timeout_s: float
    ) -> None:
        """Put `source` to the next rank's `target`, set its `flag` to `value`, wait for the own flag to reach `value`.

        Then, in the same kernel, copy the own `target` to `found` by plain loads and stores.
        source, target, found: int32[n], n any number; flag: int64[1].
        """

    def all_to_all(self, ctx: Any, source: Tensor, target: Tensor) -> None:
        """Store row p of `source` to row `rank` of rank p's `target`.  int32[world_size, n] each, n any number."""

    def move(
        self,
        ctx: Any,
        form: str,
        name: str,
        source: Tensor,
        target: Tensor,
        lanes: Tensor | None,
        other: int,
        peer: int,
        far: int,
    ) -> None:
        """Call load, store, get, put or copy once, on blocks of pointers.  source, target: int32[n].

        "load": load the peer's `source`, and store the result, all of it, to the own `target` by a plain store.
        "store": load the own `source` by a plain load, and store it to the peer's `target`.
        "get": from the peer's `source` to the own `target`.  "put": from the own `source` to the peer's `target`.
        "copy": from the peer's `source` to the `target` of rank `far`.
        With `lanes`, all get the mask, and all but "store" get `other`.
        """

    def change(
        self,
        ctx: Any,
        form: str,
        name: str,
        cells: Tensor,
        operands: Tensor,
        compares: Tensor,
        found: Tensor,
        lanes: Tensor | None,
        peer: int,
    ) -> None:
        """Call an atomic once, on a block of pointers to the peer's `cells`, with the block `operands`.  int32[n] each.

        Store what it returns to `found`, by a plain store with the same mask.  With `lanes`, also pass
        sem="acq_rel" and scope="sys".  atomic_cas has no mask, and gets `compares` as well.
        """

    def contend(
        self, ctx: Any, form: str, name: str, cell: Tensor, operands: Tensor, compares: Tensor, found: Tensor
    ) -> None:
        """Let many programs call an atomic with scalars: program (p, j) passes operands[j] to rank p's `cell`.

        p is any rank, j any index of `operands`.  What is returned goes to found[p * n + j].  atomic_cas gets
        compares[j] as well.  cell: int64[1]; operands, compares: int64[n]; found: int64[world_size * n].
        """

    def send(
        self,
        ctx: Any,
        form: str,
        name: str,
        op: str,
        source: Tensor,
        target: Tensor,
        found: Tensor,
        flag: Tensor,
        value: int,
        awaited: int,
        timeout_s: float,
    ) -> None:
        """Signal the next rank, `op` being "set" or "add", without or with data.

        "signal": call signal(flag, value), and nothing else.  "put_signal": put `source` to `target` as well, wait
        until the own flag is at least `awaited`, and copy the own `target` to `found` by plain loads and stores.
        source, target, found: int32[n], one block; flag: int64[1].
        """

    def await_flag(
        self, ctx: Any, form: str, cmp: str, flag: Tensor, sent: int, value: int, found: Tensor, timeout_s: float
    ) -> None:
        """In one kernel, signal `sent` to the next rank's flag, wait for the own flag, and note what wait returns.

        cmp: "eq", "ne", "gt", "ge", "lt" or "le"; value: what the flag is compared with; flag, found: int64[1].
        """

    def look(
        self,
        ctx: Any,
        form: str,
        name: str,
        cmp: str,
        flags: Tensor,
        sent: int,
        value: int,
        found: Tensor,
        timeout_s: float,
    ) -> None:
        """Look at two flags as a block, or at one after the other, and note what is returned.

        "wait_any": signal `sent` to the next rank's second flag, then note in found[0] what wait_any of the block
        returns.  "test": of each flag, whether it compares with `value` as `cmp` says, 0 or 1.  "load_acquire": what
        it returns of the block; has no `cmp`.  flags, found: int64[2].
        """

    def meet(
        self,
        ctx: Any,
        form: str,
        slots: Tensor,
        found: Tensor,
        flags: Tensor,
        value: int,
        group: tuple[int, int, int] | None,
        timeout_s: float,
    ) -> None:
        """Store `value` to slots[rank] of every rank, pass the device barrier, copy the own `slots` to `found`.

        Ends with another barrier.  Only members of the group call it, which is (rank_start, rank_stride, group_size);
        None for all ranks, and then the barrier gets no group.
        slots, found: int64[world_size]; flags: int64[world_size + 1], for the barrier, which changes those of members
        only: other groups may use theirs at the same time.
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
    programs: ClassVar[str] = "iris_triton.testing.kit_programs"
    num_ranks: ClassVar[int] = 3
    numel: ClassVar[int] = 1003
    timeout_s: ClassVar[float] = 20.0

    gpus_of_tier: ClassVar[Mapping[str, int]] = {"host": 0, "gpu": 1, "gpus": 2}
    """GPUs that each tier needs at least; Iris's own suite reads it (`tests/support/gpu_tiers.py`)."""

    @pytest.fixture
    def pool(self) -> RankPool:
        """Rank processes; one pool serves all suites of a test run."""
        return shared_pool()

    @pytest.fixture(params=["host", "gpu", "gpus"])
    def world(self, request: pytest.FixtureRequest) -> World:
        """The stack and the number of ranks of each tier."""
        tier: str = request.param
        device = "cpu" if tier == "host" else "cuda"
        reason = _why_not(self.allocator, self.backend, tier, self.gpus_of_tier[tier])
        if reason:
            pytest.skip(reason)
        stack = stack_jobs.Stack(self.allocator, self.backend, self.programs, device, self.timeout_s)
        if tier == "gpus":
            return stack, min(torch.cuda.device_count(), self.num_ranks)
        return stack, self.num_ranks if tier == "host" else 1

    # -- tests --------------------------------------------------------------------------------------------------------
    def test_world_ring_put_with_signal(self, pool: RankPool, world: World) -> None:
        """After its signal a message is there whole; the receiver reads it in the same kernel."""
        stack, ranks = world
        turns = min(ranks, 2)
        results = pool.run(stack_jobs.ring, ranks, stack, self.numel, turns)
        for turn in range(turns):
            expected = [_data((rank - 1) % ranks, turn, self.numel) for rank in range(ranks)]
            found = [data + _words([turn + 1]) for data in expected]  # and the flag
            self._check([result[turn] for result in results], expected, found)

    def test_world_all_to_all_store(self, pool: RankPool, world: World) -> None:
        """Every row arrives at its rank, first and last element included."""
        stack, ranks = world
        results = pool.run(stack_jobs.all_to_all, ranks, stack, self.numel)
        expected = [b"".join(_data(sender, rank, self.numel) for sender in range(ranks)) for rank in range(ranks)]
        self._check(results, expected)

    @pytest.mark.parametrize("name", device_functions.NAMES)
    def test_world_device_function(self, pool: RankPool, world: World, name: str) -> None:
        """Each function of `device_api()`, with and without a mask, changes what it should on the rank that it should.

        Atomics return the old values, and lose nothing of what many programs do; signals set and add; waits end when
        their comparison holds and not before; barriers also of groups.
        """
        self._check_calls(pool, *world, "function", name)

    @pytest.mark.parametrize("name", device_functions.NAMES)
    def test_world_device_method(self, pool: RankPool, world: World, name: str) -> None:
        """The same of DeviceContext's methods."""
        self._check_calls(pool, *world, "method", name)

    def test_world_barrier(self, pool: RankPool, world: World) -> None:
        """Behind a device barrier everybody's stores are there, whoever is late, also when it is used again."""
        stack, ranks = world
        results = pool.run(stack_jobs.meet, ranks, stack, ranks)
        for turn in range(ranks):
            everyone = _words([1000 * (turn + 1) + rank for rank in range(ranks)])
            self._check([result[turn] for result in results], [everyone] * ranks, [everyone] * ranks)

    def test_world_wait_that_gives_up(self, pool: RankPool, world: World) -> None:
        """The launch raises DeviceTimeoutError, or the next barrier does, once."""
        stack, ranks = world
        stack = dataclasses.replace(stack, timeout_s=min(stack.timeout_s, 0.5))
        for said in self._optional(pool.run(stack_jobs.give_up, ranks, stack), "DeviceContext"):
            assert said in (["DeviceTimeoutError", "", ""], ["", "DeviceTimeoutError", ""])

    # -- what a backend may have besides ------------------------------------------------------------------------------
    def test_world_device_barrier_of_the_host(self, pool: RankPool, world: World) -> None:
        """Behind `ctx.device_barrier()` all writes are there, whoever is late; a group waits for its members only."""
        stack, ranks = world
        results = self._optional(pool.run(stack_jobs.device_barrier, ranks, stack, 2), "device_barrier")
        for turn in range(4):
            for rank, result in enumerate(results):
                members, found = result[turn]
                words = [1000 * (turn + 1) + each if each in members else 0 for each in range(ranks)]
                if rank in members:
                    assert found == _words(words), f"rank {rank}, barrier {turn} of ranks {members}"

    def test_world_self_test_passes(self, pool: RankPool, world: World) -> None:
        """Every operation on every pair of ranks is judged, and nothing is wrong; each step was announced."""
        stack, ranks = world
        results = self._optional(pool.run(stack_jobs.self_test, ranks, stack, False), "self_test")
        for rank, result in enumerate(results):
            assert result.error == "", f"rank {rank}"
            assert result.others == (), "a self-test gives objects of PairCheck"
            assert [check for check in result.checks if check[3]] == [], f"what rank {rank} found"
        checks = [check for result in results for check in result.checks]
        pairs = {(rank, peer) for rank in range(ranks) for peer in range(ranks) if rank != peer} or {(0, 0)}
        ops = {op for op, *_ in checks}
        assert ops, "the self-test says nothing"
        for op in ops:
            assert {(rank, peer) for each, rank, peer, _ in checks if each == op} >= pairs, f"pairs of {op}"
        for rank, result in enumerate(results):
            assert ops <= {op for op, _ in result.begun}, f"operations that rank {rank} has announced"

    def test_world_self_test_notices(self, pool: RankPool, world: World) -> None:
        """A machine on which no memory of a peer is reached does not pass."""
        stack, ranks = world
        if ranks == 1:
            pytest.skip("a world of one has no peers")
        stack = dataclasses.replace(stack, timeout_s=min(stack.timeout_s, 2.0))
        results = self._optional(pool.run(stack_jobs.self_test, ranks, stack, True), "self_test")
        for rank in range(ranks):
            about = [check for result in results for check in result.checks if rank in check[1:3] and check[3]]
            assert about or any(result.error for result in results), f"nothing is wrong with rank {rank}, it says"

    def test_world_clocks_are_compared(self, pool: RankPool, world: World) -> None:
        """Rank 0 is not ahead of itself, and two comparisons agree within the errors that they state."""
        stack, ranks = world
        results = self._optional(pool.run(stack_jobs.compare_clocks, ranks, stack), "compare_clocks")
        for rank, (one, two) in enumerate(results):
            for _, ahead, error in (one, two):
                assert 0 <= error < 1, f"error of rank {rank} in seconds"
                assert rank > 0 or abs(ahead) <= error, "rank 0 is ahead of itself"
            passed = two[0] - one[0]
            assert passed > 0, "time goes backwards"
            drift = 1e-3 * passed
            assert abs(two[1] - one[1]) <= one[2] + two[2] + drift, f"comparisons of rank {rank} contradict each other"

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _check(self, results: Sequence[Seen], expected: Sequence[bytes], found: Sequence[bytes] = ()) -> None:
        """Compare what each rank has, what the others see of it, and what its kernel saw."""
        for rank, seen in enumerate(results):
            assert seen.own == expected[rank], f"memory of rank {rank}"
            for peer, content in enumerate(seen.peers):
                assert content == expected[peer], f"memory of rank {peer}, as rank {rank} sees it"
            if found:
                assert seen.local == found[rank], f"what the kernel of rank {rank} found"

    def _optional(self, results: list[Any], member: str) -> list[Any]:
        """Results of something that a backend need not have."""
        if None in results:
            pytest.skip(f"backend {self.backend!r} has no {member}")
        return results

    def _check_calls(self, pool: RankPool, stack: stack_jobs.Stack, ranks: int, form: str, name: str) -> None:
        """Judge the calls of one device function; all of them ran together, in the first test that wanted one."""
        results = _calls(pool, stack, ranks, form)
        if results is None:
            pytest.skip(f"device_api() of {stack.backend!r} has no DeviceContext: it has the functional API only")
        calls = [result[name] for result in results]
        errors = [f"rank {rank}: {error}" for rank, each in enumerate(calls) for error in each.errors]
        assert errors == [], "\n".join(errors)
        if name in device_functions.MOVES:
            for kind in device_functions.KINDS:
                expected = [device_functions.moved(name, rank, ranks, kind) for rank in range(ranks)]
                self._check([each.seen[kind] for each in calls], list(map(_int32s, expected)))
        elif name in device_functions.ATOMICS:
            for kind in device_functions.KINDS:
                pairs = [device_functions.changed(name, rank, ranks, kind) for rank in range(ranks)]
                after, returned = zip(*pairs, strict=True)
                self._check(
                    [each.seen[kind] for each in calls], list(map(_int32s, after)), list(map(_int32s, returned))
                )
            self._check_contention(name, [each.seen["contention"] for each in calls])
        elif name in ("signal", "put_signal"):
            for op in device_functions.OPS:
                flags = [_words([device_functions.signalled(op, rank, ranks)]) for rank in range(ranks)]
                arrived = [device_functions.moved("put", rank, ranks, "whole") for rank in range(ranks)]
                if name == "signal":
                    arrived = [[device_functions.UNTOUCHED] * device_functions.LANES] * ranks
                self._check([each.seen[op] for each in calls], flags, [2 * _int32s(data) for data in arrived])
        elif name == "wait":
            for each in device_functions.WAITS:
                word = _words([each.sent])
                self._check([call.seen[each.cmp] for call in calls], [word] * ranks, [word] * ranks)
        elif name in device_functions.LOOKS:
            for each in device_functions.WAITS:
                word, said = _words([each.before, each.sent]), _words(device_functions.looked_at(name, each))
                self._check([call.seen[each.cmp] for call in calls], [word] * ranks, [said] * ranks)
        else:
            self._check_barriers(ranks, calls)

    def _check_contention(self, name: str, seen: Sequence[Seen]) -> None:
        """Judge a word of every rank that all programs have changed."""
        count, ranks = device_functions.PROGRAMS, len(seen)
        for rank in range(ranks):
            final = int.from_bytes(seen[rank].own, "little", signed=True)
            returned = [_numbers(each.local)[rank * count : (rank + 1) * count] for each in seen]
            problem = device_functions.contention_problem(name, final, returned)
            assert problem == "", f"{count} programs of {ranks} ranks changed a word of rank {rank}: {problem}"

    def _check_barriers(self, ranks: int, calls: Sequence[Calls]) -> None:
        """Judge barriers of all and of groups: only members take part, but what they store goes to all ranks.

        A barrier that counts on the others as well would change their flags.
        """
        for group in (None, *device_functions.groups(ranks)):
            begin, stride, size = group or (0, 1, ranks)
            members = range(begin, begin + stride * size, stride)
            for turn in range(2):
                slots = [
                    10 * (turn + 1) + rank if rank in members else device_functions.UNTOUCHED for rank in range(ranks)
                ]
                untouched = _words([device_functions.UNTOUCHED] * ranks), _words([0] * (ranks + 1))
                for rank, each in enumerate(calls):
                    seen = each.seen[f"{group} {turn}"]
                    assert seen.own == _words(slots), f"slots of rank {rank}, barrier {turn} of group {group}"
                    if rank in members:
                        found = seen.local[: len(seen.own)]
                        assert found == _words(slots), f"what rank {rank} found behind barrier {turn} of group {group}"
                    else:
                        assert seen.local == b"".join(untouched), f"barrier {turn} of group {group} changed rank {rank}"


@functools.cache
def _why_not(allocator: str, backend: str, tier: str, needed: int) -> str:
    """The reason why a tier cannot run here, or an empty string."""
    if tier == "host":
        wanted = DeviceType.CPU
    else:
        wanted = DeviceType.HIP if torch.version.hip else DeviceType.CUDA
    registry = Registry()
    for kind, name in ((PluginKind.ALLOCATOR, allocator), (PluginKind.BACKEND, backend)):
        try:
            info = registry.load(registry.resolve(kind, name)).info
        except PluginError as error:
            pytest.fail(str(error))
        if info is None or wanted not in info.devices:
            return f"{kind} {name!r} does not work on {wanted}"
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if present >= needed else f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {present}"


_cache: dict[tuple[stack_jobs.Stack, int, str], list[dict[str, Calls]] | Exception | None] = {}


def _calls(pool: RankPool, stack: stack_jobs.Stack, ranks: int, form: str) -> list[dict[str, Calls]] | None:
    """Call all device functions on ranks, once in a test run; raise again what was raised.

    Returns:
        The results by name, one dictionary per rank; None if the backend does not have this form.
    """
    key = stack, ranks, form
    if key not in _cache:
        try:
            results = pool.run(device_jobs.call_all, ranks, stack, form, timeout_s=_CALLS_S + 12 * stack.timeout_s)
            _cache[key] = None if None in results else results
        except IrisError as error:  # of a rank that raised, ended, or never came back
            _cache[key] = error
    found = _cache[key]
    if isinstance(found, Exception):
        raise found
    return found


def _data(rank: int, turn: int, numel: int) -> bytes:
    return bytes(stack_jobs.source_data(rank, turn, numel).numpy().tobytes())


def _words(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def _int32s(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def _numbers(words: bytes) -> list[int]:
    return [int.from_bytes(words[at : at + 8], "little", signed=True) for at in range(0, len(words), 8)]
