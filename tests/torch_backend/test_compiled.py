"""`ctx.ccl` and `ctx.ops` inside of `torch.compile`."""

import jobs_compiled as jobs
import pytest


def test_calls_are_in_one_graph(ranks):
    assert ranks.run(jobs.in_one_graph, 3) == [[[True] * 6, [True]] * 4] * 3


def test_what_cannot_be_compiled_is_refused(ranks):
    for recorded, configured in ranks.run(jobs.refusals, 2):
        assert recorded.startswith("ArgumentError: all_reduce: writes into its output")
        assert "all_reduce: make the config outside of the code that torch.compile compiles" in configured


@pytest.mark.multigpu(2)
def test_graphs_of_the_compiler(ranks):
    assert ranks.run(jobs.reduce_overhead, 2, timeout_s=400.0) == [([], 0)] * 2
