"""Programs of torch's own that run unchanged on backend "iris": each returns what it computes, on either backend."""

import functools

import jobs_examples
import jobs_fuse
import torch
import torch.distributed as dist
from jobs_torch_backend import start, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel

from iris_core.torch_backend import fuse

SIZES = 8, 24, 8


def block(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(SIZES[0]), nn.Linear(*SIZES[:2]), nn.GELU(), nn.Linear(*SIZES[1:])).to(device)


def mesh_of(backend, device, program):
    """A mesh of all ranks, with a name of its own: torch keeps plans of equal meshes, and so of groups that ended."""
    names = (f"{backend}, {program}",)
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=names, backend_override={0: backend})


def by_hook(hook, **options):
    def program(backend, group, device):
        state = powerSGD_hook.PowerSGDState(group, **options) if options else group
        net = nn.parallel.DistributedDataParallel(block(device), process_group=group)
        net.register_comm_hook(state, hook)
        net.compile(backend="aot_eager")
        return trained(net, device)

    return program


def unevenly(backend, group, device):
    """Ranks with different numbers of steps."""
    net = nn.parallel.DistributedDataParallel(block(device), process_group=group)
    with net.join(divide_by_initial_world_size=False):
        for step in range(2 + dist.get_rank()):
            net(torch.full((3, SIZES[0]), step + 1.0, device=device)).sum().backward()
    return [each.grad for each in net.parameters()]


def by_sequence(backend, group, device):
    """Tensor parallelism with the tokens divided between the layers."""
    net, mesh = block(device), mesh_of(backend, device, "sequence")
    gathered = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"0": parallel.SequenceParallel(), "1": parallel.ColwiseParallel()}
    plan["3"] = parallel.RowwiseParallel(output_layouts=Shard(1))
    parallel.parallelize_module(net[1], mesh, gathered)
    net = parallel.parallelize_module(net, mesh, plan)
    return trained(net, device, lambda x: x.chunk(2, dim=1)[dist.get_rank()])


def by_ring(rotation):
    """Attention of context parallelism, as one process has it; torch divides that of GPUs, so the CPU's is given."""

    def program(backend, group, device):
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring  # torch may move it

        ring.set_rotate_method(rotation)
        op, places = "_scaled_dot_product_flash_attention_for_cpu", (dist.get_rank(), -1 - dist.get_rank())
        *whole, grad = (torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4))
        alone = nn.functional.scaled_dot_product_attention(*(x.requires_grad_() for x in whole), is_causal=True)
        wanted = alone, *torch.autograd.grad(alone, whole, grad)
        parts = (x.detach().chunk(2 * dist.get_world_size(), 2) for x in (*whole, grad, *wanted))
        q, k, v, grad, *wanted = (torch.cat([each[place] for place in places], 2) for each in parts)
        how = {"query": q, "key": k, "value": v, "is_causal": True, "dropout_p": 0.0}
        out, lse, *_ = ring._templated_ring_attention(group, 2, getattr(torch.ops.aten, op), **how)
        how |= {"grad_out": grad, "grad_out_name": "grad_out", "out": out, "logsumexp": lse}
        backward = getattr(torch.ops.aten, f"{op}_backward")
        found = [out, *ring._templated_ring_attention_backward(group, 2, backward, **how)[:3]]
        torch.testing.assert_close(found, wanted)
        return found

    return program


def transformer(name):
    """The transformer of the examples, trained as they do it: the losses of all steps."""

    def program(backend, group, device):
        jobs_examples.load(jobs_examples.EXAMPLES / "50_ddp.py")  # its folder is on the path now
        import torch_training as examples

        net, rank, size, dim = examples.transformer(torch.device(device)), dist.get_rank(), dist.get_world_size(), 0
        if name == "DDP":
            net = nn.parallel.DistributedDataParallel(net, process_group=group)
        elif name == "FSDP2":
            for each in (*net, net):
                fully_shard(each, mesh=mesh_of(backend, device, name))
        else:
            net, dim = examples.divide(net, mesh_of(backend, device, name)), 1
            if name == "compiled":
                torch.compiler.reset()  # all layers have the same code, and torch keeps few kinds of it
                options = fuse.options(jobs_fuse.QUICK if device == "cpu" else None)
                for each in net[:1] if device == "cpu" else net:  # each takes seconds
                    each.compile(fullgraph=True, dynamic=False, options=options)
        steps, scale = 20 if device == "cuda" else 3, 1 / size if dim else 1.0
        return [*examples.train(net, device, steps, lambda x: x.chunk(size, dim)[rank], scale)]

    return program


PROGRAMS = {
    "DDP, fp16": by_hook(default_hooks.fp16_compress_hook),
    "DDP, powerSGD": by_hook(powerSGD_hook.powerSGD_hook, matrix_approximation_rank=2, start_powerSGD_iter=2),
    "DDP, uneven": unevenly, "sequence parallel": by_sequence,
    **{f"ring attention, {name}": by_ring(name) for name in ("alltoall", "allgather")},
    **{f"transformer, {name}": transformer(name) for name in ("DDP", "FSDP2", "tensor parallel", "compiled")},
}  # fmt: skip


def as_on_the_peer(store, name, device):
    """Whether a program computes the same on gloo, or NCCL, and how many tensors that are.

    Bit for bit with two ranks, whose sums have no order; losses of more, and of fused products, up to rounding.
    """
    _, size = start(store, device=device)
    backends = "iris", "gloo" if device == "cpu" else "nccl"
    ours, others = (PROGRAMS[name](each, dist.new_group(backend=each), device) for each in backends)
    same = torch.equal if size == 2 and "compiled" not in name else functools.partial(torch.allclose, rtol=1e-5)
    return all(map(same, ours, others)), len(ours)
