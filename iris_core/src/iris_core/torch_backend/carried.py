"""Large calls beside products, which NCCL carries: it takes few multiprocessors there, and little of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.torch_backend.work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from iris_core.ccl.api import Collectives

_LEAST_NBYTES = {"allreduce": 16 << 20, "all_gather_single": 64 << 20, "reduce_scatter_single": 64 << 20}
"""From which size on: a bucket of DDP's gradients, and a layer of FSDP's."""
_FLOATS = torch.bfloat16, torch.float16, torch.float32


class Carried:
    """The calls of a process group that its NCCL group inside carries, in the order of those of `ctx.ccl`.

    Args:
        ccl: of the context for GPUs.
        method: returns a method of the group inside, by its name.
    """

    def __init__(self, ccl: Collectives, method: Callable[[str], Callable[..., Any]]) -> None:
        self._ccl, self._method = ccl, method
        self._agreed: set[tuple[Any, ...]] = set()

    def takes(self, name: str, whole: torch.Tensor, part: torch.Tensor, is_async: bool) -> bool:
        """Whether NCCL carries a call: large, of floats off the heap, outside of graphs; a sum only beside others."""
        if whole.nbytes < _LEAST_NBYTES[name] or whole.dtype not in _FLOATS or not (is_async or name != "allreduce"):
            return False
        if torch.cuda.is_current_stream_capturing() or not (whole.is_contiguous() and part.is_contiguous()):
            return False
        return not (self._ccl.is_on_heap(whole) or self._ccl.is_on_heap(part))

    def call(
        self, name: str, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], opts: Any, *arguments: Any
    ) -> dist.Work | None:
        """Run a call of NCCL's method `name`; None if Iris serves it.

        Collective.  RankMismatchError on all ranks if others run another call, or by Iris, when it is new.
        """
        whole, is_async = wholes[0], getattr(opts, "asyncOp", True)
        if len(wholes) != 1 or opts is None or not self.takes(name, whole, parts[0], is_async):
            return None
        key = name, whole.nbytes, whole.dtype
        if key not in self._agreed:
            of = {"dtype": str(whole.dtype), "bytes": str(whole.nbytes)}
            self._ccl.agree({"operation": name, "algorithm": "NCCL of the process group", **of})
            self._agreed.add(key)
        work: dist.Work | None = self._ccl.in_order(self._method(name), *arguments, opts, engine="NCCL")
        if is_async:
            return work
        if work is not None:  # else the current stream has it in order
            work.wait()
        return DoneWork([], whole.device)
