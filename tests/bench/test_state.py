"""What a benchmark may declare, and what is refused."""

import pytest

from iris_core.bench import RunOptions
from iris_core.bench.state import SkipPoint, State
from iris_core.errors import BenchmarkError


def nothing():
    """A call."""


@pytest.fixture
def state():
    return State("copy", {"nbytes": 4, "sem": "relaxed"}, RunOptions(), False, nothing)


def test_axes_are_read_by_key_and_unknown_ones_are_named(state):
    assert state["nbytes"] == 4
    assert state.get("sem") == "relaxed"
    assert state.get("dtype", "f32") == "f32"
    with pytest.raises(BenchmarkError, match="'copy' has no axis 'dtype'; it has: nbytes, sem"):
        _ = state["dtype"]


@pytest.mark.parametrize(
    ("method", "value"), [("set_bytes", 0), ("set_flops", -1), ("set_repeat", 0), ("set_rounds", 0), ("set_warmup", -1)]
)
def test_numbers_out_of_range_are_refused(state, method, value):
    with pytest.raises(BenchmarkError, match=method):
        getattr(state, method)(value)


def test_timers(state):
    with pytest.raises(BenchmarkError, match="no timer is called 'sundial'; there are: cpu, events, graph, reported"):
        state.set_timer("sundial")
    for timer in ("events", "graph"):
        with pytest.raises(BenchmarkError, match="needs a GPU"):
            state.set_timer(timer)
    state.provider("a", nothing, check=None)
    state.set_timer("reported")
    state.provider("b", nothing, check=None)
    assert [each.timer for each in state.providers.values()] == ["cpu", "reported"]
    on_gpu = State("copy", {}, RunOptions(), True, nothing)
    on_gpu.provider("a", nothing, check=None)
    on_gpu.set_timer("graph")
    on_gpu.provider("b", nothing, check=None)
    assert [each.timer for each in on_gpu.providers.values()] == ["events", "graph"]


def test_exec_is_one_provider_whose_calls_are_timed_one_by_one_after_a_preamble(state):
    log = []
    state.exec(lambda: log.append("call"), preamble_fn=lambda: log.append("preamble"))
    (provider,) = state.providers.values()
    assert (provider.name, provider.timer) == ("default", "reported")
    assert provider.call() > 0
    assert log == ["preamble", "call"]


def test_what_is_declared_twice_is_refused(state):
    state.provider("a", nothing, check=None)
    with pytest.raises(BenchmarkError, match="two providers 'a'"):
        state.skip_provider("a", "no reason")
    state.add_counter("n", 1)
    with pytest.raises(BenchmarkError, match="counter 'n' twice"):
        state.add_counter("n", 2)


def test_a_check_has_to_be_decided_on(state):
    with pytest.raises(TypeError, match="check"):
        state.provider("a", nothing)


def test_a_declaration_must_be_whole(state):
    with pytest.raises(BenchmarkError, match="declared no provider"):
        state.check()
    state.provider("a", nothing, check=None, baseline="b")
    with pytest.raises(BenchmarkError, match="a baseline of 'copy' names provider 'b'; there are: a"):
        state.check()
    state.provider("b", nothing, check=None)
    state.check()
    state.target("c", "time_us", at_most=1)
    with pytest.raises(BenchmarkError, match="a target of 'copy' names provider 'c'; there are: a, b"):
        state.check()


def test_targets_need_a_metric_and_one_bound(state):
    with pytest.raises(BenchmarkError, match="no metric is called 'speed'"):
        state.target("a", "speed", at_least=1)
    for bounds in ({}, {"at_least": 1, "at_most": 2}):
        with pytest.raises(BenchmarkError, match="either at_least or at_most"):
            state.target("a", "time_us", **bounds)


def test_skip(state):
    with pytest.raises(SkipPoint, match="no reason"):
        state.skip("no reason")
