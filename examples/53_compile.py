"""`torch.compile` with the collectives inside: one graph holds the layers and `torch.ops.iris`.

    torchrun --nproc-per-node 2 examples/53_compile.py

Each rank has some columns of the first layer of each MLP, and the rows of the second one that go with them; the second
product is one operation with the sum over all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch_training import MLP, begin, finish, train, transformer

from iris_core import torch_backend
from iris_core.torch_backend import library


class DividedMLP(nn.Module):
    """A rank's part of an MLP."""

    def __init__(self, whole: MLP, group: str) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.up, self.up_bias, self.down = (
            nn.Parameter(each.detach().chunk(size, dim)[rank].clone())
            for each, dim in ((whole.up.weight, 0), (whole.up.bias, 0), (whole.down.weight, 1))
        )
        self.bias, self.group = whole.down.bias, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(x, self.up, self.up_bias)).flatten(0, -2)
        return torch.ops.iris.matmul_all_reduce(hidden, self.down.t(), self.bias, self.group).view_as(x)


def main(steps: int = 20) -> str:
    device = begin()
    group = library.name_of(torch_backend.context_of())
    net = transformer(device)
    for block in net:
        block.mlp = DividedMLP(block.mlp, group)
    for name, parameter in net.named_parameters():
        if "mlp." not in name or name.endswith("mlp.bias"):  # all ranks have it, and each a part of its gradient
            parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    compiled = torch.compile(net, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    # gradients are those of the sum of all ranks' losses, which are the same
    losses = train(compiled, device, steps, scale=1 / dist.get_world_size())
    return finish("compiled", losses, device)


if __name__ == "__main__":
    print(main())
