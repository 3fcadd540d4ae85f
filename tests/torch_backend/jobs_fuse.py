"""Rank jobs of compiled code: products that are fused with collectives, `ctx.ccl` and `ctx.ops`."""

import collections
import itertools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import triton
import triton.language as tl
from jobs_common import unlike
from jobs_examples import EXAMPLES, load
from jobs_torch_backend import IS_211, start, whole
from tables import says
from torch.distributed.device_mesh import init_device_mesh

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.torch_backend import fuse, library
from iris_core.types import ReduceOp

# what torch 2.11 does not compile with any backend: gathers along other dimensions than the first
UNTRACED = {"gather tokens", "gather columns", "gather the second", "gather the second, bias"} if IS_211 else set()

# torch's own operators instead of C++ that would have to be compiled: the passes see the same graphs
QUICK = {"fallback_by_default": True} if hasattr(torch._inductor.config, "fallback_by_default") else {}


def compiled_and_listed(step, regather=False):
    """Compile with the pass, behind a pass that is set already.

    The second result gets the operators of each graph: (name, the graph's first input that it depends on).
    """
    graphs, before = [], []
    # which also keeps compiled code from being cached
    with torch._inductor.config.patch(post_grad_custom_post_pass=before.append):
        options = fuse.options(QUICK, regather=regather)
    run = options["post_grad_custom_post_pass"]

    def listing(graph):
        run(graph)
        graph.lint()
        assert before[-1] is graph
        inputs, first, found = itertools.count(), {}, []
        for node in graph.nodes:
            is_input = node.op == "placeholder"
            first[node] = next(inputs) if is_input else min((first[n] for n in node.all_input_nodes), default=0)
            name = str(node.target).removesuffix(".default")
            if name.startswith(("iris.", "_c10d_functional.")) and "wait" not in name:
                found.append((name, first[node]))
        graphs.append(found)

    options["post_grad_custom_post_pass"] = listing
    return torch.compile(step, fullgraph=True, dynamic=False, options=options), graphs


def sliced(x, count, dim, onto):
    """Split as some versions of torch do."""
    step = x.shape[dim] // count
    return torch.cat([x.narrow(dim, each * step, step) for each in range(count)], onto)


def shapes(store):
    """What becomes of gathers and sums along each dimension: (operators, whether the values are those of eager)."""
    rank, size = start(store)
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    alone, _ = dist.new_subgroups(1)
    f = functional
    shape = (2, 2 * size, 6 * size), (6 * size, 4 * size), (4 * size,)
    x, w, bias = (whole(each, torch.float32, rank) for each in shape)
    gathered = {dim: x.chunk(size, dim)[rank].contiguous() for dim in (1, 2)}

    def scattered(y, dim, group=world, op="sum"):
        return f.reduce_scatter_tensor(y, op, dim, group)

    def in_slices(x, w):
        return sliced(f.all_gather_tensor(x, 0, world), size, 0, 1) @ w

    def twice(x, w):
        y = f.all_gather_tensor(x, 0, world)
        return y @ w + y.sum()

    cases = {
        "gather rows": (lambda x, w: f.all_gather_tensor(x, 0, world) @ w, x[0], w),
        "gather rows, bias": (lambda x, w, b: torch.addmm(b, f.all_gather_tensor(x, 0, world), w), x[0], w, bias),
        "gather tokens": (lambda x, w: f.all_gather_tensor(x, 1, world) @ w, gathered[1], w),
        "gather tokens, sliced": (in_slices, gathered[1], w),
        "gather columns": (lambda x, w: f.all_gather_tensor(x, 2, world) @ w, gathered[2], w),
        "gather the second": (lambda x, w: x @ f.all_gather_tensor(w, 1, world), x[0], w),
        "gather the second, bias": (
            lambda x, w, b: torch.addmm(b, x, f.all_gather_tensor(w, 1, world)), x[0], w, bias.repeat(size),
        ),
        "gather inner rows": (lambda x, w: x @ f.all_gather_tensor(w, 0, world), x[0].repeat(1, size), w),
        "scatter rows": (lambda x, w: scattered(x @ w, 0), x[0], w),
        "scatter tokens": (lambda x, w: scattered(x @ w, 1), x, w),
        "scatter tokens, bias": (lambda x, w, b: scattered(torch.nn.functional.linear(x, w.t(), b), 1), x, w, bias),
        "scatter tokens, sliced": (lambda x, w: scattered(sliced(x @ w, size, 1, 0), 0), x, w),
        "scatter columns": (lambda x, w: scattered(x @ w, 2), x, w),
        "sum": (lambda x, w: f.all_reduce(x @ w, "sum", world), x, w),
        "sum, bias": (lambda x, w, b: f.all_reduce(torch.nn.functional.linear(x, w.t(), b), "sum", world), x, w, bias),
        "scatter columns, bias": (lambda x, w, b: scattered(torch.addmm(b, x, w), 1), x[0], w, bias),
        "maximum": (lambda x, w: f.all_reduce(x @ w, "max", world), x, w),
        "average": (lambda x, w: scattered(x @ w, 0, op="avg"), x[0], w),
        "the product as well": (lambda x, w: [y := x @ w, f.all_reduce(y, "sum", world)], x[0], w),
        "twice": (twice, x[0], w),
        "float64": (lambda x, w: f.all_reduce(x @ w, "sum", world), x[0].double(), w.double()),
        "alone": (lambda x, w: f.all_gather_tensor(x, 0, alone) @ w, x[0], w),
        "another group": (lambda x, w: f.all_reduce(x @ w, "sum", gloo), x[0], w),
    }  # fmt: skip
    steps = {name: step for name, (step, *_) in cases.items() if name not in UNTRACED}
    tensors = {name: [each.clone() for each in cases[name][1:]] for name in steps}

    def everything(tensors):
        return {name: step(*tensors[name]) for name, step in steps.items()}

    compiled, graphs = compiled_and_listed(everything)
    with torch.no_grad():
        results = [
            {name: each if isinstance(each, list) else [each] for name, each in call(tensors).items()}
            for call in (compiled, everything)
        ]
    owners = [name for name in steps for _ in tensors[name]]
    operators = {name: [operator for operator, number in graphs[0] if owners[number] == name] for name in steps}
    return {name: (operators[name], all(map(torch.equal, *(each[name] for each in results)))) for name in steps}


