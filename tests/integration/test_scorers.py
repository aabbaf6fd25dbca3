"""A scorer that is out of order gives no reward: real workers, real Redis, real processes that die."""

from __future__ import annotations

from rollout.schema import Blame, RolloutRequest, State

SCORERS = "tests.helpers.scorers"


def test_a_scorer_that_keeps_crashing_fails_the_rollout_after_its_attempts_and_never_scores_it(client):
    def judged(function, payload=None):
        return RolloutRequest(
            handler="judged", task={"function": f"{SCORERS}:{function}", "payload": payload}
        )

    well, crashes, killed, wrong = client.run(
        [judged("add", {"a": 1, "b": 2}), judged("exits"), judged("segfault"), judged("fail")]
    )
    assert (well.state, well.reward, well.attempt) == (State.COMPLETED, 3.0, 1)
    for item in (crashes, killed):
        assert (item.state, item.attempt, item.reward, item.drop) == (State.FAILED, 3, None, True)
        assert item.error.blame is Blame.INFRASTRUCTURE and item.error.stage == "eval"
        assert item.error.type == "ScorerCrashed"
    assert "exited with 9" in crashes.error.message and "SIGSEGV" in killed.error.message
    # A scorer with a fault is its author's, and another attempt would not mend it.
    assert (wrong.state, wrong.attempt, wrong.reward, wrong.drop) == (State.FAILED, 1, None, True)
    assert wrong.error.blame is Blame.HANDLER and "cannot judge" in wrong.error.message
