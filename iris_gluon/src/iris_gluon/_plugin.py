"""Entry point of this distribution.  Imports neither torch nor triton until a backend is created."""

from iris_core.hooks import ProviderPlugin, hookimpl
from iris_core.types import Availability, DeviceTarget
from iris_gluon.info import GLUON_INFO
from iris_triton._plugin import plugin as triton
from iris_triton._plugin import triton_home


class GluonPlugin(ProviderPlugin):
    """Provides the "gluon" backend."""

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether a recent enough Triton with Gluon is installed, which compiles for a device; import nothing."""
        availability: Availability = triton.iris_plugin_probe(target)
        home = triton_home()
        if not availability.ok or home is None or (home / "experimental" / "gluon").is_dir():
            return availability
        return Availability.no(
            f"the Triton at {home} has no Gluon (triton.experimental.gluon): install Triton's own wheel, or use "
            "backend='triton'"
        )


plugin = GluonPlugin(GLUON_INFO, "iris_gluon.backend:GluonBackend", "iris_gluon.settings:GluonSettings")
