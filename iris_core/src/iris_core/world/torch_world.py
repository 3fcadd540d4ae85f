"""What a torch.distributed that the program has initialised says: who the ranks are, and where they find each other.

Its group is asked for its members, and its store is used once for each world: it holds the name of the folder in which
the ranks meet.  Nothing else goes through it, and nothing that comes from it is more than a name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from iris_core.errors import GroupError, PeerLostError, UnsupportedError
from iris_core.world import rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

_ASK_S = 0.2  # how often to ask the store whether a rank is on another host


def is_initialized() -> bool:
    """Whether the program has initialised torch.distributed; where torch was not imported, it has not."""
    module: Any = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def members_of(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """The ranks of torch.distributed that form a group, in its order; None if this process is no member."""
    import torch.distributed as dist

    return None if dist.get_rank(group) < 0 else tuple(dist.get_process_group_ranks(group))


def find(group: dist.ProcessGroup | None) -> rendezvous.Rendezvous:
    """Where the ranks of a group meet; all ranks for None.

    Raises:
        GroupError: this process is not a member of the group.
        UnsupportedError: this process is on another host than a member that came before.
        PeerLostError: the process that has the store is gone.
    """
    import torch.distributed as dist

    members = members_of(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    if members is None:
        raise GroupError("this process is not a member of the process group that was passed as group=")
    rank = dist.get_rank(group)
    store = dist.distributed_c10d._get_default_store()
    name = f"iris/{'' if group is None else group.group_name}"
    mine = {"host": rendezvous.host_id(), "folder": rendezvous.new_folder()}
    try:
        name = f"{name}/{store.add(f'{name}/made by {rank}', 1)}"  # the same on all members, for each world they make
        chosen = json.loads(store.compare_set(f"{name}/folder", "", json.dumps(mine)))
    except RuntimeError as e:
        os.rmdir(mine["folder"])
        raise PeerLostError(f"rank {rank}: the process that has the store of torch.distributed is gone: {e}") from e
    if chosen != mine:
        os.rmdir(mine["folder"])
    key = f"{name}/elsewhere"
    if chosen["host"] != mine["host"]:
        store.set(key, str(rank))
        raise UnsupportedError(f"rank {rank} {rendezvous.ELSEWHERE}")
    next_time = 0.0

    def elsewhere() -> None:
        nonlocal next_time
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + _ASK_S
            try:
                found = store.check([key])
            except RuntimeError:  # the rank that holds the store is gone, which is noticed by itself
                return
            if found:
                raise UnsupportedError(f"rank {store.get(key).decode()} {rendezvous.ELSEWHERE}")

    return rendezvous.Rendezvous(
        chosen["folder"], rank, len(members), "1", remove=True, members=members, elsewhere=elsewhere
    )
