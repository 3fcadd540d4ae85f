"""Writes which Triton each torch requires into README.md: `python docs/triton_versions.py 2.11 2.12 ...`.

The numbers come from the metadata of torch's wheels for GPUs, as pip reports them; nothing is installed.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
REGION = re.compile(
    r"(?<=<!-- torch and triton, by docs/triton_versions\.py -->\n).*?(?=<!-- end of torch and triton -->)", re.DOTALL
)
_DRY = ("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")


def requirement(torch: str) -> str:
    """Return what a release of torch requires of Triton on Linux, such as "==3.7.1"; empty if nothing."""
    command = [sys.executable, "-m", "pip", *_DRY, f"torch=={torch}.*"]
    environ = os.environ | {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}  # no local wheels: those for CPUs
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    return required(metadata["requires_dist"])


def required(texts: list[str]) -> str:
    """Return the version of Triton that requirements name; empty if none does."""
    found = [re.match(r"triton\s*\(?([=~<>!][^;)]*)", text) for text in texts]
    return next((match.group(1).strip() for match in found if match), "")


def table(pairs: dict[str, str]) -> str:
    """Return the table for the README."""
    head = f"| | {' | '.join(f'torch {release}' for release in pairs)} |"
    row = f"| requires triton | {' | '.join(f'`{version}`' if version else '-' for version in pairs.values())} |"
    return f"{head}\n{'|---' * (len(pairs) + 1)}|\n{row}\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python docs/triton_versions.py RELEASE [RELEASE ...], such as 2.11 2.12")
    releases = {release: requirement(release) for release in sys.argv[1:]}
    README.write_text(REGION.sub(lambda _: table(releases), README.read_text()))
    print(table(releases), end="")
