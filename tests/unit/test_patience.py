"""How often a stage asks a Redis that does not take what it has to say."""

from __future__ import annotations

import pytest
import redis

from workers.patience import _Patience

REFUSALS = [
    redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'"),
    redis.ReadOnlyError("You can't write against a read only replica."),
    redis.ResponseError("MISCONF Redis is configured to save RDB snapshots, but it cannot"),
    redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
]


@pytest.mark.parametrize("error", REFUSALS, ids=["full", "read only", "disk", "replicas"])
def test_one_that_refuses_is_asked_ever_more_rarely_for_it_reads_the_whole_result_each_time(error):
    patience = _Patience()
    assert [patience.check(error) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_one_that_is_away_is_found_soon_when_it_is_back():
    patience = _Patience()
    assert [patience.check(redis.ConnectionError("refused")) for _ in range(4)] == [0.5] * 4
