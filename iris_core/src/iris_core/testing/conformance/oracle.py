"""Looking at memory and at this process without the code under test."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

_SPECIAL = ("[", "/dev/zero")  # the interpreter's own: heap, stacks, vdso


def read_bytes(ptr: int, nbytes: int, device: str = "cpu") -> bytes:
    """Return what lies at an address.

    Args:
        ptr: address, valid in this process.
        nbytes: number of bytes.
        device: "cpu", or torch's name of the GPU that reads.
    """
    if device == "cpu":
        return ctypes.string_at(ptr, nbytes)
    import torch

    torch.cuda.synchronize(device)
    return bytes(_on_gpu(ptr, nbytes, device).cpu().numpy().tobytes())


def write_bytes(ptr: int, data: bytes, device: str = "cpu") -> None:
    """Put bytes at an address; the arguments are those of `read_bytes`."""
    if device == "cpu":
        ctypes.memmove(ptr, data, len(data))
        return
    import torch

    _on_gpu(ptr, len(data), device).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.cuda.synchronize(device)


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ from their neighbours, between seeds and from zero."""
    return bytes(1 + (position * 31 + seed * 97) % 255 for position in range(nbytes))


def open_descriptors() -> set[str]:
    """Return the file descriptors of this process with what they are open on."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the one that was listing
            continue
    return found


def mapped_bytes() -> int:
    """Return the size of this process's memory mappings, without the interpreter's heap and stacks."""
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith(_SPECIAL):
                begin, end = fields[0].split("-")
                total += int(end, 16) - int(begin, 16)
    return total


@dataclass(frozen=True)
class _Span:
    """Device memory as torch takes it from other libraries."""

    ptr: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False), "version": 3}


def _on_gpu(ptr: int, nbytes: int, device: str) -> Any:
    import torch

    return torch.as_tensor(_Span(ptr, nbytes), device=device)
