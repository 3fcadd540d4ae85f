"""Kernels that reach other nodes, linked with NCCL's device functions: every NCCL and Triton, without a GPU.

The functions are those of installed wheels, or of build/nccl, where `make test-nccl` puts them: without them only the
shims are compared with what the wheels were found to define (nccl_functions.json).
"""

import importlib.metadata
import json
import pathlib
import re
import tomllib

import gluon_kernels
import pytest
import torch
import triton
import triton.language as tl
from gluon_kernels import said_by_the_compiler
from kernel_text import kernel_of
from packaging.requirements import Requirement
from tables import raises, table

from iris_core.errors import UnsupportedError
from iris_core.types import Network
from iris_triton.context import DeviceContext
from iris_triton.device_barrier import copy_between_nodes
from iris_triton.language import gin
from iris_triton.language.blocks import lanes
from iris_triton.testing.compile_only import compile_for
from iris_triton.testing.languages import in_gluon

ROOT = pathlib.Path(__file__).parents[2]
FACTS = pathlib.Path(__file__).with_name("nccl_functions.json")
FUNCTIONS = json.loads(FACTS.read_text())
VERSIONS = sorted(FUNCTIONS)
FOLDER = pathlib.Path(gin.__file__).parent / "nccl"
SHIMS = {version: FOLDER / f"{version.replace('.', '_')}.ll" for version in VERSIONS}


def bitcode(version):
    """NCCL's device functions of a minor version; skips where there are none."""
    places = list((ROOT / "build" / "nccl").glob(f"{version}.*/nvidia/nccl/lib/libnccl_device.bc"))
    for installed in importlib.metadata.distributions(name="nvidia-nccl-cu13"):
        if installed.version.startswith(f"{version}."):
            places.append(pathlib.Path(installed.locate_file("nvidia/nccl/lib/libnccl_device.bc")))
    if not (found := [place for place in places if place.exists()]):
        pytest.skip(f"make test-nccl fetches the device functions of NCCL {version}")
    return str(found[0])


def options(version):
    minor = tuple(map(int, version.split(".")))
    return {"extern_libs": gin.libraries(Network((1, 2), minor, bitcode(version)))}


def normal(signature):
    """A signature without names, attributes and names of structures: what a caller must agree with."""
    result, name, parameters = re.search(r"(\S+) @(\w+)\((.*?)\)(?: local_unnamed_addr| #|\s*$)", signature).groups()
    attributes = r"(captures|dereferenceable|range|initializes|byval)\((?:[^()]|\([^()]*\))*\)"
    words = [each.split() for each in re.sub(attributes, r"\1", parameters).split(",")]
    kept = [" ".join(word for word in each if re.fullmatch(r"byval|zeroext|signext|i\d+|ptr", word)) for each in words]
    return name, f"{'struct' if result.startswith('%') else result} ({', '.join(kept)})"


def declared(version):
    lines = SHIMS[version].read_text().splitlines()
    return dict(normal(line) for line in lines if line.startswith("declare"))


@table("version", VERSIONS)
def test_a_shim_declares_what_the_wheel_defines(version):
    assert declared(version) == FUNCTIONS[version]
    assert {path.name for path in SHIMS[version].parent.glob("*.ll")} == {path.name for path in SHIMS.values()}


@table("minor", [31, 99])
def test_another_version_is_refused_by_name(minor):
    with raises(UnsupportedError, "allocators.version", version=f"2.{minor}"):
        gin.libraries(Network((1, 2), (2, minor), "libnccl_device.bc"))


def test_the_extra_brings_versions_that_have_a_shim():
    about = tomllib.loads((ROOT / "iris_allocators" / "pyproject.toml").read_text())["project"]
    (nccl,) = (each for each in map(Requirement, about["optional-dependencies"]["nccl"]) if "nvidia" in each.name)
    assert [f"2.{minor}" for minor in range(33) if f"2.{minor}.99" in nccl.specifier] == VERSIONS


@triton.jit
def exchange(data, box, flags, context, n, peer, W: tl.constexpr, BLOCK: tl.constexpr, OP: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, W)
    i = lanes(BLOCK)
    ctx.put(data + i, box + i, peer, mask=i < n)
    ctx.put_signal(data + i, box + i, flags, 1, peer, op=OP, mask=i < n)
    ctx.put_signal(data, box, flags, 1, peer, op=OP)
    ctx.signal(flags + 1, 3, peer, op=OP)
    ctx.wait(flags, 2)
    tl.store(data + i, ctx.load(box + i, peer), mask=i < n)
    ctx.get(box + i, data + i, peer, mask=i < n)
    ctx.flush()


