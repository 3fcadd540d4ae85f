"""The static tier: what can be said of a plugin without creating anything."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import pytest
import torch

from iris_core import protocols
from iris_core.device.targets import device_targets
from iris_core.errors import SettingsError
from iris_core.registry import PluginRecord, Registry
from iris_core.registry.records import PROTOCOLS
from iris_core.settings import load_plugin_settings
from iris_core.testing.conformance import plugin_jobs
from iris_core.testing.pool import RankPool as RankPool
from iris_core.types import Capability, DeviceTarget, DeviceType, PluginInfo, PluginKind

Registered = tuple[Registry, PluginRecord]
_PROMISED = {f"Supports{each.title().replace('-', '')}": each for each in Capability}
"""Capabilities by the protocol of allocators that have them, such as `SupportsImportTensor`."""

_IMPORT = """
import importlib.metadata, sys
before = set(sys.modules)
importlib.metadata.EntryPoint("", sys.argv[1], "").load().iris_plugin_info()
sys.exit(", ".join({"torch", "triton"} & (set(sys.modules) - before)) or 0)
"""


class OnRanks:
    """Base of the suites that run jobs on ranks: on the CPU, on one GPU, on several."""

    num_ranks: ClassVar[int] = 3  #: ranks of the CPU tier, and the most GPUs of the last tier
    gpus_of_tier: ClassVar[Mapping[str, int]] = {"host": 0, "gpu": 1, "gpus": 2}
    """GPUs that each tier needs at least; Iris's own suite reads it (`tests/support/gpu_tiers.py`)."""

    @pytest.fixture
    def pool(self) -> RankPool:
        """Rank processes; one pool serves all suites of a test run."""
        return shared_pool()

    def ranks_of(self, tier: str, infos: Sequence[PluginInfo]) -> tuple[str, int]:
        """Return a tier's device, "cpu" or "cuda", and its number of ranks; skip what cannot run here."""
        wanted = {"host": DeviceType.CPU}.get(tier, DeviceType.HIP if torch.version.hip else DeviceType.CUDA)
        for info in infos:
            needs(wanted in info.devices, f"{info.kind} {info.name!r} does not work on {wanted}")
        needed, present = self.gpus_of_tier[tier], torch.cuda.device_count()
        needs(present >= needed, f"needs {needed} GPU{'s' * (needed > 1)}, torch sees {present}")
        ranks = {"host": self.num_ranks, "gpu": 1, "gpus": min(present, self.num_ranks)}
        return "cpu" if tier == "host" else "cuda", ranks[tier]


