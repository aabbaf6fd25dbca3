"""What an LLM engine wants that is broken, or somebody else's: that its lies are trained on.

One fake engine speaks the wire format and lies. `tests/helpers/engine_lies.py` has all of its lies, which
`tests/unit/test_engine_lies.py` tells with and without an honest engine beside it. In the control the check
under test is taken away.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from rollout.schema import Rollout
from services.engines import checks, vllm
from services.engines.checks import Verdict
from tests.attacks import attack
from tests.helpers.liars import Fleet, rollout_at
from workers.agent import llm


@dataclass
class Engine:
    """An engine that a rollout has to believe: there is no other."""

    place: str
    control: bool
    patch: pytest.MonkeyPatch

    def unless(self, holder: Any, name: str, *instead: Any) -> None:
        """Take a wall down in the control: put something in its place, nothing by default."""
        if self.control:
            self.patch.setattr(holder, name, instead[0] if instead else lambda *_, **__: None)

    def says(self, lie: str) -> Rollout | None:
        """The rollout that has taken the lie, or None."""
        rollout = asyncio.run(rollout_at(lie, honest=False)).rollout
        return rollout if rollout.reward is not None and not rollout.drop else None


@pytest.fixture(params=["service", "control"])
def target(request, monkeypatch):
    return Engine("service", request.param == "control", monkeypatch)


def sampled(rollout: Rollout):
    """The turn that a trainer would learn from."""
    return next(segment for segment in rollout.trajectory.chain.segments if segment.sampled)


def as_they_are(values):
    return list(values)


@attack(stopped_by="ids are held against the vocabulary")
def test_have_an_id_trained_on_that_the_model_does_not_have(target):
    target.unless(Verdict, "_ids")
    taken = target.says("an_id_just_outside_the_vocabulary")
    return taken is not None and sampled(taken).token_ids[0] == 384


@attack(stopped_by="ids are held against the vocabulary")
def test_overflow_the_trainer_with_a_huge_id(target):
    if target.control:
        # A tokenizer cannot read such an id either: the handler was blamed. Without text it went through.
        target.patch.setattr(Verdict, "_ids", lambda *_: None)
        target.patch.setattr("workers.agent.formats.parse_text", lambda *_: llm_turn())
        target.patch.setattr("workers.agent.renderer_codec.RendererCodec.parse", lambda *_: llm_turn())
        target.patch.setattr("workers.agent.formats.TemplateCodec.parse", lambda *_: llm_turn())
    taken = target.says("an_id_of_two_to_the_forty")
    return taken is not None and sampled(taken).token_ids[0] == 2**40


def llm_turn():
    from workers.agent.parsing import parsed_turn

    return parsed_turn("", None, [])


@attack(stopped_by="an id is an integer, nothing is converted")
def test_have_a_truth_value_trained_on_as_an_id(target):
    target.unless(vllm, "as_ids", as_they_are)
    taken = target.says("an_id_that_is_a_truth_value")
    return taken is not None and sampled(taken).token_ids[0] in (True, 1)


@attack(stopped_by="log-probs are at most 0")
def test_weigh_a_sample_by_a_probability_above_one(target):
    target.unless(checks, "checked_logprobs", lambda _, values: list(values))
    taken = target.says("a_log_prob_above_zero")
    return taken is not None and sampled(taken).logprobs[0] == 2.5


@attack(stopped_by="log-probs are numbers, nothing is converted")
def test_have_true_trained_on_as_a_log_prob(target):
    target.unless(vllm, "as_numbers", lambda values: [float(value) for value in values])
    target.unless(checks, "checked_logprobs", lambda _, values: list(values))
    taken = target.says("a_log_prob_that_is_true")
    return taken is not None and sampled(taken).logprobs[0] == 1.0


@attack(stopped_by="a log-prob is of an id that can be sampled")
def test_blow_up_the_importance_ratio_with_an_impossible_log_prob(target):
    target.unless(checks, "checked_logprobs", lambda _, values: list(values))
    taken = target.says("a_log_prob_of_what_cannot_be_sampled")
    return taken is not None and sampled(taken).logprobs[0] == -9999.0


@attack(stopped_by="no more ids than were asked for")
def test_sample_beyond_what_was_asked_for(target):
    target.unless(Verdict, "_ids")
    taken = target.says("more_ids_than_were_asked_for")
    return taken is not None and len(sampled(taken).token_ids) == 65


@attack(stopped_by="nothing follows a stop id")
def test_forge_what_comes_behind_the_end_of_a_turn(target):
    target.unless(Verdict, "_ids")
    taken = target.says("ids_after_the_stop_id")
    return taken is not None and sampled(taken).token_ids[0] > 300


@attack(stopped_by="a call that ended by itself ends with an id that ends a turn")
def test_have_half_a_sentence_scored_as_a_whole_answer(target):
    target.unless(Verdict, "_end")
    taken = target.says("a_stop_in_the_middle_of_a_word")
    return taken is not None and sampled(taken).token_ids == [21, 22, 23]


@attack(stopped_by="what was cut has used all the room it had")
def test_cut_answers_short_at_will(target):
    target.unless(Verdict, "_end")
    taken = target.says("a_cut_that_nothing_asked_for")
    return taken is not None and taken.finish_reason == "length"


@attack(stopped_by="the id of the call is in its answer")
def test_give_one_rollout_the_answer_of_another(target):
    target.unless(Verdict, "_echoes")
    return target.says("the_answer_to_another_call") is not None


@attack(stopped_by="the prompt that is echoed is the one that was sent")
def test_answer_another_prompt_than_was_sent(target):
    target.unless(Verdict, "_echoes")
    return target.says("the_answer_to_another_prompt") is not None


@attack(stopped_by="the count of prompt ids is the one that was sent")
def test_cut_the_prompt_and_answer_the_rest(target):
    target.unless(Verdict, "_usage")
    return target.says("a_longer_prompt") is not None


@attack(stopped_by="a version is text")
def test_have_samples_of_weights_without_a_name(target):
    target.unless(checks, "as_version", str)
    target.unless(Fleet, "trusted", believed)
    taken = target.says("weights_of_version_null")
    return taken is not None and sampled(taken).policy_version == "None"


@attack(stopped_by="a version is one that an update has brought")
def test_pass_old_samples_for_those_of_the_newest_weights(target):
    target.unless(Fleet, "trusted", believed)
    taken = target.says("weights_that_nobody_loaded")
    return taken is not None and sampled(taken).policy_version == "step-999999"


async def believed(*_):
    return True


@attack(stopped_by="spans cover the ids once")
def test_leave_it_open_which_weights_sampled_an_id(target):
    target.unless(Verdict, "_spans", lambda *given: [("default", 0, given[2]), ("default", 0, 1)])
    taken = target.says("spans_that_overlap")
    return taken is not None and taken.trajectory.sampled_tokens > len(sampled(taken).token_ids)


@attack(stopped_by="there is one choice, the one that was asked for")
def test_hide_the_answer_among_several(target):
    target.unless(vllm, "the_choice", lambda answer: answer["choices"][0])
    return target.says("two_choices") is not None


@attack(stopped_by="expert choices are an array of numbers")
def test_send_the_trainer_a_pickle(target):
    target.unless(Verdict, "_experts")
    taken = target.says("experts_that_are_a_pickle")
    return taken is not None and sampled(taken).routed_experts is not None


@attack(stopped_by="an answer's size is bounded by what was asked")
def test_fill_the_workers_memory_with_one_answer(target):
    target.unless(llm, "_most_bytes", lambda asked: llm.MAX_ANSWER_BYTES)
    return target.says("a_hundred_megabytes") is not None
