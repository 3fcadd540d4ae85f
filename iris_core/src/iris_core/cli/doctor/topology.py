"""How the GPUs of this host are connected: NVLink, XGMI or a path over PCIe.  Runs in the survey's process.

Where no source can be asked, links are unknown, and the report says why.
"""

from __future__ import annotations

from typing import Any

from iris_core.cli.doctor.amd import ask_amdsmi
from iris_core.cli.doctor.links import PATHS, PCIE, Links, Unavailable, label
from iris_core.cli.doctor.nvidia import ask_nvidia_smi, ask_nvml
from iris_core.diagnosis import Finding, Verdict


def find_links(gpus: list[dict[str, Any]], hip: bool) -> tuple[Links, list[Finding], dict[str, Any]]:
    """Return the link of every ordered pair of GPUs, what there is to say, and further versions.

    Args:
        gpus: as `gpus.list_gpus` returns them; what the source knows of each (free_bytes, compute_mode, fabric_state)
            is added.
        hip: whether they are AMD's.
    """
    sources = [ask_amdsmi] if hip else [ask_nvml, ask_nvidia_smi]
    refusals = []
    for ask in sources:
        try:
            links, versions = ask(gpus)
        except Unavailable as error:
            refusals.append(str(error))
        else:
            return links, _judge(links, refusals), versions
    if len(gpus) < 2:
        return {}, [], {}
    return {}, [Finding("GPU links", Verdict.NOTE, "\n".join([f"unknown: {refusals[0]}", *refusals[1:]]))], {}


def _judge(links: Links, refusals: list[str]) -> list[Finding]:
    """Say what connects the GPUs, by number of ordered pairs."""
    if not links:
        return []
    counts: dict[str, int] = {}
    for link in links.values():
        counts[label(link)] = counts.get(label(link), 0) + 1
    text = ", ".join(f"{name} between {count} of {len(links)} ordered pairs" for name, count in counts.items())
    text = "\n".join([text, *(f"({refusal})" for refusal in refusals)])
    slow = [name for name in counts if name in (*PATHS, PCIE.upper())]
    if slow and len(slow) < len(counts):
        text += "\nsome pairs go over PCIe although others have a faster link: one may be down (`nvidia-smi nvlink -s`)"
        return [Finding("GPU links", Verdict.NOTE, text)]
    return [Finding("GPU links", Verdict.OK, text)]
