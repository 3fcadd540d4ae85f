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
from iris_triton.collectives import TABLES, collectives
from iris_triton.collectives.packets import base as fast_algorithms
from iris_triton.collectives.packets import fabric
from iris_triton.collectives.packets.mailbox import mailbox_for, packets_for


@pytest.mark.parametrize("path", sorted(TABLES.glob("nvidia-h200-*.json")), ids=lambda path: path.stem)
def test_models_come_near_what_was_measured(path, tmp_path, monkeypatch):
    """What they would choose without the table takes at most 1.6 times as long as the best, as far as it is there."""
    monkeypatch.setattr(fast_algorithms, "lines_problem", lambda index: "")
    table, known = read_table(path), Tables(TABLES, [], "NVIDIA H200")
    chooser = Chooser(collectives(), Tables(tmp_path, [], "a GPU"), ())
    compared = 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (1 << shift for shift in range(9, 29, 2)):
            call = usual(op, dtype="bfloat16", shape=(nbytes // 2,))
            call = call.request(0, range(table.group_size), DeviceTarget(DeviceType.CUDA))
            call = dataclasses.replace(call, nbytes=nbytes, shape=(nbytes // 2,))
            entries = known.nearest(call).entries
            assert entries[0].source == str(path)
            seconds = {entry.algorithm: entry.seconds for entry in reversed(entries)}
            chosen = chooser.choose(call, None).name
            if chosen in seconds:
                assert seconds[chosen] <= 1.6 * min(seconds.values()), (op, nbytes, chosen, seconds)
                compared += 1
    assert compared > 20


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


def test_messages_of_powers_of_two_go_in_one_launch():
    """Two halves of what comes from eight members fit into a region of twice the message."""
    sizes = []

    class Team:
        def workspace(self, name, nbytes, minimum, fill):
            sizes.append(nbytes)
            return SimpleNamespace(nbytes=256 << 20, offset_bytes=0)

        def region(self, name, nbytes):
            return SimpleNamespace(tensor=torch.zeros(nbytes, dtype=torch.uint8))

    mailbox = mailbox_for(Team(), "sentinel", packets_for(16 << 20, "sentinel"), 8, 256)
    assert sizes == [256 << 20]
    assert mailbox.pieces == 1
