"""How many files of the product a call goes through: a reader can follow it."""

import jobs_routes
import pytest

from iris_core.testing import RankPool

# Files at most.
BUDGETS = {
    "zeros": 8,
    "barrier": 10,
    "all_reduce": 22,  # the first one
    "repeated all_reduce": 6,
    "Iris": 35,
}


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    environ = {"IRIS_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}  # without tables of this machine
    with RankPool(environ=environ) as ranks:  # new ones: they call everything for the first time
        first, _ = ranks.run(jobs_routes.routes, 2)
    return first


@pytest.mark.parametrize("call", BUDGETS)
def test_a_call_goes_through_few_files(routes, call):
    assert len(routes[call]) <= BUDGETS[call], sorted(routes[call])
