"""FSDP2 on backend "iris": parameters are divided among the ranks, gathered for their layer, and gradients scattered.

torchrun --nproc-per-node 2 examples/51_fsdp2.py
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_training import begin, finish, train, transformer


def main(steps: int = 20) -> str:
    device = begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    net = transformer(device)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    losses = train(net, device, steps, lambda x: x.chunk(size)[rank])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return finish("FSDP2", losses, device)


if __name__ == "__main__":
    print(main())
