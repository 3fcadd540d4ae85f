"""Looking at memory and at this process without the code under test."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

_SPECIAL = ("[", "/dev/zero")  # the interpreter's own: heap, stacks, vdso


def read_bytes(ptr: int, nbytes: int, device: str = "cpu") -> bytes:
    """Return what lies at an address of this process; a GPU (torch's name) may read a peer's memory.

    OSError where nothing can be read: the kernel says so, while reading it here would end this process.
    """
    if device == "cpu":
        with open(os.memfd_create("read"), "w+b", buffering=0) as file:
            count = file.write((ctypes.c_char * nbytes).from_address(ptr))
            if count < nbytes:
                raise OSError(f"only {count} of {nbytes} bytes at {ptr:#x} can be read")
            return os.pread(file.fileno(), nbytes, 0)
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


def open_descriptors() -> set[str]:
    """Return the file descriptors of this process with what they are open on."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that was listing
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def mapped_bytes() -> int:
    """Return the size of this process's memory mappings, without the interpreter's heap and stacks."""
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, _, _, _, _, *name = line.split(maxsplit=5)
            begin, end = addresses.split("-")
            total += 0 if "".join(name).startswith(_SPECIAL) else int(end, 16) - int(begin, 16)
    return total


def _copy_on_gpu(target: int, source: int, nbytes: int, device: str, *, to_device: bool) -> None:
    """Copy between the host and an address that a GPU can reach, by the driver.

    Not through a tensor: torch asks where the address is, and for a peer's memory makes a tensor of that other device,
    or a copy.  The driver copies in the context of the device whose view of the memory is in question.
    """
    maker, version = ("cu", "_v2") if torch.version.hip is None else ("hip", "")
    driver = ctypes.CDLL("libcuda.so.1" if version else "libamdhip64.so")
    name = f"{maker}Memcpy{'HtoD' if to_device else 'DtoH'}{version}"
    copy = getattr(driver, name)
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    synchronize = driver.cuCtxSynchronize if version else driver.hipDeviceSynchronize
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # kernels first; it also makes the device's context the driver's current one
        code = copy(target, source, nbytes) or synchronize()
    if code:
        raise OSError(f"{name} of {nbytes} bytes from {source:#x} to {target:#x} failed with code {code}")
