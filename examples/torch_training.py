"""What examples 50 to 60 share: a small transformer, data that all ranks draw alike, and training beside one process.

torchrun starts them, as many ranks as one likes; on GPUs each rank takes that of its LOCAL_RANK.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import iris_core.torch_backend  # noqa: F401 - from torch 2.14 on it is found without

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

WIDTH, HEADS, LAYERS, BATCH, TOKENS = 256, 8, 4, 8, 16


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, bias)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


def begin() -> torch.device:
    """Initialise torch.distributed on backend "iris"; return this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("iris")
    return device


def transformer(device: torch.device) -> nn.Module:
    """Return the model, with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)


def divide(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Give each rank its columns and rows of the layers; the tokens of a sequence are gathered for them."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"norm": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    for block in net:
        parallelize_module(block, mesh, plan)
    return net


def train(
    net: nn.Module, device: torch.device, steps: int, part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    scale: float = 1.0, first: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the losses of steps of SGD from `first` on, on this rank's part of each batch; see `scale` in 52."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(first, steps):
        drawn = torch.Generator().manual_seed(step)
        x, y = (part(torch.randn(BATCH, TOKENS, WIDTH, generator=drawn).to(device)) for _ in range(2))
        loss = (net(x) - y).square().mean()
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def finish(name: str, losses: torch.Tensor, device: torch.device, first: int = 0) -> str:
    """Compare losses from step `first` on with those of one process alone, and say so; end torch.distributed."""
    alone = train(transformer(device), device, first + len(losses))[first:]
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=0)
    said = f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}: {name}, {len(losses)} losses as alone"
    dist.destroy_process_group()
    return said
