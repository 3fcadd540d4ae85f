"""Fixtures of the core's tests."""

import contextlib
import logging
import os
import pathlib
import sys
import tempfile

import pytest
from dist_info import install_distribution, provider_source

from iris_core.registry import Registry, reset_default_registry
from iris_core.types import PluginKind

from .fakes import Cluster, Context

OBSERVER = """
from iris_core.hooks import hookimpl
seen = []
class P:
    @hookimpl
    def iris_opened(self, context):
        seen.append(("opened", context))
        {opened}
    @hookimpl
    def iris_allocated(self, offset_bytes, nbytes):
        seen.append(("allocated", offset_bytes, nbytes))
plugin = P()
"""


@pytest.fixture
def heap():
    with Cluster(1) as cluster:
        yield cluster.heap


@pytest.fixture
def ctx():
    with Cluster(1, 1 << 20) as cluster:
        yield Context(cluster.heap)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    return caplog


@pytest.fixture
def fresh_registry():
    """Other tests of this process may have created plugins."""
    reset_default_registry()
    yield
    reset_default_registry()


@pytest.fixture
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("IRIS_"):
            monkeypatch.delenv(name)


class Site:
    def __init__(self, folder):
        self.folder = folder

    def install(self, name, version="1.0", **kwargs):
        return install_distribution(self.folder, name, version, **kwargs)

    def provider(self, name, kind="ALLOCATOR", *, distribution=None, source=None, **kwargs):
        """Install a distribution with one provider; `source` replaces the module's text."""
        distribution = distribution or f"iris-{name}"
        module = f"site_{distribution}_{name}".replace("-", "_")
        text = provider_source(name, kind, **kwargs) if source is None else source
        points = {PluginKind[kind].group: {name: f"{module}:plugin"}}
        self.install(distribution, entry_points=points, modules={module: text})
        return module

    def observer(self, name, *, distribution=None, source=None, opened="pass"):
        """Install an observer that keeps what it has `seen`, `opened` its further statement; returns its module."""
        source = OBSERVER.format(opened=opened) if source is None else source
        return self.provider(name, "OBSERVER", distribution=distribution, source=source)

    def registry(self, block=()):
        registry = Registry(search_path=[str(self.folder)])
        registry.block(block)
        return registry

    @contextlib.contextmanager
    def renewed(self):
        """Another one in its place, for the next row of a table."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder.parent)) / "site"
        with pytest.MonkeyPatch.context() as patch, opened_site(folder, patch) as site:
            yield site


@contextlib.contextmanager
def opened_site(folder, monkeypatch):
    """An empty site folder on the import path; what was imported from it is forgotten afterwards."""
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    reset_default_registry()
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}/"):
            del sys.modules[name]
    reset_default_registry()


@pytest.fixture
def site(tmp_path, monkeypatch, clean_environment):
    with opened_site(tmp_path / "site", monkeypatch) as site:
        yield site
