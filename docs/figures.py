"""Writes every figure of README.md and docs/ from benchmarks/results: `python docs/figures.py`.

Nothing is typed by hand.  A page has regions, from `<!-- figures: NAME, by docs/figures.py -->` to
`<!-- end of figures -->`.  Each name stands for a function of this file, which writes what is between.
"""

from __future__ import annotations

import json
import pathlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.world.scaling import OPS, SIZES, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REGION = re.compile(
    r"(?<=<!-- figures: )(?P<name>[\w-]+)(?P<head>, by docs/figures\.py -->\n)(?P<text>.*?)(?=<!-- end of figures -->)",
    re.DOTALL,
)
LAUNCHED = {"graph": "graph", "events": "eager", "reported": "eager"}
"""How the calls that a timer takes were launched."""

Result = dict[str, Any]


def results(file: str) -> dict[str, Any]:
    """One file of results."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return loaded


def files(kind: str) -> list[str]:
    """The files of one kind, by the number of GPUs in their names."""
    names = [path.stem for path in RESULTS.glob(f"{kind}-*.json")]
    return sorted(names, key=lambda name: (int(re.findall(r"-(\d+)", name)[0]), name))


def source(*names: str, page: str = "docs") -> str:
    """On what and when files were measured, with links from a page."""
    hosts: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(names):
        machine = results(name)["machine"]
        link = f"[{name}]({'' if page == 'README' else '../'}benchmarks/results/{name}.json)"
        of_host = hosts.setdefault(machine.get("gpu") or machine["cpu"], {})
        of_host.setdefault(machine["date"][:10], []).append(link)
    dated = {host: "; ".join(f"{day}: {', '.join(days[day])}" for day in sorted(days)) for host, days in hosts.items()}
    return "; ".join(f"{host}, {text}" for host, text in dated.items()) + "."


KINDS = ("ccl", "nodes", "fused", "norm", "models", "ccl_launch", "ops_launch", "gluon_gemm", "rma", "torch_backend")


def versions() -> str:
    """Drivers and versions of what was measured, by device."""
    found: dict[str, dict[str, None]] = {}
    for name in (*(name for kind in KINDS for name in files(kind)), "cpu_executor", "checker"):
        machine = results(name)["machine"]
        versions = machine["versions"]
        host = f"driver {machine['driver']}, CUDA {versions['cuda']}, " if machine.get("gpu") else ""
        text = f"{host}torch {versions['torch']}, Triton {versions['triton']}"
        found.setdefault(text, {})[machine.get("gpu") or machine["cpu"]] = None
    return "\n".join(f"- {', '.join(hosts)}: {text}" for text, hosts in found.items())


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table; empty cells at the end of a row are left out, as Markdown allows."""
    lines = [re.sub(r"[ |]+$", " |", f"| {' | '.join(row)} |") for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


# -- one result a row -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        what: in words.
        file: under benchmarks/results, without ".json".
        benchmark, provider, params: which result of it.
        shown: how its number is written; a format string over the result's fields.
        beside: the same for the provider that it is compared with in that run; may be empty.
    """

    what: str
    file: str
    benchmark: str
    provider: str
    shown: str
    beside: str = ""
    params: dict[str, Any] = field(default_factory=dict)


def gemm(shape: tuple[int, int, int], timer: str) -> Figure:
    """A row for the GEMM core."""
    what = f"GEMM core in Gluon, bf16, {' x '.join(map(str, shape))}"
    number = "{tflop_per_s:.0f} TFLOP/s"
    wanted = {"shape": str(shape), "timer": timer}
    return Figure(what, "gluon_gemm-1", "gluon_gemm.gemm", "gluon", number, f"cuBLAS: {number}", wanted)


def pair(what: str, nbytes: int) -> Figure:
    """A row for stores to a peer."""
    number = "{gb_per_s:.1f} GB/s"
    return Figure(what, "rma-4xtorch", "rma.pair", "push", number, f"copy engine: {number}", {"nbytes": nbytes})


FIGURES = (
    pair("a kernel's stores to a peer, 256 MiB", 1 << 28),
    pair("a kernel's stores to a peer, 64 KiB", 1 << 16),
    gemm((8192, 8192, 8192), "graph"),
    gemm((2000, 3000, 1000), "graph"),
    gemm((2000, 3000, 1000), "events"),
    Figure(
        "GEMM + all-scatter in one kernel, bf16, 8192 x 8192 x 8192", "gluon_gemm-4", "gluon_gemm.all_scatter",
        "gluon fused", "{time_us:.0f} us", "torch.matmul, then NCCL's all-gather: {time_us:.0f} us",
    ),
)  # fmt: skip


def find(figure: Figure, provider: str) -> Result:
    """The one result of a provider that a row means; only what was verified counts."""
    found = [
        each
        for each in results(figure.file)["results"]
        if (each["benchmark"], each.get("provider")) == (figure.benchmark, provider)
        and all(each["params"].get(name) == value for name, value in figure.params.items())
    ]
    if len(found) != 1 or not found[0]["verified"]:
        raise LookupError(f"{figure.file}.json has {len(found)} results for {figure.what!r} by {provider!r}")
    return found[0]


def kernels() -> str:
    """Remote access and products."""
    rows = []
    for figure in FIGURES:
        own = find(figure, figure.provider)
        other = own.get("best_peer") or own.get("baseline")
        beside = figure.beside.format(**find(figure, other)) if figure.beside else ""
        rows.append([figure.what, figure.shown.format(**own), beside, LAUNCHED[own["timer"]], str(own["num_ranks"])])
    heads = ["", "measured", "beside it, in the same run", "launched", "GPUs"]
    return f"{table(heads, rows)}\n\n{source(*(figure.file for figure in FIGURES))}"


# -- beside peers -----------------------------------------------------------------------------------------------------
_LEFT_OUT: dict[str, set[Any]] = {
    "fused": {1, 64, 512, 1024, 2048, "11008x4096", "28672x8192"},
    "norm": {16, 128}, "models": {"heap", "dispatch", 8, 8192},
    "torch_backend": {"DDP, 4096/512", "nccl heap"},
    "ccl": {"all_gather", "reduce_scatter"},  # between kernels
}  # fmt: skip
"""Values of parameters by kind of results: points with them are in the file alone."""


def is_on_page(kind: str, params: dict[str, Any]) -> bool:
    """Whether a page has a point."""
    return _LEFT_OUT[kind].isdisjoint(params.values())


PEERS = {"ccl": ("nccl", "nccl-windows", "torch one_shot", "torch two_shot"), "fused": ("cublas+nccl", "async-tp")}


@dataclass(frozen=True)
class Point:
    """What was verified of one operation at one point.

    Attributes:
        kind, file: which results.
        op: the operation.
        params: the point.
        launched: "graph" or "eager".
        num_ranks: how many GPUs.
        times: microseconds by provider.
    """

    kind: str
    file: str
    op: str
    params: dict[str, Any]
    launched: str
    num_ranks: int
    times: dict[str, float]

    @property
    def name(self) -> str:
        """The operation, and where our tensors lie unless on the heap."""
        place = self.params.get("place", "heap")
        return self.op if place == "heap" else f"{self.op}, {place}"

    @property
    def ratio(self) -> float:
        """How many times as fast the choice is as the best peer."""
        return min(self.times[peer] for peer in PEERS[self.kind] if peer in self.times) / self.times["iris"]


def points(kind: str) -> Iterator[Point]:
    """What all files of a kind say of all ranks together, beside peers."""
    for file in files(kind):
        found: dict[Any, Point] = {}
        for each in results(file)["results"]:
            usual = {"group": "world", "scales": "none"}
            if not each.get("verified") or any(each["params"].get(name, own) != own for name, own in usual.items()):
                continue
            op, launched = each["benchmark"].removeprefix(f"{kind}."), LAUNCHED[each["timer"]]
            op = f"{each['params']['collective']} between kernels" if "collective" in each["params"] else op
            key = op, launched, *each["params"].items()
            new = Point(kind, file, op, each["params"], launched, each["num_ranks"], {})
            found.setdefault(key, new).times[each["provider"].removesuffix(" eager")] = each["time_us"]
        yield from (each for each in found.values() if "iris" in each.times and set(PEERS[kind]) & set(each.times))


def against(*, kinds: tuple[str, ...] = ("ccl", "fused")) -> str:
    """How many times as fast as the best peer our choice is, at least and at most."""
    rows: dict[str, dict[str, list[float]]] = {}
    for each in (each for kind in kinds for each in points(kind) if "collective" not in each.params):
        rows.setdefault(each.name, {}).setdefault(f"{each.num_ranks} GPUs, {each.launched}", []).append(each.ratio)
    heads = sorted({head for row in rows.values() for head in row})
    cells = [[name, *(spread(row.get(head, [])) for head in heads)] for name, row in rows.items()]
    where = source(*(each for kind in kinds for each in files(kind)), page="README")
    return f"{table(['', *heads], cells)}\n\n-: unmeasured. {where}"


def spread(ratios: list[float]) -> str:
    """The least and the greatest of some ratios; a dash for none."""
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"


def size(nbytes: int) -> str:
    """A number of bytes in words."""
    unit = next(unit for unit in (30, 20, 10, 0) if nbytes >= 1 << unit)
    return f"{nbytes >> unit} {({30: 'GiB', 20: 'MiB', 10: 'KiB', 0: 'bytes'})[unit]}"


def collectives() -> str:
    """Powers of 256, in graphs, and of ordinary tensors eagerly, too."""
    rows: dict[str, dict[str, str]] = {}
    columns: dict[tuple[int, int], str] = {}
    for each in points("ccl"):
        nbytes, is_eager = each.params["nbytes"], each.launched == "eager"
        is_left_out = (is_eager and each.params["place"] == "heap") or not is_on_page("ccl", each.params)
        if nbytes.bit_length() % 8 == 3 and not is_left_out:
            column = columns.setdefault((each.num_ranks, nbytes), f"{each.num_ranks} GPUs, {size(nbytes)}")
            cell = f"{each.times['iris']:.1f} ({each.ratio:.2f})"
            rows.setdefault(f"{each.name}, eager" if is_eager else each.name, {})[column] = cell
    heads = [columns[key] for key in sorted(columns)]
    cells = [[what, *(row.get(head, "") for head in heads)] for what, row in rows.items()]
    return f"{table(['us, graph', *heads], cells)}\n\n{source(*files('ccl'))}"


def between() -> str:
    """Collectives between two nodes by levels, beside NCCL's flat ones."""
    rows: dict[str, dict[str, str]] = {}
    for file in files("nodes"):
        for each in results(file)["results"]:
            if (each["benchmark"], each["provider"]) == ("nodes.between", "iris hierarchical") and each["verified"]:
                column = f"{each['num_ranks']} GPUs, {size(each['params']['nbytes'])}"
                cell = f"{each['time_us']:.0f} ({each['ratio_to_best_peer']:.2f})"
                rows.setdefault(each["params"]["op"], {})[column] = cell
    heads = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[op, *(row.get(head, "") for head in heads)] for op, row in rows.items()]
    return f"{table(['us, eager', *heads], cells)}\n\n{source(*files('nodes'))}"


