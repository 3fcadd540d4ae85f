"""The shape of the product: small rooms, imports that go downwards, budgets of lines, short routes of calls.

And what it makes of bytes.
"""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import pathlib
from typing import TYPE_CHECKING

import jobs_routes
import pytest

from iris_core.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("iris_core", "iris_allocators", "iris_triton", "iris_gluon")
MODULES_ON_A_LEVEL = 12
LINES_OF_A_MODULE = 600
SHARED_NAMES = {"__init__", "__main__", "_plugin", "api", "cases", "config", "settings"}

FLOORS = (
    {"errors", "types", "hooks", "protocols", "settings", "logs", "documents", "diagnosis"},
    {"world"},
    {"heap", "device", "registry"},
    {"dispatch"},
    {"providers"},
    {"ccl", "ops", "tracing"},
    {"api", "open_context"},
    {"nn", "bench", "cli", "testing", "torch_backend", "tuning", "__init__", "__main__"},
)

# Lines of a room, at most: as many as there are.  They only become fewer, but for a feature's own.  Some have more than
# was planned: `world` and `registry` (what lacks or differs on a rank, named on all), `heap` (captures, streams),
# `device` (timers, orders of launches, reports), `dispatch` and `providers` (first calls that measure, engines).
BUDGETS = {
    "iris_core/*.py": 2619,
    "iris_core/bench": 1200,
    "iris_core/ccl": 336,
    "iris_core/cli": 1632,
    "iris_core/device": 1564,
    "iris_core/dispatch": 3271,
    "iris_core/heap": 2645,
    "iris_core/nn": 838,
    "iris_core/ops": 1336,
    "iris_core/providers": 2088,
    "iris_core/registry": 873,
    "iris_core/testing": 1944,
    "iris_core/torch_backend": 2392,
    "iris_core/tracing": 476,
    "iris_core/tuning": 410,
    "iris_core/world": 2203,
    "iris_allocators/*.py": 499,
    "iris_allocators/driver": 436,
    "iris_allocators/nccl": 225,
    "iris_allocators/vmem": 653,
    "iris_triton/*.py": 1476,
    "iris_triton/collectives": 4305,
    "iris_triton/checker": 4071,
    "iris_triton/demos": 145,
    "iris_triton/gemm": 2736,
    "iris_triton/interpreter": 3590,
    "iris_triton/language": 1853,
    "iris_triton/rocm_iris": 993,
    "iris_triton/testing": 567,
    "iris_triton/tiles": 1025,
    "iris_gluon/*.py": 627,
    "iris_gluon/gemm": 1120,
    "iris_gluon/interpreter": 1489,
}

# What came after the rooms were built, in whose budgets it is: lines at most of each, and the modules and packages.
FEATURES = {
    "PyTorch": (2581, ("iris_core.torch_backend", "iris_core.dispatch.traced")),
    "engines of torch.distributed, several nodes": (
        2641,
        (
            "iris_core.providers.hierarchical", "iris_core.providers.exchanged", "iris_core.providers.straight",
            "iris_core.providers.overlapped", "iris_core.providers.torch_symmetric",
            "iris_core.providers.torch_distributed", "iris_core.world.scaling", "iris_core.world.store_exchange",
            "iris_core.device.one_sided", "iris_allocators.nccl", "iris_triton.language.gin",
            "iris_triton.interpreter.memory.network",
        ),
    ),
    "experts, attention, norms, products of few rows, multicast, launches from C": (
        3883,
        (
            "iris_core.ops.experts", "iris_core.ops.attention", "iris_core.ops.made", "iris_core.nn.expert_parallel",
            "iris_core.ops.unfused_attention",
            "iris_core.nn.norm", "iris_core.nn.sequence", "iris_core.providers.norms", "iris_triton.launcher",
            "iris_triton.collectives.experts", "iris_triton.collectives.nvls", "iris_triton.language.multimem",
            "iris_triton.gemm.packet_norm", "iris_triton.gemm.packet_product", "iris_triton.gemm.reduce_norm",
            "iris_triton.gemm.ring_attention", "iris_triton.gemm.flash_decode", "iris_triton.gemm.parts.attend",
        ),
    ),
    "checker": (
        4586,
        ("iris_triton.checker", "iris_triton.testing.checked",
         *(f"iris_core.cli.{each}" for each in ("check", "all_orders", "timeline"))),
    ),
}  # fmt: skip
REST = 38_000
"""Lines of all else, at most, as planned."""

