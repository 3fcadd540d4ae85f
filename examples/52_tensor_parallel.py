"""Tensor and sequence parallelism on backend "iris": layers are divided by columns and rows, between them the tokens.

torchrun --nproc-per-node 2 examples/52_tensor_parallel.py
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch_training import begin, finish, train, transformer


def divide(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Give each rank its columns and rows of the layers; the tokens of a sequence are gathered for them."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"norm": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    for block in net:
        parallelize_module(block, mesh, plan)
    return net


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
