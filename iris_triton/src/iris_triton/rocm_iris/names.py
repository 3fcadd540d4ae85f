"""Where the public names of AMD's Iris are: one table, and modules with its paths."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_HERE = "iris_triton.rocm_iris"
_OPS = (
    "matmul_all_reduce", "all_gather_matmul", "all_gather_matmul_hbm_buffer", "matmul_all_gather",
    "matmul_reduce_scatter",
)  # fmt: skip

TABLE = (
    (f"{_HERE}.ported_context", "Iris iris", "iris iris.iris iris.host.iris"),
    (f"{_HERE}.ported_context", "get_device_id_for_rank is_simulation_env", "iris iris.host.platform.utils iris.util"),
    ("iris_core.bench", "do_bench", "iris iris.host.platform.utils iris.util"),
    ("iris_triton.language",
     "load store copy get put atomic_add atomic_sub atomic_cas atomic_xchg atomic_xor atomic_or atomic_and "
     "atomic_min atomic_max",
     "iris iris.iris iris.mem.triton iris.mem.triton.ops iris.device.triton iris.device.triton.ops"),
    (f"{_HERE}.x", "quiet", "iris iris.mem.triton iris.mem.triton.ops iris.device.triton.ops"),
    ("iris_triton.context", "DeviceContext Context=DeviceContext",
     "iris iris.iris iris.mem.triton iris.mem.triton.context iris.device.triton iris.device.triton.context iris.x "
     "iris.x.core"),
    ("iris_triton.tiles", "Tile TileView TensorView AllReduceConfig make_tensor_view",
     "iris iris.mem.triton iris.mem.triton.types iris.x iris.x.core"),
    ("iris_triton.tiles",
     "tile_layout tile_ptr offset_ptr chiplet_transform_chunked compute_tile_indices compute_tile_offsets",
     "iris.mem.triton iris.mem.triton.types iris.x iris.x.core"),
    ("iris_triton.tiles", "chiplet_transform_chunked", "iris.ccl.utils"),
    ("iris_triton.tiles", "check_locks lock_words make_locks", "iris.x"),
    (f"{_HERE}.x",
     "all_gather gather all_to_all all_reduce_atomic all_reduce_spinlock all_reduce_one_shot all_reduce_two_shot "
     "all_reduce_ring reduce_scatter",
     "iris.x"),
    ("iris_triton.language.asm", "read_realtime get_cu_id get_xcc_id wait_cnt=wait_stores",
     "iris.mem.utils iris.device.utils iris.device_utils"),
    ("iris_gluon",
     "GluonDeviceTracing IrisDeviceCtx TraceEvent blocked_layout default_layout iris warp_size",
     "iris.gluon iris.experimental.iris_gluon"),
    ("iris_gluon", "IrisDeviceCtx Context=IrisDeviceCtx",
     "iris.mem.gluon iris.mem.gluon.context iris.device.gluon iris.device.gluon.context"),
    ("iris_gluon", "GluonDeviceTracing Tracing=GluonDeviceTracing", "iris.mem.gluon.tracing iris.device.gluon.tracing"),
    (f"{_HERE}.configs", "Config", "iris.ccl iris.ccl.config"),
    ("iris_core.types", "ReduceOp", "iris.ccl iris.ccl.utils"),
    (f"{_HERE}.collectives", "AllReduceWorkspace", "iris.ccl iris.ccl.all_reduce"),
    (f"{_HERE}.collectives", "extract_group_info", "iris.ccl iris.ccl.utils iris.host.distributed.helpers"),
    *((f"{_HERE}.operations", op, f"iris.ccl.{op}") for op in ("all_gather", "all_to_all", "reduce_scatter")),
    (f"{_HERE}.operations", "all_reduce all_reduce_preamble", "iris.ccl.all_reduce"),
    (f"{_HERE}.configs", "FusedConfig", "iris.ops iris.ops.config"),
    ("iris_core.ops.api", "FusedWorkspace", "iris.ops iris.ops.workspace"),
    *((f"{_HERE}.operations", f"{op} {op}_preamble", f"iris.ops iris.ops.{op}") for op in _OPS),
    (f"{_HERE}.ported_context", "CUDAArrayInterface tensor_from_ptr",
     "iris iris.host.memory.tensor_utils iris.tensor_utils"),
    (f"{_HERE}.hip",
     "count_devices set_device get_device_id get_cu_count get_arch_string get_num_xcc get_wall_clock_rate "
     "get_rocm_version",
     "iris.hip iris.host.platform.hip"),
    ("iris_core.logs", "logger set_logger_level DEBUG INFO WARNING ERROR",
     "iris iris.host.logging iris.host.logging.logging iris.logging"),
    ("iris_core.logs", "IrisFormatter=RankFormatter", "iris.host.logging.logging iris.logging"),
    ("iris_triton.language.trace", "TraceEvent", "iris iris.host.tracing iris.host.tracing.events iris.tracing.events"),
    ("iris_core.tracing.layout", "EVENT_NAMES", "iris.host.tracing iris.host.tracing.events iris.tracing.events"),
    (f"{_HERE}.ported_context", "Tracing", "iris.host.tracing iris.host.tracing.core iris.tracing.core"),
    ("iris_triton.language.trace", "DeviceTracing Tracing=DeviceTracing",
     "iris.mem.triton.tracing iris.device.triton.tracing"),
    (f"{_HERE}.bench", "main power_of_two register", "iris.bench"),
    ("iris_core.bench", "State axis linear_range", "iris.bench"),
)  # fmt: skip
"""A module here, its names (`theirs=ours` where they differ), modules there; docs/reference/ported.md prints it."""

NAMED: dict[str, dict[str, tuple[str, str]]] = {}  # by path and name: the module here, and the name there
for _home, _names, _paths in TABLE:
    for _path in _paths.split():
        for _count in range(_path.count(".") + 1):  # the packages above it as well
            NAMED.setdefault(_path.rsplit(".", _count)[0], {})
        NAMED[_path] |= {(pair := each.split("="))[0]: (_home, pair[-1]) for each in _names.split()}


def _made(path: str) -> ModuleType:
    """Return a module of AMD's Iris, made of names of ours; no subclass, which Triton would not take for a module."""

    def get(name: str) -> Any:
        if name not in NAMED[path]:
            raise AttributeError(f"module {path!r} has no attribute {name!r} here; docs/porting.md lists what there is")
        home, ours = NAMED[path][name]
        value = there[name] = getattr(importlib.import_module(home), ours)  # kernels look it up often
        return value

    module = ModuleType(path, f"Names of AMD's module {path!r}; see iris_triton.rocm_iris.names.")
    there = vars(module)
    there |= {"__path__": [], "__all__": sorted(NAMED[path]), "__getattr__": get}  # a package without files
    there["__dir__"] = lambda: sorted({*there, *NAMED[path]})
    return module


MODULES = {path: _made(path) for path in NAMED}
for _path, _module in MODULES.items():
    _above, _, _last = _path.rpartition(".")
    if _above and _last not in NAMED[_above]:  # `iris.iris` is the function, though there is such a module
        setattr(MODULES[_above], _last, _module)


def publish(root: str) -> None:
    """Put the modules into `sys.modules`, with `root` for the first part of their paths, unless one is there.

    `root` is "iris", or a package of ours; an ImportError if another package is installed, or imported, as `iris`.
    """
    other = sys.modules.get("iris")
    if root == "iris" and other is not MODULES["iris"]:
        spec = importlib.util.find_spec("iris") if other is None else other.__spec__
        if other is not None or (spec is not None and spec.origin is not None):  # a mere folder has no origin
            raise ImportError(
                f"there is a package `iris` already, at {spec and spec.origin}, which iris_triton.as_iris would hide: "
                "uninstall it, or change the import lines as docs/porting.md says"
            )
    for path, module in MODULES.items():
        sys.modules.setdefault(root + path.removeprefix("iris"), module)