def transformer(store, regather):
    """The transformer of the examples, divided, beside eager with its gradients; the operators of each graph."""
    rank, size = start(store)
    example = load(EXAMPLES / "52_tensor_parallel.py")
    net = example.transformer(torch.device("cpu"))[:1]
    example.divide(net, init_device_mesh("cpu", (size,)))
    compiled, graphs = compiled_and_listed(net, regather)
    x = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(rank))
    if not regather:  # of the forward pass alone, the same either way
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    gradients = []
    for each in (compiled, net):
        y = x.clone().requires_grad_()
        each(y).square().mean().backward()
        gradients.append([y.grad, *(parameter.grad.to_local() for parameter in net.parameters())])
        net.zero_grad()
    for ours, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    return [collections.Counter(name for name, _ in graph) for graph in graphs]


def in_one_graph():
    """Calls of contexts in a compiled function, and the same eagerly: integers, which are exact."""
    config = Config(algorithm="two_shot")
    # one context behind the other: code that was compiled for the first may not call it for the second
    for group in (None, [2, 0, 1]):
        with Iris("8MiB", device="cpu") as ctx:
            size, rank, name = ctx.num_ranks, ctx.cur_rank, library.name_of(ctx)

            def step(y, x, w, ctx=ctx, size=size, group=group, name=name):
                z, used_on_one_rank = 2 * x, torch.empty_like(x)
                ctx.ccl.all_reduce(used_on_one_rank, x)
                used_on_one_rank += torch.ops.iris.all_reduce(x, "sum", name)
                ctx.ccl.all_reduce(y, z, group=group)
                ctx.ccl.all_reduce(z, z, ReduceOp.MAX, config=config)
                gathered = y.new_empty(size * 4)
                ctx.ccl.all_gather(gathered, y + x, group)
                ctx.ccl.broadcast(gathered, 1, group)
                ctx.ccl.reduce(y[:2] if ctx.cur_rank == 1 else None, x[:2], 1)
                if ctx.cur_rank > 0:
                    ctx.ccl.send(x[1:2], 2) if ctx.cur_rank == 1 else ctx.ccl.recv(y[:1], 1)
                product, rows = w.new_empty(6, 3), w.new_empty(2, 3)
                ctx.ops.matmul_all_reduce(product, w, w[:3], w[0], group=group)
                ctx.ops.matmul_reduce_scatter(rows, w, w[:3])
                eighths, scaled = w.to(torch.float8_e5m2), w.new_empty(6, 3)
                ctx.ops.matmul_all_reduce(scaled, eighths, eighths[:3], a_scales=w[:, 0], b_scales=w[0], group=group)
                residual, normed = w + 1, torch.empty_like(w)
                ctx.ops.all_reduce_rms_norm(normed, residual, 2 * w, w[0], 1e-3, group=group)
                eights, scales = w.new_empty(6, 3, dtype=torch.float8_e5m2), w.new_empty(6)
                ctx.ops.all_reduce_rms_norm(eights, residual, w, w[0], scales=scales)
                gathered += used_on_one_rank.sum() if ctx.cur_rank == 2 else 0
                return gathered + z.sum(), product + scaled, rows, residual, normed, eights.float() * scales[:, None]

            x, w = ctx.arange(4) * (rank + 1), ctx.arange(18.0).view(6, 3) + rank
            compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
            for _ in range(2):  # first of all, so that ctx.ccl and ctx.ops are made while the call is traced
                y = ctx.zeros(4, dtype=torch.int64)
                ours, wanted = compiled(y, x, w), step(ctx.zeros(4, dtype=torch.int64), x, w)
                assert [*map(torch.equal, ours, wanted)] == [True] * 6
                assert y[2:].any()
                assert (y[:2].tolist() == [0, 6], y[0].item() == 2) == (rank == 1, rank == 2)


