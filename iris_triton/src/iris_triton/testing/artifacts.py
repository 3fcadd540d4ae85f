"""Keeping what the compiler makes of kernels: IRIS_KERNEL_ARTIFACTS_DIR.

    <folder>/<kernel>/rank_<r>/w<warps>_<12 digits>/kernel.ttir, .ttgir, .llir, .ptx or .amdgcn, metadata.json

The digits are of the assembly's hash, so a kernel that is specialised in several ways has a folder for each.  Kernels
that come out of Triton's cache are kept as well.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

import triton

from iris_core.logs import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("ttir", "ttgir", "llir", "ptx", "amdgcn")
_ASSEMBLY = KINDS[-2:]


class Artifacts:
    """Triton's listener of compilations, in front of the one that there was.

    Args:
        folder: where to keep the files; made when the first kernel is compiled.
        rank: of this process.
    """

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._before: Any = None

    def install(self) -> None:
        """Listen to every compilation of this process from now on."""
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self

    def remove(self) -> None:
        """Listen no more, unless another listener was put in front, which asks this one."""
        if triton.knobs.compilation.listener is self:
            triton.knobs.compilation.listener = self._before

    def __call__(
        self, *, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **others: Any
    ) -> None:
        """Keep the files of one kernel; where that fails, the kernel runs all the same."""
        try:
            self._keep(src, metadata, metadata_group)
        except OSError as error:
            logger.warning("the files of kernel %s were not kept: %s", metadata.get("name"), error)
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, **others)

    def _keep(self, src: Any, metadata: Mapping[str, Any], files: Mapping[str, str]) -> None:
        texts = {
            kind: pathlib.Path(path).read_bytes()
            for name, path in files.items()
            if (kind := name.rpartition(".")[2]) in KINDS
        }
        assembly = next((texts[kind] for kind in _ASSEMBLY if kind in texts), b"".join(texts.values()))
        name = re.sub(r"\W+", "_", str(metadata["name"]))
        variant = f"w{metadata['num_warps']}_{hashlib.sha256(assembly).hexdigest()[:12]}"
        folder = self._folder / name / f"rank_{self._rank}" / variant
        folder.mkdir(parents=True, exist_ok=True)
        for kind, text in texts.items():
            (folder / f"kernel.{kind}").write_bytes(text)
        about = {
            **metadata,
            "signature": {str(key): str(value) for key, value in getattr(src, "signature", {}).items()},
            "constants": {str(key): str(value) for key, value in getattr(src, "constants", {}).items()},
            "triton": triton.__version__,
        }
        (folder / "metadata.json").write_text(json.dumps(about, indent=1, default=str, sort_keys=True))
