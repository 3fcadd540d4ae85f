"""Tensor and sequence parallelism on backend "iris": layers are divided by columns and rows, between them the tokens.

torchrun --nproc-per-node 2 examples/52_tensor_parallel.py
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_training import begin, divide, finish, train, transformer


def main(steps: int = 20) -> str:
    device = begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    net = divide(transformer(device), init_device_mesh(device.type, (size,)))
    # gradients are those of the sum of all ranks' losses, and the loss of one process is their average
    losses = train(net, device, steps, lambda x: x.chunk(size, dim=1)[rank], 1 / size)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return finish("tensor and sequence parallel", losses, device)


if __name__ == "__main__":
    print(main())
