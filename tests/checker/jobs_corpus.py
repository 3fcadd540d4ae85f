"""Rank jobs of the checker's tests: a case of the corpus, an example, a collective, with the checker on."""

import contextlib
import importlib
import os
from unittest import mock

import torch

from iris_core import Iris
from iris_core.errors import DeviceError, DeviceTimeoutError

CHECKS = "races,uninitialised,bounds"


@contextlib.contextmanager
def checking(path, checks=CHECKS):
    """Contexts that are opened inside are checked, and findings go to a file; without one they are raised."""
    before = {name: os.environ.get(name) for name in ("IRIS_CHECK", "IRIS_CHECK_REPORTS")}
    os.environ["IRIS_CHECK"] = checks
    if path:
        os.environ["IRIS_CHECK_REPORTS"] = str(path)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_case(module, name, bug, path, backend="triton"):
    """Run a case; returns the text of an error that ends it.  A mistake may lose a signal: it waits 5 s."""
    function, *_ = importlib.import_module(module).CASES[name]
    lost = contextlib.suppress(*[DeviceTimeoutError] * bug)
    patience = {"IRIS_DEVICE_TIMEOUT": "5"} if bug else {}
    with (
        lost,
        mock.patch.dict(os.environ, patience),
        checking(path),
        Iris("4MiB", device="cpu", backend=backend) as ctx,
    ):
        try:
            function(ctx, bug)
        except IndexError as error:
            return f"{error}{''.join(getattr(error, '__notes__', ()))}"
    return ""


def checked(path, module, function, *args):
    """Call a rank job of another folder's tests with the checker on."""
    with checking(path):
        return getattr(importlib.import_module(module), function)(*args)


def decode_in_a_row(kernel, path):
    """Decode some tokens with nothing between the launches, with a kernel that may not be the library's as it is."""
    with _kernel(kernel), checking(path), Iris("4MiB", device="cpu") as ctx:
        decode = ctx.ops.flash_decode(1, 4, 2, 16, dtype=torch.float16, pieces=2)
        k, v = (torch.ones(1, 2, 64, 16, dtype=torch.float16) for _ in range(2))
        for token in range(3):
            lengths = torch.full((1,), 20 + token, dtype=torch.int32)
            decode(torch.ones(1, 4, 16, dtype=torch.float16), k, v, lengths)
        ctx.barrier()


def _kernel(path):
    """Let the library decode with the kernel of a file."""
    kernels = importlib.import_module("jobs_examples").load(path).DecodeKernels
    return mock.patch("iris_triton.gemm.flash_decode.DecodeKernels", kernels)


def explored(seeds, path, module, function, *args):
    """Call a rank job of another folder's tests in the schedule of each seed, with the checker on."""
    job, found = getattr(importlib.import_module(module), function), None
    for seed in seeds:
        with exploring(seed, path, f"{CHECKS},schedules"):
            found = job(*args)
    return found


def _decoded():
    """Decode some tokens with nothing between the launches; returns the results' bits, or the kind of the error."""
    with Iris("4MiB", device="cpu") as ctx:
        decode = ctx.ops.flash_decode(1, 4, 2, 16, dtype=torch.float16, pieces=2)
        generator = torch.Generator().manual_seed(7 + ctx.cur_rank)
        k, v = (torch.randn(1, 2, 64, 16, generator=generator).half() for _ in range(2))
        generator.manual_seed(5)
        found = []
        try:
            for token in range(3):
                lengths = torch.full((1,), 20 + token, dtype=torch.int32)
                found.append(decode(torch.randn(1, 4, 16, generator=generator).half(), k, v, lengths))
        except DeviceError as error:
            return type(error).__name__
    return torch.stack(found).view(torch.int16).tolist()


def decode_under_seeds(kernel, seeds, checks="schedules", path=""):
    """Decode under each seed; returns the results without a seed, then those of each."""
    with _kernel(kernel):
        found = [_decoded()]
        for seed in seeds:
            with exploring(seed, path, checks):
                found.append(_decoded())
    return found


@contextlib.contextmanager
def exploring(seed, path="", checks="schedules"):
    """Contexts that are opened inside run in the schedule of a seed."""
    os.environ["IRIS_CHECK_SEED"] = str(seed)
    try:
        with checking(path, checks):
            yield
    finally:
        del os.environ["IRIS_CHECK_SEED"]
