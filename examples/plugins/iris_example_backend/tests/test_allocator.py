"""What the kit cannot know of this allocator: its files."""

import errno
import os
import subprocess
import sys

import pytest

from iris_core import Iris
from iris_core.errors import HeapError, SettingsError
from iris_core.types import CreateRequest, DeviceTarget, DeviceType
from iris_example_backend.allocator import ExampleAllocator
from iris_example_backend.settings import ExampleSettings


@pytest.fixture
def make(tmp_path):
    def make(nbytes=1 << 20):
        settings = ExampleSettings(directory=tmp_path)
        return ExampleAllocator(CreateRequest(DeviceTarget(DeviceType.CPU), 0, 1, nbytes, settings))

    return make


def test_the_file_goes_when_the_allocator_is_closed(make, tmp_path):
    allocator = make()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    allocator.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_goes_when_the_process_ends(tmp_path):
    program = f"""
from iris_core import Iris
from pathlib import Path
folder = Path({str(tmp_path)!r})
ctx = Iris("1MiB", allocator="example", backend="example", device="cpu", options={{"example": {{"directory": folder}}}})
print(sum(path.suffix != ".lock" for path in folder.iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_folder_is_an_error_and_no_crash(make, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    allocator = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(HeapError, match=r"no memory for 4096 bytes at offset 8192 .* No space left"):
            allocator.commit(8192, 4096)
    allocator.commit(8192, 4096)
    allocator.close()


def test_commit_backs_what_it_says(make, tmp_path):
    allocator = make()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_blocks == 0
    allocator.commit(8192, 4096)
    assert file.stat().st_blocks * 512 == 4096
    allocator.close()


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_EXAMPLE__DIRECTORY", os.fspath(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="IRIS_EXAMPLE__DIRECTORY"):
        Iris("1MiB", allocator="example", backend="example", device="cpu")
