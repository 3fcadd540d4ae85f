"""What kernels say when they find that another member of their team calls differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.device.context_words import Mismatch, MismatchCode, code_of
from iris_core.device.reports import Meaning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.dispatch.team import Team

ELEMENT_TYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "uint16", "uint32",
    "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""torch's names of the types that kernels name by their place here; new ones come at the end."""


def mismatch_meaning(words: Sequence[int], team: Team, describe: Callable[[int], str]) -> Meaning:
    """Put the words of `Mismatch` into words of ours.

    Args:
        words: the status words, with a report.
        team: to which the word at its address belongs.
        describe: says what call a number of a kind means.
    """
    rank, ours, theirs = (words[each] for each in (Mismatch.RANK, Mismatch.OURS, Mismatch.THEIRS))
    peer = team.members[words[Mismatch.PEER]]
    kinds = words[Mismatch.OUR_KIND], words[Mismatch.THEIR_KIND]
    code = code_of(words[Mismatch.CODE])
    latest = team.latest
    op, call = (latest.op, latest.description) if latest else ("", "")
    last_call = f", whose last call on rank {team.world_rank} was {call}," if call else ""
    if code == MismatchCode.MESSAGE:
        own, other = (_type_name(kind) for kind in kinds)
        text = (
            f"rank {rank} received from rank {peer} and expected {ours} elements of {own}, but {theirs} elements of "
            f"{other} were sent. The output is as it was; later messages are not affected."
        )
        return Meaning((rank, peer), peer, "recv", "recv", text)
    if code == MismatchCode.OVERLAP:
        text = (
            f"two launches of the collectives of ranks {', '.join(map(str, team.members))}{last_call} ran at the "
            f"same time on the device of rank {rank}: two graphs, or a graph and a call, that no stream orders. Their "
            "results are not valid, on any member. Replay graphs and make calls of one group on one stream, or let "
            "one stream wait for the other, or use a group of its own for each; ctx.ccl.reset() on all members puts "
            "the group back to its beginning."
        )
        return Meaning(team.members, peer, op, call, text)
    among = f"in the collectives of ranks {', '.join(map(str, team.members))}"
    if code == MismatchCode.SPLITS:
        text = (
            f"all_to_all {among}: rank {rank} takes {ours} elements from rank {peer} (output_split_sizes), which gives "
            f"it {theirs} (input_split_sizes). The smaller number was copied; what the output has is not valid."
        )
        return Meaning(team.members, peer, "all_to_all", "all_to_all", text)
    text = (
        f"{among}, rank {rank} and rank {peer} have called differently: on rank {rank}, {describe(kinds[0])}; on rank "
        f"{peer}, {describe(kinds[1])}. Their results are not valid. Let all ranks make the same calls in the same "
        "order; ctx.ccl.reset() on all members puts the group back to its beginning."
    )
    return Meaning(team.members, peer, op, call, text)


def _type_name(number: int) -> str:
    return ELEMENT_TYPES[number] if 0 <= number < len(ELEMENT_TYPES) else f"an unknown type ({number})"
