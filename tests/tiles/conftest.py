"""The same tests on CPU ranks and on GPUs."""

from devices import device  # noqa: F401 - a fixture
