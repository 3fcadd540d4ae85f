"""Rank jobs of the checker's tests: cases of the corpus, an example, a collective, with the checker on."""

import contextlib
import importlib

from jobs_common import environment

from iris_core import Iris
from iris_core.errors import DeviceTimeoutError

CHECKS = "races,uninitialised,bounds"


def checking(path, checks=CHECKS, **variables):
    """Contexts that are opened inside are checked, and findings go to a file; without one they are raised."""
    reports = {"IRIS_CHECK_REPORTS": str(path)} if path else {}
    return environment(IRIS_CHECK=checks, **reports, **variables)


def run_cases(cases, bug, folder, backend="triton"):
    """Run cases (module, name); returns the texts of errors that end them.  Findings are in a file for each name."""
    return [_run_case(importlib.import_module(module), name, bug, folder, backend) for module, name in cases]


def _run_case(module, name, bug, folder, backend):
    """A mistake may lose a signal: it waits 5 s."""
    lost = contextlib.suppress(*[DeviceTimeoutError] * bug)
    patience = {"IRIS_DEVICE_TIMEOUT": "5"} if bug else {}
    with lost, checking(folder / name, **patience), Iris("4MiB", device="cpu", backend=backend) as ctx:
        try:
            module.CASES[name].run(ctx, bug)
        except IndexError as error:
            return f"{error}{''.join(getattr(error, '__notes__', ()))}"
    return ""


def checked(path, module, function, *args):
    """Call a rank job of another folder's tests with the checker on."""
    with checking(path):
        return getattr(importlib.import_module(module), function)(*args)


def explored(seeds, path, module, function, *args):
    """Call a rank job of another folder's tests in the schedule of each seed, with the checker on."""
    job, found = getattr(importlib.import_module(module), function), None
    for seed in seeds:
        with exploring(seed, path, f"{CHECKS},schedules"):
            found = job(*args)
    return found


def exploring(seed, path="", checks="schedules"):
    """Contexts that are opened inside run in the schedule of a seed."""
    return checking(path, checks, IRIS_CHECK_SEED=str(seed))
