"""A plugin whose module imports torch."""

import torch

from iris_core.types import PluginKind
from kit_mutants.plugins import RIGHT_ALLOCATOR, Plugin

DEVICE = torch.device("cpu")
plugin = Plugin(PluginKind.ALLOCATOR, "heavy", RIGHT_ALLOCATOR)
