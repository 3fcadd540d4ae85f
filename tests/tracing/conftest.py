"""The same tests on the CPU and on GPUs."""

from devices import device  # noqa: F401 - a fixture
