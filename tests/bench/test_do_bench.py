"""do_bench: what is called when, and what becomes of the times."""

import pytest

from iris_core.bench import do_bench
from iris_core.dispatch import first_calls
from iris_core.errors import BenchmarkError


@pytest.fixture
def calls(monkeypatch):
    """The names of what was called, on a machine without a GPU whose calls take 1, 2, 3, ... ms."""
    made = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def timed(fn, units):
        fn()
        return made.count("fn") / 1e3

    monkeypatch.setattr(first_calls, "seconds_by_clock", timed)
    return made


def bench(calls, **options):
    return do_bench(
        lambda: calls.append("fn"), lambda: calls.append("barrier"), lambda: calls.append("preamble"), **options
    )


def test_order_of_calls(calls):
    bench(calls, n_warmup=1, n_repeat=2)
    assert calls == ["barrier", "preamble", "barrier", "fn"] * 4 + ["barrier"]


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, 4.0), ({"return_mode": "min"}, 3.0), ({"return_mode": "max"}, 5.0), ({"return_mode": "median"}, 4.0),
    ({"return_mode": "all"}, [3.0, 4.0, 5.0]), ({"quantiles": [0.25, 1.0]}, [3.5, 5.0]), ({"quantiles": (0.5,)}, 4.0),
], ids=str)  # fmt: skip
def test_what_is_returned(calls, options, wanted):
    assert bench(calls, n_warmup=1, n_repeat=3, **options) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "options", [{"return_mode": "best"}, {"n_warmup": -1}, {"n_repeat": 0}, {"quantiles": [1.5]}], ids=str
)
def test_refuses(calls, options):
    with pytest.raises(BenchmarkError, match=next(iter(options))):
        bench(calls, **options)
    assert calls == []
