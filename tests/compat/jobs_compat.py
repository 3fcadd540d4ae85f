"""Rank jobs of tests/compat: scripts of ported_*.py, on the device that the test asks for."""

import importlib

from jobs_common import environment


def run_script(module, script, device, *args):
    """Call a script; its contexts take their device from the environment, since their constructor has no such name."""
    with environment(IRIS_DEVICE=device):
        return getattr(importlib.import_module(module), script)(*args)