ENGINE = 4000
"""Lines of `iris_core.dispatch`, `ccl` and `ops` that belong to no feature, at most."""


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    found = {}
    for distribution in DISTRIBUTIONS:
        source = ROOT / distribution / "src"
        for path in sorted(source.rglob("*.py")):
            found[".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports() -> dict[str, set[str]]:
    """Modules of ours that each module imports, those under TYPE_CHECKING and inside functions included."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        found = graph.setdefault(name, set())
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{each.name}" for each in node.names}
                found |= whole & modules().keys() or {node.module}
        graph[name] = (found & modules().keys()) - {name}
    return graph


def lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def floor(module: str) -> int:
    room = [*module.split("."), "__init__"][1]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def room(module: str) -> str:
    """The folder that is a room: the first one below a distribution; modules directly in it are one, too."""
    parts = modules()[module].relative_to(ROOT).parts[2:]  # without distribution/src
    return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*.py"


def test_a_level_has_few_modules():
    levels = collections.Counter(str(path.parent.relative_to(ROOT)) for path in modules().values())
    assert {level: count for level, count in levels.items() if count > MODULES_ON_A_LEVEL} == {}


def test_modules_are_short():
    found = {name: lines(path) for name, path in modules().items()}
    assert {name: count for name, count in found.items() if count > LINES_OF_A_MODULE} == {}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_names_are_not_shared(distribution):
    names = collections.Counter(p.stem for n, p in modules().items() if n.split(".")[0] == distribution)
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES


def test_no_import_goes_upwards():
    found = {
        (name, other)
        for name, others in imports().items()
        for other in others
        if name.startswith("iris_core") and other.startswith("iris_core") and floor(other) > floor(name)
    }
    assert found == set()


def test_no_modules_import_each_other():
    graphlib.TopologicalSorter(imports()).prepare()  # it names a circle


def test_rooms_keep_to_their_budgets():
    found: dict[str, int] = collections.Counter()
    for name, path in modules().items():
        found[room(name)] += lines(path)
    assert {name: count for name, count in found.items() if count > BUDGETS.get(name, 0)} == {}
    assert set(BUDGETS) - set(found) == set()


def without(features: dict[str, tuple[int, tuple[str, ...]]], found: dict[str, int], separator: str) -> dict[str, int]:
    """Return the lines of what belongs to no feature; each of those has some, and keeps to its budget."""
    rest = dict(found)
    for feature, (most, parts) in features.items():
        mine = [name for name in rest if any(f"{name}{separator}".startswith(part + separator) for part in parts)]
        count = sum(map(rest.pop, mine))
        assert 0 < count <= most, (feature, count)
    return rest


def test_features_and_all_else_keep_to_their_budgets():
    assert {name for _, modules_of in FEATURES.values() for name in modules_of} <= modules().keys()
    rest = without(FEATURES, {name: lines(path) for name, path in modules().items()}, ".")
    assert sum(rest.values()) <= REST
    engine = "iris_core.dispatch", "iris_core.ccl", "iris_core.ops"
    assert sum(count for name, count in rest.items() if name.startswith(engine)) <= ENGINE


# -- routes: how many files of the product a call goes through --------------------------------------------------------
FILES = {"zeros": 8, "barrier": 10, "all_reduce": 22, "repeated all_reduce": 6, "Iris": 35}  # at most


def test_calls_go_through_few_files(tmp_path):
    environ = {"IRIS_CACHE_DIR": str(tmp_path)}  # without tables of this machine
    with RankPool(environ=environ) as ranks:  # new ones: they call everything for the first time
        routes, _ = ranks.run(jobs_routes.routes, 2)
    assert routes.keys() == FILES.keys()
    for call, files in routes.items():
        assert len(files) <= FILES[call], (call, sorted(files))


# -- bytes: who may run code, or make objects of any kind, and where the bytes come from -------------------------------
# Every use of what can make any object of bytes, or run text, and why that is not for others to choose.
EXPLAINED = {
    ("world/launch.py", "import", "pickle"),
    ("world/group.py", "import", "pickle"),
    # a pipe that the launcher has made for its own child process, in both directions
    ("world/launch.py", "serve", "pipe.recv"),
    ("world/launch.py", "serve", "pickle.loads"),
    ("world/launch.py", "_collect", "each.pipe.recv"),
    ("world/launch.py", "_collect", "pickle.loads"),
    # text that this module makes itself, in a process that it has forked; the launcher's child evaluates the same
    ("world/launch.py", "_main", "eval"),
    ("world/launch.py", "__reduce__", "eval"),
    # `ctx.broadcast`: within a host, of ranks that the kernel and a token have proved; between nodes `_Plain`
    ("world/group.py", "broadcast_object", "pickle.loads"),
    ("world/group.py", "", "pickle.Unpickler"),
    # a fixture of that name, which compiles kernels
    ("conformance/backend.py", "test_compile_cases_compile", "compile"),
    ("cli/check.py", "run", "compile"),  # the user's own program, to see whether it is one; it is not run there
    # the user's own kernel, rewritten; its source is this program's
    ("interpreter/rewrite.py", "rewrite", "compile"),
}
ANYTHING = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "jsonpickle"}
LOADERS = {"load", "loads", "Unpickler", "run_path", "run_module", "unsafe_load", "open"}


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called; empty if it has none."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def suspicious(name: str) -> bool:
    """Whether a function can run what it is given, or make any object of it."""
    head, _, last = name.rpartition(".")
    if name in ANYTHING or (head in MODULES and last in LOADERS):
        return True
    return name in ("torch.load", "torch.jit.load", "np.load", "numpy.load") or (last == "recv" and "pipe" in head)


def uses(node: ast.AST, where: str, inside: str = "") -> Iterator[tuple[str, str, str]]:
    """Every use of such a function, as (file, innermost function, name); and imports of such modules."""
    if isinstance(node, ast.FunctionDef):
        inside = node.name
    if isinstance(node, ast.Attribute | ast.Name) and suspicious(name_of(node)):
        yield where, inside, name_of(node)
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    yield from ((where, "import", each) for each in names if each.partition(".")[0] in MODULES)
    for child in ast.iter_child_nodes(node):
        yield from uses(child, where, inside)


def test_every_use_of_what_could_run_what_others_wrote_is_explained():
    """And modules that load objects are imported there alone; tests/core has damaged files of every kind refused."""
    files = [(path, "/".join(path.parts[-2:])) for path in modules().values()]
    assert {each for path, where in files for each in uses(parsed(path), where)} == EXPLAINED
