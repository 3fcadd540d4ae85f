"""Measuring in a world of one and in pretended worlds: order, verification, numbers."""

import contextlib
import itertools

import pytest

from iris_core.errors import BenchmarkError

from .fakes import PretendedWorld


def test_providers_are_measured_in_turn_and_each_is_first_once(measure):
    order = []

    def three(state, ctx):
        state.set_warmup(0)
        state.set_repeat(1)
        for name in "abc":
            state.provider(name, lambda name=name: order.append(name), check=None)

    measure(three, rounds=4)
    assert order[9:] == list("abcbcacababc")  # behind three calls of each that nobody times


def test_steps_of_a_provider(measure):
    log = []

    def steps(state, ctx):
        state.set_repeat(3)
        state.set_warmup(2)
        state.set_rounds(2)
        state.provider(
            "a", lambda: log.append("call"), prepare=lambda: log.append("spoil"), check=lambda: log.append("check")
        )

    (result,) = measure(steps)
    first = ["spoil", "call"] * 2  # compiles; shows how long
    verified = ["spoil", "call", "check"]
    timed = ["spoil", *["call"] * 5]
    assert log == [*first, *verified, *timed, *timed, "check"]
    assert (result.calls, len(result.rounds_us), result.verified, result.timer) == (3, 2, True, "cpu")


def test_a_preamble_comes_before_every_call(measure):
    log = []

    def prepared(state, ctx):
        state.set_repeat(3)
        state.set_warmup(2)
        state.exec(lambda: log.append("call"), lambda: log.append("preamble"), check=lambda: log.append("check"))

    (result,) = measure(prepared)
    verified, timed = ["preamble", "call", "check"], ["preamble", "call"] * 5
    assert log == [*verified, *timed, *timed, *timed, "check"]
    assert (result.calls, len(result.rounds_us), result.timer) == (3, 3, "reported")


def test_the_number_of_calls_fills_the_batch(by_provider):
    def calls(state, ctx):
        state.provider("quick", lambda: None, check=None)
        state.provider("slow", lambda: sum(range(20_000)), check=None)

    results = by_provider(calls, batch_ms=0.1)
    assert results["quick"].calls > 20
    assert results["slow"].calls == 1
    assert results["slow"].time_us > results["quick"].time_us


@pytest.mark.parametrize("check", [lambda: False, lambda: 0])
def test_wrong_data_is_an_error_and_not_a_time(by_provider, check):
    def wrong(state, ctx):
        state.set_bytes(1000)
        state.add_counter("n", 1)
        state.provider("right", lambda: None, check=lambda: True, baseline="wrong")
        state.provider("wrong", lambda: None, check=check, peer=True)
        state.target("wrong", "time_us", at_most=1e9)
        state.target("right", "ratio", at_least=0)

    results = by_provider(wrong)
    bad, good = results["wrong"], results["right"]
    assert bad.error == "the data is wrong"
    assert (bad.time_us, bad.gb_per_s, bad.rounds_us, bad.local_us, bad.verified) == (None, None, (), (), False)
    assert bad.targets[0].reached is None
    assert good.time_us > 0
    assert good.verified
    assert (good.ratio, good.ratio_to_best_peer) == (None, None)  # what is wrong is nobody's yardstick
    assert good.targets[0].reached is None


def test_a_wrong_provider_is_not_timed(measure):
    calls = []

    def wrong(state, ctx):
        state.provider("wrong", lambda: calls.append(1), check=lambda: False)

    measure(wrong)
    assert len(calls) == 3  # two to compile, and the one that was checked


def test_an_assertion_says_what_is_wrong(measure):
    def check():
        raise AssertionError("3 of 4 elements differ")

    def wrong(state, ctx):
        state.provider("wrong", lambda: None, check=check)

    assert measure(wrong)[0].error == "3 of 4 elements differ"


def test_data_that_goes_wrong_while_it_is_timed_is_found(measure):
    calls = itertools.count()
    box = {}

    def call():
        box["value"] = "right" if next(calls) < 10 else "wrong"

    def late(state, ctx):
        state.set_repeat(5)
        state.provider("late", call, check=lambda: box["value"] == "right")

    (result,) = measure(late)
    assert result.error == "the data is wrong"
    assert result.time_us is None


def test_a_provider_that_does_nothing_is_found_by_spoiling(measure):
    box = {"value": "left by another provider"}

    def idle(state, ctx):
        state.provider("idle", lambda: None, prepare=box.clear, check=lambda: "value" in box)

    assert measure(idle)[0].error


