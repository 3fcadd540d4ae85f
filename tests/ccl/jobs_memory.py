"""Rank jobs of test_memory."""

from jobs_common import environment

from iris_core import Iris
from iris_core.errors import IrisError


def areas(device):
    """Ranges of groups that share members, and of one that does not fit."""
    sets = [(0, 1), (1, 2), (2, 0), (0, 1, 2), (1, 0)]
    places, said = {}, ""
    with environment(IRIS_SYSTEM_SIZE="64KiB"), Iris("1MiB", device=device) as ctx:
        area = ctx._system_area
        for members in sets:
            if ctx.cur_rank in members:
                world = ctx._world.subworld(members)
                places[members] = area.reserve(world, 1000 * len(members), "a test")
        before = list(area._used)
        try:
            area.reserve(ctx._world, 64 << 10, "a test")
        except IrisError as e:
            said = str(e)
        ctx.barrier()
        return places, said, before == area._used, area.nbytes


def regions(device, system_size, workspace):
    """Regions of the whole world and of a part of it: stable, symmetric, filled, growing."""
    with environment(IRIS_SYSTEM_SIZE=system_size, IRIS_CCL_WORKSPACE=workspace), Iris("2MiB", device=device) as ctx:
        found = []
        for members in ((0, 1, 2), (2, 0)):
            if ctx.cur_rank not in members:
                continue
            team = ctx.ccl.team(members)
            first = team.region("test", 1000, fill=7)
            same = team.region("test", 500)
            other = team.region("other", 1000)
            larger = team.region("test", 5000)
            space = team.workspace("space", 1 << 40)
            again = team.workspace("space", 1 << 40)
            found.append(
                {
                    "offsets": [r.offset_bytes for r in (first, other, larger, space)],
                    "same": same is first and again is space and team.region("test", 5000) is larger,
                    "filled": first.tensor.unique().tolist() == [7] and other.tensor.unique().tolist() == [0],
                    "sizes": [r.nbytes for r in (first, other, larger, space)],
                    "place": first.tensor.data_ptr() - team.base_ptrs[team.rank] == first.offset_bytes,
                    "rank": (team.rank, team.size, team.members),
                }
            )
            try:
                team.region("huge", 1 << 30)
                found[-1]["huge"] = "there was room"
            except IrisError as e:
                found[-1]["huge"] = str(e)
        ctx.barrier()
        return found, ctx.stats().num_blocks
