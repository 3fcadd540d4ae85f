"""Frozen dataclasses and enums that the protocols use.  Imports neither torch nor triton."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from iris_core.settings import PluginSettings

    Group = dist.ProcessGroup | DeviceMesh | Sequence[int] | None  # a mesh of one dimension; None: all ranks

VERSION = "0.2.0"
"""Version of iris-core, which its siblings share."""

PLUGIN_API: tuple[int, int] = (1, 0)
"""(major, minor) of the plugin API.  A plugin must have the same major and a minor that is not newer."""


class PluginKind(enum.StrEnum):
    """Kinds of plugins; each has its own entry-point group."""

    ALLOCATOR = "allocator"
    BACKEND = "backend"
    COLLECTIVE = "collective"
    OBSERVER = "observer"

    @property
    def group(self) -> str:
        """The entry-point group of this kind."""
        return "iris.plugins" if self is PluginKind.OBSERVER else f"iris.{self}s"


class PluginState(enum.StrEnum):
    """Where a plugin stands; `reason` in the registry's record says why."""

    DISCOVERED = "discovered"  # its entry point was seen
    LOADED = "loaded"  # imported, checked and registered
    CREATED = "created"  # an instance is in use in this process
    BLOCKED = "blocked"  # IRIS_BLOCK names it
    BROKEN = "broken"  # importing, validating or probing it raised
    INCOMPATIBLE = "incompatible"  # written for another plugin API
    UNAVAILABLE = "unavailable"  # cannot be used on this machine
    CONFLICTING = "conflicting"  # another distribution offers the same name


