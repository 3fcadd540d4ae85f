"""What the tests share."""

from programs import run_program  # noqa: F401 - a fixture
