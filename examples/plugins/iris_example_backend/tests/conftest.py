"""What the tests share: rank processes, the same as those of the kit's suites, for starting them takes long."""

import pytest

from iris_core.testing.conformance.plugin import shared_pool


@pytest.fixture
def pool():
    return shared_pool()
