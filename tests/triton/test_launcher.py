"""Launching a compiled kernel again: what reaches the driver is what Triton's own launcher would give it."""

import types

import pytest
import triton
from triton.backends.nvidia.driver import CudaLauncher

from iris_triton import _compat

VALUES = [0x7000, 0x8000, 5, 128]


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A driver that Triton takes for active; from 3.8 on its launcher asks for one, also where it has no use for it."""
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace())


def launcher(given, *, scratch=0):
    """Triton's launcher of a kernel, whose compiled function writes down what it is given."""
    made = object.__new__(CudaLauncher)
    vars(made).update(
        launch=lambda *args: given.append(args),
        num_ctas=1,
        global_scratch_size=scratch,
        global_scratch_align=128,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=True,
        arg_annotations=("annotations",),
        kernel_signature=b"signature",
        gsan_enabled=False,
    )
    return made


def compiled_kernel(run):
    described = lambda *args: types.SimpleNamespace(get=lambda: {"name": "kernel"})
    return types.SimpleNamespace(run=run, function=17, packed_metadata=(4, 1, 0), launch_metadata=described)


def test_the_driver_gets_what_triton_gives_it():
    given = []
    run = launcher(given)
    _compat.launcher_of(compiled_kernel(run), 8)(99, VALUES)
    run(8, 1, 1, 99, 17, (4, 1, 0), None, None, None, *VALUES)
    ours, tritons = given
    assert ours == tritons


def test_scratch_memory_is_allocated():
    asked, given = [], []

    def allocate(nbytes, alignment, stream):
        asked.append((nbytes, alignment, stream))
        return "scratch"

    triton.set_allocator(allocate)
    try:
        _compat.launcher_of(compiled_kernel(launcher(given, scratch=64)), 8)(99, VALUES)
    finally:
        triton.set_allocator(triton.runtime._allocation.NullAllocator())
    assert asked == [(8 * 64, 128, 99)]
    assert "scratch" in given[0]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told(monkeypatch, name):
    given = []

    def hook(metadata):
        pass

    monkeypatch.setattr(triton.knobs.runtime, name, hook)
    _compat.launcher_of(compiled_kernel(launcher(given)), 8)(99, VALUES)
    assert hook in given[0]
