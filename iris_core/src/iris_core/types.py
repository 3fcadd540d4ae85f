"""Frozen dataclasses and enums that the protocols use.  Imports neither torch nor triton."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from iris_core.settings import PluginSettings


Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | Sequence[int] | None"
"""A group of ranks: a mesh has one dimension; None are all ranks."""

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
    """Description of a plugin, made without touching a device."""

    name: str  #: name by which users choose it; equal to its entry point's name
    kind: PluginKind  #: what it provides
    summary: str  #: one line for `iris plugins`
    api: tuple[int, int] = PLUGIN_API  #: the PLUGIN_API it was written for
    devices: frozenset[DeviceType] = frozenset()  #: device types it can work on
    provides: frozenset[Capability] = frozenset()  #: capabilities of what it creates (allocators)
    requires: frozenset[Capability] = frozenset()  #: capabilities it needs from the other side (backends)
    priority: int = 0  #: larger is tried first in automatic selection
    demos: frozenset[str] = frozenset()  #: names of what `demos` of its backend returns (`SupportsDemos`)


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
    """One device, described without opening it."""

    type: DeviceType  #: cpu, cuda or hip
    index: int = 0  #: torch's device index; 0 for the CPU
    arch: str = ""  #: "sm_90", "gfx942", ...; empty if unknown or CPU
    warp_size: int = 32  #: lanes of a warp or wave; 32 for the CPU

    @property
    def torch_device(self) -> str:
        """The device string that torch understands ("cpu", "cuda:3"; HIP devices are "cuda" to torch)."""
        return "cpu" if self.type is DeviceType.CPU else f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Everything that a plugin gets to create an allocator or a backend for one rank."""

    target: DeviceTarget  #: device of this rank
    rank: int  #: this rank
    world_size: int  #: number of ranks
    heap_nbytes: int  #: size of each rank's heap in bytes
    settings: PluginSettings  #: the plugin's own settings, already validated (class from `iris_plugin_settings`)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rank's heap that peers can map."""

    offset_bytes: int  #: where it lies in the owner's heap
    nbytes: int  #: its size
    payload: bytes = b""  #: plain bytes that peers need (an IPC handle, say)
    #: file descriptor to be passed; stays the exporter's on export, becomes the importer's on import
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
    """Figures of one rank's heap, all in bytes unless named otherwise."""

    reserved: int  #: size of the heap
    committed: int  #: bytes backed by memory as far as the allocator knows
    allocated: int  #: bytes in live blocks, rounded as allocated
    pending: int  #: bytes freed or dropped that become free at the next agreement of all ranks
    free: int  #: bytes that can be handed out now, without what groups of this rank have at the heap's end
    largest_free: int  #: the largest free block, without that
    peak: int  #: largest `allocated + pending` so far
    num_blocks: int  #: live blocks (count)
    fragmentation: float  #: 1 - largest_free / free; 0 when nothing is free


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with arguments, for the test tier that compiles without a GPU."""

    name: str  #: shown in test ids
    kernel: Any  #: the jitted function
    args: tuple[Any, ...]  #: positional arguments as `kernel.warmup` takes them (torch dtypes stand for pointers)
    kwargs: Mapping[str, Any] = field(default_factory=dict)  #: constexpr and keyword arguments
    options: Mapping[str, Any] = field(default_factory=dict)  #: num_warps and the like
    #: per device type, regular expressions that the assembly must contain
    expect: Mapping[DeviceType, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of a demonstration on one rank."""

    error: float  #: largest deviation from the same computation by torch on one process
    tolerance: float  #: what may be expected of the arithmetic
    detail: str  #: one line for the table

    @property
    def ok(self) -> bool:
        """Whether the result is right; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Demo:
    """A program that shows what a backend can do, for `iris demo`."""

    name: str  #: short name, for the command line
    title: str  #: one line for the table
    run: Callable[[Any], DemoResult]  #: called on every rank with the context


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
    """One call of a collective, described for choosing an algorithm."""

    #: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", ...
    op: str
    shape: tuple[int, ...]  #: shape of this rank's input; of its output, where it has no input
    dtype: str  #: torch's name of the element type ("bfloat16")
    nbytes: int  #: bytes of that tensor
    rank: int  #: this rank in the group
    group_size: int  #: ranks that take part
    target: DeviceTarget  #: device of this rank
    #: operation-specific options (reduction, root, in_place, ...), all in docs/write_a_collective.md
    options: Mapping[str, Any] = field(default_factory=dict)
    #: ranks of the world that take part, in the group's order; empty where there is no world
    members: tuple[int, ...] = ()
    direct_in: bool = True  #: peers can address this rank's input: it lies on the heap and is contiguous
    direct_out: bool = True  #: the same of its output
    nodes: tuple[int, ...] = ()  #: the node of each of them; empty where the world is on one
    multicast: bool = False  #: one address reaches the heaps of all of them at once (IRIS_VMEM__MULTICAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequest:
    """What the requests of `ctx.ops` have in common; docs/ops.md says more."""

    #: "matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter" or "all_reduce_rms_norm"
    op: str
    dtype: str  #: torch's name of the operands' element type, or that of x and of the residual
    out_dtype: str  #: likewise of the result's
    nbytes: int  #: bytes of what is moved: of the gathered A, of the product, or of x
    rank: int  #: this rank in the group
    members: tuple[int, ...]  #: ranks of the world that take part, in the group's order
    target: DeviceTarget  #: device of this rank
    options: Mapping[str, Any] = field(default_factory=dict)  #: see `FusedRequest` and `NormRequest`
    processors: int = 1  #: multiprocessors (SMs, CUs) of the device, of the smallest one of all ranks; on the CPU 1
    nodes: tuple[int, ...] = ()  #: as in `CollectiveRequest`

    @property
    def group_size(self) -> int:
        """How many ranks take part."""
        return len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRequest(OperationRequest):
    """One product of `ctx.ops`, described for choosing an algorithm; see `OperationRequest`.

    Its options are "gather_dim", "layout" ("torch" or "tiles"), "bias" (what it lies along: "columns", "rows" or
    "none"), "config" (FusedConfig's fields that were given) and "tf32" (products of float32 may be of TF32: what the
    config says, else torch's setting; False for other elements and on the CPU).
    """

    m: int  #: of the product that each rank computes: m x k times k x n
    n: int
    k: int
    a_stride: tuple[int, ...]  #: in elements, as all strides
    b_stride: tuple[int, ...]
    out_stride: tuple[int, ...]
    out_shape: tuple[int, int]  #: rows and columns of the output
    bias_stride: tuple[int, int] | None  #: how far a step down and a step to the right go; None without a bias
    reach_a: bool  #: peers can address A: on the heap, without gaps in rows, at 16-byte addresses
    reach_out: bool  #: the same of the output
    aligned: tuple[bool, bool, bool, bool]  #: A, B, the output and the bias begin at multiples of 16 bytes
    b_dtype: str = ""  #: torch's name of B's element type; empty for that of A, from which only 8-bit floats may differ
    #: what of A and B has a scale: "rows" (A's rows, B's columns), "blocks" (1 x 128 of A, 128 x 128 of B) or "none"
    scales: str = "none"
    #: strides of A's scales and of B's: to the next row or block down, and to the right
    scale_strides: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        return self.m, self.n, self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRequest(OperationRequest):
    """One call of `all_reduce_rms_norm`, described for choosing an algorithm; see `OperationRequest`.

    All its tensors are contiguous; where the output is of 8-bit floats, there is a scale for each row.  Its options are
    "layout" ("torch"), "in_place" (True: of the residual) and "config" (fields of `Config` that were given).
    """

    rows: int  #: of x, the residual and the output
    hidden: int
    weight_dtype: str  #: torch's name of the weight's element type
    eps: float  #: added to the mean of the squares
    direct_in: bool  #: peers can address x: it lies on the heap
    aligned: bool  #: x, the residual, the weight and the output begin at multiples of 16 bytes

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, hidden)."""
        return self.rows, self.hidden


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """Contents of a context tensor."""

    rank: int  #: this rank
    world_size: int  #: number of ranks
    heap_bases: tuple[int, ...]  #: address of every rank's heap in this process
    #: bound of device-side waits in nanoseconds; 0 means unbounded, and so does a negative one, after which a wait
    #: describes itself (WAITING)
    timeout_ns: int = 0
    status_ptr: int = 0  #: address of the status words, 0 if none
    #: the host's address and size in bytes of the memory to which kernels write reports, or (0, 0)
    report_range: tuple[int, int] = (0, 0)
    device: str = "cpu"  #: torch device string of the tensor
    trace: tuple[int, ...] = ()  #: the tracing words; empty means tracing is off
    network: tuple[int, ...] = ()  #: the words with which kernels reach other nodes; empty where they cannot


@dataclass(frozen=True, slots=True)
class Network:
    """How kernels reach ranks of other nodes: by NCCL's device functions, or by their emulation on CPU ranks."""

    #: what kernels hand to these functions: the device communicator, and the window that the heap is
    words: tuple[int, int]
    version: tuple[int, int]  #: (major, minor) of NCCL, which says what its functions look like
    bitcode: str = ""  #: path of the functions, to be linked into kernels; empty where they are emulated
    far_bases: tuple[int, ...] = ()  #: where they are emulated, the address of every rank's heap in this process
    delay_s: float = 0.0  #: where they are emulated, how much later than it was started a put may arrive, in seconds


@dataclass(frozen=True, slots=True)
class BarrierSlot:
    """The flags of one group, as one member's kernel sees them."""

    #: int64[size + 1] on the heap: word i is raised by member i; the last one counts this rank's barriers
    words: torch.Tensor
    targets: torch.Tensor  #: int64[size] on the device: address, in this process, of this rank's word on every member
    size: int  #: number of members


@dataclass(frozen=True)
class ClockOffset:
    """How a device's clock compares with rank 0's at one moment."""

    at: int  #: the moment, in ticks of this clock
    ahead: int  #: ticks by which this clock is ahead
    error: float  #: most that this can be wrong by, in ticks
