"""How calls are to run: `Config` of `ctx.ccl`, `FusedConfig` of `ctx.ops`.

The fields are those of AMD's Iris, and the algorithm by name.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar

from torch.compiler import is_dynamo_compiling

from iris_core.errors import ArgumentError

AUTO = "auto"
_VARIANTS = {
    "all_gather_variant": (AUTO, "persistent", "partitioned"),
    "all_reduce_variant": (AUTO, "atomic", "ring", "two_shot", "one_shot", "spinlock"),
    "reduce_scatter_variant": (AUTO, "two_shot"),
}
"""Fields that name algorithms, with what they may name."""

_CACHE_MODIFIERS = (None, "", ".ca", ".cg", ".cv"), "one of '', '.ca', '.cg', '.cv'"
_KNOWN: dict[str, tuple[tuple[Any, ...], str]] = {
    **{name: (values, f"one of {', '.join(values)}") for name, values in _VARIANTS.items()},
    "num_warps": ((None, 1, 2, 4, 8, 16, 32), "a power of two up to 32"),
    "all_reduce_distribution": ((None, 0, 1), "0 (every world_size-th tile) or 1 (a block of tiles)"),
    "threads_per_warp": ((None, 32, 64), "32 or 64"),
    "cache_modifier_a": _CACHE_MODIFIERS,
    "cache_modifier_b": _CACHE_MODIFIERS,
    "allow_tf32": ((True, False, None), "True, False or None"),
    "use_gluon": ((True, False), "True or False"),
    "same_place": ((True, False), "True or False"),
}
"""Fields with few values, and how errors list them."""

AMDS_TILE = {"block_size_m": 256, "block_size_n": 64, "group_size_m": 1}
"""What layout "tiles" of `ctx.ops` means where the config does not say: the defaults of AMD's Iris."""

CONFIGS: dict[int, LaunchConfig] = {}
"""Every config there was by its hash: a number is a constant for the compiler, unlike (in torch 2.11) a config."""


class LaunchConfig:
    """Base of both kinds of configs."""

    use_gluon: bool
    algorithm: str | None

    _POSITIVE: ClassVar[tuple[str, ...]] = (
        "block_size_m", "block_size_n", "block_size_k", "group_size_m", "swizzle_size", "comm_sms", "num_sms",
        "num_fetch_sms", "num_xcds", "chunk_size", "num_stages", "num_warps", "chunks",
    )  # fmt: skip
    _NOT_GIVEN: ClassVar[tuple[str, ...]] = ("allow_tf32", "same_place")  # fields that algorithms do not get so

    def __post_init__(self) -> None:
        every: Any = fields(self)  # type: ignore[arg-type]
        for name in (field.name for field in every):
            value, least = getattr(self, name), int(name in self._POSITIVE)
            is_number = value is not None and (least or name == "waves_per_eu")
            if is_number and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31):
                raise self._wrong(f"{name} must be {least} or more, an integer of 31 bits, not {value!r}")
            values, text = _KNOWN.get(name, ((value,), ""))
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
                raise self._wrong(f"{name} must be {text}, not {value!r}")
        if self.algorithm is not None and (not isinstance(self.algorithm, str) or not self.algorithm):
            raise self._wrong(f"algorithm must be a name or None, not {self.algorithm!r}")
        if is_dynamo_compiling():  # calls in compiled code refuse what was made there
            return
        # a repeated call looks its config up: once is enough
        number = hash(tuple(getattr(self, field.name) for field in every))
        while CONFIGS.setdefault(number, self) != self:
            number += 1
        object.__setattr__(self, "_hash", number)

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)  # type: ignore[call-overload]  # hashes are a process's own

    def _wrong(self, text: str) -> ArgumentError:
        return ArgumentError(f"{'FusedConfig' if isinstance(self, FusedConfig) else 'Config'}: {text}")

    def named(self, op: str) -> tuple[str | None, str]:
        """Return the algorithm that this config names for an operation, and by which field; (None, "") if none.

        Raises:
            ArgumentError: `algorithm` and a variant name different ones, or the operation has no variants.
        """
        if isinstance(self, FusedConfig) and op != "matmul_all_reduce" and self.all_reduce_variant != AUTO:
            raise ArgumentError(
                f"{op}: all_reduce_variant={self.all_reduce_variant!r} names an algorithm of matmul_all_reduce; name "
                f"one of {op} by algorithm="
            )
        field = f"{op.removeprefix('matmul_')}_variant"
        variant = getattr(self, field, AUTO)
        if variant == AUTO:
            return self.algorithm, "algorithm" if self.algorithm else ""
        if self.algorithm not in (None, variant):
            raise self._wrong(f"algorithm={self.algorithm!r} contradicts {field}={variant!r}")
        return variant, field

    def given(self, op: str = "") -> dict[str, Any]:
        """Return the fields that were given, without those that name algorithms or are a part of requests.

        Args:
            op: the operation; fields of other operations are left out.
        """
        skipped = {"algorithm", "use_gluon", *_VARIANTS, *self._NOT_GIVEN}
        if op not in ("", "all_reduce", "reduce_scatter"):
            skipped.add("all_reduce_distribution")
        every: Any = fields(self)  # type: ignore[arg-type]
        return {
            field.name: getattr(self, field.name)
            for field in every
            if field.name not in skipped and getattr(self, field.name) != field.default
        }


