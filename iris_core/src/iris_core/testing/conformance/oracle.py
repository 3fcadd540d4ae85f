"""Looking at memory and at this process without the code under test."""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
    _copy_on_gpu("DtoH", ctypes.addressof(out), ptr, nbytes, device)
    return out.raw


def write_bytes(ptr: int, data: bytes, device: str = "cpu") -> None:
    """Put bytes at an address, as `read_bytes` reads them."""
    if device == "cpu":
        ctypes.memmove(ptr, data, len(data))
    else:
        source = ctypes.create_string_buffer(data, len(data))
        _copy_on_gpu("HtoD", ptr, ctypes.addressof(source), len(data), device)


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ from their neighbours, between seeds and from zero."""
    return bytes(1 + (position * 31 + seed * 97) % 255 for position in range(nbytes))


def open_descriptors() -> set[str]:
    """Collect garbage, which could close some later, and return this process's file descriptors with what they are."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that was listing
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def mapped_bytes() -> int:
    """Return the size of this process's memory mappings, without the interpreter's heap and stacks."""
    with open("/proc/self/maps") as file:
        mapped = [line.split(maxsplit=5) for line in file]
    ranges = (each[0].split("-") for each in mapped if not each[-1].startswith(_SPECIAL))
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def _copy_on_gpu(way: str, target: int, source: int, nbytes: int, device: str) -> None:
    """Copy between the host and an address that a GPU can reach, by the driver.

    Not through a tensor: for a peer's memory torch makes one of that other device, or a copy, and it is this device's
    view that is in question.
    """
    maker, version = ("cu", "_v2") if torch.version.hip is None else ("hip", "")
    driver = ctypes.CDLL("libcuda.so.1" if version else "libamdhip64.so")
    name = f"{maker}Memcpy{way}{version}"
    synchronize = driver.cuCtxSynchronize if version else driver.hipDeviceSynchronize
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # kernels first; it also makes the device's context the driver's current one
        places = ctypes.c_void_p(target), ctypes.c_void_p(source)
        code = getattr(driver, name)(*places, ctypes.c_size_t(nbytes)) or synchronize()
    if code:
        raise OSError(f"{name} of {nbytes} bytes from {source:#x} to {target:#x} failed with code {code}")
