"""Algorithms in Gluon as plugins, so that the conformance kit can be run on them."""

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_gluon.settings import GluonSettings


class InGluon:
    """One algorithm of iris_gluon.collectives.

    Args:
        op, algorithm: which one.
    """

    def __init__(self, op, algorithm):
        self.op, self.algorithm = op, algorithm
        self.info = PluginInfo(
            name=f"{op}-{algorithm}".replace("_", "-"),
            kind=PluginKind.COLLECTIVE,
            summary="an algorithm of iris-gluon",
            devices=frozenset({DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP}),
            requires=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
        )

    @hookimpl
    def iris_plugin_info(self):
        return self.info

    @hookimpl
    def iris_plugin_settings(self):
        return GluonSettings

    @hookimpl
    def iris_plugin_probe(self):
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request):
        from iris_gluon.collectives import collectives

        found = next(each for each in collectives() if (each.op, each.name) == (self.op, self.algorithm))
        found.__class__ = type(self.algorithm, (type(found),), {"info": property(lambda _: self.info)})
        found.name = f"{self.algorithm}_in_the_kit"  # the backend offers the other name
        return found


all_gather = InGluon("all_gather", "gluon_push")
all_to_all = InGluon("all_to_all", "gluon_push")
all_reduce = InGluon("all_reduce", "gluon_two_shot")
