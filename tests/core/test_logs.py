"""The logger, and when long waits are warned about."""

import queue
from types import SimpleNamespace

import pytest

from iris_core.device import reports
from iris_core.device.reports import LongWait, Watchdog


@pytest.fixture
def watch(monkeypatch):
    """A watchdog of rank 3 that looks when it is told to, at a time that the test says; its thread sleeps meanwhile."""
    state = {"now": 1000.0, "wait": None, "error": ""}
    monkeypatch.setattr(reports.time, "monotonic", lambda: state["now"])
    log = SimpleNamespace(warnings=[], errors=[])
    log.warning, log.error = log.warnings.append, log.errors.append
    said = SimpleNamespace(long_wait=lambda: state["wait"], unheard=lambda: state["error"])
    dog = Watchdog(3, 60.0, said, log)

    def look(now, wait=None, error=""):
        state.update(now=now, wait=wait or state["wait"], error=error)
        dog._look_for_waits()
        dog._look_for_errors()
        return log

    yield look
    dog.close()


def test_a_wait_is_logged_at_growing_intervals_and_when_it_has_ended(watch):
    assert watch(1000.0).warnings == []
    for minute in range(10):  # the wait says once a minute that it goes on
        log = watch(1060.0 + 60 * minute, LongWait(minute + 1, " for rank 1 in all_reduce", "details. "))
    spans = [text.split(";")[0] for text in log.warnings]
    assert spans == [f"rank 3 has waited for rank 1 in all_reduce for {span} s" for span in (60, 120, 240, 480)]
    assert len(watch(1660.0).warnings) == 4
    assert watch(1721.0).warnings[4].startswith("rank 3 no longer waits for rank 1 in all_reduce")
    assert len(watch(1800.0).warnings) == 5
    last = watch(1900.0, LongWait(99, " in a kernel", "")).warnings[5]
    assert last.startswith("rank 3 has waited in a kernel for 60")


def test_an_error_that_is_not_raised_is_logged_once(watch):
    assert watch(1000.0, error="late").errors == []
    for now in (1005.0, 1010.0):
        assert watch(now, error="late").errors == ["the next call raises: late"]
    assert watch(1015.0).errors == watch(1020.0, error="other").errors


def test_a_context_may_be_collected_by_its_watchdog():
    """The garbage collector closes a dropped context on any thread, also on the one that closing waits for."""
    started, ended = queue.SimpleQueue(), queue.SimpleQueue()

    def look():
        ended.put(started.get(timeout=60).close())

    dog = Watchdog(3, 0.01, SimpleNamespace(long_wait=look, unheard=lambda: ""), None)
    started.put(dog)
    assert ended.get(timeout=60) is False
    assert dog.close() is True
    assert ended.empty()
