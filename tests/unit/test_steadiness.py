"""When a reaper waits before it judges, and when it must not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import redis

from services.settings import Settings
from tests.helpers.chores import services
from workers.chores.reaper import Reaper
from workers.chores.steadiness import Steadiness


class Clocks:
    """Redis' clock and ours."""

    def __init__(self):
        self.ours = self.redis = 1000.0

    def time(self):
        return int(self.redis), int(self.redis % 1 * 1e6)

    def pass_(self, seconds, jump=0.0):
        self.ours += seconds
        self.redis += seconds + jump


@pytest.mark.parametrize(("interval", "lease"), [(1.0, 30.0), (15.0, 30.0), (3.0, 6.0), (60.0, 30.0)])
def test_whoever_looks_as_rarely_as_was_set_judges_all_the_same(interval, lease):
    clocks = Clocks()
    steadiness = Steadiness(clocks, lease, interval, lambda: clocks.ours)
    for _ in range(40):
        clocks.pass_(interval)
        assert steadiness.look() == 0.0
    assert not steadiness.patient


def test_a_jump_and_a_standstill_make_it_patient():
    clocks = Clocks()
    steadiness = Steadiness(clocks, 30.0, 1.0, lambda: clocks.ours)
    for seconds, jump in ((1.0, 7200.0), (60.0, 0.0), (1.0, -7200.0)):
        steadiness.look()
        clocks.pass_(600.0)
        steadiness.look()
        clocks.pass_(20.0)
        assert not steadiness.patient
        steadiness.look()
        clocks.pass_(seconds, jump)
        assert steadiness.look() == pytest.approx(jump, abs=0.01)
        assert steadiness.patient


def test_a_jump_is_kept_until_it_was_dealt_with():
    dealt: list[tuple[float, int]] = []
    answers = iter([redis.ConnectionError("loading"), redis.ReadOnlyError("replica"), None])

    def clock_jumped(seconds, within_s, known_ms):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        dealt.append((seconds, known_ms))

    reaper = Reaper(services(redis.Redis(), Settings()))
    jumps = iter([0.0, 7200.0, 0.0, 0.0])
    reaper._steadiness = SimpleNamespace(look=lambda: next(jumps), disturbed=lambda: None)
    reaper.election = SimpleNamespace(won=lambda: True)
    reaper._store = SimpleNamespace(moved=iter([1, 2, 3, 4]).__next__)
    reaper.clock_jumped = clock_jumped
    ticks: list[int] = []
    reaper.tick = lambda: ticks.append(1)
    for _ in range(4):
        reaper.turn()
    assert len(ticks) == 2
    assert dealt == [(7200.0, 1)], "with what had been moved before the look that saw nothing yet"
