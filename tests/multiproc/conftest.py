"""Time for tests that start processes."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("timeout"):
            # A call has a timeout of its own (ranks.CALL_TIMEOUT_S), which tells more; a test may
            # make several.
            item.add_marker(pytest.mark.timeout(300))
