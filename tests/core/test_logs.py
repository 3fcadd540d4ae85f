"""The logger."""

import io
import logging
import re
import subprocess
import sys

import pytest
from tables import table

from iris_core import logs


@pytest.fixture
def stream(monkeypatch):
    """What the one handler writes; the level is restored afterwards."""
    (handler,) = [each for each in logs.logger.handlers if isinstance(each.formatter, logs.RankFormatter)]
    written = io.StringIO()
    monkeypatch.setattr(handler, "stream", written)
    level = logs.logger.level
    yield written
    logs.logger.setLevel(level)


def test_lines_and_records_carry_the_rank_and_the_callers_extra(stream):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logs.set_logger_level(logs.INFO)
    logs.logger.info("alone %d", 1)
    logs.logger.addHandler(handler)
    try:
        logs.rank_logger(2, 8).error("with rank", extra={"phase": "open"})
        logs.rank_logger(2, 8).debug("unseen")
    finally:
        logs.logger.removeHandler(handler)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO \[Iris\] alone 1", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d ERROR \[Iris\] \[2/8\] with rank", second)
    (record,) = records
    assert (record.iris_rank, record.iris_num_ranks, record.phase) == (2, 8, "open")
    assert not hasattr(record, "iris_where")


def test_a_traceback_is_written(stream):
    try:
        raise ValueError("inner")
    except ValueError:
        logs.logger.exception("outer")
    assert "Traceback" in stream.getvalue()
    assert "ValueError: inner" in stream.getvalue()


def test_levels(stream):
    for level, number in (("debug", 10), (" ERROR ", 40), (logs.INFO, 20)):
        logs.set_logger_level(level)
        assert logs.logger.level == number
    with pytest.raises(ValueError, match="'loud' is not one of DEBUG, INFO, WARNING, ERROR"):
        logs.set_logger_level("loud")


PROGRAM = """
import importlib, logging
from iris_core import logs
importlib.reload(logs)
print(len(logs.logger.handlers), logs.logger.level, logs.logger.propagate, logging.getLogger().handlers)
"""


@table(("variable", "level"), [(None, 30), ("debug", 10), ("nonsense", 30)])
def test_import_attaches_one_handler_reads_the_level_and_leaves_the_root_alone(monkeypatch, variable, level):
    monkeypatch.delenv("IRIS_LOG_LEVEL", raising=False)
    if variable is not None:
        monkeypatch.setenv("IRIS_LOG_LEVEL", variable)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", str(level), "False", "[]"]
