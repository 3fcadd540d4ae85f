"""The portable algorithms as plugins, so that the conformance kit can be run on them."""

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings


class AsPlugin:
    """One algorithm of iris_triton.collectives.

    Args:
        op, algorithm: which one.
    """

    def __init__(self, op, algorithm):
        self.op, self.algorithm = op, algorithm
        self.info = PluginInfo(
            name=f"{op}-{algorithm}".replace("_", "-"),
            kind=PluginKind.COLLECTIVE,
            summary="an algorithm of iris-triton",
            devices=frozenset(DeviceType),
            requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
        )

    @hookimpl
    def iris_plugin_info(self):
        return self.info

    @hookimpl
    def iris_plugin_settings(self):
        return TritonSettings

    @hookimpl
    def iris_plugin_probe(self):
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request):
        from iris_triton.collectives import collectives

        found = next(each for each in collectives() if (each.op, each.name) == (self.op, self.algorithm))
        cls = type(found)
        found.__class__ = type(cls.__name__, (cls,), {"info": property(lambda _: self.info)})
        return found


all_reduce_two_shot = AsPlugin("all_reduce", "two_shot")
all_reduce_one_shot = AsPlugin("all_reduce", "one_shot")
reduce_scatter = AsPlugin("reduce_scatter", "pull")
reduce = AsPlugin("reduce", "pull")
all_gather = AsPlugin("all_gather", "pull")
all_gather_persistent = AsPlugin("all_gather", "persistent")
all_to_all = AsPlugin("all_to_all", "pull")
all_to_all_partitioned = AsPlugin("all_to_all", "partitioned")
broadcast = AsPlugin("broadcast", "pull")
gather = AsPlugin("gather", "pull")
scatter = AsPlugin("scatter", "pull")
