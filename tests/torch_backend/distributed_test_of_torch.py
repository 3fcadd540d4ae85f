"""Run the DistributedTest suite that lies in torch's wheel on backend "iris", with ranks that are forked off.

    WORLD_SIZE=3 BACKEND=iris python tests/torch_backend/distributed_test_of_torch.py -v

With BACKEND=gloo, or on GPUs nccl, "iris" takes that one's place: then the suite does not leave out what it asks of it
alone.  BY=gloo or BY=nccl runs the suite on that backend itself, to compare with.
"""
# ruff: noqa: E402 - torch's module reads the environment when it is imported

import functools
import os
import pathlib
import tempfile
import unittest.mock

FOLDER = pathlib.Path(os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp()))
for name in ("barrier", "test_dir", "init_dir"):
    (FOLDER / name).mkdir(exist_ok=True)
os.environ.setdefault("INIT_METHOD", f"file://{FOLDER}/shared_init_file")

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import distributed_test

import iris_core.torch_backend  # noqa: F401 - registers the backend with torch 2.11 to 2.13

name_of_group = dist.get_backend
replaced = os.environ["BACKEND"]
if replaced != os.environ.get("BY", "iris"):

    def in_its_place(make, *args, backend=None, **options):
        return make(*args, backend="iris" if backend == replaced else backend, **options)

    def backend_of(group=None, find=name_of_group):
        name = find(group)
        return replaced if name == "iris" else name

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        setattr(dist, name, functools.partial(in_its_place, getattr(dist, name)))
    dist.get_backend = dist.distributed_c10d.get_backend = backend_of
    distributed_test.PROFILING_SUPPORTED_BACKENDS = []  # no event of ours begins with "gloo:" or "nccl:"


class TestDistBackendWithFork(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The suite, each test on new ranks."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def test_ddp_logging_data_cpu(self):
        with unittest.mock.patch.object(dist, "get_backend", name_of_group):  # which DDP logs
            super().test_ddp_logging_data_cpu()


if __name__ == "__main__":
    run_tests()
