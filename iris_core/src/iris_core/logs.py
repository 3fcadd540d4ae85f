"""The logger of Iris: `HH:MM:SS LEVEL [Iris] [rank/num_ranks] message` on standard error.

The level comes from IRIS_LOG_LEVEL when this module is imported and can be changed with `set_logger_level`.  Only the
logger "iris" is configured; the root logger stays the application's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any

__all__ = [
    "DEBUG", "ERROR", "INFO", "LEVELS", "WARNING", "RankFormatter", "RankLogger", "logger", "rank_logger",
    "set_logger_level",
]  # fmt: skip

LEVELS = {"DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "ERROR": ERROR}
"""Level names that IRIS_LOG_LEVEL accepts, in any case."""

logger = logging.getLogger("iris")
"""Parent of every logger of Iris."""


class RankFormatter(logging.Formatter):
    """Formats a record as `HH:MM:SS LEVEL [Iris] [rank/num_ranks] message`.

    The rank part is there if the record has the attributes `iris_rank` and `iris_num_ranks`; `rank_logger` sets them.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s [Iris]%(iris_where)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line, with the rank when it is known."""
        rank, num_ranks = getattr(record, "iris_rank", None), getattr(record, "iris_num_ranks", None)
        where = "" if rank is None or num_ranks is None else f" [{rank}/{num_ranks}]"
        # A copy: other handlers of the application must not see our attribute.
        return self._style.format(logging.makeLogRecord({**record.__dict__, "iris_where": where}))


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger whose records carry `iris_rank` and `iris_num_ranks`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the record and keep the caller's own `extra`."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def rank_logger(rank: int, world_size: int) -> RankLogger:
    """Return a logger that puts the rank into every record.

    Example:
        >>> rank_logger(0, 4).warning("heap is nearly full")  # 12:00:00 WARNING [Iris] [0/4] heap is nearly full
    """
    return RankLogger(logger, {"iris_rank": rank, "iris_num_ranks": world_size})


def set_logger_level(level: int | str) -> None:
    """Set the level of Iris's logger: DEBUG, INFO, WARNING, ERROR, or such a name in any case; else ValueError."""
    if isinstance(level, str):
        if level.strip().upper() not in LEVELS:
            raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
        level = LEVELS[level.strip().upper()]
    logger.setLevel(level)


if not any(each.name == logger.name for each in logger.handlers):  # a reload of this module adds no second one
    _handler = logging.StreamHandler()
    _handler.name = logger.name
    _handler.setFormatter(RankFormatter())
    logger.addHandler(_handler)
    logger.propagate = False
# A wrong name is reported as SettingsError when Iris() reads its settings; an import is no place to fail.
logger.setLevel(LEVELS.get(os.environ.get("IRIS_LOG_LEVEL", "").strip().upper(), WARNING))
