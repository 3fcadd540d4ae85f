"""Entry point of this distribution.  Imports neither torch nor triton until a backend is created."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import TYPE_CHECKING

from iris_core.diagnosis import Finding, Verdict
from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_core.settings import PluginSettings
    from iris_core.types import CreateRequest
    from iris_triton.backend import TritonBackend

TRITON_INFO = PluginInfo(
    name="triton",
    kind=PluginKind.BACKEND,
    summary="Triton kernels, on GPUs and (through the CPU executor) on CPUs",
    devices=frozenset({DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
    priority=10,
)
"""What the "triton" backend says about itself."""

OLDEST_TRITON = (3, 6)
"""Oldest Triton release that the backend works with; the tested ones stand in `iris_triton._compat`."""

DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")
"""Distributions that may have installed the package `triton`."""


def installed_triton() -> tuple[str, str] | None:
    """Return (distribution, version) of the installed Triton without importing it, or None.

    The version is empty if the package comes from none of `DISTRIBUTIONS`.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        return None
    for distribution in DISTRIBUTIONS:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


class TritonPlugin:
    """Provides the "triton" backend."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the backend."""
        return TRITON_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `TritonSettings`."""
        from iris_triton.settings import TritonSettings

        return TritonSettings

    @hookimpl
    def iris_plugin_probe(self) -> Availability:
        """Say whether a recent enough Triton is installed, without importing it."""
        oldest = ".".join(map(str, OLDEST_TRITON))
        found = installed_triton()
        if found is None:
            return Availability.no(
                "Triton is not installed. torch's GPU wheels bring it; a CPU torch brings none: "
                "pip install the version that matches your torch (torch 2.11: triton==3.6.0, 2.12: 3.7.0, 2.13: 3.7.1)"
            )
        distribution, version = found
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TRITON:
            return Availability.no(
                f"{distribution} {version} is too old: install triton>={oldest}, or a torch that brings it"
            )
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> TritonBackend:
        """Create one rank's backend."""
        from iris_triton.backend import TritonBackend

        return TritonBackend(request)

    @hookimpl
    def iris_plugin_diagnose(self) -> list[Finding]:
        """Say for `iris doctor` whether the installed Triton can be imported and was tested with Iris."""
        if installed_triton() is None:
            return []  # the probe says what to do
        try:
            import triton

            from iris_triton import _compat
        except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
            return [Finding("triton", Verdict.BROKEN, f"cannot be imported: {type(error).__name__}: {error}")]
        version, problem = str(triton.__version__), _compat.version_problem()
        text = problem or f"{version}, tested with Iris"
        return [Finding("triton", Verdict.NOTE if problem else Verdict.OK, text, {"version": version})]


plugin = TritonPlugin()
