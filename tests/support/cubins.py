"""What NVIDIA's tools say about compiled kernels."""

import pathlib
import re
import subprocess
import tempfile

import triton


def resources(compiled):
    """Registers of a thread, and bytes that did not fit into them."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def assembler_says(ptx):
    """What the assembler writes about a kernel for Hopper: what it has spilled, and what it could not overlap."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", source, "-o", source.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
