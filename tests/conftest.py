"""What all tests share: the pool of rank processes, and a look at which code is tested."""

import filecmp
import glob
import importlib.util
import multiprocessing
import os
import pathlib
import re
import signal
import sys
from multiprocessing import forkserver

import pytest

from iris_core.testing import RankPool

ROOT = pathlib.Path(__file__).parents[1]

# not in pyproject.toml: some suites below here run with settings of their own
sys.path.insert(0, str(ROOT / "tests" / "support"))
os.environ.setdefault("IRIS_TUNE", "off")  # what is chosen must not depend on times; tests that measure say so
# markers and options of `make gpu-test`; where ranks compute; programs as a reader runs them
pytest_plugins = ["gpu_tiers", "devices", "programs"]

collect_ignore: list[pathlib.Path] = []  # pytest reads it
if importlib.util.find_spec("hypothesis") is None:  # on GPU hosts without a package index
    modules = (ROOT / "tests").rglob("test_*.py")
    collect_ignore = [path for path in modules if re.search(r"^(from|import) hypothesis", path.read_text(), re.M)]


def pytest_addoption(parser):
    """`make test-all` says --exhaustive."""
    parser.addoption("--exhaustive", action="store_true", help="every combination, where else a part of them is taken")


def pytest_collection_modifyitems(config, items):
    """Leave out what only combines what other tests try one by one; begin with what takes long.

    Processes of pytest-xdist take each other's last tests: first ones stay together, and share their fixtures.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not config.getoption("exhaustive"):
        skip = pytest.mark.skip(reason="only with --exhaustive (make test-all)")
        for item in items:
            device = getattr(item, "callspec", None) and item.callspec.params.get("device")
            if any(mark.kwargs.get("device", device) == device for mark in item.iter_markers("exhaustive")):
                item.add_marker(skip)


def pytest_collection_finish():
    """What has been collected is no garbage."""
    importlib.import_module("frozen")


@pytest.fixture
def some(request):
    """Returns a function (cases, every, start): every so many of them from the start-th on; with --exhaustive, all."""
    if request.config.getoption("exhaustive"):
        return lambda cases, every, start=0: list(cases)
    return lambda cases, every, start=0: list(cases)[start % every :: every]


def pytest_report_header():
    """Say which modules are left out."""
    names = ", ".join(path.name for path in collect_ignore)
    return f"hypothesis is not installed: without {names}" if collect_ignore else None


def pytest_sessionstart():
    """Where the distributions are installed as copies, refuse to test old ones."""
    for name in ("iris_core", "iris_allocators", "iris_triton", "iris_gluon"):
        checkout = ROOT / name / "src" / name
        installed = pathlib.Path(importlib.import_module(name).__file__).parent
        if installed.samefile(checkout):
            continue
        modules = [str(path.relative_to(checkout)) for path in checkout.rglob("*.py")]
        _, differing, missing = filecmp.cmpfiles(checkout, installed, modules, shallow=False)
        if differing or missing:
            files = ", ".join(sorted(differing + missing)[:3])
            raise pytest.UsageError(f"{installed} differs from this checkout ({files}): install {name} again")


@pytest.fixture
def interruptible():
    """SIGINT interrupts this process and those that it starts, also where a shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_ALGORITHMS = ("pull", "pull_reduce", "push", "send_recv", "two_shot")
WARM = (
    "torch", "triton", "iris_triton.context", "iris_core.api", "iris_triton.interpreter.launch",
    *(f"iris_triton.collectives.{name}" for name in _ALGORITHMS),
)  # fmt: skip
"""What rank processes import at start."""
OF_TORCH = ("torch._inductor.compile_fx", "torch.distributed.checkpoint")
"""What many of them import later: two seconds, once for all that are forked."""


@pytest.fixture(scope="session", autouse=True)
def server():
    """The server that forks all rank processes has imported what they need, whichever test comes first."""
    context = multiprocessing.get_context("forkserver")
    if not glob.glob("/dev/nvidia[0-9]*") and not glob.glob("/dev/kfd"):  # there, ranks are not forked
        context.set_forkserver_preload([*WARM, *OF_TORCH, "pytest", "frozen"])  # pytest for tests/support/forked.py
        with pytest.MonkeyPatch.context() as patch:  # Python 3.11 gives the server no sys.path
            patch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"), prepend=os.pathsep)
            forkserver._forkserver.ensure_running()  # in a process of forked.run, that has the server of its parent
    return context


@pytest.fixture(scope="session")
def pool():
    """One pool of rank processes for the whole run; waits inside kernels are bounded, and hints must be true."""
    environ = {"IRIS_DEVICE_TIMEOUT": "30", "IRIS_TRITON__HINTS": "raise", "IRIS_GLUON__HINTS": "raise"}
    with RankPool(warm=WARM, timeout_s=300.0, environ=environ, torch_distributed=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def fork_ranks():
    """Returns a function (monkeypatch): `iris_core.run` has its ranks forked from the pool's server.

    They are as fresh as others, without seconds of imports.
    """

    def run(fn, num_ranks, *args, environ=None, torch_distributed=False):
        with RankPool(timeout_s=600.0, environ=environ, torch_distributed=torch_distributed) as ranks:
            return ranks.run(fn, num_ranks, *args)

    names = "run", "world.launch.run", "cli.doctor.start_ranks"
    return lambda patch: [patch.setattr(f"iris_core.{name}", run) for name in names]


@pytest.fixture
def forked_ranks(monkeypatch, fork_ranks):
    """As `fork_ranks`, for one test."""
    fork_ranks(monkeypatch)
