"""How many files of the product a call goes through: a reader can follow it."""

import jobs_routes

from iris_core.testing import RankPool

# Files at most.
BUDGETS = {
    "zeros": 8,
    "barrier": 10,
    "all_reduce": 22,  # the first one
    "repeated all_reduce": 6,
    "Iris": 35,
}


def test_calls_go_through_few_files(tmp_path):
    environ = {"IRIS_CACHE_DIR": str(tmp_path)}  # without tables of this machine
    with RankPool(environ=environ) as ranks:  # new ones: they call everything for the first time
        routes, _ = ranks.run(jobs_routes.routes, 2)
    assert routes.keys() == BUDGETS.keys()
    for call, files in routes.items():
        assert len(files) <= BUDGETS[call], (call, sorted(files))