def reduce_overhead():
    """What is wrong in calls of a function that CUDA graphs replay, and why a graph was left out."""
    with Iris("64MiB", device="cuda") as ctx:
        group, ops, wrong = library.name_of(ctx), torch.ops.iris, []

        def step(x, w):
            y = torch.empty_like(x)
            ctx.ccl.all_reduce(y, 2 * x)
            z = x + y
            ctx.ccl.all_reduce(z, z)
            fused = (op(x + 1, w, None, group) for op in (ops.matmul_all_reduce, ops.matmul_reduce_scatter))
            gathered = ops.all_gather(x + y, group), ops.all_gather_matmul(x + 1, w, None, group)
            columns = ops.all_gather_matmul(x[:, :64] + 1, w, None, group, 1) if ctx.num_ranks == 2 else x
            return y + 1, z, *fused, *gathered, columns, ops.reduce_scatter(y + x, "sum", group)

        compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
        counted = torch._dynamo.utils.counters["inductor"]
        counted.clear()
        w = torch.randint(0, 2, (128, 256), device=ctx.device).bfloat16()
        for seed in range(5):  # first calls, in the warm-up; the capture; replays
            drawn = torch.Generator().manual_seed(10 * seed + ctx.cur_rank)
            x = torch.randint(0, 2, (64 * ctx.num_ranks, 128), generator=drawn).to(w)
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in compiled(x, w)]
            pairs = enumerate(zip(found, step(x, w), strict=True))
            wrong += [(seed, place) for place, (ours, eager) in pairs if not torch.equal(ours, eager)]
        torch.cuda.synchronize()
        torch._dynamo.reset()
        return wrong, counted["cudagraph_skips"]


@triton.jit
def increment(x):
    tl.store(x, tl.load(x) + 1)


def refusals():
    """What is wrong with what compiled functions say whose calls cannot be in their graph.  One works beside graphs."""
    words = says("ccl.no gradient")
    with Iris("1MiB", device="cpu") as ctx:
        x, y, w = torch.ones(4, requires_grad=True), torch.zeros(4), torch.ones(4, 4, requires_grad=True)
        group, product = library.name_of(ctx), ctx.zeros(4, 4)

        def recorded(x):
            ctx.ccl.all_reduce(y, 2 * x)
            return y.sum()

        def configured(x):
            ctx.ccl.all_reduce(y, 2 * x.detach(), config=Config(algorithm="two_shot"))
            return y.sum()

        decode, length = ctx.ops.flash_decode(1, 1, 1, 16, dtype=torch.float32), torch.ones(1, dtype=torch.int32)

        def beside(x):
            ctx.ops.matmul_all_reduce(product, x.outer(x), x.outer(x), async_op=True).wait()
            ctx.ccl.barrier()
            keys = ctx.zeros(1, 1, 1, 16)
            increment[(1,)](keys)
            return product + x + decode(keys[0], keys, keys, length).sum()

        def compiled(step, fullgraph=True):
            return lambda: torch.compile(step, backend="aot_eager", fullgraph=fullgraph)(x)

        assert unlike(
            (f"ArgumentError: all_reduce: {words}", compiled(recorded, False)),
            (".*all_reduce: .*config", compiled(configured, False)),
            (f".*all_reduce: {words}", compiled(recorded)), (f".*matmul_all_reduce: {words}",
             compiled(lambda x: ctx.ops.matmul_all_reduce(w.detach().clone(), w, w))),
            (".*all_reduce: async_op ", compiled(lambda x: ctx.ccl.all_reduce(y, y, async_op=True))),
            (".*barrier is not for compiled code", compiled(lambda x: (ctx.ccl.barrier(), x + 1)[1])),
            (".*gradients, not 'max'", compiled(lambda x: torch.ops.iris.all_reduce(x, "max", group))),
        ) == []  # fmt: skip
        total = torch.compile(beside, backend="aot_eager")(x.detach() + 1).sum().item()
        assert total == 16 * (2 * 4 * 16 + 2 + 1)  # each of 2 ranks adds 4 products of 4 and 4
