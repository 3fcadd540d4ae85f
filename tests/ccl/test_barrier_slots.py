"""Which flags a barrier on the device uses, by the graph that captures it."""

import pytest
import torch

from iris_core.device import launch_order
from iris_core.device.barrier import _Group
from iris_core.errors import UnsupportedError


def test_every_graph_has_flags_of_its_own(monkeypatch):
    """Replays have no order with other launches.  Where a capture has no number, every barrier in it has its own."""
    group = _Group((0, 1), torch.arange(6).view(6, 1).expand(6, 3), torch.zeros(6, 2), None)
    used = []
    for capture in (0, 5, 5, 0, 9, 5, None, None):
        monkeypatch.setattr(launch_order, "current_capture", lambda index, capture=capture: capture)
        used.append(int(group._slot().words[0]))
    assert used == [0, 1, 1, 0, 2, 1, 3, 4]
    monkeypatch.setattr(launch_order, "current_capture", lambda index: 11)
    assert int(group._slot().words[0]) == 5
    monkeypatch.setattr(launch_order, "current_capture", lambda index: 12)
    with pytest.raises(UnsupportedError, match="IRIS_SYSTEM_SIZE"):
        group._slot()
