"""Algorithms of iris_triton as plugins, packets emulated on the CPU, so that the conformance kit can be run on them."""

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings


class AsPlugin:
    """One algorithm of iris_triton.collectives.

    Args:
        op, algorithm: which one.
        devices: what it says that it serves.
    """

    def __init__(self, op, algorithm, devices=DeviceType):
        self.op, self.algorithm = op, algorithm
        self.info = PluginInfo(
            name=f"{op}-{algorithm}".replace("_", "-"),
            kind=PluginKind.COLLECTIVE,
            summary="an algorithm of iris-triton",
            devices=frozenset(devices),
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

        from iris_triton.collectives import collectives

        known = (*collectives(packets=False), *emulated())
        found = next(each for each in known if (each.op, each.name) == (self.op, self.algorithm))
        cls = type(found)
        found.__class__ = type(cls.__name__, (cls,), {"info": property(lambda _: self.info)})
        return found


PACKETS = {
    "all_reduce": ["ll_one_shot", "ll128_two_shot", "sentinel_two_shot", "sentinel_split"],
    "all_gather": ["ll_mailbox"], "broadcast": ["ll_mailbox"], "scatter": ["ll_mailbox"],
    **{op: ["ll128_mailbox"] for op in ("reduce_scatter", "all_to_all", "reduce", "gather")},
}  # fmt: skip
PORTABLE = {
    "all_reduce": ["two_shot", "one_shot"], "all_gather": ["pull", "persistent"], "all_to_all": ["pull", "partitioned"],
    **{op: ["pull"] for op in ("reduce_scatter", "reduce", "broadcast", "gather", "scatter")},
}  # fmt: skip
for _family, _devices in ((PACKETS, [DeviceType.CPU]), (PORTABLE, DeviceType)):
    for _op, _names in _family.items():
        globals().update({f"{_op}_{name}": AsPlugin(_op, name, _devices) for name in _names})
NAMES = [name for name, each in list(globals().items()) if isinstance(each, AsPlugin)]
