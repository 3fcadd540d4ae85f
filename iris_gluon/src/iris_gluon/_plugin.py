"""Entry point of this distribution.  Imports neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from iris_core.errors import UnsupportedError
from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_core.settings import PluginSettings

GLUON_INFO = PluginInfo(
    name="gluon",
    kind=PluginKind.BACKEND,
    summary="Gluon kernels",
    devices=frozenset({DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
)
"""What the "gluon" backend says about itself."""

NOT_YET = "the Gluon device language is not in this release yet; use backend='triton'"


class GluonPlugin:
    """Holds the place of the "gluon" backend, which this release does not have."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the backend."""
        return GLUON_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `GluonSettings`."""
        from iris_gluon.settings import GluonSettings

        return GluonSettings

    @hookimpl
    def iris_plugin_probe(self) -> Availability:
        """Say that there is no device language yet."""
        return Availability.no(NOT_YET)

    @hookimpl
    def iris_plugin_create(self) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError(NOT_YET)


plugin = GluonPlugin()
