"""Base of the algorithms in Gluon, where they differ from those in Triton."""

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest, DeviceType
from iris_gluon.info import GLUON_INFO
from iris_triton.collectives.parts.collective import KernelCollective
from iris_triton.collectives.parts.sizes import VECTOR_NBYTES, Blocks, blocks_for

LANDING = "gluon landing"  # for what peers cannot address; before others store into it is a barrier: all share it


class GluonCollective(KernelCollective):
    """One operation by one algorithm in Gluon.  Gluon does not pipeline loops, so there are no stages to choose."""

    info = GLUON_INFO
    uses = ("comm_sms", "num_warps", "block_size_m", "block_size_n", "threads_per_warp", "waves_per_eu")

    variants: tuple[str, ...] = ()  # values of config fields that mean this algorithm where use_gluon is asked for

    def _problem(self, request: CollectiveRequest) -> str:
        config, target = request.options.get("config", {}), request.target
        lanes = config.get("threads_per_warp", target.warp_size)
        if lanes != target.warp_size:
            return f"threads_per_warp is {lanes}, and this device has {target.warp_size}"
        if "waves_per_eu" in config and target.type is not DeviceType.HIP:
            return "waves_per_eu speaks of AMD GPUs"
        return super()._problem(request)

    @staticmethod
    def _blocks(request: CollectiveRequest, team: Team, elements: int | None, item: int, *, reduces: bool) -> Blocks:
        """How to divide a launch, in blocks of a vector or more."""
        blocks = blocks_for(request, team, elements, item, reduces=reduces)
        options = {name: value for name, value in blocks.options.items() if name != "num_stages"}
        if waves := request.options["config"].get("waves_per_eu"):
            options["waves_per_eu"] = waves
        return Blocks(blocks.programs, max(blocks.block, VECTOR_NBYTES // item), options)
