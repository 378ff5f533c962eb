"""What tests of several folders share."""

import pytest

# Modules of helpers, so that their failed asserts show values too.
pytest.register_assert_rewrite("ranks", "reference", "toys")