@triton.jit
def by_offset(found, network, peer):
    gin.put_bytes(network, peer, 0, 4096, 128)
    gin.flush(network)
    tl.store(found, gin.lsa_pointer(tl.load(network + 1), 64, peer))


ROWS = """
i = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
ctx.from_tensor(context, W).put(x + i, y + i, peer)
"""
rows = kernel_of(triton.jit, "x, y, context, peer, W: tl.constexpr", ROWS, tl=tl, ctx=DeviceContext)


ARGUMENTS = torch.float32, torch.float32, torch.int64, torch.int64, 100, 3
SIZES = {"W": 4, "BLOCK": 256}


def undefined(ptx):
    """Functions that the assembly calls and does not have; the driver has __assertfail."""
    found = re.findall(r"^\.extern \.func\s+(?:\([^)]*\)\s*)?(\w+)", ptx, re.MULTILINE)
    return set(found) - {"__assertfail", "vprintf"}


def test_without_the_library_nothing_is_added():
    plain = compile_for(exchange, ARGUMENTS, {**SIZES, "OP": "add"})
    assert "extern_elementwise" not in plain.asm["ttir"]
    assert not re.search("nccl[A-Z]|iris_gin", plain.asm["ptx"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_defines_what_was_found(version, monkeypatch):
    """The functions as they are linked, before they are optimised."""
    from triton.backends.nvidia import compiler

    linked, optimize = [], compiler.llvm.optimize_module
    noted = lambda mod, *args, **named: (linked.append(str(mod)), optimize(mod, *args, **named))
    monkeypatch.setattr(compiler.llvm, "optimize_module", noted)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    if version != "2.30":
        compile_for(exchange, ARGUMENTS, {**SIZES, "OP": "add", **options(version)})
    compile_for(by_offset, (torch.int64, torch.int64, 3), options(version))
    lines = re.findall(r"^define .*@nccl\w+\(.*$", "\n".join(linked), re.MULTILINE)
    found = dict(normal(line) for line in lines)
    assert {name: found.get(name) for name in FUNCTIONS[version]} == FUNCTIONS[version]


@table("version, least, kernel, arguments, sizes", [
    *((version, 50_000, by_offset, (torch.int64, torch.int64, 3), {}) for version in VERSIONS),
    *(("2.32", 100_000, kernel, ARGUMENTS, {**SIZES, "OP": op}) for kernel, op in (
        (exchange, "add"), (exchange, "set"), (in_gluon(exchange, DeviceContext=gluon_kernels), "add"))),
    ("2.32", 0, rows, (torch.float16, torch.float16, torch.int64, 3), {"W": 4}),
    *(("2.32", 0, copy_between_nodes, (torch.int64, 4, 1, 0, 1 << 33, 128, 64, 1), {"GETS": gets, "SIGNALS": not gets})
      for gets in (False, True)),  # what the host launches
])  # fmt: skip
def test_kernels_for_other_nodes_compile(version, least, kernel, arguments, sizes):
    made = compile_for(kernel, arguments, {**sizes, **options(version)})
    assert undefined(made.asm["ptx"]) == set()
    assert len(made.asm["cubin"]) > least  # NCCL's functions are in it


def test_an_nccl_without_signals_of_words_is_refused_by_name():
    said = said_by_the_compiler(exchange, *ARGUMENTS, **SIZES, OP="add", **options("2.30"))
    assert "nvidia-nccl-cu13>=2.32" in said


@triton.jit
def reach(x, context, world: tl.constexpr, peer):
    ctx = DeviceContext.from_tensor(context, world)
    at = x + lanes(64)
    ctx.put_signal(at, at, x, ctx.atomic_add(x, 1, peer), peer)
    ctx.store(at, ctx.load(at, (peer + lanes(64)) % world), peer, mask=lanes(64) < 9)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_kernels_say_whom_they_cannot_reach_where_they_are_checked(language, target):
    """Compiled with debug=True they carry their name, to report it; else there is nothing of it."""
    kernel = reach if language == "triton" else in_gluon(reach)
    name = str(int.from_bytes(b"reach", "little"))
    for checked in (False, True):
        ir = compile_for(kernel, (torch.int64, torch.int64, 4, 3), {"debug": checked}, target).asm["ttgir"]
        assert (name in ir) == checked
