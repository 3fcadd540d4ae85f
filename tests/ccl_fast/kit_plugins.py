"""Algorithms of both languages as plugins, packets emulated on the CPU, for the conformance kit."""

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings


class AsPlugin:
    """One algorithm of iris_triton.collectives or iris_gluon.collectives.

    Args:
        op, algorithm: which one.
        devices: what it says that it serves.
    """

    def __init__(self, op, algorithm, devices=DeviceType):
        self.op, self.algorithm = op, algorithm
        self.backend = "gluon" if algorithm.startswith("gluon") else "triton"
        self.info = PluginInfo(
            name=f"{op}-{algorithm}".replace("_", "-"),
            kind=PluginKind.COLLECTIVE,
            summary=f"an algorithm of iris-{self.backend}",
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

        from iris_gluon.collectives import collectives as in_gluon
        from iris_triton.collectives import collectives

        known = (*collectives(packets=False), *emulated(), *in_gluon())
        found = next(each for each in known if (each.op, each.name) == (self.op, self.algorithm))
        cls = type(found)
        found.__class__ = type(cls.__name__, (cls,), {"info": property(lambda _: self.info)})
        if self.backend == "gluon":  # the backend offers the other name
            found.name = f"{self.algorithm}_in_the_kit"
        return found


PACKETS = {
    "all_reduce": ["ll_one_shot", "ll128_two_shot", "sentinel_two_shot", "sentinel_split"],
    "all_gather": ["ll_mailbox"], "broadcast": ["ll_mailbox"], "scatter": ["ll_mailbox"],
    **{op: ["ll128_mailbox"] for op in ("reduce_scatter", "all_to_all", "reduce", "gather")},
}  # fmt: skip
PORTABLE = {
    "all_reduce": ["two_shot", "one_shot"], "all_gather": ["pull", "persistent", "push"],
    "all_to_all": ["pull", "partitioned", "push"],
    **{op: ["pull"] for op in ("reduce_scatter", "reduce", "broadcast", "gather", "scatter")},
}  # fmt: skip
GLUON = {"all_gather": ["gluon_push"], "all_to_all": ["gluon_push"], "all_reduce": ["gluon_two_shot"]}
NVLS = {"all_reduce": ["nvls_two_shot"], "reduce_scatter": ["nvls"], "all_gather": ["nvls"]}
_EMULATED = [DeviceType.CPU]
for _family, _devices in ((PACKETS, _EMULATED), (NVLS, _EMULATED), (PORTABLE, DeviceType), (GLUON, DeviceType)):
    for _op, _names in _family.items():
        globals().update({f"{_op}_{name}": AsPlugin(_op, name, _devices) for name in _names})
NAMES = [name for name, each in list(globals().items()) if isinstance(each, AsPlugin)]
