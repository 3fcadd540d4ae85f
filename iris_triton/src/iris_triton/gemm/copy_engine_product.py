"""`copy_engine_push`, `copy_engine`: torch.matmul on the main stream, and the copy engine on a second one.

Chosen where a table says so: what multiplies loses no multiprocessor.  all_gather_matmul: the product with the own rows
begins at once, that with each of the others' when they are there.  matmul_reduce_scatter, matmul_all_reduce: the copy
engine carries the product for each owner of rows to its slot there beside the next product; then slots are added up.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from iris_core.dispatch import PLAIN, products
from iris_core.dispatch.team import Host
from iris_core.providers.baseline import multiply
from iris_core.types import FusedRequest
from iris_triton.collectives.parts.side import Side, await_word, copies_obstacle
from iris_triton.gemm.parts.fused import Fused, Plan, bind, divided, staged_memory
from iris_triton.gemm.parts.shards import COPY_S, Shards, shards_of
from iris_triton.gemm.parts.sum_slots import bind_sum


class _CopyEngine(Fused):
    """Base of the copy-engine algorithms: one product for each member."""

    uses = ()
    measured_only = True
    efficiency: ClassVar[Mapping[str, float]] = {}
    exposed = 1 / 4  # of the last product, or copy
    copy_s = COPY_S

    def _problem(self, request: FusedRequest) -> str:
        problem = super()._problem(request)
        if not problem and request.dtype not in PLAIN and request.scales == "none":
            return f"torch.matmul does not multiply {request.dtype}"
        return problem or copies_obstacle(request.target.type)


# -- gathering --------------------------------------------------------------------------------------------------------
def multiply_shards(
    shards: Shards, order: list[tuple[int, Callable[[Any], None] | None]], tf32: bool
) -> Callable[..., None]:
    """Return a function that starts the copies, multiplies its own rows, then each peer's rows after waiting for them.

    `order` has the members in the order of their products, each with the kernel that waits for its word; own rows None.
    """

    def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> None:
        rows, (bias, *scales) = a.shape[0], divided(shards.scales is not None, more)
        with torch.no_grad():
            shards.move(a, *scales[:1])
            for member, wait in order:
                part = slice(member * rows, (member + 1) * rows)
                if wait is not None:
                    wait(None)
                added = bias if bias is None or bias.dim() < 2 or bias.shape[0] == 1 else bias[part]
                own = () if shards.scales is None else (shards.scales[part], scales[1])
                multiply(a if wait is None else shards.matrix[part], b, added, out[part], tf32, *own)
            shards.side.join()

    return run


class CopyEngineGather(_CopyEngine):
    """`copy_engine_push` of all_gather_matmul; rows come as `iris_triton.gemm.parts.shards` says.

    With gather_dim 1 the shards' products would be added up in the output, rounded.
    """

    serves: ClassVar[Mapping[str, Any]] = {"gather_dim": 0}

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for all rows, and for every copy its addresses.  Collective: every member calls it."""
        shards, team = shards_of(request, host, self.name), host.team
        order: list[tuple[int, Callable[[Any], None] | None]] = [(team.rank, None)]
        for member in ((team.rank + step) % team.size for step in range(1, team.size)):
            arguments = {"words": shards.words, "index": member}
            order.append((member, bind(request, host, await_word, 1, arguments, {"num_warps": 1})))
        return Plan(multiply_shards(shards, order, request.options["tf32"]), aux_buffer=shards.matrix.view(torch.uint8))


# -- reducing ---------------------------------------------------------------------------------------------------------
Carried = tuple[int, int, torch.Tensor, Any, Any]
"""Rows of one of the others: where they begin and end, where their product is computed, target and source of its copy,
as `Side.address` makes them."""


def carry_products(
    side: Side, carried: list[Carried], own: tuple[int, torch.Tensor], add: Callable[..., None], wait: bool, tf32: bool,
    scaled: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return a function that multiplies, copies each product to its owner during the next one, then sums the slots.

    `own` is where the own rows begin, and where their product goes; `add` adds up, given the output and, if there is
    one, the bias.  With `wait` a barrier runs before `add`; otherwise `add` has one itself.
    """
    first, slot = own

    def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> None:
        bias, *scales = divided(scaled, more)

        def product_of(begin: int, end: int, product: torch.Tensor) -> None:
            own_scales = (scales[0][begin:end], scales[1]) if scales else ()
            multiply(a[begin:end], b, None, product, tf32, *own_scales)

        with torch.no_grad():
            side.follow()  # after its barrier the slots may be written
            for begin, end, product, target, source in carried:
                product_of(begin, end, product)
                side.wait()
                side.copy(target, source, product.nbytes, side.raw)
            if len(slot):
                product_of(first, first + len(slot), slot)
            if wait:
                side.barrier(side.stream)  # beside the last product
            side.join()
            add(None, out, *([] if bias is None else [bias]))

    return run


class CopyEngineReduce(_CopyEngine):
    """`copy_engine` of matmul_reduce_scatter and matmul_all_reduce: the next one's first, the own last."""

    serves: ClassVar[Mapping[str, Any]] = {"layout": "torch"}

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the slots, and for every copy its addresses.  Collective: every member calls it."""
        team = host.team
        size, me = team.size, team.rank
        dtype: torch.dtype = getattr(torch, request.out_dtype)
        rows_each, row_nbytes = -(-request.m // size), request.n * dtype.itemsize
        nbytes = size * rows_each * row_nbytes
        memory, staged, stride = staged_memory(request, host, self.name, nbytes + -nbytes % products.ROW_NBYTES)
        slots = memory[:nbytes].view(dtype).view(size, rows_each, request.n)
        whole = host.scratch(request.m * row_nbytes, "product")
        product = whole[: request.m * row_nbytes].view(dtype).view(request.m, request.n)
        side, mine = Side.of(team, request.target), slots[me].data_ptr() - team.base_ptrs[me]
        begins = [min(owner * rows_each, request.m) for owner in range(size + 1)]
        carried: list[Carried] = []
        for owner in ((me + step) % size for step in range(1, size)):
            begin, end = begins[owner], begins[owner + 1]
            if begin < end:
                part, target = product[begin:end], side.address(team.base_ptrs[owner] + mine)
                carried.append((begin, end, part, target, side.address(part.data_ptr())))
        own = begins[me], slots[me][: begins[me + 1] - begins[me]]
        add, wait = bind_sum(request, host, slots, rows_each, stride), self.op == "matmul_reduce_scatter"
        run = carry_products(side, carried, own, add, wait, request.options["tf32"], request.scales != "none")
        return Plan(run, staged_out=staged, aux_buffer=memory)
