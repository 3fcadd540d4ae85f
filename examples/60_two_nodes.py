"""Two machines on backend "iris": layers are divided within each, FSDP2 divides their parts between them.

On each machine, with the first one's name:
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/60_two_nodes.py --folder /shared/run
On one machine, as if it were two:
    IRIS_NODES=2x2 torchrun --nproc-per-node 4 examples/60_two_nodes.py

With a folder that all machines see, parameters are saved there, and training goes on where it stopped: when a rank or
a machine is lost, the world ends with its name, and torchrun starts all ranks again: with the variable, on a new store;
in its own one gloo would find where the lost ranks were.
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_training import begin, divide, finish, train, transformer

from iris_core import torch_backend

SAVED_EVERY = 5


def main(steps: int = 20, folder: str = "") -> str:
    device = begin()
    ctx = torch_backend.context_of()
    nodes, place = ctx.num_nodes, ctx.node_ranks.index(ctx.cur_rank)
    per_node, sizes = len(ctx.node_ranks), [0] * ctx.num_ranks
    dist.all_gather_object(sizes, per_node)
    if len(set(sizes)) > 1:
        sys.exit("the nodes have different numbers of ranks, and all divide the layers alike: start as many on each")
    mesh = init_device_mesh(device.type, (nodes, per_node), mesh_dim_names=("between", "within"))
    net = divide(transformer(device), mesh["within"])
    for block in net:
        fully_shard(block, mesh=mesh["between"])
    fully_shard(net, mesh=mesh["between"])
    first = load(net, folder)
    if first >= steps:
        dist.destroy_process_group()
        return f"rank {ctx.cur_rank} of {ctx.num_ranks} on {device}: {nodes} nodes, nothing is left of {steps} steps"

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(nodes)[ctx.node].chunk(per_node, dim=1)[place]  # samples of the node, tokens of the rank

    losses = []
    for begun in range(first, steps, SAVED_EVERY):
        ended = min(begun + SAVED_EVERY, steps)
        losses.append(train(net, device, ended, part, 1 / per_node, begun))
        if folder:
            checkpoint.save(get_model_state_dict(net), checkpoint_id=f"{folder}/{ended:06}")
    found = torch.cat(losses)
    dist.all_reduce(found, dist.ReduceOp.AVG)
    return finish(f"{nodes} nodes", found, device, first)


def load(net: torch.nn.Module, folder: str) -> int:
    """Return the number of steps that were saved last, with their parameters in the net."""
    done = sorted(pathlib.Path(folder).glob("*/.metadata")) if folder else []  # which is written last
    if not done:
        return 0
    state = get_model_state_dict(net)
    checkpoint.load(state, checkpoint_id=done[-1].parent)
    set_model_state_dict(net, state)
    return int(done[-1].parent.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="", help="where parameters are saved")
    print(main(**vars(parser.parse_args())))