def fused() -> str:
    """The choice beside the best peer, in graphs and eagerly."""
    found: dict[tuple[int, str], dict[tuple[int, str], dict[str, str]]] = {}  # tables, their rows, and cells
    for each in points("fused"):
        if is_on_page("fused", each.params):
            rows = found.setdefault((each.num_ranks, each.launched), {})
            row = rows.setdefault((each.params["m"], each.params["weight"]), {})
            row[each.op] = f"{each.times['iris']:.0f} ({each.ratio:.2f})"
    parts = []
    for (gpus, launched), rows in found.items():
        ops = list(dict.fromkeys(op for row in rows.values() for op in row))
        heads = (op.replace("_", "_<wbr>") for op in ops)  # may be broken there
        cells = [[f"{m}, {weight}", *(row.get(op, "") for op in ops)] for (m, weight), row in sorted(rows.items())]
        parts.append(table([f"us, {gpus} GPUs, {launched}", *heads], cells))
    return "\n\n".join([*parts, source(*files("fused"))])


# -- torch's backend --------------------------------------------------------------------------------------------------
def by_point(benchmark: str) -> dict[tuple[str, int, str, str], dict[str, Result]]:
    """What was verified of a benchmark of the backend by (file, GPUs, launched, point), then by provider."""
    found: dict[tuple[str, int, str, str], dict[str, Result]] = {}
    for file in files("torch_backend"):
        for each in results(file)["results"]:
            if each["benchmark"] == f"torch_backend.{benchmark}" and each.get("verified"):
                key = file, each["num_ranks"], LAUNCHED[each["timer"]], json.dumps(each["params"])
                found.setdefault(key, {})[each["provider"].removesuffix(" eager")] = each
    return found