@dataclass(frozen=True)
class Config(LaunchConfig):
    """How a collective is to run.  Everything that is not given (None) is the algorithm's choice.

    A field that is given is binding: an algorithm that has no use for it is not chosen, and is
    refused when it was named.  The fields are those of AMD's Iris but its rings', `algorithm` and `chunks`.

    Raises:
        ArgumentError: (a ValueError) a field has a value that cannot be.
    """

    #: rows of a tile; where only these or its columns are given, the others are 32 or 64, as in AMD's Iris
    block_size_m: int | None = None
    block_size_n: int | None = None  #: columns of a tile; times its rows, what a program handles at a time
    swizzle_size: int | None = None  #: rows of tiles that are taken together, for locality
    comm_sms: int | None = None  #: number of programs (SMs, CUs) that communicate
    num_xcds: int | None = None  #: number of accelerator dies
    chunk_size: int | None = None  #: programs in a row on one die
    use_gluon: bool = False  #: only algorithms written in Gluon; those of Iris are for products
    all_gather_variant: str = AUTO  #: "persistent"; "auto" for the library's choice
    #: "one_shot" or "two_shot"; "auto" for the library's choice; no algorithm serves "partitioned" (of all_gather),
    #: "atomic", "ring" and "spinlock" of AMD's Iris
    all_reduce_variant: str = AUTO
    all_reduce_distribution: int | None = None  #: which tiles a rank reduces: 0 every world_size-th, 1 a block of them
    reduce_scatter_variant: str = AUTO  #: "two_shot", or "auto" for the library's choice
    num_stages: int | None = None  #: stages of software pipelining
    num_warps: int | None = None  #: warps of a program, a power of two up to 32
    threads_per_warp: int | None = None  #: 32 or 64
    waves_per_eu: int | None = None  #: hint for AMD's compiler; 0 for none
    algorithm: str | None = None  #: name of an algorithm (`ctx.ccl.explain` lists them); None for the library's choice
    #: a promise: an output on the heap lies at the same byte of all members' heaps; `copy_engine` then writes to it
    same_place: bool = False
    #: of `hierarchical`, between nodes: pieces, of which the rail carries one while the node works on others
    chunks: int | None = None

    __hash__ = LaunchConfig.__hash__


@dataclass(frozen=True)
class FusedConfig(LaunchConfig):
    """How an operation of `ctx.ops` is to run; what is given, and what is not, means the same as in `Config`.

    The fields are those of AMD's Iris, and others.  Its defaults (tiles of 256 x 64, steps of 64) have a
    meaning here only where they define the result, with layout "tiles".

    Raises:
        ArgumentError: (a ValueError) a field has a value that cannot be.
    """

    block_size_m: int | None = None  #: rows of a tile of the product; with layout "tiles" 256 if they are not given
    block_size_n: int | None = None  #: its columns; with layout "tiles", where a rank gets such tiles, 64 if not given
    block_size_k: int | None = None  #: the step of the inner dimension
    #: row tiles that are taken together, for locality; with layout "tiles" 1 if it is not given
    group_size_m: int | None = None
    num_sms: int | None = None  #: number of programs (SMs, CUs); None for the algorithm's choice
    num_xcds: int | None = None  #: as in `Config`
    #: tiles in a row on one die; where Hopper's algorithms send tiles to owners, in a row to one of them
    chunk_size: int | None = None
    cache_modifier_a: str | None = None  #: how A is loaded: "", ".ca", ".cg" or ".cv"
    cache_modifier_b: str | None = None  #: likewise B
    #: whether products of float32 may be of TF32 (10 bits of mantissa) on GPUs; None for what torch is set to
    #: (`torch.backends.cuda.matmul.fp32_precision`, `torch.set_float32_matmul_precision`), which is not
    allow_tf32: bool | None = None
    #: algorithm of matmul_all_reduce, and of nothing else, by a name of AMD's Iris; Iris brings "two_shot"; "auto" for
    #: the library's choice
    all_reduce_variant: str = AUTO
    num_warps: int | None = None  #: as in `Config`
    num_stages: int | None = None  #: as in `Config`
    num_fetch_sms: int | None = None  #: programs that fetch shards for the others, where an algorithm has such
    use_gluon: bool = False  #: as in `Config`
    algorithm: str | None = None  #: name of an algorithm (`ctx.ops.explain` lists them); None for the library's choice

    __hash__ = LaunchConfig.__hash__
