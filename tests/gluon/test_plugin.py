"""The plugin, which passes the conformance kit, the surface of the package, and its demos."""

import importlib.metadata
import importlib.util
import json
import types

import pytest
from tables import table

from iris_core import Iris
from iris_core.cli import main
from iris_core.testing import BackendConformance, StackConformance
from iris_core.types import DeviceTarget, DeviceType
from iris_gluon import IrisDeviceCtx, demos, language
from iris_gluon._plugin import plugin
from iris_gluon.backend import GluonBackend
from iris_triton import demos as programs
from iris_triton import interpreter
from iris_triton._plugin import plugin as triton_plugin

CPU = DeviceTarget(DeviceType.CPU)


def test_the_backend_is_usable_here_and_not_the_first_choice(monkeypatch):
    assert plugin.iris_plugin_probe(CPU).ok
    with Iris("1MiB", device="cpu") as ctx:
        assert ctx.backend.info.name == "triton"
    monkeypatch.setenv("IRIS_GLUON__CPU_TIMEOUT", "7")  # settings are those of the executor
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        assert isinstance(ctx.backend, GluonBackend)
        assert ctx.backend.info == plugin.iris_plugin_info()
        assert interpreter.configuration().timeout_s == 7
        api = ctx.backend.device_api()
    assert set(api) == {*language.__all__, "IrisDeviceCtx", "DeviceContext"}
    assert api["IrisDeviceCtx"] is api["DeviceContext"] is IrisDeviceCtx


@table("folders, target, reason", [
    (None, CPU, "not installed"),
    ([], CPU, "Gluon"),
    (["backends/nvidia", "experimental/gluon"], CPU, ""),  # as a wheel that was built for one vendor
    (["backends/nvidia", "experimental/gluon"], DeviceTarget(DeviceType.CUDA, 0, "sm_90"), ""),
    (["backends/nvidia", "experimental/gluon"], DeviceTarget(DeviceType.HIP, 0, "gfx942"),
     "has no compiler for hip devices (triton/backends/amd)"),
])  # fmt: skip
def test_what_a_triton_lacks_is_a_reason(monkeypatch, tmp_path, folders, target, reason):
    for folder in folders or ():
        (tmp_path / folder).mkdir(parents=True)
    spec = None if folders is None else types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: ())
    answer = plugin.iris_plugin_probe(target)
    assert (answer.ok, reason in answer.reason) == (not reason, True)


@table("kind, arch, reason", [
    ("cuda", "", ""), ("cuda", "sm_60", "sm_60"), ("cuda", "sm_70", ""), ("cuda", "sm_90", ""),
    ("cuda", "sm_120", ""), ("hip", "", ""), ("hip", "gfx803", "do not compile for gfx803"), ("hip", "gfx90a", ""),
    ("hip", "gfx942", ""), ("hip", "gfx950", ""), ("hip", "gfx1100", "do not compile for gfx1100"),
])  # fmt: skip
def test_devices_that_kernels_do_not_compile_for(kind, arch, reason):
    for each in (plugin, triton_plugin):
        answer = each.iris_plugin_probe(DeviceTarget(DeviceType(kind), 0, arch))
        assert (answer.ok, reason in answer.reason) == (not reason, True)


def test_the_key_of_the_class_depends_on_every_method():
    """A kernel that gets the class as an argument is cached under this key, not under the code that it calls."""
    before = IrisDeviceCtx.cache_key
    kernels = [member for name, member in vars(IrisDeviceCtx).items() if name in language.__all__]
    assert len(kernels) == len(language.__all__)
    for kernel in kernels:
        key, kernel.hash = kernel.cache_key, "other"
        try:
            assert IrisDeviceCtx.cache_key != before
        finally:
            kernel.hash = key
    assert before == IrisDeviceCtx.cache_key


def test_demos_run_on_three_ranks_and_are_right(capsys, forked_ranks):
    assert main(["demo", "--ranks", "3", "--device", "cpu", "--backend", "gluon", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [demo.name for demo in demos.demos()] != []
    assert plugin.iris_plugin_info().demos == {row["name"] for row in rows} == {each.name for each in programs.demos()}
    assert all(row["ok"] and row["backend"] == "gluon" and row["error"] <= row["tolerance"] for row in rows)


class TestGluonBackend(BackendConformance):
    name = "gluon"
    case_step = 45  # tests/compile has the same functions


class OnOurRanks(StackConformance):
    """The suites make rank processes of their own; those of the other tests are there already."""

    backend = "gluon"

    @pytest.fixture
    def pool(self, pool):
        return pool


class TestHostWithGluon(OnOurRanks):
    allocator = "host"

    @pytest.mark.exhaustive
    def test_world_device_functions(self, pool, world):
        """The methods, which are tried, call them; tests/multirank calls them as well."""
        super().test_world_device_functions(pool, world)


class TestHostWithTriton(TestHostWithGluon):
    backend = "triton"


class TestTorchWithGluon(OnOurRanks):
    allocator = "torch"


class TestVmemWithGluon(OnOurRanks):
    allocator = "vmem"
