"""What `iris doctor` does in a process of its own, because it may crash or hang: a survey, and the self-tests.

    python -m iris_core.cli._examine FILE ARGUMENT      (the doctor starts it)

All processes append records, lines of JSON, to one file: so what was found before a crash is known, and where it was.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core.diagnosis import Finding, PairCheck, Verdict
from iris_core.errors import IrisError, PeerLostError, error_text
from iris_core.world.launch import RankError, end_with_parent, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from iris_core.types import DeviceTarget

    Record = dict[str, Any]
    Write = Callable[..., None]

HEAP_SIZE = "64MiB"

_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
_KILL_S = 5.0


def examine_apart(
    argument: Record, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[list[Record], str]:
    """Run `main` in a process of its own; return its records, and how it failed: empty if it did not.

    Args:
        argument: the self-test's backend, allocator, device and ranks; empty for the survey.
        timeout_s: seconds after which it is ended, with all processes that it has started.
        environment: its variables; what they say of a world of ranks is left out.
    """
    with tempfile.TemporaryDirectory(prefix="iris-doctor-", ignore_cleanup_errors=True) as folder:
        records, errors = Path(folder, "records"), Path(folder, "errors")
        variables = {name: value for name, value in environment.items() if not name.startswith(_WORLD_VARIABLES)}
        with errors.open("wb") as output:  # a file: a pipe stays open as long as any process is left
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, str(records), json.dumps(argument)],
                env=variables | {"TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # one group of processes, to be ended together
            )
            try:
                status = child.wait(timeout_s)
                problem = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                problem = problem if status else ""
            except subprocess.TimeoutExpired:
                problem = f"did not end within {timeout_s:g} s"
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: left to the system
                        child.wait(_KILL_S)
        told = errors.read_text(errors="replace").strip().splitlines()[-3:]
        return _read(records), "\n".join([problem, *told]) if problem else ""


def _read(path: Path) -> list[Record]:
    """The records of a file; the last one may be cut off."""
    records: list[Record] = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            records.append(json.loads(line))
    return records


def main(file: str, argument: str) -> int:
    """Do what the argument says; 1 if a rank failed."""
    end_with_parent()  # the bound does not hold where somebody has ended the doctor
    job = json.loads(argument)
    if not job:
        survey(writer(file))
        return 0
    try:
        run(on_rank, job["ranks"], job, file)
    except IrisError as error:
        rank = error.rank if isinstance(error, RankError) else None
        if isinstance(error, PeerLostError) and error.ranks:  # its process crashed
            rank = error.ranks[0]
        writer(file)(failed=rank, error=str(error))
        return 1
    return 0


def writer(file: str, **always: Any) -> Write:
    """Return what appends a record in one piece, so that those of several processes do not mix."""

    def write(**fields: Any) -> None:
        with open(file, "ab", buffering=0) as opened:
            opened.write(json.dumps(always | fields, default=str).encode() + b"\n")

    return write


# -- the self-test ----------------------------------------------------------------------------------------------------
def on_rank(job: Record, file: str) -> None:
    """Run a backend's self-test on one rank.

    Args:
        job: backend, allocator, device and ranks.
        file: where the records go.
    """
    from iris_core import Iris

    write = writer(file, rank=int(os.environ["RANK"]))

    def begin(op: str, peer: int | None) -> None:
        write(begin=op, peer=peer)

    begin("open", None)
    try:
        with Iris(HEAP_SIZE, backend=job["backend"], allocator=job["allocator"], device=job["device"]) as ctx:
            self_test = getattr(ctx.backend, "self_test", None)
            if self_test is None:
                write(unsupported=True)
                return
            for check in self_test(ctx, begin):
                if not isinstance(check, PairCheck):
                    raise TypeError(f"the backend's self-test gave {check!r}, not a PairCheck")
                write(check=asdict(check))
            begin("close", None)
        begin("", None)
    except BaseException as error:
        write(error=error_text(error))
        raise


# -- the survey -------------------------------------------------------------------------------------------------------
def survey(write: Write) -> None:
    """Ask torch, the GPUs and the plugins."""
    facts: Record = {"versions": {}, "gpus": [], "pairs": []}
    for name, step in {"torch": _torch, "GPUs": _gpus, "plugins": _plugins}.items():
        write(begin=name)
        for finding in step(facts):
            write(finding=asdict(finding))
        write(facts=facts)


def _torch(facts: Record) -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        yield Finding("torch", Verdict.BROKEN, f"cannot be imported: {error}. pip install 'torch>=2.11'")
        return
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    facts["versions"] = {"torch": torch.__version__, "cuda_of_torch": cuda, "hip_of_torch": hip}
    built = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs only"
    yield Finding("torch", Verdict.OK, f"{torch.__version__}, built for {built}")
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        yield _no_gpu(torch, built)


def _no_gpu(torch: Any, built: str) -> Finding:
    present = sorted(glob.glob("/dev/nvidia[0-9]*")) or sorted(glob.glob("/dev/kfd"))
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hidden = [f"{name}={os.environ[name]!r}" for name in hiding if os.environ.get(name, "0") in ("", "-1")]
    text = f"none: torch, built for {built}, sees no GPU; kernels run on the CPU"
    if hidden:
        return Finding("GPUs", Verdict.NOTE, f"{text}; {', '.join(hidden)} hides them")
    if not present:
        return Finding("GPUs", Verdict.OK if built == "CPUs only" else Verdict.NOTE, text)
    if built == "CPUs only":
        return Finding("GPUs", Verdict.NOTE, f"{text}, but there are {', '.join(present)}: install a torch for them")
    why = "it gives no reason"
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever the driver raises is the reason
        why = " ".join(str(error).split())
    if "802" in why:
        why += "\nGPUs behind NVSwitch need a running nvidia-fabricmanager of the driver's version"
    return Finding("GPUs", Verdict.BROKEN, f"{text}, but there are {', '.join(present)}: {why}")


def _gpus(facts: Record) -> Iterator[Finding]:
    if not facts["versions"]:
        return
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = _gpu(index)
        shown = (gpu["name"], f"{gpu['memory_bytes'] / (1 << 30):.1f} GiB", gpu["arch"], gpu["pci_bus_id"])
        yield Finding(f"GPU {index}", Verdict.OK, ", ".join(filter(None, shown)))
        facts["gpus"].append(gpu)
    gpus = range(len(facts["gpus"]))
    pairs = facts["pairs"] = [
        {"from": one, "to": other, "access": torch.cuda.can_device_access_peer(one, other)}
        for one in gpus
        for other in gpus
        if one != other
    ]
    missing = [f"{pair['from']}->{pair['to']}" for pair in pairs if not pair["access"]]
    if missing:
        hip = facts["versions"]["hip_of_torch"]
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        yield Finding(
            "peer access",
            Verdict.BROKEN,
            f"GPUs cannot reach each other's memory: {listed}. No heap can span them.\n"
            f"`{'rocm-smi --showtopoaccess' if hip else 'nvidia-smi topo -p2p r'}` shows the driver's view; IOMMU, ACS "
            "and VMs without peer-to-peer are common reasons.\n"
            f"Until then choose GPUs that reach each other with {'HIP' if hip else 'CUDA'}_VISIBLE_DEVICES",
        )
    elif pairs:
        yield Finding("peer access", Verdict.OK, f"between all {len(pairs)} ordered pairs")


def _gpu(index: int) -> Record:
    import torch

    properties = torch.cuda.get_device_properties(index)
    bus: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return {
        "index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "arch": _target(index).arch,
        "compute_units": properties.multi_processor_count,
        "pci_bus_id": None if None in bus else "{:08x}:{:02x}:{:02x}.0".format(*bus),
        "uuid": str(getattr(properties, "uuid", "")) or None,
    }


def _target(index: int) -> DeviceTarget:
    from iris_core.device.targets import device_targets

    (target,) = device_targets(f"cuda:{index}", 0)
    return target


def _plugins(facts: Record) -> Iterator[Finding]:
    """Let every plugin that can be loaded say what it needs; then say what `Iris()` would choose."""
    from iris_core.device.targets import device_targets
    from iris_core.registry import default_registry
    from iris_core.registry.select import select
    from iris_core.settings import load_settings
    from iris_core.types import DeviceTarget, DeviceType, PluginKind, PluginState

    targets = [DeviceTarget(DeviceType.CPU), *(_target(gpu["index"]) for gpu in facts["gpus"])]
    registry, settings = default_registry(), None
    with contextlib.suppress(IrisError):  # a wrong setting has an entry of its own
        settings = load_settings()
        registry.block(settings.block)
    for record in registry.load_all():
        if record.kind is PluginKind.OBSERVER or record.state is not PluginState.LOADED:
            continue  # the list of plugins says what is wrong with it
        try:
            yield from registry.diagnose(record, targets)
        except IrisError as error:
            yield Finding(f"diagnosis of {record.name}", Verdict.BROKEN, str(error))
    if settings is not None and facts["versions"]:
        try:
            plan = select(registry, settings, targets=device_targets(settings.device, 0))
        except IrisError as error:
            yield Finding("choice", Verdict.BROKEN, str(error))
        else:
            yield Finding("choice", Verdict.OK, plan.explain())


if __name__ == "__main__":
    from iris_core.cli import _examine  # under its real name, by which new processes find `on_rank`

    sys.exit(_examine.main(*sys.argv[1:]))