def torch_all_reduce() -> str:
    """`dist.all_reduce` of heap tensors beside NCCL's backend, at powers of 256."""
    rows: dict[tuple[int, int], list[str]] = {}
    for (_, gpus, launched, point), there in by_point("all_reduce").items():
        params, times = json.loads(point), {name: each["time_us"] for name, each in there.items()}
        is_shown = params["place"] == "heap" and params["nbytes"].bit_length() % 8 == 3
        if {"iris", "nccl"} <= times.keys() and is_shown:
            cells = rows.setdefault((gpus, params["nbytes"]), [""] * 2)
            cells[launched == "graph"] = f"{times['iris']:.1f} ({times['nccl'] / times['iris']:.2f})"
    if not rows:
        return "No run on GPUs is kept yet."
    heads = ["GPUs", "bytes", "eager", "graph"]
    lines = [[str(gpus), size(nbytes), *row] for (gpus, nbytes), row in sorted(rows.items())]
    return f"{table(heads, lines)}\n\n{source(*files('torch_backend'))}"


def torch_steps() -> str:
    """Thousands of tokens per second of training steps: by provider and launch, and those of the host by provider."""
    launched: dict[str, dict[str, str]] = {}
    eager: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for benchmark, what in (("tensor_parallel", "tensor parallel"), ("fsdp2", "FSDP2"), ("ddp", "DDP")):
        for (_, gpus, how, point), there in by_point(benchmark).items():
            params, is_divided = json.loads(point), benchmark == "tensor_parallel"
            tokens = params["batch"] * params["tokens"] * (1 if is_divided else gpus)
            for name, each in there.items():
                is_beside = name != "nccl" and "nccl" in there
                ratio = each.get("ratio") or (there["nccl"]["time_us"] / each["time_us"] if is_beside else 0.0)
                beside = f" ({ratio:.2f})" if is_beside else ""
                cell = f"{tokens / each['time_us'] * 1e3:,.0f}{beside}"
                if is_divided:
                    columns[f"{gpus} GPUs, {how}"] = None
                    launched.setdefault(name, {})[f"{gpus} GPUs, {how}"] = cell
                    continue
                step = f"{what}, {params['width']}/{params['tokens']}"
                if is_on_page("torch_backend", {"step": step, "provider": name}):
                    eager.setdefault(step, {})[f"{gpus} GPUs, {name}"] = cell
    if not launched or not eager:
        return "No run on GPUs is kept yet."
    names = list(dict.fromkeys(name for row in eager.values() for name in row))
    divided = [[name, *(row.get(column, "") for column in columns)] for name, row in launched.items()]
    others = [[step, *(row.get(name, "") for name in names)] for step, row in eager.items()]
    tables = table(["tensor parallel", *columns], divided), table(["eager", *names], others)
    return "\n\n".join([*tables, source(*files("torch_backend"))])


