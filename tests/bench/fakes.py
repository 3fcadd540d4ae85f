"""Other ranks, and a GPU, for tests that have neither."""

import contextlib
from types import SimpleNamespace

import torch

from iris_core.world import SingleWorld


class PretendedWorld(SingleWorld):
    """A world in which every other rank says what this one says, changed by `others`."""

    def __init__(self, world_size, others=lambda rank, obj: obj):
        super().__init__()
        self.world_size = world_size
        self._others = others

    def all_gather_object(self, obj):
        return [obj, *(self._others(rank, obj) for rank in range(1, self.world_size))]


class FakeGPU:
    """In place of what the timers use of torch.cuda: launches move a clock, graphs hold launches."""

    def __init__(self, monkeypatch):
        self.clock_s = 0.0
        self.launches = 0  # that ran
        self.log = []
        self.capturing = None
        self.num_nodes = 1
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_s = gpu.clock_s

            def synchronize(self):
                """Everything has run already."""

            def elapsed_time(self, end):
                return (end.at_s - self.at_s) * 1e3

        class CUDAGraph:
            def __init__(self):
                self.held = []

            def replay(self):
                gpu.log.append("replay")
                for seconds in self.held:
                    gpu.launch(seconds)

            def reset(self):
                gpu.log.append("reset")

        @contextlib.contextmanager
        def graph(captured, capture_error_mode):
            gpu.log.append("capture")
            gpu.capturing = captured
            yield
            gpu.capturing = None

        fakes = {"Event": Event, "CUDAGraph": CUDAGraph, "graph": graph, "synchronize": self.synchronize}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(1e-4))

    def launch(self, seconds):
        """Run something that takes so long, or hold it in the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.held.append(seconds)
        else:
            self.clock_s += seconds
            self.launches += 1

    def synchronize(self):
        """Nothing runs later than it is launched; inside a capture this would be an error."""
        assert self.capturing is None

    def context(self, num_ranks):
        """Something that looks like an open context on this GPU."""
        return SimpleNamespace(
            device="cuda:0", num_ranks=num_ranks, num_nodes=self.num_nodes,
            ccl=SimpleNamespace(barrier=lambda: self.log.append("align between nodes")), scope=contextlib.nullcontext,
            barrier=lambda: self.log.append("barrier"), device_barrier=lambda: self.log.append("align"),
        )  # fmt: skip
