"""One-sided access of the host: which ranks can be reached; copies to and from another rank's heap, and signals."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import torch

from iris_core.device.context_words import COMPARISONS
from iris_core.device.reports import KernelReports
from iris_core.errors import ArgumentError, CapabilityError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.types import DeviceTarget, DeviceType
from iris_core.world import World

Op = Literal["set", "add"]
Comparison = Literal["eq", "ne", "gt", "ge", "lt", "le"]

_OPS: tuple[Op, ...] = get_args(Op)
_WORDS = torch.int32, torch.int64
_WAY_OUT = "a heap that the network reaches (allocator='nccl'), ctx.ccl or torch.distributed"


class OneSided:
    """Which ranks share a node, and copies and signals that no other rank takes part in; a mixin of contexts.

    Local.  All run on the given stream, or the current one, in its order, and the host waits for nothing; on the CPU
    they are done when the call returns.  `tensor` and `signal` are tensors of this heap, or views of them, which mean
    the same place on the other rank: it must not be freed before the call is done.  What a put writes may be read once
    its signal was seen by `signal_wait` or by `wait` in a kernel, or after a barrier.

    Ranks on other nodes are reached where the allocator has a network ("nccl"): what is copied is contiguous there and
    here, both on the heap; a signal has 64 bits and is added to; and no barrier makes a put visible, but a signal that
    was sent to the same rank after it.

    They raise:
        ArgumentError: (a ValueError) the rank is out of range, or shapes, dtypes or names do not fit.
        NotOnHeapError: (a ValueError) a tensor does not lie wholly on the symmetric heap.
        UnsupportedError: the rank is on another node, which the network does not reach, or not so; or a tensor is a
            lazy view.
        CapabilityError: the backend launches no signals, or its kernels use no network.
        DeviceTimeoutError, DeviceError: of earlier kernels, as `Iris.device_barrier` does; nothing was launched.
    """

    heap: SymmetricHeap
    target: DeviceTarget
    backend: Any
    _world: World
    _reports: KernelReports
    _context: torch.Tensor

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the ranks are on."""
        return len(self._world.nodes)

    @property
    def node(self) -> int:
        """Index of this rank's node; nodes are in the order of their lowest ranks."""
        return self._world.node

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, in ascending order: those whose memory it can reach."""
        return self._world.nodes[self._world.node]

    @property
    def node_group(self) -> tuple[int, ...]:
        """The same, as `group=` takes it."""
        return self.node_ranks

    @property
    def rail_group(self) -> tuple[int, ...]:
        """The ranks that have this rank's place on their nodes, one of each node that has that many; for `group=`."""
        place = self.node_ranks.index(self._world.rank)
        return tuple(ranks[place] for ranks in self._world.nodes if place < len(ranks))

    def is_reachable(self, rank: int) -> bool:
        """Whether kernels of this rank can address another one's heap: it is on the same node.

        Raises:
            ArgumentError: no such rank.
        """
        if not isinstance(rank, int) or not 0 <= rank < self._world.world_size:
            raise ArgumentError(f"is_reachable: there is no rank {rank!r} in a world of {self._world.world_size}")
        return rank in self.node_ranks

    def put(
        self, tensor: torch.Tensor, peer: int, source: torch.Tensor | None = None, *,
        signal: torch.Tensor | None = None, value: int = 1, op: Op = "set", stream: Any = None,
    ) -> None:  # fmt: skip
        """Copy to another rank's `tensor`, and then change its signal.

        Args:
            tensor: where to, on the other rank.
            peer: the other rank.
            source: what to copy, of the same shape and dtype, on this rank's device; this rank's `tensor` by default.
            signal: one integer of 32 or 64 bits to change there afterwards; None for none.
            value, op: what to "set" it to, or to "add".  Several ranks may add to a signal; only one may set it.
            stream: a torch stream; None for the current one.

        Example:
            >>> from iris_core import Iris
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     box, arrived = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64)
            ...     ctx.put(box, 0, torch.ones(4), signal=arrived)
            ...     ctx.signal_wait(arrived, 1)
            ...     box.tolist()
            [1.0, 1.0, 1.0, 1.0]
        """
        given = tensor if source is None else source
        if self._is_far("put", peer):
            self._between_nodes("put", peer, (given, "source"), (tensor, "tensor"), signal, value, op, stream)
            return
        there = self.heap.as_remote(tensor, peer)
        _check_alike("put", tensor, given, "source")
        word = None if signal is None else self._word("put", signal, peer, op)
        with self._on(stream):
            if source is not None or there.data_ptr() != tensor.data_ptr():
                there.copy_(given.detach(), non_blocking=True)
            if word is not None:
                self.backend.signal(word, value, op)

    def get(
        self, tensor: torch.Tensor, peer: int, out: torch.Tensor | None = None, *, stream: Any = None
    ) -> torch.Tensor:
        """Copy another rank's `tensor` to `out`, and return that.

        Args:
            tensor: where from, on the other rank.
            peer: the other rank.
            out: of the same shape and dtype, on this rank's device; a new tensor by default, unless the rank is on
                another node.
            stream: a torch stream; None for the current one.
        """
        if self._is_far("get", peer):
            if out is None:
                raise UnsupportedError(
                    "get: from a rank on another node only a tensor on the heap can be filled: pass out"
                )
            self._between_nodes("get", peer, (tensor, "tensor"), (out, "out"), None, 0, "add", stream)
            return out
        with self._on(stream):
            out = torch.empty_like(tensor, requires_grad=False) if out is None else out
            there = self.heap.as_remote(tensor, peer)
            _check_alike("get", tensor, out, "out")
            return out.copy_(there, non_blocking=True)

    def signal(self, signal: torch.Tensor, peer: int, value: int = 1, *, op: Op = "set", stream: Any = None) -> None:
        """Change another rank's signal, after this rank's earlier work on the stream; see `put`."""
        if self._is_far("signal", peer):
            self._between_nodes("signal", peer, None, None, signal, value, op, stream)
            return
        word = self._word("signal", signal, peer, op)
        with self._on(stream):
            self.backend.signal(word, value, op)

    def signal_wait(self, signal: torch.Tensor, value: int, *, cmp: Comparison = "ge", stream: Any = None) -> None:
        """Let the stream wait until this rank's own signal compares so with a value; the host goes on at once.

        On the CPU the host waits.  What came before the signal is visible to later work on the stream.  Bounded like
        waits in kernels, by IRIS_DEVICE_TIMEOUT.

        Args:
            signal: as in `put`.
            value: the value to compare with.
            cmp: "eq", "ne", "gt", "ge", "lt" or "le": signal <cmp> value.
            stream: a torch stream; None for the current one.
        """
        if cmp not in COMPARISONS:
            raise ArgumentError(f"signal_wait: cmp must be one of {', '.join(COMPARISONS)}, not {cmp!r}")
        word = self._word("signal_wait", signal, self.heap.rank, "set")
        with self._on(stream):
            self.backend.signal_wait(word, value, cmp)

    def launch_options(self) -> dict[str, Any]:
        """Return the options of a launch with which the device context's puts and signals reach other nodes.

        Local.  Empty where the allocator has no network, or there is one node: a kernel is launched alike everywhere.

        Raises:
            CapabilityError: the backend's kernels cannot use a network.
            UnsupportedError: the backend does not know this version of the network's functions.

        Example:
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     ctx.launch_options()  # kernel[grid](x, ctx.get_device_context(), ..., **ctx.launch_options())
            {}
        """
        network = self.heap.network
        if network is None:
            return {}
        self._check_backend("launch_options", "network_options")
        return dict(self.backend.network_options(network))

    def _check_backend(self, what: str, method: str) -> None:
        """Raise CapabilityError if the backend's kernels use no network, in this way."""
        if not hasattr(self.backend, method):
            raise CapabilityError(f"{what}: kernels of backend {self.backend.info.name!r} use no network")

    def _is_far(self, what: str, peer: int) -> bool:
        """Whether a rank is on another node; refused where the network does not reach it."""
        if not 0 <= peer < self._world.world_size or self.is_reachable(peer):
            return False
        if self.heap.network is None:
            self._world.check_reachable(peer, what, _WAY_OUT)
        self._check_backend(what, "copy_between_nodes")
        return True

    def _between_nodes(
        self, what: str, peer: int, source: tuple[torch.Tensor, str] | None, target: tuple[torch.Tensor, str] | None,
        signal: torch.Tensor | None, value: int, op: str, stream: Any,
    ) -> None:  # fmt: skip
        """Let the network copy, and add to a signal; tensors with their names in errors."""
        nbytes, offsets = 0, [0, 0]
        if source is not None and target is not None:
            _check_alike(what, target[0], *source) if what == "put" else _check_alike(what, source[0], *target)
            nbytes = source[0].numel() * source[0].element_size()
            offsets = [self._run(what, peer, *each) for each in (source, target)]
        addition = None
        if signal is not None:
            self._check_word(what, signal, op)
            if op != "add" or signal.dtype is not torch.int64:
                raise UnsupportedError(
                    f"{what}: rank {peer} is on another node, where the network adds to signals of 64 bits only: pass "
                    f'op="add" and a signal of int64, not op={op!r} and one of {signal.dtype}'
                )
            addition = self._run(what, peer, signal, "signal"), value
        if not nbytes and addition is None:
            return
        with self._on(stream):
            where = self.heap.network, self._context, peer, *offsets, nbytes
            self.backend.copy_between_nodes(*where, gets=what == "get", signal=addition)

    def _run(self, what: str, peer: int, tensor: torch.Tensor, name: str) -> int:
        """Return the offset of a tensor that is one run of memory on the heap."""
        offset = self.heap.offset_on(tensor, peer, f"{what}: the {name}")
        if not tensor.is_contiguous():
            raise UnsupportedError(
                f"{what}: rank {peer} is on another node, and the network copies contiguous tensors only; the {name}, "
                f"of shape {tuple(tensor.shape)}, has strides {tensor.stride()}"
            )
        return offset

    def _word(self, what: str, signal: torch.Tensor, peer: int, op: str) -> torch.Tensor:
        """Return a rank's signal."""
        self._check_word(what, signal, op)
        return self.heap.as_remote(signal, peer)

    def _check_word(self, what: str, signal: torch.Tensor, op: str) -> None:
        """Raise if a tensor is no signal, or an operation none for signals."""
        if op not in _OPS:
            raise ArgumentError(f"{what}: op must be one of {', '.join(_OPS)}, not {op!r}")
        if not hasattr(self.backend, "signal_wait"):
            raise CapabilityError(f"{what}: backend {self.backend.info.name!r} launches no signals")
        if signal.dtype not in _WORDS or signal.numel() != 1:
            raise ArgumentError(
                f"{what}: a signal is one element of int32 or int64, not {tuple(signal.shape)} of {signal.dtype}"
            )

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Any:
        """Run the block on a stream, unless a kernel has failed before."""
        if stream is not None and not hasattr(stream, "synchronize"):
            raise TypeError(f"stream must be a torch stream or None, not {type(stream).__name__}")
        self._reports.watch()
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        if self.target.type is DeviceType.CPU:
            yield
            return
        with torch.cuda.device(self.target.index), torch.cuda.stream(stream):
            yield


def _check_alike(what: str, tensor: torch.Tensor, own: torch.Tensor, name: str) -> None:
    """Raise ArgumentError unless what is copied is like the tensor on the heap."""
    if own.shape != tensor.shape or own.dtype != tensor.dtype or own.device != tensor.device:
        raise ArgumentError(
            f"{what}: the {name} is {tuple(own.shape)}, {own.dtype}, on {own.device}; the tensor on the heap is "
            f"{tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
        )
