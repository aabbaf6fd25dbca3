"""Drawing tokens: the right distribution, truncation, and independence of neighbours."""

from __future__ import annotations

import math
import random

import pytest
import torch

from services.inference.errors import RequestError
from services.inference.sampling import SamplingParams, draw, processed_logprobs

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0]])


def test_frequencies_match_the_reported_probabilities():
    rows = 20000
    result = draw(LOGITS.expand(rows, -1), [SamplingParams()] * rows, [random.Random(i) for i in range(rows)])
    for token, probability in enumerate(LOGITS.softmax(-1)[0].tolist()):
        share = result.token_ids.count(token) / rows
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability / rows))


def test_top_k_keeps_k_tokens_and_top_p_the_smallest_set_that_reaches_p():
    kept = [
        (processed_logprobs(LOGITS, [params])[0] > float("-inf")).nonzero().flatten().tolist()
        for params in (
            SamplingParams(top_k=2),
            SamplingParams(top_p=0.6),
            SamplingParams(top_p=0.7),
            SamplingParams(top_k=1, top_p=0.9),
            SamplingParams(top_p=1.0, top_k=-1),
        )
    ]
    assert kept == [[2, 3], [3], [2, 3], [3], [0, 1, 2, 3, 4]]


def test_truncated_logprobs_are_renormalised():
    table = processed_logprobs(LOGITS, [SamplingParams(top_k=3, temperature=0.5)])
    assert table.exp().sum().item() == pytest.approx(1.0)


def test_a_row_draws_the_same_beside_any_neighbours():
    rows = [SamplingParams(temperature=0.7), SamplingParams(temperature=0.0), SamplingParams(top_k=2)]
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    together = draw(logits, rows, [random.Random(i) for i in range(3)])
    for i, params in enumerate(rows):
        alone = draw(logits[i : i + 1], [params], [random.Random(i)])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)
        assert alone.ranks[0] == together.ranks[i]


def test_a_token_without_probability_is_never_drawn():
    class Extreme(random.Random):
        def random(self):
            return self.value

    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 1.0, float("-inf")]])
    for value in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        rng = Extreme()
        rng.value = value
        assert draw(logits, [SamplingParams()], [rng]).token_ids[0] in (1, 3)


def test_the_second_end_of_turn_id_is_a_stop_token_as_in_vllm():
    params = SamplingParams.from_json({"stop_token_ids": [9]}, eos_ids=(5, 6))
    assert (params.end_of_turn_id, params.stop_token_ids) == (5, {6, 9})
    params = SamplingParams.from_json({"stop_token_ids": [9], "ignore_eos": True}, eos_ids=(5, 6))
    assert (params.end_of_turn_id, params.stop_token_ids) == (None, {9})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, True, "1"])
def test_a_temperature_that_is_no_number_from_0_to_2_is_refused(value):
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams.from_json({"temperature": value}, eos_ids=())
