"""The algorithms of packets as plugins, emulated on the CPU, so that the conformance kit can be run on them."""

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings


class Emulated:
    """One algorithm of iris_triton.collectives.packets.

    Args:
        op, algorithm: which one.
    """

    def __init__(self, op, algorithm):
        self.op, self.algorithm = op, algorithm
        self.info = PluginInfo(
            name=f"fast-{op}-{algorithm}".replace("_", "-"),
            kind=PluginKind.COLLECTIVE,
            summary="an algorithm of iris-triton",
            devices=frozenset({DeviceType.CPU}),
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
        from emulation import emulated

        found = next(each for each in emulated() if (each.op, each.name) == (self.op, self.algorithm))
        cls = type(found)
        found.__class__ = type(cls.__name__, (cls,), {"info": property(lambda _: self.info)})
        return found


one_shot = Emulated("all_reduce", "ll_one_shot")
two_shot = Emulated("all_reduce", "ll128_two_shot")
two_shot_of_floats = Emulated("all_reduce", "sentinel_two_shot")
split = Emulated("all_reduce", "sentinel_split")
reduce_scatter = Emulated("reduce_scatter", "ll128_mailbox")
all_gather = Emulated("all_gather", "ll_mailbox")
all_to_all = Emulated("all_to_all", "ll128_mailbox")
broadcast = Emulated("broadcast", "ll_mailbox")
reduce = Emulated("reduce", "ll128_mailbox")
gather = Emulated("gather", "ll128_mailbox")
scatter = Emulated("scatter", "ll_mailbox")
