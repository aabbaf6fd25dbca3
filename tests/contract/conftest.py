"""The same tests on both backends."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def backend(request):
    """A running backend with the demo model."""
    return request.getfixturevalue(request.param)
