"""Where algorithms of packets are offered, and when they are chosen."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from tables import table

from iris_core.dispatch.choice import Chooser, Tables
from iris_core.dispatch.tables import read_table
from iris_core.testing.conformance.collective_jobs import usual
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.collectives import TABLES, collectives, fast_collectives
from iris_triton.collectives.packets import base as fast_algorithms
from iris_triton.collectives.packets import fabric
from iris_triton.collectives.packets.mailbox import mailbox_for, packets_for

CPU, GPU, AMD = (DeviceTarget(each) for each in (DeviceType.CPU, DeviceType.CUDA, DeviceType.HIP))


def request(op, target=GPU, size=4, **changes):
    return usual(op, **changes).request(0, range(size), target)


def one(op, name):
    return next(each for each in fast_collectives() if (each.op, each.name) == (op, name))


@pytest.mark.parametrize("path", sorted(TABLES.glob("nvidia-h200-*.json")), ids=lambda path: path.stem)
def test_models_come_near_what_was_measured(path, tmp_path, monkeypatch):
    """What they would choose without the table takes at most 1.6 times as long as the best, as far as it is there."""
    monkeypatch.setattr(fast_algorithms, "lines_problem", lambda index: "")
    table, known = read_table(path), Tables(TABLES, [], "NVIDIA H200")
    chooser = Chooser(collectives(), Tables(tmp_path, [], "a GPU"), ())
    compared = 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (1 << shift for shift in range(9, 29, 2)):
            call = dataclasses.replace(
                request(op, size=table.group_size, dtype="bfloat16"), nbytes=nbytes, shape=(nbytes // 2,)
            )
            entries = known.nearest(call).entries
            assert entries[0].source == str(path)
            seconds = {entry.algorithm: entry.seconds for entry in reversed(entries)}
            chosen = chooser.choose(call, None)[0].name
            if chosen in seconds:
                assert seconds[chosen] <= 1.6 * min(seconds.values()), (op, nbytes, chosen, seconds)
                compared += 1
    assert compared > 20


@table(("name", "changes", "reason"), [
    ("sentinel_two_shot", {"dtype": "int32"}, "may have any value"),
    ("sentinel_two_shot", {"dtype": "float64"}, "may have any value"),
    ("ll_one_shot", {"dtype": "complex64"}, "does not know elements"),
    ("sentinel_split", {"place": "ordinary"}, "not on the heap"),
    ("sentinel_split", {"dtype": "int32"}, "may have any value"), ("ll_one_shot", {"size": 9}, "up to 8 ranks"),
])  # fmt: skip
def test_what_is_refused(name, changes, reason):
    assert reason in one("all_reduce", name).supports(request("all_reduce", **changes)).reason
    asked = request("all_reduce")
    changed = dataclasses.replace(asked, options={**asked.options, "config": {"block_size_m": 8}})
    assert "block_size_m" in one("all_reduce", name).supports(changed).reason
    for target in (CPU, AMD):
        assert all("for NVIDIA GPUs" in each.supports(request(each.op, target)).reason for each in fast_collectives())


@table(("text", "holds"), [
    (None, False),  # a device that was not probed
    *((json.dumps({"format": 1, "device": "x", "facts": {"whole_lines": {"holds": holds}}}), holds)
      for holds in (True, False)),
    *((text, False) for text in (
        "", "[]", "[" * 100_000, '{"format": 2, "facts": {}}', '{"format": 1, "facts": {"magic": {}}}',
        '{"format": 1, "facts": {"whole_lines": {"holds": "no"}}}', '{"format": 1, "facts": {"whole_lines": 1}}')),
])  # fmt: skip
def test_facts_are_read(tmp_path, monkeypatch, text, holds):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    path = tmp_path / "fabric" / "NVIDIA_X_200.json"
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    fabric.has_whole_lines.cache_clear()
    assert fabric.has_whole_lines("NVIDIA X-200") is holds
    fabric.has_whole_lines.cache_clear()


KB, MB = 1 << 10, 1 << 20


@table(("op", "chosen"), [
    ("all_reduce", {
        KB: "ll128_one_shot", 64 * KB: "ll128_one_shot", 128 * KB: "sentinel_two_shot", 256 * KB: "ll128_two_shot",
        MB: "sentinel_two_shot", 4 * MB: "sentinel_two_shot", 16 * MB: "sentinel_split", 1024 * MB: "sentinel_split",
    }),
    ("all_gather", {KB: "ll128_mailbox", 8 * MB: "ll128_mailbox", 16 * MB: "push", 1024 * MB: "push"}),
    ("reduce_scatter", {
        KB: "sentinel_mailbox", 256 * KB: "ll128_mailbox", MB: "sentinel_mailbox", 16 * MB: "sentinel_mailbox",
        128 * MB: "pull", 1024 * MB: "pull",
    }),
    ("all_to_all", {KB: "ll128_mailbox", 8 * MB: "ll128_mailbox", 16 * MB: "push", 1024 * MB: "push"}),
])  # fmt: skip
def test_eight_gpus_get_what_won_there(op, chosen, monkeypatch):
    """The designs that were the fastest on 8 x H200, by the size of the whole buffer; bfloat16, on the heap."""
    monkeypatch.setattr(fast_algorithms, "lines_problem", lambda index: "")
    chooser = Chooser(collectives(), Tables(TABLES, [], "NVIDIA H200"), ())
    for nbytes, name in chosen.items():
        own = nbytes // 8 if op == "all_gather" else nbytes
        call = dataclasses.replace(request(op, size=8, dtype="bfloat16"), nbytes=own, shape=(own // 2,))
        algorithm, why = chooser.choose(dataclasses.replace(call, direct_in=True, direct_out=True), None)[:2]
        assert algorithm.name == name, (op, nbytes, why)


def test_launches_of_rare_kinds_can_be_dropped():
    """A program whose lengths vary makes new kinds without end."""
    assert all(each.drops_plans for each in (*fast_collectives(), *collectives()))


def test_messages_of_powers_of_two_go_in_one_launch():
    """Two halves of what comes from eight members fit into a region of twice the message."""
    sizes = []

    class Team:
        def workspace(self, name, nbytes, minimum, fill):
            sizes.append(nbytes)
            return SimpleNamespace(nbytes=256 * MB, offset_bytes=0)

        def region(self, name, nbytes):
            return SimpleNamespace(tensor=torch.zeros(nbytes, dtype=torch.uint8))

    mailbox = mailbox_for(Team(), "sentinel", packets_for(128 * MB // 8, "sentinel"), 8, 256)
    assert sizes == [256 * MB]
    assert mailbox.pieces == 1
