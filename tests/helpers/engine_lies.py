"""Answers of an engine that lies, made of honest ones: they would poison a trainer, or end a worker.

`LIES` maps a name to a function of the honest body of `/inference/v1/generate` and the call. It changes the
body in place, or returns what is sent instead: another JSON value, or a `Raw` answer.
"""

from __future__ import annotations

import base64
import functools
import gzip
import io
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.helpers.fake_wire import Call

OUTSIDE = 384
"""The first id that the demo model does not have."""


@dataclass(frozen=True)
class Raw:
    """An answer that is no JSON of a body."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Lie = Callable[[dict[str, Any], Call], Any]


def tell(name: str, body: dict[str, Any], call: Call) -> Any:
    """The lie of that name about this call."""
    answer = LIES[name](body, call)
    return body if answer is None else answer


def _ids(body: dict[str, Any]) -> list[int]:
    return body["choices"][0]["token_ids"]


def _say_ids(
    body: dict[str, Any], ids: list[Any], reason: str | None = None, stop_reason: int | None = None
) -> None:
    """Ids with log-probs, counts and spans that fit them, so that nothing but the ids is odd."""
    choice = body["choices"][0]
    choice["token_ids"] = ids
    choice["logprobs"]["content"] = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids]
    choice["weight_versions"] = [{**choice["weight_versions"][0], "start": 0, "end": len(ids)}]
    if reason is not None:
        choice["finish_reason"], choice["stop_reason"] = reason, stop_reason
    elif choice["finish_reason"] == "length":
        choice["stop_reason"] = None
    sampled = len(ids)
    body["usage"] |= {
        "completion_tokens": sampled,
        "total_tokens": body["usage"]["prompt_tokens"] + sampled,
    }


def _say_id(value: Any) -> Lie:
    return lambda body, call: _say_ids(body, [value, *_ids(body)[1:]])


def _change(*path: str | int, by: Callable[[Any], Any]) -> Lie:
    """What is at this place of the body becomes what `by` makes of it."""

    def lie(body: dict[str, Any], call: Call) -> None:
        *way, last = path
        place = functools.reduce(operator.getitem, way, body)
        place[last] = by(place.get(last) if isinstance(place, dict) else place[last])

    return lie


def _say(*path: str | int, value: Any) -> Lie:
    return _change(*path, by=lambda _: value)


def _say_logprob(value: Any) -> Lie:
    return _say(*CONTENT, 0, "logprob", value=value)


def _say_span(start: int, end: int) -> Lie:
    """Two spans; the second one from `start`, to `end` beyond the last id."""

    def split(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**spans[0], "end": 1}, {**spans[0], "start": start, "end": spans[0]["end"] + end}]

    return _change(*CHOICE, "weight_versions", by=split)


def _send(body: bytes, *status_and_headers: Any) -> Lie:
    return lambda *_: Raw(body, *status_and_headers)


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content")
VERSION = (*CHOICE, "weight_versions", 0, "version")
EXPERTS = (*CHOICE, "routed_experts")

LIES: dict[str, Lie] = {
    "an_id_just_outside_the_vocabulary": _say_id(OUTSIDE),
    "an_id_of_two_to_the_forty": _say_id(2**40),
    "an_id_below_zero": _say_id(-1),
    "an_id_that_is_a_fraction": _say_id(21.5),
    "an_id_that_is_a_truth_value": _say_id(True),
    "an_id_that_is_text": _say_id("21"),
    "a_log_prob_above_zero": _say_logprob(2.5),
    "a_log_prob_slightly_above_zero": _say_logprob(0.001),
    "a_log_prob_that_is_true": _say_logprob(True),
    "a_log_prob_that_is_text": _say_logprob("-0.5"),
    "a_log_prob_that_is_null": _say_logprob(None),
    "a_log_prob_that_is_no_number": _say_logprob(float("nan")),
    "a_log_prob_without_end": _say_logprob(float("-inf")),
    "a_log_prob_of_what_cannot_be_sampled": _say_logprob(-9999.0),
    "a_log_prob_of_four_hundred_digits": _say_logprob(-(10**400)),
    "weights_of_version_null": _say(*VERSION, value=None),
    "weights_of_version_number": _say(*VERSION, value=7),
    "weights_of_no_version": _say(*VERSION, value=""),
    "weights_of_a_version_of_a_megabyte": _say(*VERSION, value="v" * 2**20),
    "weights_that_nobody_loaded": _say(*VERSION, value="step-999999"),
    "spans_with_a_gap": _say_span(2, 0),
    "spans_that_overlap": _say_span(0, 0),
    "spans_beyond_the_ids": _say_span(1, 1),
    "a_span_that_begins_with_true": _say_span(True, 0),
    "an_end_that_is_a_number": _say(*CHOICE, "finish_reason", value=7),
    "an_end_of_an_unknown_kind": _say(*CHOICE, "finish_reason", value="tired"),
    "ends_every_call_itself": _say(*CHOICE, "finish_reason", value="abort"),
    "a_stop_by_text_that_nobody_asked_for": _say(*CHOICE, "stop_reason", value="\n"),
    "a_stop_by_an_id_that_is_not_there": _say(*CHOICE, "stop_reason", value=5),
    "a_stop_in_the_middle_of_a_word": lambda body, call: _say_ids(body, [21, 22, 23], "stop"),
    "a_cut_that_nothing_asked_for": lambda body, call: _say_ids(body, [21, 22, 23], "length"),
    "more_ids_than_were_asked_for": lambda body, call: _say_ids(body, [21] * (call.max_tokens + 1), "length"),
    "ids_after_the_stop_id": lambda body, call: _say_ids(body, [min(call.stop_token_ids), *_ids(body)[1:]]),
    "another_choice_than_the_first": _say(*CHOICE, "index", value=7),
    "two_choices": _change("choices", by=lambda choices: choices * 2),
    "no_choices": _say("choices", value=[]),
    "choices_that_are_an_object": _change("choices", by=lambda choices: {"0": choices[0]}),
    "ids_that_are_null": _say(*CHOICE, "token_ids", value=None),
    "ids_that_are_none": _say(*CHOICE, "token_ids", value=[]),
    "no_log_probs": _say(*CHOICE, "logprobs", value=None),
    "one_log_prob_too_few": _change(*CONTENT, by=lambda entries: entries[:-1]),
    "log_probs_of_other_ids": _change(*CONTENT, 0, "token_id", by=lambda token: token + 1),
    "experts_that_are_an_object": _say(*EXPERTS, value={"layer": 1}),
    "experts_that_are_no_base64": _say(*EXPERTS, value="€" * 12),
    "experts_that_are_a_pickle": _say(*EXPERTS, value=_npy(np.array([[[print]]], object))),
    "experts_of_more_tokens_than_there_were": _say(*EXPERTS, value=_npy(np.zeros((99_999, 1, 2), np.int8))),
    "experts_that_are_cut_off": _say(*EXPERTS, value=_npy(np.zeros((20, 4, 2), np.int8))[:-40]),
    "experts_of_one_dimension": _say(*EXPERTS, value=_npy(np.zeros(20, np.int8))),
    "a_longer_prompt": _change("usage", "prompt_tokens", by=lambda count: count + 1),
    "more_ids_than_it_gives": _change("usage", "completion_tokens", by=lambda count: count + 1),
    "the_answer_to_another_call": _say(
        "request_id", value="generate-tokens-0197f1aa-0000-7000-8000-000000000000"
    ),
    "the_answer_to_a_numbered_call": _say("request_id", value=12),
    "the_answer_to_another_prompt": lambda body, call: body.update(prompt_token_ids=[*call.prompt[:-1], 21]),
    "a_list": lambda body, call: [body],
    "nothing": _send(b""),
    "a_page_of_html": _send(b"<html>200 OK</html>"),
    "a_megabyte_of_brackets": _send(b'{"choices":' + b"[" * 2**20),
    "a_hundred_megabytes": _change("padding", by=lambda _: "x" * (100 << 20)),
    "a_gigabyte_in_a_megabyte": lambda body, call: Raw(
        gzip.compress(b" " * (64 << 20), 9) * 16, headers={"Content-Encoding": "gzip"}
    ),
    "somebody_elses_address": _send(b"", 307, {"Location": "/elsewhere"}),
    "created_without_an_answer": lambda body, call: Raw(
        json.dumps(body).encode(), 302, {"Location": "/elsewhere"}
    ),
}
