"""Measuring in a world of one and in pretended worlds: order, verification, numbers."""

import itertools
from unittest.mock import Mock

from tables import raises, table

from iris_core.errors import BenchmarkError

from .conftest import PretendedWorld

nothing = lambda: None


def only(call=nothing, check=None, **more):
    return lambda state, ctx: state.provider("a", call, check=check, **more)


def test_wrong_data_is_an_error_and_not_a_time(measure):
    calls = []

    def wrong(state, ctx):
        state.set_bytes(1000)
        state.provider("right", nothing, check=lambda: True, baseline="wrong")
        state.provider("wrong", lambda: calls.append(1), check=lambda: False, peer=True)
        state.target("wrong", "time_us", at_most=1e9)
        state.target("right", "ratio", at_least=0)

    good, bad = measure(wrong)
    found = bad.error, bad.time_us, bad.gb_per_s, bad.rounds_us, bad.local_us, bad.verified
    assert found == ("the data is wrong", None, None, (), (), False)
    assert len(calls) == 2  # one to compile, and the one that was checked
    assert good.time_us > 0
    assert good.verified
    assert (good.ratio, good.ratio_to_best_peer) == (None, None)  # what is wrong is nobody's yardstick
    assert (bad.targets[0].reached, good.targets[0].reached) == (None, None)


def late(state, ctx):
    """Data that goes wrong while it is timed."""
    calls, box = itertools.count(), {}
    state.set_repeat(5)
    state.provider("a", lambda: box.update(right=next(calls) < 10), check=lambda: box["right"])


def idle(state, ctx):
    """A provider that does nothing, and whose output is right but for spoiling."""
    box = {"value": "left by another provider"}
    state.provider("a", nothing, prepare=box.clear, check=lambda: "value" in box)


OF_RANK_2 = PretendedWorld(3, lambda rank, obj: "2 elements differ" if obj == "" and rank == 2 else obj)
UNLIKE = PretendedWorld(2, lambda rank, obj: ("skipped", *obj[1:]) if isinstance(obj, tuple) else obj)


@table(("benchmark", "world", "error"), [
    (late, None, "the data is wrong"), (idle, None, "the data is wrong"),
    (only(check=Mock(side_effect=AssertionError("3 of 4 elements differ"))), None, "3 of 4 elements differ"),
    (only(check=Mock(side_effect=AssertionError())), None, "an assertion of the check failed"),
    (only(check=lambda: True), OF_RANK_2, "rank 2: 2 elements differ"),
])  # fmt: skip
def test_wrong_data_is_found(measure, benchmark, world, error):
    (result,) = measure(benchmark, world=world)
    assert (result.error, result.time_us) == (error, None)


def reported(answer):
    def benchmark(state, ctx):
        state.set_timer("reported")
        state.provider("a", lambda: answer, check=None)

    return benchmark


@table(("benchmark", "world", "error", "key"), [
    (only(check=Mock(side_effect=ZeroDivisionError("broken"))), None, ZeroDivisionError, "any"),  # no wrong data
    (only(), UNLIKE, BenchmarkError, "bench.unlike"), (only(None), None, BenchmarkError, "bench.no rank"),
    *((reported(answer), None, BenchmarkError, "bench.seconds") for answer in (None, 0.0, "soon")),
])  # fmt: skip
def test_what_is_raised(measure, benchmark, world, error, key):
    with raises(error, key):
        measure(benchmark, world=world)


def test_reported_times_are_taken_as_they_are(measure):
    slowly = itertools.cycle([3e-3, 1e-3, 2e-3])

    def reported(state, ctx):
        state.add_counter("fixed", 3)
        state.add_counter("next", lambda: next(slowly))  # read when everything is measured
        state.set_timer("reported")
        state.set_warmup(0)
        state.set_bytes(4_000_000)
        state.set_flops(8_000_000)
        state.provider("slow", lambda: next(slowly), check=None, baseline="quick")
        state.provider("quick", lambda: 1e-3, check=None, operations=4, peer=True)
        state.target("slow", "ratio", at_least=0.5)
        state.target("slow", "time_us", at_most=2000)

    slow, quick = measure(reported, rounds=3)
    assert slow.rounds_us == (3000, 1000, 2000)
    assert (slow.time_us, quick.time_us) == (2000, 250)  # four operations in a call
    assert (slow.gb_per_s, slow.tflop_per_s) == (2, 0.004)
    assert (slow.ratio, slow.ratio_to_best_peer, slow.best_peer) == (0.125, 0.125, "quick")
    assert quick.ratio_to_best_peer is None  # it is the only peer
    assert [each.reached for each in slow.targets] == [False, True]
    assert slow.counters == {"fixed": 3, "next": 3e-3}
