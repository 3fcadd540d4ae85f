"""`ctx.ops`: products of matrices, and norms, fused with communication.

A repeated call is one dict lookup and a launch; `Binder` prepares the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling

from iris_core.dispatch import PRODUCTS, products
from iris_core.dispatch.bind import Launches
from iris_core.dispatch.calls import Calls, current_device
from iris_core.dispatch.config import Config, FusedConfig
from iris_core.dispatch.products import NORM, ROW_NBYTES, FusedCall, NormCall, call_of
from iris_core.dispatch.requests import TORCH, check_strided, reach
from iris_core.dispatch.traced import is_traced, trace
from iris_core.errors import ArgumentError
from iris_core.ops.attention import FlashDecode, RingAttention
from iris_core.ops.experts import ExpertGroup
from iris_core.protocols import Work
from iris_core.types import Group

_FLOAT32 = torch.float32


@dataclass(eq=False)
class FusedWorkspace:
    """Plans of `ctx.ops` and their memory, for calls that are repeated.

    The context keeps every plan as long as it is open, so no workspace is needed for speed.  With a workspace, plans
    and their local memory are the caller's, and can be dropped.  Memory that peers reach stays with the context.

    It serves one context: another one may use it after `reset()` or `clear()`, or when the first one was closed.
    A graph that was captured with it needs it for its replays, neither reset nor cleared.

    Nothing has to be reset between calls: flags are counters that only grow.
    """

    operation: str = ""  #: of the last call; empty before the first one
    shape: tuple[int, ...] = ()  #: (m, n, k) of the product that each rank computed in it
    dtype: torch.dtype | None = None  #: of its operands
    world_size: int = 0  #: ranks that took part
    variant: str = ""  #: the algorithm
    #: memory of this rank that the algorithm stages in (uint8); None if it needs none
    aux_buffer: torch.Tensor | None = field(default=None, repr=False)
    locks: torch.Tensor | None = field(default=None, repr=False)  #: local flags of the algorithm; None if it has none
    prepared: bool = False  #: whether the last call, or a preamble, has prepared it
    calls: Launches = field(default_factory=Launches, repr=False)  #: the plans; the library's, like the next two
    held: dict[int, Any] = field(default_factory=dict, repr=False)  #: the plans that graphs know
    owner: object = field(default=None, repr=False)  #: whose they are

    def matches(
        self, operation: str, shape: tuple[int, ...], dtype: torch.dtype, world_size: int, variant: str = ""
    ) -> bool:
        """Whether it is prepared for such a call; with `variant`, for that algorithm."""
        same = (self.operation, self.shape, self.dtype, self.world_size) == (operation, shape, dtype, world_size)
        return self.prepared and same and variant in ("", self.variant)

    def reset(self) -> None:
        """Forget the plans; local memory stays, for the next call."""
        self.calls.clear()
        self.held.clear()
        self.owner = None
        self.aux_buffer = self.locks = None
        self.prepared = False

    def clear(self) -> None:
        """Forget everything, and drop the local memory."""
        self.reset()
        self.operation, self.shape, self.dtype, self.world_size, self.variant = "", (), None, 0, ""
        self.calls.scratch.clear()

    def describe(self, bound: Any) -> None:
        """Describe a call that was prepared; its plan may have the attributes `aux_buffer` and `locks`."""
        if (request := bound.request) is None:
            return
        self.operation, self.shape, self.dtype = request.op, request.shape, getattr(torch, request.dtype)
        self.world_size, self.variant, self.prepared = request.group_size, bound.algorithm, True
        self.aux_buffer, self.locks = getattr(bound.plan, "aux_buffer", None), getattr(bound.plan, "locks", None)


def _preamble_of(operation: Callable[..., Any]) -> Callable[..., FusedWorkspace]:
    def preamble(
        self: Operations,
        output: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        workspace: FusedWorkspace | None = None,
        **options: Any,
    ) -> FusedWorkspace:
        """Prepare a call; the next such call exchanges nothing between hosts.

        Collective: every member calls it.  It need not be called: the first call does the same.  Nothing is launched,
        except where a first call measures (IRIS_TUNE); the output's values are lost then.

        Args:
            output, A, B, bias, config, workspace: as the operation takes them.
            **options: its other keywords.
        """
        return operation(self, output, A, B, bias, None, config, workspace, **options)  # type: ignore[no-any-return]

    preamble.__name__ = f"{operation.__name__}_preamble"
    preamble.__qualname__ = f"{operation.__qualname__}_preamble"
    return preamble


def _parts(output: Any, x: Any, size: int, scatter: int, gather: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors with the members' parts along a first dimension; ArgumentError if they do not fit."""
    for name, each in (("output", output), ("x", x)):
        check_strided("ulysses", name, each)
    wanted, dims = list(x.shape), range(-x.ndim, x.ndim)
    are_dims = all(isinstance(each, int) and each in dims for each in (scatter, gather))
    if not are_dims or (scatter - gather) % x.ndim == 0 or wanted[scatter] % size:
        raise ArgumentError(
            f"ulysses: x has shape {tuple(x.shape)}; scatter_dim={scatter} and gather_dim={gather} must be two of its "
            f"dimensions, from {-x.ndim} to {x.ndim - 1}, and {size} ranks must divide the first one"
        )
    scatter, gather = scatter % x.ndim, gather % x.ndim
    wanted[scatter] //= size
    wanted[gather] *= size
    if list(output.shape) != wanted:
        raise ArgumentError(
            f"ulysses: x has shape {tuple(x.shape)}, so the output must be {tuple(wanted)}, not {tuple(output.shape)}"
        )
    given = x.unflatten(scatter, (size, wanted[scatter])).movedim(scatter, 0)
    return output.unflatten(gather, (size, x.shape[gather])).movedim(gather, 0), given