# -- times of one thing -----------------------------------------------------------------------------------------------
LAUNCHES = ("iris, to the launcher", "iris", "iris bound")
BESIDE_LAUNCHES = ("torch two_shot", "nccl", "triton", "torch")


def launches() -> str:
    """What repeated calls cost the CPU."""
    rows = []
    for kind in ("ccl_launch", "ops_launch"):
        for file in files(kind):
            by_call: dict[str, Result] = {}
            for each in results(file)["results"]:
                (call,) = each["params"].values()
                by_call.setdefault(call, {"GPUs": each["num_ranks"]})[each["provider"]] = each["time_us"]
            for call, times in by_call.items():
                own = [f"{times[name]:.1f}" if name in times else "" for name in LAUNCHES]
                beside = [f"{name} {times[name]:.1f}" for name in BESIDE_LAUNCHES if name in times]
                rows.append([f"`{call}`", str(times["GPUs"]), *own, ", ".join(beside)])
    heads = ["us of the CPU, eager", "GPUs", "to the launcher", "whole", "bound", "beside"]
    return f"{table(heads, rows)}\n\n{source(*files('ccl_launch'), *files('ops_launch'))}"


def norms() -> str:
    """all_reduce + residual + RMSNorm beside a collective and the compiled norm, in graphs and eagerly."""
    names = {"iris": "one call", "ccl+norm": "`all_reduce` and norm", "nccl+norm": "NCCL and norm"}
    rows = []
    for file in files("norm"):
        by_rows: dict[int, dict[str, float]] = {}
        for each in results(file)["results"]:
            if is_on_page("norm", each["params"]):
                by_rows.setdefault(each["params"]["rows"], {})[each["provider"]] = each["time_us"]
        gpus = str(results(file)["results"][0]["num_ranks"])
        for number, times in by_rows.items():
            cells = (f"{times[name + end]:.1f}" for name in names for end in ("", " eager"))
            rows.append([str(number), gpus, *cells])
    heads = [f"{name}, {how}" for name in names.values() for how in ("graph", "eager")]
    return f"{table(['rows of 8192, us', 'GPUs', *heads], rows)}\n\n{source(*files('norm'))}"


