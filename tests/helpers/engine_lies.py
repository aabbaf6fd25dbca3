"""Answers of an engine that lies, made of honest ones: they would poison a trainer, or end a worker.

`LIES` maps a name to a function of the honest body of `/inference/v1/generate` and the call. It changes the
body in place, or returns what is sent instead: another JSON value, or a `Raw` answer.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
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
LIES: dict[str, Lie] = {}


def lie(function: Lie) -> Lie:
    LIES[function.__name__] = function
    return function


def tell(name: str, body: dict[str, Any], call: Call) -> Any:
    """The lie of that name about this call."""
    told = LIES[name](body, call)
    return body if told is None else told


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    return body["choices"][0]


def _entries(body: dict[str, Any]) -> list[dict[str, Any]]:
    return _choice(body)["logprobs"]["content"]


def _say_ids(body: dict[str, Any], ids: list[Any], reason: str | None = None) -> None:
    """Ids with log-probs, counts and spans that fit them, so that nothing but the ids is odd."""
    choice = _choice(body)
    choice["token_ids"] = ids
    choice["logprobs"]["content"] = [{"token_id": one, "logprob": -0.5, "rank": 1} for one in ids]
    choice["weight_versions"] = [{**choice["weight_versions"][0], "start": 0, "end": len(ids)}]
    choice["finish_reason"] = reason or choice["finish_reason"]
    if choice["finish_reason"] == "length":
        choice["stop_reason"] = None
    body["usage"] |= {
        "completion_tokens": len(ids),
        "total_tokens": body["usage"]["prompt_tokens"] + len(ids),
    }


def _say_id(value: Any) -> Lie:
    return lambda body, call: _say_ids(body, [value, *_choice(body)["token_ids"][1:]])


def _say_logprob(value: Any) -> Lie:
    def told(body: dict[str, Any], call: Call) -> None:
        _entries(body)[0]["logprob"] = value

    return told


def _say_version(value: Any) -> Lie:
    def told(body: dict[str, Any], call: Call) -> None:
        for span in _choice(body)["weight_versions"]:
            span["version"] = value

    return told


def _say_span(start: int, end: int) -> Lie:
    """Two spans; the second one from `start`, to `end` beyond the last id."""

    def told(body: dict[str, Any], call: Call) -> None:
        choice = _choice(body)
        version, count = choice["weight_versions"][0]["version"], len(choice["token_ids"])
        choice["weight_versions"] = [
            {"version": version, "start": 0, "end": 1},
            {"version": version, "start": start, "end": count + end},
        ]

    return told


def _say(name: str, value: Any) -> Lie:
    def told(body: dict[str, Any], call: Call) -> None:
        _choice(body)[name] = value

    return told


def _say_usage(name: str, by: int) -> Lie:
    def told(body: dict[str, Any], call: Call) -> None:
        body["usage"][name] += by

    return told


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


LIES |= {
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
    "weights_of_version_null": _say_version(None),
    "weights_of_version_number": _say_version(7),
    "weights_of_no_version": _say_version(""),
    "weights_of_a_version_of_a_megabyte": _say_version("v" * 2**20),
    "weights_that_nobody_loaded": _say_version("step-999999"),
    "spans_with_a_gap": _say_span(2, 0),
    "spans_that_overlap": _say_span(0, 0),
    "spans_beyond_the_ids": _say_span(1, 1),
    "a_span_that_begins_with_true": _say_span(True, 0),
    "an_end_that_is_a_number": _say("finish_reason", 7),
    "an_end_of_an_unknown_kind": _say("finish_reason", "tired"),
    "a_stop_by_text_that_nobody_asked_for": _say("stop_reason", "\n"),
    "a_stop_by_an_id_that_is_not_there": _say("stop_reason", 5),
    "another_choice_than_the_first": _say("index", 7),
    "ids_that_are_null": _say("token_ids", None),
    "ids_that_are_none": _say("token_ids", []),
    "no_log_probs": _say("logprobs", None),
    "experts_that_are_an_object": _say("routed_experts", {"layer": 1}),
    "experts_that_are_no_base64": _say("routed_experts", "€" * 12),
    "experts_that_are_a_pickle": _say("routed_experts", _npy(np.array([[[print]]], object))),
    "experts_of_more_tokens_than_there_were": _say("routed_experts", _npy(np.zeros((99_999, 1, 2), np.int8))),
    "experts_that_are_cut_off": _say("routed_experts", _npy(np.zeros((20, 4, 2), np.int8))[:-40]),
    "experts_of_one_dimension": _say("routed_experts", _npy(np.zeros(20, np.int8))),
    "a_longer_prompt": _say_usage("prompt_tokens", 1),
    "more_ids_than_it_gives": _say_usage("completion_tokens", 1),
}


@lie
def more_ids_than_were_asked_for(body, call):
    ids = [21] * (call.max_tokens + 1)
    _say_ids(body, ids, "length")


@lie
def ids_after_the_stop_id(body, call):
    ids = _choice(body)["token_ids"]
    _say_ids(body, [min(call.stop_token_ids), *ids[1:]])


@lie
def a_stop_in_the_middle_of_a_word(body, call):
    _say_ids(body, [21, 22, 23], "stop")
    _choice(body)["stop_reason"] = None


@lie
def a_cut_that_nothing_asked_for(body, call):
    _say_ids(body, [21, 22, 23], "length")


@lie
def log_probs_of_other_ids(body, call):
    _entries(body)[0]["token_id"] += 1


@lie
def one_log_prob_too_few(body, call):
    _entries(body).pop()


@lie
def the_answer_to_another_call(body, call):
    body["request_id"] = "generate-tokens-0197f1aa-0000-7000-8000-000000000000"


@lie
def the_answer_to_a_numbered_call(body, call):
    body["request_id"] = 12


@lie
def the_answer_to_another_prompt(body, call):
    body["prompt_token_ids"] = [*call.prompt[:-1], 21]


@lie
def two_choices(body, call):
    body["choices"] *= 2


@lie
def no_choices(body, call):
    body["choices"] = []


@lie
def choices_that_are_an_object(body, call):
    body["choices"] = {"0": _choice(body)}


@lie
def a_list(body, call):
    return [body]


@lie
def nothing(body, call):
    return Raw(b"")


@lie
def a_page_of_html(body, call):
    return Raw(b"<html>200 OK</html>")


@lie
def a_megabyte_of_brackets(body, call):
    return Raw(b'{"choices":' + b"[" * 2**20)


@lie
def a_hundred_megabytes(body, call):
    return Raw(json.dumps({**body, "padding": "x" * (100 << 20)}).encode())


@lie
def a_gigabyte_in_a_megabyte(body, call):
    packed = gzip.compress(b" " * (64 << 20), 9)
    return Raw(packed * 16, headers={"Content-Encoding": "gzip"})


@lie
def somebody_elses_address(body, call):
    return Raw(b"", 307, {"Location": "/elsewhere"})


@lie
def created_without_an_answer(body, call):
    return Raw(json.dumps(body).encode(), 302, {"Location": "/elsewhere"})


@lie
def ends_every_call_itself(body, call):
    _choice(body)["finish_reason"] = "abort"
