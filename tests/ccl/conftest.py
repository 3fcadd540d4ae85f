"""The same tests on CPU ranks, where packets are emulated, and on GPUs."""

from devices import device, probed  # noqa: F401 - fixtures
