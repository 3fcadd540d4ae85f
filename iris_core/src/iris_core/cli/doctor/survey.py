"""What is asked of torch, the GPUs' drivers and the plugins: in a process of its own, because they may crash or hang.

    python -m iris_core.cli.doctor.survey FOLDER ARGUMENT      (the doctor starts it; ARGUMENT is not used)

Steps run one after the other; each one's result is recorded when it is done.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core.cli.doctor.process import Recorder, environment_without_world, read_records, run_module
from iris_core.diagnosis import Finding, Verdict
from iris_core.errors import IrisError
from iris_core.world.launch import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from iris_core.types import DeviceTarget

_FILE = "survey.jsonl"


@dataclass
class Survey:
    """What was found.

    Attributes:
        findings: entries of the report.
        versions: versions of libraries and drivers by name.
        gpus: what is known of every GPU; see `gpus.list_gpus`.
        pairs: what is known of every ordered pair of GPUs: `from`, `to`, `access`, `link`, `link_count`, `atomics`.
        hip: whether the GPUs are AMD's.
        torch: whether torch can be imported.
    """

    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    hip: bool = False
    torch: bool = False


def take_survey(timeout_s: float) -> Survey:
    """Run the survey in a process of its own.

    Args:
        timeout_s: seconds that it may take.
    """
    with tempfile.TemporaryDirectory(prefix="iris-doctor-") as name:
        folder = Path(name)
        ending = run_module(__name__, {}, folder, timeout_s, environment_without_world())
        survey, unfinished = read_survey(read_records(folder / _FILE))
    if ending.problem:
        where = f"examining {unfinished}" if unfinished else "examining torch, GPUs and plugins"
        text = "\n".join(filter(None, [f"{where} {ending.problem}", ending.stderr]))
        survey.findings.append(Finding(unfinished or "survey", Verdict.BROKEN, text))
    return survey


def read_survey(records: Iterable[dict[str, Any]]) -> tuple[Survey, str]:
    """Return what the records tell, and the step that was not finished; empty if all were."""
    survey, unfinished = Survey(), ""
    for record in records:
        if "begin" in record:
            unfinished = record["begin"]
            continue
        unfinished = ""
        for each in record["findings"]:
            survey.findings.append(Finding(**{**each, "verdict": Verdict(each["verdict"])}))
        survey.versions.update(record["versions"])
        survey.gpus = record["gpus"]
        survey.pairs = record["pairs"]
        survey.hip, survey.torch = record["hip"], record["torch"]
    return survey, unfinished


def collect(write: Callable[..., None]) -> None:
    """Do all steps in this process and record them.

    Args:
        write: `Recorder.write`.
    """
    survey = Survey()
    for name, step in (
        ("torch", _torch),
        ("GPUs", _gpus),
        ("GPU links", _links),
        ("plugins", _plugins),
        ("choice", _choice),
    ):
        write(begin=name)
        survey.findings = []
        try:
            step(survey)
        except Exception as error:  # noqa: BLE001 - what a step runs into is what it has found
            text = f"examining it raised {type(error).__name__}: {error}"
            survey.findings.append(Finding(name, Verdict.BROKEN, text))
        write(**asdict(survey))


def _torch(survey: Survey) -> None:
    from iris_core.cli.doctor.gpus import torch_and_driver

    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        text = f"cannot be imported: {error}. pip install 'torch>=2.11'"
        survey.findings.append(Finding("torch", Verdict.BROKEN, text))
        return
    survey.torch = True
    survey.hip = getattr(torch.version, "hip", None) is not None
    survey.findings, survey.versions = torch_and_driver(torch)


def _gpus(survey: Survey) -> None:
    if not survey.torch:
        return
    import torch

    from iris_core.cli.doctor.gpus import list_gpus, peer_access

    survey.gpus = list_gpus(torch)
    survey.pairs = peer_access(torch, survey.gpus)


def _links(survey: Survey) -> None:
    from iris_core.cli.doctor.gpus import describe, describe_driver, judge_access
    from iris_core.cli.doctor.links import UNKNOWN
    from iris_core.cli.doctor.topology import find_links

    if not survey.gpus:
        return
    links, findings, versions = find_links(survey.gpus, survey.hip)
    survey.versions.update(versions)
    for pair in survey.pairs:
        unknown = {"link": UNKNOWN, "link_count": None, "atomics": None}
        pair.update(links.get((pair["from"], pair["to"]), unknown))
    survey.findings = [
        describe_driver(survey.versions),
        *describe(survey.gpus),
        *judge_access(survey.pairs, survey.hip),
        *findings,
    ]


def _plugins(survey: Survey) -> None:
    """Let every plugin that can be loaded say what it needs."""
    from iris_core.registry import default_registry
    from iris_core.types import PluginKind, PluginState

    targets = _targets(survey)
    registry = default_registry()
    _block(registry)
    for record in registry.load_all():
        if record.kind is PluginKind.OBSERVER or record.state is not PluginState.LOADED:
            continue  # the list of plugins says what is wrong with it
        try:
            survey.findings += registry.diagnose(record, targets)
        except IrisError as error:
            survey.findings.append(Finding(f"diagnosis of {record.name}", Verdict.BROKEN, str(error)))


def _targets(survey: Survey) -> list[DeviceTarget]:
    from iris_core.types import DeviceTarget, DeviceType

    kind = DeviceType.HIP if survey.hip else DeviceType.CUDA
    return [DeviceTarget(DeviceType.CPU), *(DeviceTarget(kind, gpu["index"], gpu["arch"]) for gpu in survey.gpus)]


def _block(registry: Any) -> None:
    from iris_core.settings import load_settings

    try:
        registry.block(load_settings().block)
    except IrisError:
        return  # a wrong setting has an entry of its own


def _choice(survey: Survey) -> None:
    """What Iris() would choose here."""
    from iris_core.device.targets import device_targets
    from iris_core.registry import default_registry
    from iris_core.registry.select import select
    from iris_core.settings import load_settings

    if not survey.torch:
        return  # torch has an entry of its own
    try:
        settings = load_settings()
    except IrisError:
        return  # the same
    try:
        plan = select(default_registry(), settings, targets=device_targets(settings.device, 0))
    except IrisError as error:
        survey.findings.append(Finding("choice", Verdict.BROKEN, str(error)))
    else:
        survey.findings.append(Finding("choice", Verdict.OK, plan.explain()))


if __name__ == "__main__":
    end_with_parent()  # the bound does not hold where somebody has ended the doctor
    collect(Recorder(Path(sys.argv[1]) / _FILE).write)