class Operations(Calls):
    """The fused operations of one context: `ctx.ops`.

    With W members of a group:

    | operation | A | B | output |
    |---|---|---|---|
    | matmul_all_reduce | (M, K) | (K, N) | (M, N), the sum of all members' products |
    | matmul_reduce_scatter | (M, K) | (K, N) | (M / W, N), this member's rows of that sum |
    | all_gather_matmul, gather_dim=0 | (M / W, K) | (K, N) | (M, N), the rows of all times the own B |
    | all_gather_matmul, gather_dim=1 | (M, K / W) | (K, N) | (M, N), the columns of all times the own B |
    | matmul_all_gather, gather_dim=0 | (M, K) | (K, N) | (W * M, N), the products of all below each other |
    | matmul_all_gather, gather_dim=1 | (M, K) | (K, N) | (M, W * N), beside each other |

    Collective: every member of the group calls an operation with the same arguments, in the same order, with the same
    group's collectives, and no other rank does.  These must be equal: dtypes, shapes, config, options, whether a tensor
    that others work on (A where it is gathered, the output where products are) lies on the heap with dense rows that
    begin at multiples of 16 bytes; its place there may differ.

    Tensors may lie on the heap or not, and may be transposed or have gaps; what peers work on best lies on the heap
    with dense rows, else it goes through a workspace.  Element types are float32, float16 and bfloat16, the same
    everywhere, and 8-bit floats for A and B where an algorithm multiplies them on the device.  Products are added up
    in float32; those of float32 are as exact as torch's, which it can be set to make faster (`FusedConfig.allow_tf32`);
    members have the same setting.  Nothing is recorded for gradients: see `iris_core.nn`.

    Stream, graphs: as with `ctx.ccl`.  An operation can be captured once it was called with tensors of the same kind.

    Arguments that they share:
        output: the result; shares no memory with the others.
        A, B: the operands.
        bias: added once to the result: (N,) or (1, N) for each column, (M, 1) for each row, where (M, N) is what the
            output has; with matmul_all_gather it is what this member computes.  Where members share a result, that is
            in matmul_all_reduce and matmul_reduce_scatter, they pass equal values for equal elements of it.
        a_scales, b_scales: float32, both or neither: A and B, of 8-bit floats, are multiplied by them.  Of rows:
            (m,) or (m, 1), and (n,) or (1, n), where this member's A is (m, k) and its B (k, n), as torch._scaled_mm
            takes them.  Of blocks of 128, as of DeepSeek-V3 (2024): (m, ceil(k / 128)) and (ceil(k / 128),
            ceil(n / 128)).  Not with all_gather_matmul of gather_dim=1.
        async_op: return a handle (`wait()`, `is_completed()`) instead of running on the current stream.
        config: how to run; see `iris_core.ops.FusedConfig`.
        workspace: holds the plans and their local memory instead of the context; see `FusedWorkspace`.
        group: the ranks; see `Collectives`.

    All return the workspace, which holds the plan of the call; with `async_op` the handle.

    All raise what collectives do (see `Collectives`), an ArgumentError also where torch would record gradients.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     a, b, c = torch.ones(4, 3), torch.ones(3, 2), ctx.zeros(4, 2)
        ...     _ = ctx.ops.matmul_all_reduce(c, a, b)
        ...     print(c[0])
        tensor([3., 3.])
    """

    _launches, _operations = ("fused", "fused_anywhere"), (*PRODUCTS, NORM)

    # -- operations ---------------------------------------------------------------------------------------------------
    def matmul_all_reduce(
        self, output: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: FusedWorkspace | None = None, *,
        group: Group = None, a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None,
    ) -> FusedWorkspace | Work:  # fmt: skip
        """Add up the products of all members; all get the same bits.  See `Operations`."""
        scales = () if a_scales is b_scales is None else (a_scales, b_scales)
        how = group, config, None, TORCH
        return self._run("matmul_all_reduce", (output, A, B, bias, *scales), how, async_op, workspace)

    def all_gather_matmul(
        self, output: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: FusedWorkspace | None = None, *,
        group: Group = None, a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None,
        gather_dim: int = 1,
    ) -> FusedWorkspace | Work:  # fmt: skip
        """Multiply the shards of all members, put together, with this member's B.  See `Operations`.

        Args:
            gather_dim: 1: shards are columns of A, as in AMD's Iris; 0: they are rows, as in torch's
                asynchronous tensor parallelism.
        """
        scales = () if a_scales is b_scales is None else (a_scales, b_scales)
        how = group, config, gather_dim, TORCH
        return self._run("all_gather_matmul", (output, A, B, bias, *scales), how, async_op, workspace)

    def matmul_all_gather(
        self, output: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: FusedWorkspace | None = None, *,
        group: Group = None, a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None,
        gather_dim: int = 0,
    ) -> FusedWorkspace | Work:  # fmt: skip
        """Give every member the products of all.  See `Operations`.

        Args:
            gather_dim: 0: below each other, as in AMD's Iris; 1: beside each other.
        """
        scales = () if a_scales is b_scales is None else (a_scales, b_scales)
        how = group, config, gather_dim, TORCH
        return self._run("matmul_all_gather", (output, A, B, bias, *scales), how, async_op, workspace)

    def matmul_reduce_scatter(
        self, output: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: FusedWorkspace | None = None, *,
        group: Group = None, a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None,
        layout: str = TORCH,
    ) -> FusedWorkspace | Work:  # fmt: skip
        """Add up the products of all members; each gets its part of the sum.  See `Operations`.

        Args:
            layout: "torch": the output is (M / W, N), rows of the sum.  "tiles", as in AMD's Iris: it is
                (M, N), and each member gets a run of tiles (block_size_m x block_size_n of the config) of the sum at
                their own places, numbered down group_size_m rows of tiles, then to the right, then the next rows; the
                rest of its output stays as it is.
        """
        scales = () if a_scales is b_scales is None else (a_scales, b_scales)
        how = group, config, None, layout
        return self._run("matmul_reduce_scatter", (output, A, B, bias, *scales), how, async_op, workspace)

    matmul_all_reduce_preamble = _preamble_of(matmul_all_reduce)
    all_gather_matmul_preamble = _preamble_of(all_gather_matmul)
    matmul_all_gather_preamble = _preamble_of(matmul_all_gather)
    matmul_reduce_scatter_preamble = _preamble_of(matmul_reduce_scatter)

    def all_reduce_rms_norm(
        self,
        output: torch.Tensor,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        scales: torch.Tensor | None = None,
        async_op: bool = False,
        config: Config | None = None,
        group: Group = None,
    ) -> Work | None:
        """Add up x of all members, add the sum to the residual, and normalise that: what stands between two layers.

        The sum is rounded to x's dtype, in the group's order as by `ctx.ccl.all_reduce`; the new residual is rounded,
        too, and the output is `residual / sqrt(mean(residual ** 2) + eps) * weight`, computed in float32 and rounded
        once (Zhang, Sennrich: Root Mean Square Layer Normalization, 2019).  Members with equal residuals and weights
        get the same bits.  All tensors are contiguous and share no memory, and on all members x lies on the heap or on
        none.

        Args:
            output: (..., hidden), of x's dtype or of 8-bit floats.
            residual: (..., hidden), of x's dtype; it is changed.
            x: (..., hidden): float32, float16 or bfloat16.
            weight: (hidden,): one of these types.
            eps: added to the mean of the squares.
            scales: float32 (...) or (..., 1), only with 8-bit floats: the output times them is the result; each row's
                largest element becomes the largest number of the type.  As torch._scaled_mm takes them.
            config: of `ctx.ccl`: see `iris_core.ccl.Config`.

        Raises: as `Operations` says, and a LayoutError if a tensor has gaps.

        Example:
            >>> import torch
            >>> from iris_core import Iris
            >>> with Iris("1MiB", device="cpu") as ctx:
            ...     x, residual, out = torch.full((2, 4), 3.0), torch.ones(2, 4), torch.empty(2, 4)
            ...     ctx.ops.all_reduce_rms_norm(out, residual, x, torch.ones(4))
            ...     print(residual[0].tolist(), round(out[0, 0].item(), 3))
            [4.0, 4.0, 4.0, 4.0] 1.0
        """
        tensors = output, residual, x, weight, scales
        return self._run(NORM, tensors, (group, config, eps), async_op)  # type: ignore[return-value]  # no workspace

    def ulysses(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        *,
        scatter_dim: int,
        gather_dim: int,
        async_op: bool = False,
        config: Config | None = None,
        group: Group = None,
    ) -> Work | None:
        """Divide one dimension among the members instead of another one: `ctx.ccl.all_to_all`, with no copy before it.

        Attention with a divided sequence computes with all tokens and some heads in between (Jacobs et al., DeepSpeed
        Ulysses, 2023): of (batch, tokens, heads, elements), `scatter_dim=2, gather_dim=1` leads there, and
        `scatter_dim=1, gather_dim=2` back.  With gradients: `iris_core.nn.ulysses`.

        Args:
            output: x's shape with `scatter_dim` divided by the members, and `gather_dim` times as large; memory of its
                own.
            x: this member's part of `gather_dim`; part i of `scatter_dim` is for member i.
            scatter_dim, gather_dim: two dimensions; negative ones count from the end.
            config: of `ctx.ccl`.

        Raises: as `ctx.ccl.all_to_all` does.

        Example:
            >>> import torch
            >>> from iris_core import Iris
            >>> with Iris("1MiB", device="cpu") as ctx:
            ...     x, out = torch.ones(3, 4, 8), torch.empty(3, 4, 8)
            ...     ctx.ops.ulysses(out, x, scatter_dim=1, gather_dim=0)
            ...     print(torch.equal(out, x))
            True
        """
        context: Any = self._binder.open()
        try:
            parts = _parts(output, x, len(self._binder.members_of(group)), scatter_dim, gather_dim)
        except (ArgumentError, TypeError) as error:
            self.refuse("all_to_all", error, group)
        return context.ccl.all_to_all(*parts, group, async_op, config)  # type: ignore[no-any-return]

    @staticmethod
    def _describe(op: str, tensors: Any, how: Any, async_op: bool, workspace: Any = None) -> tuple[Any, bool]:
        return call_of(op, tensors, how), bool(async_op) or workspace is not None

    def experts(
        self, max_tokens: int, hidden: int, experts: int, *, top_k: int, dtype: torch.dtype = torch.bfloat16,
        result: torch.dtype | None = None, scales: int = 0, group: Group = None,
    ) -> ExpertGroup:  # fmt: skip
        """Make a group of ranks that divide the experts of a layer; see `iris_core.ops.experts.ExpertGroup`."""
        return ExpertGroup(self._binder, max_tokens, hidden, experts, top_k, dtype, result, scales, group)

    def flash_decode(
        self, batch: int, heads: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype = torch.bfloat16,
        scale: float | None = None, pieces: int | None = None, group: Group = None,
    ) -> FlashDecode:  # fmt: skip
        """Make attention of new tokens to a divided cache; see `iris_core.ops.attention.FlashDecode`."""
        return FlashDecode(self._binder, batch, heads, kv_heads, head_dim, dtype, scale, pieces, group)

    def ring_attention(
        self, heads: int, kv_heads: int, length: int, head_dim: int, *, dtype: torch.dtype = torch.bfloat16,
        scale: float | None = None, causal: bool = False, striped: bool = False, gradients: bool = False,
        group: Group = None,
    ) -> RingAttention:  # fmt: skip
        """Make attention over a divided sequence; see `iris_core.ops.attention.RingAttention`."""
        given = heads, kv_heads, length, head_dim, dtype, scale, causal, striped, gradients, group
        return RingAttention(self._binder, *given)

    def members_of(self, group: Group = None) -> tuple[int, ...]:
        """Return the ranks of this context's world that form a group, in the group's order.

        Raises:
            IrisError: this rank is not a member of the group.
            HeapClosedError: the context is closed.
        """
        return self._binder.members_of(group)

    def refuse(self, op: str, error: Exception, group: Group = None) -> NoReturn:
        """Raise the error of this member's invalid call, on all members that compare theirs.

        Collective where no such operation was called before, like the call itself; else this member waits for none.
        """
        self._binder.refuse(op, error, group)

    # -- plans, and where they are kept -------------------------------------------------------------------------------
    def _bind(self, call: FusedCall | NormCall, key: Any, workspace: FusedWorkspace | None) -> Any:
        """Return the bound launch of a call; that of a product refers to its workspace and is referred to by it."""
        binder = self._binder

        def holder() -> Launches:  # the context's, or those of a workspace that has no plans for another heap
            if workspace is None:
                return self._bound
            if not isinstance(workspace, FusedWorkspace):
                raise TypeError(f"{call.op}: workspace must be a FusedWorkspace, not {type(workspace).__name__}")
            if workspace.owner is not binder:
                if workspace.owner is not None:
                    raise ArgumentError(
                        f"{call.op}: the workspace holds plans of another context, which is still open; use one for "
                        "each context, or reset() it in between"
                    )
                workspace.calls.scratch.clear()  # kernels of the other context may still use it
            return workspace.calls

        bound: Any = self._prepare(call, key, holder)
        bound.reach = tuple(0 if each is None else reach(each) for each in call.tensors)
        if isinstance(call, NormCall):
            return bound
        if bound.workspace is None:
            bound.workspace = own = FusedWorkspace() if workspace is None else workspace
            own.owner = binder
            binder.workspaces.add(own)
            own.describe(bound)
        if key is not None:
            bound.workspace.calls[key] = bound
        return bound

    # -- the fast path ------------------------------------------------------------------------------------------------
    def _run(
        self, op: str, tensors: tuple[Any, ...], how: tuple[Any, ...], async_op: bool | None,
        workspace: FusedWorkspace | None = None,
    ) -> FusedWorkspace | Work:  # fmt: skip
        binder = self._binder
        if is_compiling() and is_traced(tensors):
            return trace(self, op, tensors, how, async_op, workspace)  # type: ignore[no-any-return]
        gpu = binder.gpu
        if gpu is not None and current_device() != gpu:  # a thread of its own begins on device 0
            with torch.cuda.device(gpu):
                return Operations._run(self, op, tensors, how, async_op, workspace)
        whole = op, *how
        front = self._bound.front if workspace is None else None
        bound: Any = front(tensors, whole) if front is not None else False
        if not bound:
            is_new, bound = bound is None, self._find(op, tensors, how, workspace)
            if is_new and front is not None:
                front.keep(tensors, whole, bound)
        if gpu is not None and torch.cuda.is_current_stream_capturing():
            (binder.held if workspace is None else workspace.held)[id(bound)] = bound  # a graph knows it
        if workspace is not None:
            workspace.describe(bound)
        if async_op:
            return bound.run_async(*tensors)  # type: ignore[no-any-return]
        if async_op is not None:  # else it was to be prepared
            bound.run(*tensors)
        return bound.workspace  # type: ignore[no-any-return]

    def _find(self, op: str, tensors: tuple[Any, ...], how: tuple[Any, ...], workspace: FusedWorkspace | None) -> Any:
        """Return the bound launch of a call, by a key that Python makes; bind it if there is none."""
        key: Any = None
        bound: Any = None
        try:
            low, high, is_recording = self._low, self._high, torch.is_grad_enabled()
            places: list[int] = []
            facts: list[Any] = []  # a tensor is on the heap or not, and aligned or not, wherever it lies
            for each in tensors:
                if each is None:
                    places.append(0)
                    facts.append(None)
                    continue
                at = each.data_ptr()
                places.append(at)
                facts.append((
                    each.shape, each.stride(), each.dtype, each.get_device(), low <= at < high, at % ROW_NBYTES == 0,
                    each.is_neg(), is_recording and each.requires_grad,
                ))  # fmt: skip
            # What torch is set to decides about some products, and may have been changed since.
            a = tensors[1]
            key = op, *facts, how, a.dtype is _FLOAT32 and a.is_cuda and products.torch_allows_tf32()
            if workspace is None:
                bound = self._bound.get(key)
            elif workspace.owner is self._binder:
                bound = workspace.calls.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor with memory, or no key: the binder says what
            if isinstance(how[0], list):
                return self._find(op, tensors, (tuple(how[0]), *how[1:]), workspace)
            key = None
        if bound is None:
            return self._bind(call_of(op, tensors, how), key, workspace)
        if products.overlap(places, bound.reach):
            products.check_apart(call_of(op, tensors, how))  # one may lie in the gaps of the other
        return bound
