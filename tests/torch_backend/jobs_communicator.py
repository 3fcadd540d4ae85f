"""Rank jobs about the communicator in the shape of vLLM's and SGLang's."""

import torch
import torch.distributed as dist
from jobs_common import said_by
from jobs_torch_backend import whole

from iris_core.torch_backend.communicator import Communicator


class EngineBase:
    """What an engine's own base class does with the arguments, and a method that is not ours."""

    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", global_ranks=None):
        self.name_of_engine, self.global_ranks = unique_name, global_ranks

    def dispatch(self):
        return "the engine's"

    def destroy(self):
        self.name_of_engine = "destroyed"


class EngineCommunicator(Communicator, EngineBase):
    """As docs/pytorch.md combines them."""


def every_method(ranks, max_nbytes):
    """Return what is unlike gloo's result, on some ranks; integers, which are exact."""
    group = dist.new_group(ranks)
    me = dist.get_rank()
    if me not in ranks:
        return []
    size, rank = len(ranks), ranks.index(me)
    comm = EngineCommunicator(
        group, torch.device("cpu"), group, "tp:0", heap_size="16MiB", max_nbytes=max_nbytes, global_ranks=[7]
    )
    inputs = [torch.arange(24 * size, dtype=torch.int32).view(2, 4, 3 * size) * (r + 1) for r in range(size)]
    mine, total, found = inputs[rank], sum(inputs), {}
    before = mine.clone()
    found["all_reduce"] = comm.all_reduce(mine), total
    found["strided"] = comm.all_reduce(mine.mT), total.mT
    found["bool"] = comm.all_reduce(torch.tensor([rank == 0, False])), torch.tensor([True, False])
    for dim in (0, 1, -1):
        found[f"all_gather {dim}"] = comm.all_gather(mine, dim), torch.cat(inputs, dim)
    found["all_gather of scalars"] = comm.all_gather(mine.sum()), torch.stack([each.sum() for each in inputs])
    found["reduce_scatter"] = comm.reduce_scatter(mine), total.chunk(size, -1)[rank]
    sizes = [3 * r for r in range(size)]
    rows = [torch.full((each, 2), float(r)) for r, each in enumerate(sizes)]
    found["all_gatherv"] = comm.all_gatherv(rows[rank], sizes=sizes), torch.cat(rows)
    found["all_gatherv of a list"] = comm.all_gatherv([rows[rank]], sizes=sizes)[0], torch.cat(rows)
    whole = torch.ones(2, sum(sizes)) * (rank + 1)
    summed = torch.ones(2, sizes[rank]) * (size * (size + 1) // 2)
    found["reduce_scatterv"] = comm.reduce_scatterv(whole, -1, sizes), summed
    found["broadcast"] = comm.broadcast(mine.clone(), 1), inputs[1]
    gathered = comm.gather(mine, 1, 0)
    found["gather"] = (gathered, torch.cat(inputs)) if rank == 1 else (torch.zeros(0), torch.zeros(0))
    if (scalars := comm.gather(mine.sum(), 1)) is not None:
        found["gather of scalars"] = scalars, found["all_gather of scalars"][1]
    on_heap = comm.empty(4, dtype=torch.float16).fill_(rank)
    with comm.capture():
        found["symmetric"] = comm.custom_all_reduce(on_heap), torch.full((4,), float(sum(range(size)))).half()
    if rank == 0:
        comm.send(mine)
    if rank == 1:
        found["recv"] = comm.recv(mine.shape, mine.dtype), inputs[0]
    wrong = [what for what, (a, b) in found.items() if a.dtype != b.dtype or not torch.equal(a, b)]
    assert torch.equal(mine, before)
    assert rank == 1 or gathered is None
    assert (comm.name_of_engine, comm.global_ranks, comm.dispatch()) == ("tp:0", [7], "the engine's")
    assert comm.should_use(mine) == comm.should_custom_ar(mine) == (max_nbytes is None)
    assert not comm.should_use(torch.tensor([True]))
    assert said_by(lambda: comm.all_gatherv(rows[rank], sizes=[1, *sizes])).startswith("ArgumentError")
    assert said_by(lambda: comm.all_gatherv(rows[rank], 1, sizes)).startswith("ArgumentError")
    for each in (mine[:, :, 1:], mine.sum()):
        assert said_by(comm.reduce_scatter, each).startswith("ArgumentError")
    assert said_by(lambda: Communicator(group, global_ranks=[7])).startswith("TypeError")
    comm.destroy()
    assert comm.name_of_engine == "destroyed"
    return wrong


def captured(replays):
    """Return in which replays of a graph, which has new inputs each time, which results are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device, wrong = torch.device("cuda", rank % torch.cuda.device_count()), []
    comm = Communicator(dist.new_group(backend="gloo"), device, heap_size="64MiB")
    x, on_heap = torch.zeros(64, 16 * size, device=device), comm.empty(1000, dtype=torch.bfloat16)

    def step():
        total = comm.custom_all_reduce(x)
        return total, comm.all_gather(total + x, 0), comm.reduce_scatter(x, 1), comm.all_reduce(on_heap.copy_(x[0, 0]))

    step()
    graph = torch.cuda.CUDAGraph()
    with comm.capture(), torch.cuda.graph(graph):
        found = step()
    for turn in range(replays):
        inputs = [whole(x.shape, x.dtype, 10 * turn + each) for each in range(size)]
        x.copy_(inputs[rank])
        graph.replay()
        total = sum(inputs)
        wanted = total, torch.cat([total + each for each in inputs]), total.chunk(size, 1)[rank], total[0, 0].bfloat16()
        pairs = enumerate(zip(found, wanted, strict=True))
        wrong += [(turn, place) for place, (ours, each) in pairs if not torch.equal(ours.cpu(), each.expand_as(ours))]
    graph.reset()
    comm.destroy()
    return wrong
