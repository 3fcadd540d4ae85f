"""Settings of the Gluon backend."""

from __future__ import annotations

from iris_core.settings import PluginSettings


class GluonSettings(PluginSettings):
    """Settings of the "gluon" backend: it has none."""