def models() -> str:
    """Tokens to experts and back, heads for tokens, attention to a divided cache, beside their peers."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for file in files("models"):
        points: dict[tuple[str, int], dict[str, float]] = {}
        for each in results(file)["results"]:
            if not is_on_page("models", each["params"]):
                continue
            name = ", ".join((each["benchmark"].removeprefix("models."), *map(str, each["params"].values())))
            points.setdefault((name, each["num_ranks"]), {})[each["provider"]] = each["time_us"]
        for (name, gpus), times in points.items():
            for how, suffix in (("graph", ""), ("eager", " eager")):
                beside = next(peer for peer in ("alone+ccl", "nccl") if f"{peer}{suffix}" in times or peer in times)
                other = times.get(f"{beside}{suffix}") or times[beside]
                cell = f"{times[f'iris{suffix}']:.1f} ({other / times[f'iris{suffix}']:.2f})"
                rows.setdefault((name, beside), {})[f"{gpus} GPUs, {how}"] = cell
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[*name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    return f"{table(['us', 'beside', *columns], cells)}\n\n{source(*files('models'))}"


def signals() -> str:
    """Signals and barriers on the allocator `torch`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    shown = [file for file in files("rma") if results(file)["run"]["allocator"] == "torch"]
    for file in shown:
        for each in results(file)["results"]:
            if each["benchmark"] in ("rma.latency", "rma.barrier") and each.get("provider") in ("signal", "barrier"):
                what = "signal, one way" if each["provider"] == "signal" else "`device_barrier`"
                where = f"{each['num_ranks']} GPUs"
                row = rows.setdefault((f"{what}, {each['params']['sem']}", LAUNCHED[each["timer"]]), {})
                row[where] = f"{each['time_us']:.2f}"
    columns = sorted({where for row in rows.values() for where in row})
    cells = [[*name, *(row.get(where, "") for where in columns)] for name, row in sorted(rows.items())]
    return f"{table(['us', 'launched', *columns], cells)}\n\n{source(*shown)}"


def executor() -> str:
    """The CPU executor beside Triton's interpreter."""
    by_case: dict[str, dict[str, float]] = {}
    for each in results("cpu_executor")["results"]:
        if each["verified"]:
            by_case.setdefault(each["params"]["case"], {})[each["provider"]] = each["time_us"]
    rows = [
        [case, *(f"{times[name]:.0f}" if name in times else "" for name in ("executor", "stock"))]
        for case, times in by_case.items()
    ]
    return f"{table(['us, eager', 'executor', 'stock interpreter'], rows)}\n\n{source('cpu_executor')}"


def checker() -> str:
    """What the checker costs."""
    heads = ["ms, eager", "off", "races", "all", "races / off", "all / off", "bytes of tables per byte touched"]
    rows = []
    for each in results("checker")["rows"]:
        times = (each[key] for key in ("off_ms", "races_ms", "all_ms"))
        ratios = (each[key] for key in ("times", "times_all", "bytes_per_byte"))
        rows.append([each["program"], *(f"{number:.0f}" for number in times), *(f"{number:.1f}" for number in ratios)])
    return f"{table(heads, rows)}\n\n{source('checker')}"


