"""The kit's own eyes on a GPU, with a driver library that copies on the host."""

import contextlib
import ctypes
import mmap
from unittest.mock import Mock

import pytest
import torch
from tables import raises

from iris_core.testing.conformance import oracle


@pytest.mark.parametrize("hip", [False, True])
def test_memory_is_read_and_written_by_the_driver(monkeypatch, hip):
    library = Mock()
    library.cuCtxSynchronize.return_value = library.hipDeviceSynchronize.return_value = 0
    copies = ("hipMemcpyHtoD", "hipMemcpyDtoH") if hip else ("cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2")
    for name in copies:
        getattr(library, name).side_effect = lambda *args: ctypes.memmove(*args) * 0
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip else None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libamdhip64.so": hip, "libcuda.so.1": not hip}[name] and library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", library.kernels)
    memory = ctypes.create_string_buffer(16)
    oracle.write_bytes(ctypes.addressof(memory) + 3, b"\1\0\2", "cuda:1")
    assert memory.raw[2:7] == b"\0\1\0\2\0"
    assert oracle.read_bytes(ctypes.addressof(memory) + 3, 4, "cuda:1") == b"\1\0\2\0"
    synchronize = "hipDeviceSynchronize" if hip else "cuCtxSynchronize"
    assert [name for name, *_ in library.mock_calls] == [s for copy in copies for s in ("kernels", copy, synchronize)]
    getattr(library, synchronize).return_value = 700
    with raises(OSError, "device.failed", name=copies[1], code=700):
        oracle.read_bytes(ctypes.addressof(memory), 4, "cuda:1")


def test_memory_that_cannot_be_read_is_an_error():
    size = mmap.PAGESIZE
    anonymous, everything = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(-1, 2 * size, anonymous, everything)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert oracle.read_bytes(base + 1, 2 * size - 1) == bytes(2 * size - 1)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(size), 0) == 0
    assert oracle.read_bytes(base, size) == bytes(size)
    with raises(OSError, "device.read", size=size, of=size + 1, base=hex(base)):
        oracle.read_bytes(base, size + 1)
    with pytest.raises(OSError, match="Bad address"):
        oracle.read_bytes(base + size, 1)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(size), everything)
