"""Other ranks, and a GPU, for tests that have neither."""

import contextlib
from types import SimpleNamespace

import torch

from iris_core.world import World


class PretendedWorld(World):
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
        self.clock_s, self.launches = 0.0, 0  # of what ran
        self.log, self.capturing, self.num_nodes = [], None, 1
        for fake in (self.Event, self.CUDAGraph, self.graph, self.synchronize, self._sleep):
            monkeypatch.setattr(torch.cuda, fake.__name__, fake)

    def Event(self, enable_timing):
        """Everything has run already when the host waits for it."""
        assert enable_timing
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_s", self.clock_s)
        event.elapsed_time = lambda end: (end.at_s - event.at_s) * 1e3
        return event

    def CUDAGraph(self):
        graph = SimpleNamespace(held=[], reset=lambda: self.log.append("reset"))
        graph.replay = lambda: (self.log.append("replay"), [self.launch(seconds) for seconds in graph.held])
        return graph

    @contextlib.contextmanager
    def graph(self, captured, capture_error_mode):
        self.log.append("capture")
        self.capturing = captured
        yield
        self.capturing = None

    def launch(self, seconds):
        """Run something that takes so long, or hold it in the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.held.append(seconds)
        else:
            self.clock_s += seconds
            self.launches += 1

    def _sleep(self, cycles):
        self.launch(1e-4)

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
