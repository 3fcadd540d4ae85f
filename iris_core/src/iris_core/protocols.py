"""Protocols between the core and its plugins.

Structural types: a plugin's class need not inherit from them; mypy and the conformance kit (`iris_core.testing`) check
implementations.  Allocators never communicate: only the heap runs exchanges, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from iris_core import types

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from iris_core.diagnosis import PairCheck


R = TypeVar("R", contravariant=True)


class Allocator(Protocol):
    """Owns the physical memory of one rank's heap and knows how peers reach it."""

    @property
    def info(self) -> types.PluginInfo:
        """The plugin's description."""

    @property
    def base_ptr(self) -> int:
        """Address of this rank's heap; never changes."""

    @property
    def nbytes(self) -> int:
        """Size of the heap's address range in bytes."""

    @property
    def granularity(self) -> int:
        """Bytes by which physical memory is committed and given back."""

    @property
    def generation(self) -> int:
        """Grows whenever `export` has something new to tell peers."""

    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Back a range with memory; a no-op where memory comes on first touch or is there already."""

    def tensor(self, offset_bytes: int, nbytes: int, on_release: Callable[[], None]) -> torch.Tensor:
        """Return a 1-D uint8 tensor over a range of the heap.

        The tensor has a storage of its own, which keeps the mapping alive.  `on_release` is called exactly once, when
        the last tensor that shares this storage is gone; it may be called from any thread and must not raise.
        """

    def export(self) -> Sequence[types.Segment]:
        """Describe the memory for peers.  Descriptors stay the allocator's."""

    def import_peer(self, rank: int, segments: Sequence[types.Segment]) -> types.PeerMapping:
        """Map a peer's memory; repeating it is harmless.

        Takes over the descriptors in `segments`, also when it raises.
        """

    def close(self) -> None:
        """Unmap peers, then release own memory once its last tensor is gone.  Idempotent."""


class SupportsGrowth(Protocol):
    """An allocator whose `commit` makes memory that peers have to map (`Capability.GROWTH`).

    The heap exchanges segments after every commit that made some: `export` on all ranks, `import_peer` of every peer,
    then `exchanged` on all ranks if all could; the same again while `has_more` on any rank.
    """

    @property
    def has_more(self) -> bool:
        """Whether the last `export` left something out, so that not too many descriptors are open at a time."""

    def exchanged(self) -> None:
        """Every peer has mapped what the last `export` described: it need not be described again."""


