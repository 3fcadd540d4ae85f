"""Entry point of this distribution.  Imports neither torch nor triton until a backend is created."""

import importlib.metadata
import importlib.util
import pathlib
import re

from iris_core.diagnosis import Finding, Verdict
from iris_core.hooks import ProviderPlugin, hookimpl
from iris_core.types import Availability, DeviceTarget, DeviceType
from iris_triton.info import TRITON_INFO

OLDEST_TRITON = (3, 6)  # the tested releases stand in `iris_triton._compat`
OLDEST_CUDA = 70  # compute capability that the device functions compile for

AMD_ARCHES = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx101", "gfx103")
"""Beginnings of the names of AMD's GPUs that the device functions compile for.

Compiling for gfx942 and gfx950 is tested; the others have no tracing, which reads registers of those two.
"""

_COMPILERS = {DeviceType.CUDA: "nvidia", DeviceType.HIP: "amd"}
DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")  # they may have installed it


def triton_home() -> pathlib.Path | None:
    """Return the folder of the installed package `triton`, without importing it."""
    spec = importlib.util.find_spec("triton")
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin).parent


def installed_triton() -> tuple[str, str] | None:
    """Return the installed Triton's distribution and version, or None; both empty if it comes from no known one."""
    if triton_home() is None:
        return None
    for distribution in DISTRIBUTIONS:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def arch_problem(target: DeviceTarget) -> str:
    """Say why kernels cannot be compiled for a GPU; empty if they can, or if the target does not say what it is."""
    number = re.fullmatch(r"sm_(\d+)[a-z]?", target.arch)
    if target.type is DeviceType.CUDA and number and int(number[1]) < OLDEST_CUDA:
        return (
            f"{target.arch} is too old: atomics with an order and a scope need sm_{OLDEST_CUDA} (Volta) or newer; "
            "compute on the CPU there (device='cpu')"
        )
    if target.type is DeviceType.HIP and target.arch and not target.arch.startswith(AMD_ARCHES):
        return (
            f"kernels do not compile for {target.arch}: it lacks the clock by which waits are bounded, or Triton does "
            f"not know it. Those that work: {', '.join(AMD_ARCHES)}; compute on the CPU there (device='cpu')"
        )
    return ""


def compiler_problem(target: DeviceTarget) -> str:
    """Say whether the installed Triton has no compiler for a device's vendor; empty if it has one."""
    name, home = _COMPILERS.get(target.type), triton_home()
    if name is None or home is None or (home / "backends" / name).is_dir():
        return ""
    if importlib.metadata.entry_points(group="triton.backends", name=name):  # another distribution's
        return ""
    return (
        f"the Triton at {home} has no compiler for {target.type} devices (triton/backends/{name}): install the one "
        "that this torch asks for"
    )


class TritonPlugin(ProviderPlugin):
    """Provides the "triton" backend."""

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether a recent enough Triton is installed, which compiles for a device, without importing it."""
        if (found := installed_triton()) is None:
            return Availability.no(
                "Triton is not installed. torch's GPU wheels bring it; a CPU torch brings none: "
                "pip install 'iris-triton[cpu]', or the triton that the README's table has for your torch"
            )
        distribution, version = found
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TRITON:
            oldest = ".".join(map(str, OLDEST_TRITON))
            text = f"{distribution} {version} is too old: install triton>={oldest}, or a torch that brings it"
            return Availability.no(text)
        problem = arch_problem(target) or compiler_problem(target)
        return Availability.no(problem) if problem else Availability.yes()

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
        text, verdict = problem or f"{version}, tested with Iris", Verdict.NOTE if problem else Verdict.OK
        return [Finding("triton", verdict, text, {"version": version})]


plugin = TritonPlugin(TRITON_INFO, "iris_triton.backend:TritonBackend", "iris_triton.settings:TritonSettings")
