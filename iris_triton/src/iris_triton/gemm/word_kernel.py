"""Waiting for a word between products that are no kernels of ours."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.language.flags import await_flag


@triton.jit(do_not_specialize=("index", "rank", "timeout_ns", "status"))
def await_word(words, index, rank, timeout_ns, status):
    """Wait until a word is 1, and clear it.  One program; what its stream does afterwards sees what the word speaks of.

    Args:
        words: int32 words in own memory.
        index: which of them.
        rank, timeout_ns, status: the caller in the world; bound of the wait, and where it reports.
    """
    word = words + index
    one = tl.cast(index, tl.int32) * 0 + 1
    await_flag(word, one, "eq", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    tl.store(word, 0)
