"""Drawing tokens: the right distribution, truncation, and independence of neighbours."""

from __future__ import annotations

import math
import random

import pytest
from pydantic import ValidationError

from tests.helpers.lazy import Lazy

torch, sampling = Lazy("torch"), Lazy("services.inference.sampling")


@pytest.fixture
def five():
    """Logits of five tokens."""
    return torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0]])


def test_frequencies_match_the_reported_probabilities(five):
    rows = 20000
    result = sampling.draw(
        five.expand(rows, -1), [sampling.SamplingParams()] * rows, [random.Random(i) for i in range(rows)]
    )
    for token, probability in enumerate(five.softmax(-1)[0].tolist()):
        share = [drawn.sampled[0] for drawn in result].count(token) / rows
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability / rows))


def test_top_k_keeps_k_tokens_and_top_p_the_smallest_set_that_reaches_p(five):
    kept = [
        (sampling.processed_logprobs(five, [params])[0] > float("-inf")).nonzero().flatten().tolist()
        for params in (
            sampling.SamplingParams(top_k=2),
            sampling.SamplingParams(top_p=0.6),
            sampling.SamplingParams(top_p=0.7),
            sampling.SamplingParams(top_k=1, top_p=0.9),
            sampling.SamplingParams(top_p=1.0, top_k=-1),
        )
    ]
    assert kept == [[2, 3], [3], [2, 3], [3], [0, 1, 2, 3, 4]]


def test_truncated_logprobs_are_renormalised(five):
    table = sampling.processed_logprobs(five, [sampling.SamplingParams(top_k=3, temperature=0.5)])
    assert table.exp().sum().item() == pytest.approx(1.0)


def test_a_row_draws_the_same_beside_any_neighbours():
    rows = [
        sampling.SamplingParams(temperature=0.7),
        sampling.SamplingParams(temperature=0.0),
        sampling.SamplingParams(top_k=2),
    ]
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    together = sampling.draw(logits, rows, [random.Random(i) for i in range(3)])
    for i, params in enumerate(rows):
        alone = sampling.draw(logits[i : i + 1], [params], [random.Random(i)])
        token, logprob, rank = together[i].sampled
        assert alone[0].sampled == (token, pytest.approx(logprob, abs=1e-6), rank)


def test_a_token_without_probability_is_never_drawn():
    class Extreme(random.Random):
        def random(self):
            return self.value

    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 1.0, float("-inf")]])
    for value in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        rng = Extreme()
        rng.value = value
        assert sampling.draw(logits, [sampling.SamplingParams()], [rng])[0].sampled[0] in (1, 3)


def test_the_second_end_of_turn_id_is_a_stop_token_as_in_vllm():
    params = sampling.SamplingParams(stop_token_ids=[9])
    assert params.stop_reasons(eos_ids=(5, 6)) == {5: None, 6: 6, 9: 9}
    params = sampling.SamplingParams(stop_token_ids=[9, 5], ignore_eos=True)
    assert params.stop_reasons(eos_ids=(5, 6)) == {5: 5, 9: 9}


@pytest.mark.parametrize(
    "neutral", [{"min_p": 0.0}, {"stop": []}, {"stop": None}, {"repetition_penalty": 1.0}]
)
def test_a_parameter_that_changes_nothing_is_accepted(neutral):
    assert sampling.SamplingParams(**neutral) == sampling.SamplingParams()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, True, "1"])
def test_a_temperature_that_is_no_number_from_0_to_2_is_refused(value):
    with pytest.raises(ValidationError, match="temperature"):
        sampling.SamplingParams(temperature=value)