def gpu_tests() -> str:
    """The reports of GPU tests: for each tier what passed, failed and was skipped."""
    rows = []
    for name in files("gpu-tests"):
        report = results(name)
        machine, ranks = report["machine"], report["ranks_per_gpu"]
        on = f"{machine['gpus']} x {machine['gpu']}" + (f", {ranks} ranks on each" if ranks > 1 else "")
        tiers = {tier["gpus"]: f"{tier['passed']}/{tier['failed']}/{tier['skipped']}" for tier in report["tiers"]}
        link = f"[{report['source']['commit'][:7]}](../benchmarks/results/{name}.json)"
        rows.append([on, machine["date"][:10], link, *(tiers.get(gpus, "") for gpus in (1, 2, 4, 8))])
    heads = ["passed/failed/skipped", "date", "commit", *(f"tier {gpus}" for gpus in (1, 2, 4, 8))]
    return table(heads, rows)


# -- several nodes, on paper ------------------------------------------------------------------------------------------
def scaling() -> str:
    """What the model says of collectives and of training steps, with its own constants."""
    machines, model = [Machine(1 << power) for power in range(8)], results("published")["training"][0]
    alike: dict[tuple[str, ...], list[str]] = {}
    for op in OPS:
        both = [[f"{each.seconds(op, nbytes) * 1e6:,.0f}" for nbytes in SIZES[::2]] for each in machines]
        alike.setdefault(tuple(map(" / ".join, both)), []).append(op)
    sizes = " / ".join(map(size, SIZES[::2]))
    columns = [["nodes of 8", *(str(each.num_nodes) for each in machines)]]
    columns += [[f"{', '.join(ops)}, {sizes}, us", *times] for times, ops in alike.items()]
    for tokens in (model["tokens_per_gpu"], 1024):
        steps = (each.step_seconds(*trained(model, tokens)) for each in machines)
        columns.append([f"step, {tokens} tokens, ms", *(f"{step * 1e3:,.0f}" for step in steps)])
    heads, *rows = map(list, zip(*columns, strict=True))
    return table(heads, rows)


def trained(model: Result, tokens: float) -> tuple[float, float, int]:
    """What `step_seconds` takes, of a model that was trained on one node: its computation goes with the tokens."""
    return tokens / model["tokens_per_second_per_gpu"], model["params"], model["layers"]


def scaling_published() -> str:
    """What the model says where others have measured."""
    published, rows = results("published"), []
    for each in published["bus_bandwidth"]:
        machine = Machine(each["num_nodes"], each["gpus"])
        rates = [machine.bus_bytes_per_s(each["op"], each["nbytes"], flat=flat) / 1e9 for flat in (True, False)]
        shown = [f"{rate:.0f}" for rate in (each["gb_per_s"], *rates)]
        rows.append([f"bus GB/s: [{each['what']}]({each['source']})", *shown])
    about = trained(published["training"][0], published["training"][0]["tokens_per_gpu"])
    for each in published["training"]:
        machine = Machine(each["num_nodes"], each["gpus"])
        steps = [machine.step_seconds(*about, flat=flat) for flat in (True, False)]
        rates = [each["tokens_per_second_per_gpu"], *(each["tokens_per_gpu"] / step for step in steps)]
        rows.append([f"tokens/s per GPU: [{each['what']}]({each['source']})", *(f"{rate:,.0f}" for rate in rates)])
    return table(["", "published", "model, flat", "model, by levels"], rows)


REGIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels, "against": against, "collectives": collectives, "between": between, "fused": fused,
    "launches": launches, "signals": signals, "executor": executor, "checker": checker, "gpu-tests": gpu_tests,
    "torch-all-reduce": torch_all_reduce, "torch-steps": torch_steps, "scaling": scaling,
    "scaling-published": scaling_published, "norms": norms, "models": models, "versions": versions,
}  # fmt: skip


def pages() -> list[pathlib.Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(page: str) -> str:
    """A page with its regions as they should be."""
    return REGION.sub(lambda found: f"{found['name']}{found['head']}{REGIONS[found['name']]()}\n", page)


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text()))
