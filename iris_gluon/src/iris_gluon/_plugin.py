"""Entry point of this distribution.  Imports neither torch nor triton until a backend is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.hooks import hookimpl
from iris_core.types import Availability, PluginInfo
from iris_gluon.info import GLUON_INFO

if TYPE_CHECKING:
    from iris_core.settings import PluginSettings
    from iris_core.types import CreateRequest, DeviceTarget
    from iris_gluon.backend import GluonBackend


class GluonPlugin:
    """Provides the "gluon" backend."""

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
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether a recent enough Triton with Gluon is installed, which compiles for a device; import nothing."""
        from iris_triton._plugin import plugin as triton
        from iris_triton._plugin import triton_home

        availability: Availability = triton.iris_plugin_probe(target)
        home = triton_home()
        if not availability.ok or home is None or (home / "experimental" / "gluon").is_dir():
            return availability
        return Availability.no(
            f"the Triton at {home} has no Gluon (triton.experimental.gluon): install Triton's own wheel, or use "
            "backend='triton'"
        )

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> GluonBackend:
        """Create one rank's backend."""
        from iris_gluon.backend import GluonBackend

        return GluonBackend(request)


plugin = GluonPlugin()
