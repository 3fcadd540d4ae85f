"""The plugin and the surface of the package."""

import importlib.metadata
import importlib.util
import json
import pathlib
import runpy
import subprocess
import sys

import pytest

import iris_gluon
from iris_core import Iris
from iris_core.registry import Registry
from iris_core.types import DeviceTarget, DeviceType, PluginKind
from iris_gluon import IrisDeviceCtx, language
from iris_gluon._plugin import plugin
from iris_gluon.backend import GluonBackend
from iris_gluon.settings import GluonSettings
from iris_triton._plugin import plugin as triton_plugin

CPU = DeviceTarget(DeviceType.CPU)


def test_the_backend_is_usable_here_and_not_the_first_choice():
    assert plugin.iris_plugin_probe(CPU).ok
    with Iris("1MiB", device="cpu") as ctx:
        assert ctx.backend.info.name == "triton"
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        assert isinstance(ctx.backend, GluonBackend)
        assert ctx.backend.info == plugin.iris_plugin_info()


def test_a_triton_without_gluon_is_a_reason(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").touch()
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    answer = plugin.iris_plugin_probe(CPU)
    assert not answer.ok
    assert "has no Gluon" in answer.reason


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in plugin.iris_plugin_probe(CPU).reason


@pytest.mark.parametrize("plugin", [plugin, triton_plugin], ids=["gluon", "triton"])
def test_devices_that_kernels_do_not_compile_for(plugin):
    for kind, arch, reason in [
        ("cuda", "", ""),
        ("cuda", "sm_60", "sm_60 is too old: atomics"),
        ("cuda", "sm_70", ""),
        ("cuda", "sm_90", ""),
        ("cuda", "sm_120", ""),
        ("hip", "", ""),
        ("hip", "gfx803", "do not compile for gfx803"),
        ("hip", "gfx90a", ""),
        ("hip", "gfx942", ""),
        ("hip", "gfx950", ""),
        ("hip", "gfx1100", "do not compile for gfx1100"),
    ]:
        answer = plugin.iris_plugin_probe(DeviceTarget(DeviceType(kind), 0, arch))
        assert answer.ok == (reason == "")
        assert reason in answer.reason


def test_a_triton_without_a_compiler_for_the_vendor_is_a_reason(monkeypatch, tmp_path):
    """As a wheel that was built for one vendor; which of the compilers are there is read from the folder."""
    for folder in ("backends/nvidia", "experimental/gluon"):
        (tmp_path / folder).mkdir(parents=True)
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: ())
    assert plugin.iris_plugin_probe(CPU).ok
    assert plugin.iris_plugin_probe(DeviceTarget(DeviceType.CUDA, 0, "sm_90")).ok
    answer = plugin.iris_plugin_probe(DeviceTarget(DeviceType.HIP, 0, "gfx942"))
    assert "has no compiler for hip devices (triton/backends/amd)" in answer.reason


def test_the_package_and_its_plugin_are_light():
    code = (
        "import sys, iris_gluon, iris_gluon.interpreter, iris_gluon._plugin as p; t = p.plugin.iris_plugin_probe;"
        "from iris_core.types import DeviceTarget, DeviceType; assert t(DeviceTarget(DeviceType.CUDA, 0, 'sm_90'));"
        "p.plugin.iris_plugin_settings(); print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_registry_knows_it():
    registry = Registry()
    record = registry.load(registry.resolve(PluginKind.BACKEND, "gluon"))
    assert record.info == plugin.iris_plugin_info()


def test_settings_are_those_of_the_executor(monkeypatch):
    assert GluonSettings().bounds_check
    with pytest.raises(ValueError, match="cpu_timeout"):
        GluonSettings(cpu_timeout=0)
    monkeypatch.setenv("IRIS_GLUON__CPU_TIMEOUT", "7")
    with Iris("1MiB", device="cpu", backend="gluon"):
        from iris_triton import interpreter

        assert interpreter.configuration().timeout_s == 7


def test_device_api():
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        api = ctx.backend.device_api()
    assert set(api) == {*language.__all__, "IrisDeviceCtx", "DeviceContext"}
    assert api["IrisDeviceCtx"] is api["DeviceContext"] is IrisDeviceCtx


def test_the_key_of_the_class_depends_on_every_method():
    """A kernel that gets the class as an argument is cached under this key, not under the code that it calls."""
    before = IrisDeviceCtx.cache_key
    assert before == IrisDeviceCtx.cache_key
    kernels = [member for name, member in vars(IrisDeviceCtx).items() if name in language.__all__]
    assert len(kernels) == len(language.__all__)
    for kernel in kernels:
        key, kernel.hash = kernel.cache_key, "other"
        try:
            assert IrisDeviceCtx.cache_key != before
        finally:
            kernel.hash = key
    assert before == IrisDeviceCtx.cache_key


def test_public_names():
    for name in iris_gluon.__all__:
        assert getattr(iris_gluon, name) is not None
        assert name in dir(iris_gluon)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = iris_gluon.nothing


def test_the_readme_runs(tmp_path, capsys):
    """The first block of the distribution's README is a program."""
    readme = pathlib.Path(iris_gluon.__file__).parents[2] / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "program.py").write_text(code)
    runpy.run_path(str(tmp_path / "program.py"))
    assert json.loads(capsys.readouterr().out) == [0.0, 1.0, 2.0, 3.0]
