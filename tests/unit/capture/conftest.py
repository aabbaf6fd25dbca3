from __future__ import annotations

import pytest

from tests.unit.capture.toy import Toy


@pytest.fixture
def toy():
    toy = Toy()
    yield toy
    toy.close()
