"""Rank jobs of tests/compat: scripts of ported_*.py, on the device that the test asks for."""

import importlib

import torch
import torch.distributed as dist
from jobs_common import environment


def run_script(module, script, device, *args):
    """Call a script; its contexts take their device from the environment, since their constructor has no such name."""
    with environment(IRIS_DEVICE=device):
        return getattr(importlib.import_module(module), script)(*args)


def load_from_torchs_symmetric_memory():
    """Kernels are given the addresses that torch's own symmetric memory has of the peers; there is no context."""
    from ported_rma import BLOCK, load_and_add
    from torch.distributed import _symmetric_memory

    rank, world = dist.get_rank(), dist.get_world_size()
    device, partner = torch.device("cuda", rank % torch.cuda.device_count()), (rank + 1) % world
    torch.cuda.set_device(device)
    x = _symmetric_memory.empty(2 * BLOCK, dtype=torch.int32, device=device)
    handle = _symmetric_memory.rendezvous(x, dist.group.WORLD)
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    found = torch.zeros(BLOCK, dtype=torch.int32, device=device)
    x.fill_(rank)
    handle.barrier()
    load_and_add[(1,)](x, found, rank, partner, peers, BLOCK)
    handle.barrier()
    assert (found == partner).all()
    assert (x[BLOCK:] == rank + 1 + (rank - 1) % world).all()
    handle.barrier()
    torch.cuda.synchronize()
