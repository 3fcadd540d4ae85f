"""Looking at memory and at this process without the code under test."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPECIAL = ("[", "/dev/zero")  # the interpreter's own: heap, stacks, vdso


def read_bytes(ptr: int, nbytes: int, device: str = "cpu") -> bytes:
    """Return what lies at an address of this process; a GPU (torch's name) may read a peer's memory."""
    if device == "cpu":
        return ctypes.string_at(ptr, nbytes)
    out = ctypes.create_string_buffer(nbytes)
    _copy_on_gpu(ctypes.addressof(out), ptr, nbytes, device, to_device=False)
    return out.raw


def write_bytes(ptr: int, data: bytes, device: str = "cpu") -> None:
    """Put bytes at an address, as `read_bytes` reads them."""
    if device == "cpu":
        ctypes.memmove(ptr, data, len(data))
        return
    source = ctypes.create_string_buffer(data, len(data))
    _copy_on_gpu(ptr, ctypes.addressof(source), len(data), device, to_device=True)


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ from their neighbours, between seeds and from zero."""
    return bytes(1 + (position * 31 + seed * 97) % 255 for position in range(nbytes))


def check_readable(ptr: int, nbytes: int) -> None:
    """Raise OSError unless a range of the host's memory can be read: reading it would end this process."""
    reached = ptr
    for begin, end, access, _ in _mappings():  # by ascending address
        if begin <= reached < end and access.startswith("r"):
            reached = end
    if reached < ptr + nbytes:
        raise OSError(f"address {reached:#x} cannot be read: nothing is mapped there, or it must not be read")


def open_descriptors() -> set[str]:
    """Return the file descriptors of this process with what they are open on."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that was listing
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def mapped_bytes() -> int:
    """Return the size of this process's memory mappings, without the interpreter's heap and stacks."""
    return sum(end - begin for begin, end, _, name in _mappings() if not name.startswith(_SPECIAL))


def _mappings() -> Iterator[tuple[int, int, str, str]]:
    """Begin, end, access and name of each mapping of this process."""
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, access, _, _, _, *name = line.split(maxsplit=5)
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16), access, "".join(name)


def _copy_on_gpu(target: int, source: int, nbytes: int, device: str, *, to_device: bool) -> None:
    """Copy between the host and an address that a GPU can reach, by the driver.

    Not through a tensor: torch asks where the address is, and for a peer's memory makes a tensor of that other device,
    or a copy.  The driver copies in the context of the device whose view of the memory is in question.
    """
    if torch.version.hip is None:
        library, copies, synchronize = "libcuda.so.1", ("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"), "cuCtxSynchronize"
    else:
        library, copies, synchronize = "libamdhip64.so", ("hipMemcpyDtoH", "hipMemcpyHtoD"), "hipDeviceSynchronize"
    driver = ctypes.CDLL(library)
    name = copies[to_device]
    copy = getattr(driver, name)
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # kernels first; it also makes the device's context the driver's current one
        code = copy(target, source, nbytes) or getattr(driver, synchronize)()
    if code:
        raise OSError(f"{name} of {nbytes} bytes from {source:#x} to {target:#x} failed with code {code}")
