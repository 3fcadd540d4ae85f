"""Products fused with collectives in compiled code: `torch.compile(net, options=fuse.options())`.

A pass over Inductor's graphs rewrites functional collectives of process groups of backend "iris", as DTensor and
`torch.distributed` in compiled code make them, where a product of matrices stands next to them:

| in the graph | becomes |
|---|---|
| all_gather, product | `torch.ops.iris.all_gather_matmul` |
| product, reduce_scatter of sums | `torch.ops.iris.matmul_reduce_scatter` |
| product, all_reduce of sums | `torch.ops.iris.matmul_all_reduce` |

Views between them are followed, along whichever dimension ranks gather or scatter.  A bias that is added before a sum
is added up by itself.  All else stays as it is: other groups, dtypes, reductions and dynamic shapes; a gathered tensor
with several uses; a product that is needed as well as its sum.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._C import _distributed_c10d as c10d
from torch._inductor import custom_graph_pass
from torch.fx import Graph

from iris_core.dispatch import PLAIN
from iris_core.torch_backend import library
from iris_core.torch_backend.adapters import operations_of

Node = Any
"""A `torch.fx.Node`, whose arguments torch types as a union of all that there is."""
_ATEN, _C10D, _IRIS = torch.ops.aten, torch.ops._c10d_functional, torch.ops.iris
_GATHER, _SCATTER = _C10D.all_gather_into_tensor.default, _C10D.reduce_scatter_tensor.default
_REDUCE, _WAIT = _C10D.all_reduce.default, _C10D.wait_tensor.default
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)
_VIEWS = (
    _ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.clone.default,
    _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims,
)  # fmt: skip
_PERMUTE, _CAT, _SLICE = _ATEN.permute.default, _ATEN.cat.default, _ATEN.slice.Tensor
_SPLITS = (_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
_OURS = {*_PRODUCTS, *_VIEWS, *_SPLITS, _PERMUTE, _CAT, _SLICE, _GATHER, _SCATTER, _REDUCE, _WAIT, operator.getitem}


def options(given: Mapping[str, Any] | None = None, *, regather: bool = False) -> dict[str, Any]:
    """Return options of `torch.compile` with which products and collectives are fused.

    Args:
        given: further options of `torch.compile`; its passes, or else those of `torch._inductor.config`, run before.
            Those of a mode are `torch._inductor.list_mode_options(mode)`.
        regather: in training, gather again in the backward pass what a product of the forward pass has gathered.  This
            rank's part is kept, and not the whole; both gathers are fused.  Without it nothing is gathered twice, and
            of gathers only those are fused that no gradient needs.

    Example:
        >>> import torch
        >>> from iris_core.torch_backend import fuse
        >>> net = torch.compile(torch.nn.Linear(4, 4), options=fuse.options())
    """
    passes = {"post_grad_custom_post_pass": _fuse} | ({"joint_custom_pre_pass": _regather} if regather else {})
    found = dict(given or {})
    for name, run in passes.items():
        before = found.get(name, getattr(torch._inductor.config, name))
        listed = list(before) if isinstance(before, list | tuple) else [] if before is None else [before]
        found[name] = _Pass(run, listed)
    return found


_AWARE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)  # torch 2.11 has none


class _Pass(_AWARE or custom_graph_pass.CustomGraphPass):  # type: ignore[misc]
    """A pass after others, as before 2.13 torch takes only one."""

    def __init__(self, run: Callable[[Graph], None], before: Sequence[Any]) -> None:
        self._run, self._before = run, before

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for each in self._before:
            each(graph, *[is_inference] * (_AWARE is not None and isinstance(each, _AWARE)))
        self._run(graph)

    def uuid(self) -> Any:
        """Return what compiled code that is kept depends on: the passes, and the groups of backend "iris"."""
        before = [getattr(each, "uuid", lambda: None)() for each in self._before]
        groups = dist.distributed_c10d._world.pg_names.values() if dist.is_initialized() else ()
        ours = [(name, each._devices) for name in groups if (each := _ours(name)) is not None]
        sources = custom_graph_pass.get_hash_for_files((__file__, library.__file__))
        return (sources, self._run.__name__, str(before), str(ours)) if all(before) else None


def _ours(name: Any) -> Any:
    """Return the operations of the process group of a name; None if it has another backend."""
    try:
        return operations_of(c10d._resolve_process_group(name))
    except (RuntimeError, TypeError, ValueError):
        return None


# -- tensors through views --------------------------------------------------------------------------------------------
class _Unfit(Exception):
    """Something that is not fused."""


class _Factor:
    """A part of a dimension; a dimension is a list of them, without those of size 1."""

    def __init__(self, size: int) -> None:
        self.size = size


_Dims = list[list[_Factor]]


def _factors(size: Any) -> list[_Factor]:
    if not isinstance(size, int) or size < 1:
        raise _Unfit
    return [_Factor(size)] if size > 1 else []


class _Through:
    """The dimensions of a tensor (`first`), and of what views make of it (`now`), in the same factors."""

    def __init__(self, first: _Dims, rank: _Factor | None = None) -> None:
        self.first, self.now, self._rank = first, [list(each) for each in first], rank

    def view(self, shape: Sequence[Any]) -> None:
        left, dims = [each for dim in self.now for each in dim], []
        for size in shape:
            dim: list[_Factor] = []
            while size != 1:
                if not left or not isinstance(size, int):
                    raise _Unfit
                if left[0].size > size:
                    left[:1] = self._split(left[0], size)
                if size % left[0].size:
                    raise _Unfit
                size //= left[0].size
                dim.append(left.pop(0))
            dims.append(dim)
        self.now = dims

    def _split(self, factor: _Factor, head: int) -> list[_Factor]:
        if factor is self._rank or factor.size % head:
            raise _Unfit
        parts = [_Factor(head), _Factor(factor.size // head)]
        for dim in self.first:
            if factor in dim:
                at = dim.index(factor)
                dim[at : at + 1] = parts
        return parts

    def permute(self, order: Sequence[int]) -> None:
        self.now = [self.now[each] for each in order]

    def rejoin(self, split_dim: int, count: int, cat_dim: int) -> None:
        """Split one dimension into equal parts and concatenate them along another one."""
        shape = [math.prod(each.size for each in dim) for dim in self.now]
        self.view([*shape[:split_dim], count, shape[split_dim] // count, *shape[split_dim + 1 :]])
        head = self.now.pop(split_dim)
        self.now[cat_dim] = head + self.now[cat_dim]


def _shape(node: Node) -> Sequence[Any]:
    return node.meta["val"].shape  # type: ignore[no-any-return]


def _follow(node: Node, passed_over: Collection[Node] = ()) -> tuple[list[Node], list[Any], list[Node]]:
    """Follow a tensor through views of all its elements.

    Return it and the views, the methods of `_Through` with arguments for them, and the users of the last one.
    """
    chain: list[Node] = [node]
    steps: list[Any] = []
    while True:
        users = [each for each in chain[-1].users if each not in passed_over]
        target = users[0].target if len(users) == 1 else None
        if target in _VIEWS:
            steps.append((_Through.view, _shape(users[0])))
        elif target is _PERMUTE:
            steps.append((_Through.permute, users[0].args[1]))
        elif (found := _rejoined(chain[-1], users, passed_over)) is not None:
            users, arguments = found
            steps.append((_Through.rejoin, *arguments))
        else:
            return chain, steps, users
        chain += users


def _rejoined(node: Node, users: list[Node], passed_over: Collection[Node]) -> tuple[list[Node], list[int]] | None:
    """Return the nodes that split a tensor and concatenate the parts in their order, and arguments of `rejoin`."""
    splits = users if len(users) == 1 and users[0].target in _SPLITS else []
    parts = [each for split in splits for each in split.users if each not in passed_over] or users
    if not splits and (len(parts) < 2 or any(each.target is not _SLICE for each in parts)):
        return None
    joins = {user for part in parts for user in part.users if user not in passed_over}
    cat: Any = joins.pop() if len(joins) == 1 else None
    if cat is None or cat.target is not _CAT or {*cat.args[0]} != {*parts}:
        return None
    parts, shape = list(cat.args[0]), _shape(node)
    cut = _given(splits[0], 2) if splits else parts[0].args[1]
    dims = [each % len(shape) for each in (cut, _given(cat, 1))]
    step = shape[dims[0]] // len(parts)
    begins = [each.args[1] if splits else each.args[2] // step for each in parts]
    if begins != [*range(len(parts))] or any(_shape(each)[dims[0]] * len(parts) != shape[dims[0]] for each in parts):
        return None
    return [*splits, *parts, cat], [dims[0], len(parts), dims[1]]


def _given(node: Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)


# -- what is fused ----------------------------------------------------------------------------------------------------
class _Product(NamedTuple):
    node: Node
    a: Node
    b: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> _Product:
        if node.target not in _PRODUCTS or node.kwargs:
            raise _Unfit
        *bias, a, b = node.args[-3:]
        found = cls(node, a, b, bias[0] if bias else None)
        dtypes = {each.meta["val"].dtype for each in found if each is not None}
        if len(dtypes) > 1 or str(dtypes.pop()).removeprefix("torch.") not in PLAIN:
            raise _Unfit
        if found.bias is not None and _shape(found.bias) != _shape(node)[1:]:
            raise _Unfit
        return found


def _group(collective: Node) -> str:
    name: Any = collective.kwargs.get("group_name", collective.args[-1])
    found = _ours(name)
    if found is None or not found._serves(collective.meta["val"]) or not collective.users:
        raise _Unfit
    return str(name)


def _call(target: Any, *args: Any) -> Node:
    graph = next(each for each in args if isinstance(each, torch.fx.Node)).graph
    node = graph.call_function(target, args)
    with torch.no_grad():
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda each: each.meta["val"]))
    return node


def _arrange(node: Node, dims: _Dims, wanted: _Dims) -> Node:
    """View a tensor of some dimensions as one of the same factors in another order."""
    now, then = [each for dim in dims for each in dim], [each for dim in wanted for each in dim]
    if now != then:
        node = _view(node, [each.size for each in now])
        node = _call(_PERMUTE, node, [now.index(each) for each in then])
    return _view(node, [math.prod(each.size for each in dim) for dim in wanted])


def _view(node: Node, shape: list[int]) -> Node:
    return node if list(_shape(node)) == shape else _call(_ATEN.reshape.default, node, shape)


def _transposed(node: Node) -> Node:
    return _call(_PERMUTE, node, [1, 0])


def _gathered(gather: Node, passed_over: Collection[Node] = ()) -> tuple[list[Node], _Product, _Through, _Factor]:
    """Return the views of what is gathered, the only product that takes the last one, and the factors."""
    _group(gather)
    waits, ranks = [*gather.users], _factors(gather.args[1])
    chain, steps, users = _follow(waits[0], passed_over)
    if len(waits) != 1 or waits[0].target is not _WAIT or len(users) != 1 or not ranks:
        raise _Unfit
    product = _Product.of(users[0])
    if (product.a is chain[-1]) == (product.b is chain[-1]):
        raise _Unfit
    (rank,), parts = ranks, [_factors(each) for each in _shape(gather.args[0])]
    dims = _Through([[rank, *parts[0]], *parts[1:]], rank)
    for step, *arguments in steps:
        step(dims, *arguments)
    return [gather, *chain], product, dims, rank


def _fuse_gather(gather: Node) -> None:
    chain, product, dims, rank = _gathered(gather)
    (rows, inner), other, bias = dims.now, product.b, product.bias
    is_second = product.b is chain[-1]
    with gather.graph.inserting_before(product.node):
        if is_second:
            rows, inner, other = inner, rows, _transposed(product.a)
            bias = bias and _call(_ATEN.unsqueeze.default, bias, 1)
        columns = _factors(_shape(other)[1])
        own = [[each for each in dim if each is not rank] for dim in dims.first]
        rest = [each for each in (rows if rank in rows else inner) if each is not rank]
        name, shard = _group(gather), gather.args[0]
        if rank in rows:
            out = _call(_IRIS.all_gather_matmul.default, _arrange(shard, own, [rest, inner]), other, bias, name, 0)
            out = _arrange(out, [[rank, *rest], columns], [rows, columns])
        else:
            other = _arrange(other, [inner, columns], [[rank, *rest], columns])
            out = _call(_IRIS.all_gather_matmul.default, _arrange(shard, own, [rows, rest]), other, bias, name, 1)
        product.node.replace_all_uses_with(_transposed(out) if is_second else out)
    _erase(product.node)


def _fuse_sum(node: Node) -> None:
    product, (chain, steps, users) = _Product.of(node), _follow(node)
    if len(users) != 1 or users[0].target not in (_SCATTER, _REDUCE) or users[0].args[1] != "sum":
        raise _Unfit
    (sums,), (_, a, b, bias) = users, product
    name, waits = _group(sums), [each for each in users[0].users if each.target is _WAIT]
    dims = _Through([_factors(each) for each in _shape(node)])
    order = None
    if sums.target is _SCATTER:
        for step, *arguments in steps:
            step(dims, *arguments)
        size: Any = sums.args[2]
        dims.view([size, *_shape(sums)])
        if len(dims.now[0]) != 1 or (bias is not None and dims.now[0][0] in dims.first[1]):
            raise _Unfit
        (order,) = dims.now[0]
    with node.graph.inserting_before(node):
        if order is not None:
            rows, columns = dims.first
            if order in columns:
                rows, columns, a, b = columns, rows, _transposed(b), _transposed(a)
            rest, inner = [each for each in rows if each is not order], _factors(_shape(a)[1])
            a = _arrange(a, [rows, inner], [[order, *rest], inner])
        fused = _IRIS.matmul_all_reduce if order is None else _IRIS.matmul_reduce_scatter
        out = _call(fused.default, a, b, None, name)
        if bias is not None:  # those of other ranks may have other values
            out = _call(_ATEN.add.Tensor, out, _call(_IRIS.all_reduce.default, bias, "sum", name))
        if order is not None:
            out = _arrange(out, [rest, columns], dims.now[1:])
    if order is None:
        node.replace_all_uses_with(out)
        out = chain[-1] if len(chain) > 1 else out
    for each in (*waits, sums):
        each.replace_all_uses_with(out, lambda user: user not in waits)
    for each in waits:
        _erase(each)


def _erase(node: Node) -> None:
    """Erase what is left over of what was fused."""
    if node.target in _OURS and not node.users:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for each in inputs:
            _erase(each)


def _fuse(graph: Graph) -> None:
    """Fuse, after Inductor's own passes; see the module's docstring."""
    for fuse, targets in ((_fuse_sum, _PRODUCTS), (_fuse_gather, (_GATHER,))):
        for node in [each for each in graph.nodes if each.target in targets]:
            with contextlib.suppress(_Unfit):
                fuse(node)


def _regather(graph: Graph) -> None:
    """Mark gathers that one product of the forward pass takes, and products of the backward pass, to be done again."""
    backward: set[Node] = set()
    for node in graph.nodes:
        if str(node.target).startswith("tangents") if node.op == "placeholder" else backward & {*node.all_input_nodes}:
            backward.add(node)
    for node in graph.nodes:
        if node.target is _GATHER and node not in backward:
            with contextlib.suppress(_Unfit):
                for each in _gathered(node, backward)[0]:
                    each.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
