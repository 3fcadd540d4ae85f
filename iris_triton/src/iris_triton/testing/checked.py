"""A fixture for tests of programs: they run with the checker on, and fail where it finds something.

docs/checking.md shows how to use it.
"""

import json
import pathlib
from collections.abc import Iterator

import pytest

from iris_core.settings import ORDINARY_CHECKS
from iris_triton.checker.reports import Report


class Findings:
    """Findings of the checker in the ranks that a test has started."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._taken = path, 0

    def take(self) -> list[Report]:
        """Return the findings since the last call, in the order in which they were made."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        new, self._taken = lines[self._taken :], len(lines)
        return [Report.from_json(line) for line in new if "text" in json.loads(line)]


@pytest.fixture
def checked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Findings]:
    """Check what this process and the ranks that it starts do on CPUs; findings that it does not take fail the test."""
    path = tmp_path / "findings"
    monkeypatch.setenv("IRIS_CHECK", ",".join(ORDINARY_CHECKS))
    monkeypatch.setenv("IRIS_CHECK_REPORTS", str(path))
    monkeypatch.setenv("IRIS_DEVICE", "cpu")
    findings = Findings(path)
    yield findings
    left = findings.take()
    if left:
        pytest.fail("the checker found:\n" + "\n".join(map(str, left)), pytrace=False)