class PluginConformance(OnRanks):
    """Tests of every provider plugin; the suites of allocators and backends contain it.

    A subclass gives the plugin's name, or the fixture `plugin`: the object that the entry point names.
    """

    kind: ClassVar[PluginKind]  #: what the plugin provides
    name: ClassVar[str]  #: name of its entry point

    @pytest.fixture
    def plugin(self) -> Any:
        """Return the plugin object: the installed one called `name`."""
        return plugin_jobs.installed(self.kind, self.name)[1].plugin

    @pytest.fixture
    def info(self, plugin: Any) -> PluginInfo:
        """Return the plugin's description."""
        return cast("PluginInfo", plugin.iris_plugin_info())

    @pytest.fixture
    def registered(self, plugin: Any) -> Registered:
        """Return the plugin alone in a registry, through which the kit calls its hooks."""
        registry = Registry(search_path=[])
        return registry, registry.register(self.kind, plugin)

    @pytest.fixture
    def target(self, info: PluginInfo, registered: Registered) -> DeviceTarget:
        """Return a device of this machine that the plugin works on: the CPU if it can, else a GPU."""
        registry, record = registered
        usable = [each for each in device_targets(None, rank=0)[::-1] if each.type in info.devices]  # the CPU first
        answers = {each: registry.probe(record, each) for each in usable}
        chosen = [each for each in usable if answers[each]]
        needs(chosen, f"{info.name!r} works on {', '.join(sorted(info.devices))}; of those here it says {answers}")
        return chosen[0]

    @pytest.fixture
    def created(self, registered: Registered, target: DeviceTarget) -> Any:
        """Return what the plugin creates for one rank, with default settings."""
        return plugin_jobs.create(*registered, target)

    def test_static_entry_point_names_the_plugin(self, plugin: Any, info: PluginInfo) -> None:
        """The installed entry point has the name, the kind and the object that were given to the kit."""
        _, installed = plugin_jobs.installed(self.kind, info.name)
        assert installed.plugin is plugin, f"{installed.entry_point} is another object than the fixture `plugin`"

    def test_static_info_is_complete(self, info: PluginInfo) -> None:
        """A summary of one line for `iris plugins`, and devices to choose by."""
        assert info.summary == info.summary.strip() != ""
        assert "\n" not in info.summary
        assert info.devices

    def test_static_import_is_light(self, info: PluginInfo) -> None:
        """Listing plugins imports them all, so a plugin's module must import neither torch nor triton."""
        _, installed = plugin_jobs.installed(self.kind, info.name)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _IMPORT, installed.entry_point]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{installed.entry_point} may import these only when creating: {done.stderr}"

    def test_static_probe_answers_for_every_device(self, info: PluginInfo, registered: Registered) -> None:
        """The registry takes the plugin, whose answers are twice the same, and have a reason with every "no"."""
        registry, record = registered
        for device in DeviceType:
            answer = registry.probe(record, DeviceTarget(device))
            assert answer == registry.probe(record, DeviceTarget(device))
            assert answer.ok != bool(answer.reason.strip()), f"{info.name!r} on {device}: {answer}"

    def test_static_settings_have_defaults_and_descriptions(self, info: PluginInfo, registered: Registered) -> None:
        """`iris config` can show every setting, nothing has to be set, and typing errors are errors."""
        registry, record = registered
        settings = registry.settings_class(record)
        for name, field in settings.model_fields.items():
            assert not field.is_required(), f"setting {name} has no default"
            assert (field.description or "").strip(), f"setting {name} has no docstring below it"
        assert settings() == settings()
        with pytest.raises(SettingsError, match="no_such_setting"):
            load_plugin_settings(info.name, settings, {"no_such_setting": 1})

    def test_static_protocol(self, created: Any, info: PluginInfo) -> None:
        """Every member of the protocol is there, called with the protocol's parameter names in their order.

        Of an optional protocol there are all members or none; those of an allocator are there if `provides` says so.
        """
        assert not (problems := member_problems(created, PROTOCOLS[self.kind])), "; ".join(problems)
        assert created.info == info
        of_allocators = {PluginKind.ALLOCATOR: True, PluginKind.BACKEND: False}.get(self.kind)
        for name, protocol in vars(protocols).items():
            if name.startswith("Supports") and (name in _PROMISED) is of_allocators:
                own = [each for each in vars(protocol) if not each.startswith("_")]
                has_some = any(inspect.getattr_static(created, each, None) is not None for each in own)
                assert not has_some or member_problems(created, protocol) == [], name
                if of_allocators:
                    assert has_some == (_PROMISED[name] in info.provides), f"it has {name}: {has_some}"

    def test_host_diagnosis(self, plugin: Any, info: PluginInfo, pool: RankPool) -> None:
        """What `iris doctor` shows of it: findings with a subject and a text, with devices and without any."""
        needs(hasattr(plugin, "iris_plugin_diagnose"), f"{info.name!r} does not implement iris_plugin_diagnose")
        pool.run(plugin_jobs.diagnose, 1, self.kind, info.name)


@functools.cache
def shared_pool() -> RankPool:
    """Return the pool of this process; its workers are daemons and end with it."""
    pool = RankPool(timeout_s=60.0, torch_distributed=True)
    atexit.register(pool.close)
    return pool


def needs(has: object, otherwise: str) -> None:
    """Skip the test, for the reason given, where what it needs is not there."""
    if not has:
        pytest.skip(otherwise)


def no_problems(*of_ranks: Iterable[str]) -> None:
    """Fail if any rank, or any call, has a problem."""
    found = [each for problems in of_ranks for each in problems if each]
    assert not found, "\n".join(found)


def member_problems(obj: Any, protocol: type) -> list[str]:
    """Say how an object departs from a protocol, a class: which members are missing, or called in another way."""
    problems = []
    for name, member in inspect.getmembers_static(protocol):
        if name.startswith("_"):
            continue
        static = inspect.getattr_static(obj, name, None)
        if static is None:
            problems.append(f"{name} is missing")
        elif isinstance(member, property):
            problems += [f"{name} is a method; it must be a property"] * inspect.isroutine(static)
        elif not callable(getattr(obj, name)):
            problems.append(f"{name} is no method")
        else:
            parameters = list(inspect.signature(member).parameters.values())[1:]  # without self
            names = " ".join(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)
            problems += parameter_problems(name, getattr(obj, name), names)
    return problems


def parameter_problems(name: str, function: Callable[..., Any], parameters: str) -> list[str]:
    """Say, in at most one sentence, how a function's parameters depart from a list of names.

    Those after a | have defaults, and so must any further ones.  Triton's jit wraps a function in `fn`.
    """
    expected, optional = (each.split() for each in parameters.partition("|")[::2])
    while not inspect.isroutine(function) and hasattr(function, "fn"):
        function = function.fn
    signature, calls = inspect.signature(function), [expected, expected + optional]
    with contextlib.suppress(TypeError):  # it takes fewer, or demands more
        if [list(signature.bind(*names).arguments) for names in calls] == calls:
            return []
    return [f"{name}{signature} should take ({', '.join(expected)}), and then may be given ({', '.join(optional)})"]
