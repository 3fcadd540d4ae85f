"""Fixtures of tests that are the same on CPU ranks and on GPUs."""

import pytest


def unprobed(device, encodings):
    """Why calls in these encodings cannot be made on this machine; empty if they can."""
    from iris_triton.collectives.packets.fabric import lines_problem

    return "" if device == "cpu" or "ll128" not in encodings else lines_problem(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def device(request):
    """Where the ranks compute; on GPUs, the test's `num_ranks` decides about its tier."""
    return request.param


@pytest.fixture(autouse=True)
def probed(request):
    """Skip what leans on a fact about this machine's memory that was not probed; asked on a rank, as CUDA is there."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if params.get("device") == "cuda" and "ll128" in params.get("encodings", (params.get("encoding"),)):
        reason = request.getfixturevalue("pool").run(unprobed, 1, "cuda", ["ll128"])[0]
        if reason:
            pytest.skip(reason)