class SupportsNetwork(Protocol):
    """An allocator whose memory kernels reach on other nodes, too (`Capability.NETWORK`).

    The heap calls `invite` on all ranks, and `connect` with what all have returned, before `export`.
    """

    def invite(self) -> Sequence[int]:
        """Return what the other ranks need, as integers of 64 bits, equally many on all ranks; refuse what is local."""

    def connect(self, invitations: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> types.Network | None:
        """Make this rank's memory a part of the network.  Collective: it may talk with the other ranks by itself.

        Args:
            invitations: of all ranks, by rank.
            nodes: the ranks of each node.

        Returns:
            How kernels reach the ranks of other nodes; None where there is one node.
        """


class SupportsDecommit(Protocol):
    """An allocator that can give physical memory back while the address range stays."""

    def decommit(self, offset_bytes: int, nbytes: int) -> None:
        """Give a granule-aligned range back; its content is undefined afterwards.

        The heap calls it with the same range on every rank, after all have agreed that none uses it.  It also unmaps
        what this process sees of the peers' memory there, for only then is that memory free.
        """

    @property
    def committed_bytes(self) -> int:
        """Bytes backed by memory now."""


class SupportsImportTensor(SupportsDecommit, Protocol):
    """An allocator that can put an existing tensor's memory on the heap without a copy; `decommit` takes it off."""

    def import_extent(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Return how many bytes of the heap the tensor's memory needs, and where its storage will begin in them.

        And at which offset of the heap the storage lies already, wholly in memory imported before; -1 if it does not.
        The size is a multiple of `granularity`.  UnsupportedError if this tensor's memory cannot be imported.
        """

    def import_tensor(self, offset_bytes: int, tensor: torch.Tensor, on_release: Callable[[], None]) -> torch.Tensor:
        """Map the tensor's memory at an offset of the heap and return a tensor of the same shape that shares it.

        `on_release` is called as by `Allocator.tensor`.  The offset is a multiple of `granularity`; nothing else is
        mapped there, unless it is where an earlier import that `import_extent` found begins: then nothing is mapped.
        The storage of `tensor` lives at least as long as that of the result.
        """


class SupportsMulticast(Protocol):
    """An allocator that can make addresses which reach the heaps of all ranks at once (`Capability.MULTICAST`)."""

    @property
    def multicast(self) -> MulticastRange | None:
        """What makes them, where settings ask for it, which they must on all ranks; it has made nothing yet."""


class MulticastRange(Protocol):
    """Makes these addresses in three steps, while the heap opens; each on all ranks before the next one on any."""

    def offer(self) -> Sequence[types.Segment]:
        """Describe, on rank 0, what all ranks join; nothing on others."""

    def join(self, segments: Sequence[types.Segment]) -> None:
        """Take part in what rank 0 has described, also on rank 0; takes over the descriptors of another rank."""

    def map(self) -> int:
        """Return where this range, of the heap's size, begins in this process; it follows what the heap commits."""


class MemoryMap(Protocol):
    """A backend's view of the heap, for bounds checks and messages."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def nbytes(self) -> int:
        """Size of each rank's heap."""

    @property
    def heap_bases(self) -> tuple[int, ...]:
        """Address of every rank's heap in this process; of ranks on other nodes, where nothing can be accessed."""

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; kernels reach the memory of those of their own."""

    @property
    def network(self) -> types.Network | None:
        """How kernels reach ranks of other nodes; None where they cannot."""

    @property
    def version(self) -> int:
        """Changes whenever `live_blocks` would answer differently."""

    def live_blocks(self) -> Sequence[types.Block]:
        """Blocks that may be accessed, by ascending offset: allocations, and what groups of this rank have.

        Every rank has the allocations at the same offsets, and every member of a group has its memory at the same one.
        """

    def check_peers(self) -> None:
        """Raise PeerLostError if a peer has ended or given up.  Cheap; called while a kernel waits."""

    def stands_still(self, quiet: bool) -> bool:
        """Say that kernels of this rank have polled in vain, and return whether no rank can end that.

        Args:
            quiet: whether nothing has changed since the last call; not at the first one of a launch.
        """

    def elsewhere(self) -> Sequence[int]:
        """Return the ranks whose kernels have not polled in vain, as far as known, while those of this rank did."""


class DeviceBackend(Protocol):
    """A device-side language in which kernels are written."""

    @property
    def info(self) -> types.PluginInfo:
        """The plugin's description."""

    def make_context(self, spec: types.ContextSpec) -> torch.Tensor:
        """Encode the context tensor (int64, on the rank's device) that kernels decode."""

    def attach(self, memory: MemoryMap) -> None:
        """Get the heap: once, when it is open and before any kernel is launched."""

    def detach(self) -> None:
        """Let the heap go: once, before it closes; also where opening failed before or in `attach`."""

    def device_api(self) -> Mapping[str, Any]:
        """Return the device functions by name (load, store, ...), as kernels call them."""

    def compile_cases(self) -> Sequence[types.CompileCase]:
        """Kernels that must compile for every GPU target, without a GPU."""


class SupportsCompileOnly(Protocol):
    """A backend that can compile its cases without a GPU; the conformance kit asks it to."""

    def compile_only(self, case: types.CompileCase, target: str) -> str:
        """Compile one of `compile_cases()` for "sm_90", "gfx942" or "gfx950", and return the assembly.

        Raises the language's own error if the case does not compile.
        """


class SupportsChecking(Protocol):
    """A backend that can check kernels on CPU ranks while they run (docs/checking.md)."""

    def start_checker(
        self, checks: Sequence[str], path: str | None, timeline: bool, heap: Any, world: Any, seed: int | str = 0
    ) -> None:
        """Look for mistakes of the kinds that IRIS_CHECK names, until `detach`.  Collective: every rank calls it.

        Args:
            checks: of `iris_core.settings.CHECKS`.
            path: file to which findings are appended; None: the first one is raised.
            timeline: whether the last accesses of each rank are appended there at the end.
            heap, world: the context's `SymmetricHeap` and `World`.
            seed: of the schedule, or the name of its order, where `checks` has "schedules".
        """


class SupportsDemos(Protocol):
    """A backend that brings programs for `iris demo`."""

    def demos(self) -> Sequence[types.Demo]:
        """Return the programs, in the order in which they are shown; `PluginInfo.demos` has their names."""


class SupportsDeviceBarrier(Protocol):
    """A backend that can make ranks wait for each other on the device."""

    def device_barrier(self, slot: types.BarrierSlot, sem: str, stream: Any = None) -> None:
        """Launch a kernel that ends when every member of the slot's group has launched as many as this rank.

        It raises this rank's word on every member, and waits until all of its own words are as high.  The host neither
        waits nor allocates, so that it can be captured in a graph once it was called with any slot of that size.
        Launches with one slot do not overlap.

        Args:
            slot: the group's flags.
            sem: "release" if this rank's earlier work on the stream must be visible afterwards; or "relaxed".
            stream: a torch stream; None for the current one.
        """


class CallCache(Protocol):
    """Recent calls by what their tensors are like: a quick look, before a key is made of them in Python.

    Calls are equal if their tensors have the same shapes, strides, dtypes, devices, alignment to 16 bytes, are on the
    heap or not, and lie equally far from each other where they overlap; and `how` has the same objects, or equal texts.
    """

    def __call__(self, tensors: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
        """Return what was kept for such a call; None if nothing was, False if nothing can be."""

    def keep(self, tensors: tuple[Any, ...], how: tuple[Any, ...], value: Any) -> None:
        """Keep a value, which is no bool and not None, or drop it."""

    def clear(self) -> None:
        """Drop all."""


class SupportsCallCache(Protocol):
    """A backend that has a quick cache of calls."""

    def call_cache(self, low: int, high: int, skips_float32: bool) -> CallCache | None:
        """Return a new cache, for a heap between these addresses; None where there can be none.

        Calls with tensors of float32 are not kept if `skips_float32`.
        """


class SupportsSignals(Protocol):
    """A backend that can change and await signals on a stream, for `ctx.put` and `ctx.signal_wait`."""

    def signal(self, word: torch.Tensor, value: int, op: str) -> None:
        """Launch a kernel on the current stream that changes one word, after all earlier work of the stream.

        Args:
            word: one element of int32 or int64 in any rank's memory.
            value, op: what to "set" it to, or to "add".
        """

    def signal_wait(self, word: torch.Tensor, value: int, cmp: str) -> None:
        """Launch a kernel on the current stream that ends when `word <cmp> value`; the host waits on the CPU only."""


class SupportsNetworkOptions(Protocol):
    """A backend whose kernels can reach other nodes, for `ctx.launch_options`, and `ctx.put` and `ctx.get` there."""

    def network_options(self, network: types.Network) -> Mapping[str, Any]:
        """Return the options of a launch that link the network's functions.

        Raises:
            UnsupportedError: the backend does not know the functions of that version.
        """

    def copy_between_nodes(
        self, network: types.Network, context: torch.Tensor, peer: int, source: int = 0, target: int = 0,
        nbytes: int = 0, *, gets: bool = False, signal: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel on the current stream that puts to a rank on another node or gets from it, and then signals.

        At its end the source of a put may be changed, and what it gets is there.

        Args:
            network, context: of the heap; the context tensor.
            source, target: offsets on the heaps that are copied from and to, in bytes.
            nbytes: how much; nothing is put where it is 0.
            gets: whether the source is the peer's; else the target is.
            signal: the offset of a word of 64 bits, and what is added to it there once all puts before have arrived.
        """


class SupportsCollectives(Protocol):
    """A backend that brings algorithms for `ctx.ccl`."""

    def collectives(self) -> Sequence[Collective]:
        """Return the algorithms, for this rank's device; what is named first counts where two cost the same."""

    def tables(self) -> Sequence[Path]:
        """Folders with measured tables of collectives (docs/collectives.md has the format)."""


class SupportsOperations(Protocol):
    """A backend that brings algorithms for `ctx.ops`."""

    def operations(self) -> Sequence[FusedOperation | NormOperation]:
        """Return the algorithms, for this rank's device; what is named first counts where two cost the same."""

    def operation_tables(self) -> Sequence[Path]:
        """Folders with measured tables of operations (docs/collectives.md has the format)."""


class SupportsGroups(Protocol):
    """A backend with kernels for the objects of `ctx.ops` that groups make: experts, flash_decode, ring_attention."""

    def group_kernels(self, name: str, space: Any) -> Any:
        """Return the kernels of an object, which launch on the current stream.

        Args:
            name: of the operation; `iris_triton` has ExpertKernels (`collectives.experts`), DecodeKernels and
                RingKernels (`gemm.flash_decode`, `gemm.ring_attention`), or alike.
            space: what they work with, such as `iris_core.ops.experts.Workspace`.
        """


class Context(Protocol):
    """The part of an open `iris_core.Iris` that backends and the core itself use; its members are documented there."""

    device: str  #: device of the heap, as torch names it
    target: types.DeviceTarget  #: the same, with its architecture
    backend: DeviceBackend  #: the device backend
    settings: Any  #: the context's `IrisSettings`
    heap: Any  #: the context's `SymmetricHeap`

    @property
    def cur_rank(self) -> int:
        """This rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    def get_device_context(self) -> torch.Tensor:
        """Return the context tensor."""

    def get_cu_count(self) -> int:
        """Return the number of multiprocessors of this rank's GPU."""

    def empty(self, *sizes: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate on the heap, without values.  Collective."""

    def zeros(self, *sizes: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate on the heap, with zeros.  Collective."""

    def scope(self) -> AbstractContextManager[Any]:
        """Free what is allocated in the block when it ends.  Collective."""

    def barrier(self) -> None:
        """Wait for all ranks.  Collective."""

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the value of one rank on all.  Collective."""

    def warning(self, message: str) -> None:
        """Log at level WARNING."""


class SupportsTracing(Protocol):
    """A backend whose kernels can record events, for `ctx.tracing`."""

    @property
    def ticks_per_second(self) -> float:
        """Ticks of the clock that events are recorded with."""

    def set_trace(self, context: torch.Tensor, words: Sequence[int], buffers: Sequence[torch.Tensor]) -> None:
        """Set the buffers to which kernels write events.

        Args:
            context: the context tensor, which is changed in place: captured graphs record as well.
            words: `iris_core.tracing.layout` says what they mean; empty for no tracing.
            buffers: the tensors whose addresses they hold, which stay until the next call.
        """

    def compare_clocks(self, context: Context) -> types.ClockOffset:
        """Compare this rank's clock with rank 0's.  Collective: every rank of the context calls it."""


class SupportsSelfTest(Protocol):
    """A backend that can test remote access between all pairs of ranks, for `iris doctor`."""

    def self_test(self, context: Context, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
        """Run each operation on each peer's memory, and yield this rank's findings on the result.

        Collective: every rank of the context calls it.  Of a world of one the rank is its own peer.  Waits inside
        kernels are bounded by the context's IRIS_DEVICE_TIMEOUT.

        Args:
            context: an open context, which the doctor closes.
            begin: to be called with (operation, peer) before each step that may hang or crash, peer None for all peers,
                and with ("barrier", None) before waiting for the other ranks; so the report says where a rank was.
        """


class Work(Protocol):
    """Handle of an asynchronous operation."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Let the current stream wait until it is done; on the CPU, or with a time, the host waits.

        CollectiveTimeoutError if it takes longer than `timeout_s`.
        """

    def is_completed(self) -> bool:
        """Whether it is done, without blocking."""


class Algorithm(Protocol[R]):
    """One algorithm for one operation: a `Collective` of `ctx.ccl`, or a `FusedOperation` of `ctx.ops`.

    Both are chosen, agreed on, prepared and kept in the same way; they differ in their requests, in what they prepare
    with, and in the tensors of a launch.  Plugins of the entry-point group iris.collectives bring either.

    Optional members: `measured_only = True`, if it is to be chosen where it was measured and by name only;
    `always_measured = True`, if first calls are to measure it whatever it estimates; `tunings(request)`, which returns
    mappings of fields of the config that `iris tune` should measure for a request: at most six, each another launch,
    the empty one first; `deterministic = True`, if a reduction's bits depend on inputs, shapes and members alone
    (docs/collectives.md). One of `ctx.ccl` then starts with the first member's elements, goes on in the group's order,
    floats of less than 32 bits as float32, and rounds once, so that all of these algorithms have the same bits;
    `spans_nodes = True`, if it serves groups on several nodes, whose memory is not mapped (`measured_only` counts
    within nodes only); `composes = True`, if it is one of `ctx.ccl` that prepares with a `Host`, as those of `ctx.ops`
    do, for it is made of others; `scaled`, which of `FusedRequest.scales` it takes beside "none": its launch then gets
    A's and B's scales, too; `begin(plan, *tensors)`, which launches and returns a handle, before whose `wait()` the
    current stream goes on.
    """

    @property
    def info(self) -> types.PluginInfo:
        """The plugin's description."""

    @property
    def op(self) -> str:
        """Operation: "all_reduce", "matmul_all_reduce", ..."""

    @property
    def name(self) -> str:
        """Name of the algorithm, unique for its operation."""

    def supports(self, request: R, /) -> types.Availability:
        """Whether this algorithm can serve the request, and if not, why.  Local; never raises."""

    def cost(self, request: R, /) -> float:
        """Estimated seconds, for a choice where no measured table covers the request; grows with its bytes."""

    def prepare(self, request: R, host: Any, /) -> Any:
        """Make a plan with its memory.  Collective: every member of the group calls it, and no other rank."""

    def launch(self, plan: Any, /, *tensors: Any, **options: Any) -> Work | None:
        """Run the plan on a stream; as often as one likes.  Collective: every member of the group calls it.

        When it is done on a rank, that rank's output is complete and the other tensors, which were only read, may be
        changed.  Nothing is written to a peer's output before the peer has called, and nothing is allocated.

        Args:
            plan: what `prepare` returned.
            *tensors: of the call; None where this rank has none.
            **options: `stream`, a torch stream, for collectives.

        Returns:
            None if it is done when the stream is there (on the CPU: already), else a handle.
        """


class Collective(Algorithm[types.CollectiveRequest], Protocol):
    """An algorithm of `ctx.ccl`; docs/write_a_collective.md says what it must keep to."""

    def prepare(self, request: types.CollectiveRequest, context: Any, /) -> Any:
        """Make a plan, with the open `Iris`; see `Algorithm`."""

    def launch(
        self, plan: Any, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None, /
    ) -> Work | None:
        """Run the plan on a stream; None for the current one."""


class NormOperation(Algorithm[types.NormRequest], Protocol):
    """An algorithm of `ctx.ops.all_reduce_rms_norm`; docs/write_a_collective.md says what it must keep to."""

    def launch(
        self, plan: Any, out: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
        scales: torch.Tensor | None, /
    ) -> Work | None:  # fmt: skip
        """Run the plan on the current stream."""


class FusedOperation(Algorithm[types.FusedRequest], Protocol):
    """An algorithm of `ctx.ops`: a product and communication; docs/write_a_collective.md says what it must keep to."""

    def launch(
        self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, /
    ) -> Work | None:
        """Run the plan on the current stream."""
