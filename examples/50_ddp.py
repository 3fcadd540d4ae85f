"""DistributedDataParallel on backend "iris": each rank computes on its part of the batch, gradients are averaged.

torchrun --nproc-per-node 2 examples/50_ddp.py
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_training import begin, finish, train, transformer


def main(steps: int = 20) -> str:
    device = begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(transformer(device))
    losses = train(net, device, steps, lambda x: x.chunk(size)[rank])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return finish("DDP", losses, device)


if __name__ == "__main__":
    print(main())
