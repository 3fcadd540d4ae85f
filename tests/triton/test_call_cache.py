"""The cache of calls in C: it finds a call exactly if the one that was kept had tensors like these."""

import contextlib
import gc
import itertools
import random
import sys
import threading
import weakref

import pytest
import torch

from iris_triton import launcher

LOW, HIGH = 1 << 12, 1 << 20
ARENA = torch.zeros(1 << 14, dtype=torch.uint8)


def new(skips_float32=False):
    at = ARENA.data_ptr()
    made = launcher.call_cache(at + LOW, at + HIGH, skips_float32)
    if made is None:
        pytest.skip("there is no C compiler here, or torch is older than 2.11")
    return made


def drawn(generator):
    dtype = generator.choice([torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.bool])
    begin = generator.choice([0, 63, 64, 72, LOW - 64, LOW - 1, LOW, LOW + 512]) // dtype.itemsize * dtype.itemsize
    flat = ARENA[begin : begin + 2048].view(dtype)
    return generator.choice([
        lambda: flat[:64], lambda: flat[:64].view(8, 8), lambda: flat[:64].view(8, 8).t(), lambda: flat[:64:2],
        lambda: flat[0], lambda: flat[:1].expand(64), lambda: None,
    ])()  # fmt: skip


def described(tensors):
    """What the cache tells calls apart by, and no more."""
    found, ranges = [], []
    for each in tensors:
        if each is None:
            found.append(None)
            continue
        at = each.data_ptr() - ARENA.data_ptr()
        last = sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True))
        ranges.append((at, at + (last + 1) * each.itemsize))
        found.append((each.shape, each.stride(), each.dtype, LOW <= at < HIGH, each.data_ptr() % 16 == 0))
    for (one, its_end), (other, others_end) in itertools.combinations(ranges, 2):
        found.append(other - one if one < others_end and other < its_end else None)
    return found


def test_finds_calls_with_tensors_like_those_that_were_kept():
    cache, generator, how, found = new(), random.Random(5), ("op", None, object()), 0
    for _ in range(400):
        kept = tuple(drawn(generator) for _ in range(generator.choice([1, 2, 2, 5])))
        cache.clear()
        cache.keep(kept, how, "value")
        assert cache(kept, how) == "value"
        for _ in range(30):
            asked = tuple(generator.choice([each, drawn(generator)]) for each in kept)
            is_like = described(asked) == described(kept)
            assert cache(asked, how) == ("value" if is_like else None), (kept, asked)
            found += is_like
        assert not cache(kept[:-1], how)
        assert cache(kept, ("op", None, object())) is None
    assert found > 500


def test_what_needs_a_closer_look_is_never_found():
    class Own(torch.Tensor):
        pass

    cache, x, how, found = new(), torch.ones(4), ("op",), []
    recorded, half = torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.complex64).conj()
    others = half, half.imag, x.as_subclass(Own), x[:0], torch.empty(4, device="meta")[:0], recorded, 5, x.to_sparse()
    for other in others:
        for tensors in ((x, other), (other,)):
            cache.keep(tensors, how, "value")
            assert cache(tensors, how) is False
    assert cache((x,) * 9, how) is False
    assert cache([x], how) is False
    with torch.no_grad():
        cache.keep((recorded,), how, "value")
        assert cache((recorded,), how) == "value"
    assert cache((recorded,), how) is False
    torch.func.vmap(lambda each: found.append(cache((each,), how)), out_dims=None)(torch.ones(2, 4))
    assert found == [False]
    cache.keep((x,), ([0, 1],), "value")  # a list may change
    assert cache((x,), ([0, 1],)) is None
    assert new(skips_float32=True)((x,), how) is False
    for wrong in ((), ((x,),), ((x,), [1])):
        with pytest.raises(TypeError):
            cache(*wrong)


def test_how_is_compared_by_value_or_is_the_same_object():
    cache, x, number = new(), (ARENA[64:128],), int("1000")
    how = "".join(["su", "m"]), number, (0, number), float("1.5"), True
    cache.keep(x, how, "value")
    assert cache(x, ("".join(["s", "um"]), int("1000"), (0, int("1000")), float("1.5"), True)) == "value"
    for place, other in ((0, "min"), (0, how), (1, 1000.0), (1, 1), (2, (0, True)), (2, (0,)), (3, 1), (4, 1)):
        assert cache(x, (*how[:place], other, *how[place + 1 :])) is None, other
    assert cache(x, (*how, [0])) is None


def test_at_the_end_of_the_stack_nothing_is_found_at_worst():
    def ask(depth, how):
        return ask(depth - 1, how) if depth else cache(x, how)

    cache, x, found = new(), (ARENA[64:128],), set()
    cache.keep(x, ((1, 10**30),), "value")
    for depth in range(sys.getrecursionlimit()):
        with contextlib.suppress(RecursionError):
            found.add(ask(depth, ((1, 10 ** len("x" * 30)),)))
    assert found <= {"value", None}
    assert "value" in found


def test_holds_many_calls_and_lets_them_go():
    cache, how = new(), [(object(),) for _ in range(2000)]
    values = [threading.Event() for _ in how]  # any objects that weak references can hold
    for each, value in zip(how, values, strict=True):
        cache.keep((ARENA,), each, value)
    hits = [cache((ARENA,), each) for each in how]
    assert all(hit in (None, value) for hit, value in zip(hits, values, strict=True))
    assert sum(each is not None for each in hits) == 256
    seen = [weakref.ref(each) for each in values]
    values[-1].cache = cache  # a cycle
    del cache, hits, values, value
    gc.collect()
    assert not any(each() for each in seen)


def test_without_a_table_that_it_knows_there_is_no_cache(monkeypatch):
    def refuse(*about):
        raise ValueError("DLPack 2")

    monkeypatch.setattr(launcher, "_c_type", lambda file, name: refuse)
    assert launcher.call_cache(0, 0, False) is None
