"""Installed distributions in a folder, for tests of plugins and of the registry.

With the folder on `sys.path` (`monkeypatch.syspath_prepend`) their entry points are found like those of any other.
"""

_PROVIDER = '''
from iris_core.hooks import hookimpl
from iris_core.settings import PluginSettings
from iris_core.types import *

class Settings(PluginSettings):
    """No settings."""

class Plugin:
    @hookimpl
    def iris_plugin_info(self):
        return {info}

    @hookimpl
    def iris_plugin_settings(self):
        return {settings}

    @hookimpl
    def iris_plugin_probe(self, target):
        {probe}

    @hookimpl
    def iris_plugin_create(self, request):
        {create}

plugin = Plugin()
'''


def install_distribution(folder, name, version="1.0", *, entry_points=None, modules=None):
    """Write a distribution's dist-info folder and its modules, as an installer would; returns the former.

    `entry_points` are, by group, names and what they name; `modules` are source texts by name.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("tests/support\n")
    lines = []
    for group, points in (entry_points or {}).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(source)
    return info


def provider_source(
    name, kind="ALLOCATOR", *, info="", settings="Settings", probe="return Availability.yes()", create="return object()"
):
    """Return the source of a module with a valid provider plugin, `plugin`.

    `info` are further arguments of `PluginInfo`; without any, the plugin works on the CPU, an allocator provides remote
    loads, stores and atomics, and a backend requires them.  `settings` is the expression that `iris_plugin_settings`
    returns, `probe` and `create` are the bodies of these hooks.
    """
    relation = {"ALLOCATOR": "provides", "BACKEND": "requires"}.get(kind)
    capabilities = "frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})"
    usual = "devices=frozenset({DeviceType.CPU})" + (f", {relation}={capabilities}" if relation else "")
    described = f"PluginInfo(name={name!r}, kind=PluginKind.{kind}, summary='a test', {info or usual})"
    return _PROVIDER.format(info=described, settings=settings, probe=probe, create=create)