def test_an_exception_is_not_taken_for_wrong_data(measure):
    def breaks():
        raise ZeroDivisionError("broken")

    def raises(state, ctx):
        state.provider("a", lambda: None, check=breaks)

    with pytest.raises(ZeroDivisionError, match="broken"):
        measure(raises)


def test_wrong_data_on_another_rank_is_an_error_here_that_names_it(measure):
    def one(state, ctx):
        state.provider("a", lambda: None, check=lambda: True)

    def others(rank, obj):
        return "2 elements differ" if obj == "" and rank == 2 else obj

    (result,) = measure(one, world=PretendedWorld(3, others))
    assert result.error == "rank 2: 2 elements differ"
    assert result.time_us is None


def test_ranks_that_declare_different_things_are_refused(measure):
    def one(state, ctx):
        state.provider("a", lambda: None, check=None)

    def others(rank, obj):
        return ("skipped", *obj[1:]) if isinstance(obj, tuple) else obj

    with pytest.raises(BenchmarkError, match=r"not declared alike on all ranks: rank 0 has .*rank 1 has \('skipped'"):
        measure(one, world=PretendedWorld(2, others))


def test_skipping_a_point_or_a_provider(measure, by_provider):
    def skips(state, ctx):
        state.provider("a", lambda: None, check=None)
        state.skip("too large")

    (result,) = measure(skips, {"nbytes": 4})
    assert (result.skipped, result.provider, result.time_us, result.error) == ("too large", "", None, "")
    assert result.params == {"nbytes": 4}

    def skips_one(state, ctx):
        state.skip_provider("engine", "needs a GPU")
        state.provider("ours", lambda: None, check=None, baseline="engine")

    results = by_provider(skips_one)
    assert results["engine"].skipped == "needs a GPU"
    assert results["engine"].time_us is None
    assert results["ours"].time_us > 0
    assert results["ours"].ratio is None
    assert not results["ours"].verified  # it has no check


def test_reported_times_are_taken_as_they_are(by_provider):
    seconds = {"slow": itertools.cycle([3e-3, 1e-3, 2e-3]), "quick": itertools.repeat(1e-3)}

    def reported(state, ctx):
        state.set_timer("reported")
        state.set_warmup(0)
        state.set_bytes(4_000_000)
        state.set_flops(8_000_000)
        state.provider("slow", lambda: next(seconds["slow"]), check=None, baseline="quick")
        state.provider("quick", lambda: next(seconds["quick"]), check=None, operations=4, peer=True)
        state.target("slow", "ratio", at_least=0.5)
        state.target("slow", "time_us", at_most=2000)

    results = by_provider(reported, rounds=3)
    slow, quick = results["slow"], results["quick"]
    assert slow.rounds_us == (3000, 1000, 2000)
    assert slow.time_us == 2000
    assert quick.time_us == 250  # four operations in a call
    assert slow.gb_per_s == 2
    assert slow.tflop_per_s == 0.004
    assert slow.ratio == slow.ratio_to_best_peer == 0.125
    assert slow.best_peer == "quick"
    assert quick.ratio_to_best_peer is None  # it is the only peer
    assert [each.reached for each in slow.targets] == [False, True]


@pytest.mark.parametrize("answer", [None, 0.0, "soon"])
def test_a_call_that_reports_nothing_is_refused(measure, answer):
    def reported(state, ctx):
        state.set_timer("reported")
        state.provider("a", lambda: answer, check=None)

    with pytest.raises(BenchmarkError, match="has to return its seconds"):
        measure(reported)


def test_counters_are_read_when_everything_is_measured(measure):
    calls = []

    def counts(state, ctx):
        state.add_counter("fixed", 3)
        state.add_counter("calls", lambda: len(calls))
        state.provider("a", lambda: calls.append(1), check=None)

    (result,) = measure(counts)
    assert result.counters == {"fixed": 3.0, "calls": len(calls)}


def test_what_was_entered_is_left_after_measuring_and_after_an_error(measure):
    log = []

    @contextlib.contextmanager
    def resource():
        log.append("open")
        yield "resource"
        log.append("close")

    def holds(state, ctx):
        assert state.enter(resource()) == "resource"
        state.provider("a", lambda: log.append("call"), check=None)

    measure(holds)
    assert log[0] == "open"
    assert log.count("close") == 1
    assert log[-1] == "close"
    log.clear()

    def holds_and_declares_nothing(state, ctx):
        state.enter(contextlib.closing(type("Closes", (), {"close": lambda self: log.append("close")})()))

    with pytest.raises(BenchmarkError, match="declared no provider"):
        measure(holds_and_declares_nothing)
    assert log == ["close"]
