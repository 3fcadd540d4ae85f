"""Whether GPUs may multiply float32 as TF32 (10 bits of mantissa): torch's setting, and keeping to a wish of one call.

torch has an old and a new way to set it (`torch.backends.cuda.matmul.allow_tf32`, `set_float32_matmul_precision`; since
2.9 `fp32_precision`).  `torch.backends.cuda.matmul.fp32_precision` is what its products look at, whichever way was
used; reading the old attributes raises where the new one was set.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_TF32, _IEEE = "tf32", "ieee"


def torch_allows_tf32() -> bool:
    """Whether torch's own products of float32 may be of TF32 on GPUs; by default they are not."""
    setting: Any = torch.backends.cuda.matmul  # typed without the attribute
    return bool(setting.fp32_precision == _TF32)


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let torch multiply float32 as a call wants it, whatever its own setting is; the setting is put back.

    It is one of the whole process: another thread that launches a product in the meantime gets the same.
    """
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if (before == _TF32) == tf32:
        yield
        return
    setting.fp32_precision = "none"  # then it is that of torch.backends.cuda, or of torch.backends
    inherited = setting.fp32_precision == before
    setting.fp32_precision = _TF32 if tf32 else _IEEE
    try:
        yield
    finally:
        setting.fp32_precision = "none" if inherited else before