class DeviceType(enum.StrEnum):
    """Kind of device that a rank computes on."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"


class Capability(enum.StrEnum):
    """Capabilities of an allocator's memory; backends name those that they need."""

    REMOTE_LOAD_STORE = "remote-load-store"
    REMOTE_ATOMICS = "remote-atomics"
    GROWTH = "growth"
    DECOMMIT = "decommit"
    IMPORT_TENSOR = "import-tensor"
    NETWORK = "network"
    MULTICAST = "multicast"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """Description of a plugin, made without touching a device.

    Attributes:
        name: name by which users choose it; equal to its entry point's name.
        kind: what it provides.
        summary: one line for `iris plugins`.
        api: the PLUGIN_API it was written for.
        devices: device types it can work on.
        provides: capabilities of what it creates (allocators).
        requires: capabilities it needs from the other side (backends).
        priority: larger is tried first in automatic selection.
    """

    name: str
    kind: PluginKind
    summary: str
    api: tuple[int, int] = PLUGIN_API
    devices: frozenset[DeviceType] = frozenset()
    provides: frozenset[Capability] = frozenset()
    requires: frozenset[Capability] = frozenset()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether something can be used, and if not, for which `reason`."""

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.ok, bool) and isinstance(self.reason, str)):
            raise TypeError(f"Availability takes a bool and text, not {self.ok!r} and {self.reason!r}")

    @classmethod
    def yes(cls) -> Availability:
        """Say that it can be used."""
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Availability:
        """Say that it cannot be used: what is missing and, where there is one, the way out."""
        return cls(False, reason)

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """One device, described without opening it.

    Attributes:
        type: cpu, cuda or hip.
        index: torch's device index; 0 for the CPU.
        arch: "sm_90", "gfx942", ...; empty if unknown or CPU.
        warp_size: lanes of a warp or wave; 32 for the CPU.
    """

    type: DeviceType
    index: int = 0
    arch: str = ""
    warp_size: int = 32

    @property
    def torch_device(self) -> str:
        """The device string that torch understands ("cpu", "cuda:3"; HIP devices are "cuda" to torch)."""
        return "cpu" if self.type is DeviceType.CPU else f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Everything that a plugin gets to create an allocator or a backend for one rank.

    Attributes:
        target: device of this rank.
        rank: this rank.
        world_size: number of ranks.
        heap_nbytes: size of each rank's heap in bytes.
        settings: the plugin's own settings, already validated (class from `iris_plugin_settings`).
    """

    target: DeviceTarget
    rank: int
    world_size: int
    heap_nbytes: int
    settings: PluginSettings


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rank's heap that peers can map.

    Attributes:
        offset_bytes: where it lies in the owner's heap.
        nbytes: its size.
        payload: plain bytes that peers need (an IPC handle, say).
        fd: file descriptor to be passed; stays the exporter's on export, becomes the importer's on import.
    """

    offset_bytes: int
    nbytes: int
    payload: bytes = b""
    fd: int | None = None


@dataclass(frozen=True, slots=True)
class PeerMapping:
    """Where a peer's heap begins in this process's address space."""

    rank: int
    base_ptr: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A live block of the heap: `nbytes` as asked for, before rounding."""

    offset_bytes: int
    nbytes: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class HeapStats:
    """Figures of one rank's heap, all in bytes unless named otherwise.

    Attributes:
        reserved: size of the heap.
        committed: bytes backed by memory as far as the allocator knows.
        allocated: bytes in live blocks, rounded as allocated.
        pending: bytes freed or dropped that become free at the next agreement of all ranks.
        free: bytes that can be handed out now, without what groups of this rank have at the heap's end.
        largest_free: the largest free block, without that.
        peak: largest `allocated + pending` so far.
        num_blocks: live blocks (count).
        fragmentation: 1 - largest_free / free; 0 when nothing is free.
    """

    reserved: int
    committed: int
    allocated: int
    pending: int
    free: int
    largest_free: int
    peak: int
    num_blocks: int
    fragmentation: float


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with arguments, for the test tier that compiles without a GPU.

    Attributes:
        name: shown in test ids.
        kernel: the jitted function.
        args: positional arguments as `kernel.warmup` takes them (torch dtypes stand for pointers).
        kwargs: constexpr and keyword arguments.
        options: num_warps and the like.
        expect: per device type, regular expressions that the assembly must contain.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[DeviceType, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of a demonstration on one rank.

    Attributes:
        error: largest deviation from the same computation by torch on one process.
        tolerance: what may be expected of the arithmetic.
        detail: one line for the table.
    """

    error: float
    tolerance: float
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the result is right; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Demo:
    """A program that shows what a backend can do, for `iris demo`.

    Attributes:
        name: short name, for the command line.
        title: one line for the table.
        run: called on every rank with the context.
    """

    name: str
    title: str
    run: Callable[[Any], DemoResult]


class ReduceOp(enum.IntEnum):
    """How the elements of the ranks become one."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7


REDUCIBLE = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
"""torch's names of the element types that can be reduced."""


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """One call of a collective, described for choosing an algorithm.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", ...
        shape: shape of this rank's input; of its output, where it has no input.
        dtype: torch's name of the element type ("bfloat16").
        nbytes: bytes of that tensor.
        rank: this rank in the group.
        group_size: ranks that take part.
        target: device of this rank.
        options: operation-specific options (reduction, root, in_place, ...), all in docs/write_a_collective.md.
        members: ranks of the world that take part, in the group's order; empty where there is no world.
        nodes: the node of each of them; empty where the world is on one.
        direct_in: peers can address this rank's input: it lies on the heap and is contiguous.
        direct_out: the same of its output.
        multicast: one address reaches the heaps of all of them at once (IRIS_VMEM__MULTICAST).
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    rank: int
    group_size: int
    target: DeviceTarget
    options: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    direct_in: bool = True
    direct_out: bool = True
    nodes: tuple[int, ...] = ()
    multicast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequest:
    """What the requests of `ctx.ops` have in common; docs/ops.md says more.

    Attributes:
        op: "matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter" or
            "all_reduce_rms_norm".
        dtype: torch's name of the operands' element type, or that of x and of the residual.
        out_dtype: likewise of the result's.
        nbytes: bytes of what is moved: of the gathered A, of the product, or of x.
        rank: this rank in the group.
        members: ranks of the world that take part, in the group's order.
        target: device of this rank.
        options: see `FusedRequest` and `NormRequest`.
        processors: multiprocessors (SMs, CUs) of the device, of the smallest one of all ranks; on the CPU 1.
        nodes: as in `CollectiveRequest`.
    """

    op: str
    dtype: str
    out_dtype: str
    nbytes: int
    rank: int
    members: tuple[int, ...]
    target: DeviceTarget
    options: Mapping[str, Any] = field(default_factory=dict)
    processors: int = 1
    nodes: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """How many ranks take part."""
        return len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRequest(OperationRequest):
    """One product of `ctx.ops`, described for choosing an algorithm; see `OperationRequest`.

    Attributes:
        m, n, k: the product that each rank computes: m x k times k x n.
        a_stride, b_stride, out_stride: of the tensors, in elements.
        out_shape: rows and columns of the output.
        bias_stride: how far, in elements of the bias, a step down and a step to the right go; None without a bias.
        reach_a, reach_out: peers can address A, or the output: on the heap, without gaps in rows, at 16-byte addresses.
        aligned: A, B, the output and the bias begin at multiples of 16 bytes; one answer for each.
        options: "gather_dim", "layout" ("torch" or "tiles"), "bias" (what it lies along: "columns", "rows" or "none"),
            "config" (FusedConfig's fields that were given), "tf32" (products of float32 may be of TF32: what the config
            says, else torch's setting; False for other elements and on the CPU).
        b_dtype: torch's name of B's element type; empty for that of A, from which only 8-bit floats may differ.
        scales: what of A and B has a scale: "rows" (A's rows, B's columns), "blocks" (1 x 128 of A, 128 x 128 of B) or
            "none".
        scale_strides: of A's scales and of B's, in elements: to the next row or block down, and to the right.
    """

    m: int
    n: int
    k: int
    a_stride: tuple[int, ...]
    b_stride: tuple[int, ...]
    out_stride: tuple[int, ...]
    out_shape: tuple[int, int]
    bias_stride: tuple[int, int] | None
    reach_a: bool
    reach_out: bool
    aligned: tuple[bool, bool, bool, bool]
    b_dtype: str = ""
    scales: str = "none"
    scale_strides: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        return self.m, self.n, self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRequest(OperationRequest):
    """One call of `all_reduce_rms_norm`, described for choosing an algorithm; see `OperationRequest`.

    All its tensors are contiguous.

    Attributes:
        rows, hidden: of x, the residual and the output.
        out_dtype: of an 8-bit float there is a scale for each row.
        weight_dtype: torch's name of the weight's element type.
        eps: added to the mean of the squares.
        direct_in: peers can address x: it lies on the heap.
        aligned: x, the residual, the weight and the output begin at multiples of 16 bytes.
        options: "layout" ("torch"), "in_place" (True: of the residual), "config" (fields of `Config` that were given).
    """

    rows: int
    hidden: int
    weight_dtype: str
    eps: float
    direct_in: bool
    aligned: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, hidden)."""
        return self.rows, self.hidden


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """Contents of a context tensor.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        heap_bases: address of every rank's heap in this process.
        timeout_ns: bound of device-side waits in nanoseconds; 0 means unbounded, and so does a negative one, after
            which a wait describes itself (WAITING).
        status_ptr: address of the status words, 0 if none.
        report_range: the host's address and size in bytes of the memory to which kernels write reports, or (0, 0).
        device: torch device string of the tensor.
        trace: the tracing words; empty means tracing is off.
        network: the words with which kernels reach other nodes; empty where they cannot.
    """

    rank: int
    world_size: int
    heap_bases: tuple[int, ...]
    timeout_ns: int = 0
    status_ptr: int = 0
    report_range: tuple[int, int] = (0, 0)
    device: str = "cpu"
    trace: tuple[int, ...] = ()
    network: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """How kernels reach ranks of other nodes: by NCCL's device functions, or by their emulation on CPU ranks.

    Attributes:
        words: what kernels hand to these functions: the device communicator, and the window that the heap is.
        version: (major, minor) of NCCL, which says what its functions look like.
        bitcode: path of the functions, to be linked into kernels; empty where they are emulated.
        far_bases: where they are emulated, the address of every rank's heap in this process.
        delay_s: where they are emulated, how much later than it was started a put may arrive, in seconds.
    """

    words: tuple[int, int]
    version: tuple[int, int]
    bitcode: str = ""
    far_bases: tuple[int, ...] = ()
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BarrierSlot:
    """The flags of one group, as one member's kernel sees them.

    Attributes:
        words: int64[size + 1] on the heap: word i is raised by member i; the last one counts this rank's barriers.
        targets: int64[size] on the device: address, in this process, of this rank's word on every member.
        size: number of members.
    """

    words: torch.Tensor
    targets: torch.Tensor
    size: int


@dataclass(frozen=True)
class ClockOffset:
    """How a device's clock compares with rank 0's at one moment.

    Attributes:
        at: the moment, in ticks of this clock.
        ahead: ticks by which this clock is ahead.
        error: most that this can be wrong by, in ticks.
    """

    at: int
    ahead: int
    error: float
