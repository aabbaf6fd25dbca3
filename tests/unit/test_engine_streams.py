"""Calls that are watched while they are sampled: what is told, what is joined, and what is not believed."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from rollout.schema import Backend
from services.engines.base import Completion, SampleRequest
from tests.helpers.engine_lies import LIES
from tests.helpers.engine_model import EngineModel, Timing
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.liars import Fleet, served
from tests.unit.test_engine_client import PLENTY, answer
from tests.unit.test_engine_client import served as raw_server
from workers.agent import llm, pieces
from workers.agent.llm import BackendUnavailable, BrokenCall, EngineClient, session
from workers.agent.pieces import Pieces
from workers.agent.router import BackendRouter
from workers.errors import ModelError

STOP = 2
LANGUAGE = FakeLanguage(first_id=20, vocab_size=300, ends=30)
PROMPT = [100, 101, 102, 104]
REQUEST = SampleRequest(
    "call-1", PROMPT, 60, stop_token_ids=frozenset([STOP]), end_ids=frozenset(), vocab_size=384
)
TRUTH = LANGUAGE.answer(PROMPT, max_tokens=60, stop_token_ids=[STOP])
"""What an undisturbed engine says: a dozen ids or more, the stop id last."""
WHOLE = Completion("call-1", TRUTH.token_ids, TRUTH.logprobs, "stop", [("default", 0, len(TRUTH.token_ids))])
HALF = len(TRUTH.token_ids) // 2
STEP = Timing(base_s=0.002)
ROUTES = ("generate", "completions")


def engine(route="generate", **faults):
    made = FakeEngine(
        EngineModel(language=LANGUAGE, timing=STEP),
        max_model_len=2048,
        completions_only=route == "completions",
    )
    for kind, options in faults.items():
        made.fault(kind, **options)
    return made


class Fares(Fleet):
    """Backends whose weights fare as a test says."""

    kept_: bool | None = True
    known = frozenset(["default"])

    async def kept(self, backend):
        return self.kept_

    async def trusted(self, backend_id, version, policy):
        return version in self.known


class Told(list):
    """What `watch` was told, call by call."""

    def __call__(self, token_ids):
        assert token_ids, "an empty run was told"
        self.append(list(token_ids))

    @property
    def ids(self):
        return [token for run in self for token in run]


def watched(*engines, request=REQUEST, timeout_s=PLENTY, during=None, **fares):
    """The outcome of one watched call to the first of these engines: what was told, the completion, the
    router and the fleet. `during(engines, told, fleet)` runs beside it."""

    async def main():
        told = Told()
        async with served(list(engines)) as fleet, session() as http:
            fleet.__class__ = Fares
            for name, value in fares.items():
                setattr(fleet, name, value)
            router = BackendRouter("r", fleet, http, wait_s=0.2)
            call = asyncio.create_task(router.generate(request, timeout_s, told))
            beside = asyncio.create_task(during(engines, told, fleet)) if during else None
            try:
                return told, await asyncio.wait_for(call, PLENTY), router, fleet
            except BrokenCall as error:
                return told, error, router, fleet
            finally:
                if beside:
                    await beside

    return asyncio.run(main())


def check(told, completion, *, spans=None, cached=0):
    """It is the undisturbed answer, and each id was told once."""
    assert told.ids == TRUTH.token_ids
    assert completion == replace(
        WHOLE, logprobs=pytest.approx(TRUTH.logprobs), spans=spans or WHOLE.spans, cached_tokens=cached
    )


async def until(told, count):
    while len(told.ids) < count:
        await asyncio.sleep(0.001)


# -- one engine, undisturbed -----------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_a_watched_call_is_told_as_it_is_sampled_and_ends_as_the_whole_one(route):
    assert len(TRUTH.token_ids) > 12 and TRUTH.finish_reason == "stop"
    told, completion, router, _ = watched(engine(route))
    check(told, completion)
    assert len(told) > HALF, "ids were held back"
    assert "failed_calls" not in router.metrics

    async def whole():
        async with served([engine(route)]) as fleet, session() as http:
            return await BackendRouter("r", fleet, http).generate(REQUEST, PLENTY)

    assert asyncio.run(whole()) == completion


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_is_full_ends_with_length(route):
    told, completion, *_ = watched(engine(route), request=replace(REQUEST, max_tokens=5))
    assert told.ids == completion.token_ids == TRUTH.token_ids[:5]
    assert completion.finish_reason == "length"


# -- calls that break off --------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["cut", "truncated", "abort", "hang"])
def test_a_call_that_breaks_off_goes_on_from_its_ids(route, kind):
    faulty = engine(route, **{kind: {"calls": 1, "tokens": HALF}})
    other = engine(route)
    told, completion, router, fleet = watched(faulty, other, timeout_s=2.0 if kind == "hang" else PLENTY)
    # A call that is cut off has not told what was cached.
    check(told, completion, cached=0 if kind == "abort" else None)
    assert router.metrics["failed_calls"] == 1
    (again,) = (faulty if kind == "abort" else other).calls[-1:]
    assert again.prompt_tokens >= len(PROMPT) + HALF, "the call began anew"
    assert fleet.suspected == ([] if kind == "abort" else ["engine0"])


@pytest.mark.parametrize("route", ROUTES)
def test_wherever_it_breaks_off_the_joined_answer_is_the_undisturbed_one(route):
    for tokens in range(1, len(TRUTH.token_ids) + 1):
        told, completion, *_ = watched(engine(route, cut={"calls": 1, "tokens": tokens}), engine(route))
        whole = completion.cached_tokens is not None
        check(told, completion, cached=completion.cached_tokens)
        assert whole == (tokens == len(TRUTH.token_ids)), "behind the last id there is nothing to cut"


def test_one_id_a_call_is_progress_enough():
    told, completion, router, _ = watched(engine(cut={"tokens": 1}), request=replace(REQUEST, max_tokens=7))
    assert told.ids == completion.token_ids == TRUTH.token_ids[:7]
    assert router.metrics["failed_calls"] == 6, "more than may fail in vain"


def test_aborts_do_not_add_up_to_a_failure_while_ids_come():
    told, completion, router, fleet = watched(engine(abort={"tokens": 2}))
    check(told, completion)
    assert router.metrics["failed_calls"] > 5 and fleet.suspected == []


def test_a_backend_that_is_found_down_in_the_middle_of_a_stream_is_left_with_the_ids_kept():
    async def down(engines, told, fleet):
        await until(told, HALF)
        fleet.down("engine0")

    first, second = engine(), engine()
    first.fault("slow", factor=5)
    told, completion, *_ = watched(first, second, during=down)
    check(told, completion, cached=None)
    assert [record.state for record in first.calls] == ["cancelled"]
    assert second.calls[0].prompt_tokens >= len(PROMPT) + HALF


def test_a_call_that_is_ended_before_it_begins_is_made_elsewhere():
    class Downs(Fares):
        def watch(self, backend_id, call, policy):
            super().watch(backend_id, call, policy)
            if backend_id == "engine0":
                self.down(backend_id)

    async def main():
        told = Told()
        async with served([engine(), engine()]) as fleet, session() as http:
            fleet.__class__ = Downs
            return told, await BackendRouter("r", fleet, http).generate(REQUEST, PLENTY, told)

    told, completion = asyncio.run(main())
    check(told, completion)


def test_who_cancels_a_watched_call_cancels_it_in_the_engine():
    async def main():
        slow = engine(slow={"factor": 20})
        told = Told()
        async with served([slow]) as fleet, session() as http:
            call = asyncio.create_task(BackendRouter("r", fleet, http).generate(REQUEST, PLENTY, told))
            await asyncio.wait_for(until(told, 2), PLENTY)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while slow.calls[0].state == "running":
                await asyncio.sleep(0.01)
            return slow.calls[0].state

    assert asyncio.run(asyncio.wait_for(main(), PLENTY)) == "cancelled"


# -- weights ---------------------------------------------------------------------------------------


def update(mode):
    """A weight update of the first engine in the middle of the call."""

    async def exchange(engines, told, fleet):
        await until(told, HALF)
        model = engines[0].model
        await model.pause(mode)
        model.version = "step-1"
        exchange.at = len(told.ids) if mode == "keep" else None
        model.resume()

    return exchange


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_each_id_has_the_version_of_the_weights_that_sampled_it_though_they_change_in_mid_call(mode):
    during = update(mode)
    first = engine(slow={"factor": 5})
    told, completion, *_ = watched(first, during=during, known=frozenset(["step-1"]))
    check(told, completion, spans=completion.spans)
    if mode == "wait":
        assert completion.spans == WHOLE.spans
        return
    (old, start, middle), (new, begin, end) = completion.spans
    assert (old, start, new, begin, end) == ("default", 0, "step-1", middle, len(TRUTH.token_ids))
    assert HALF <= middle <= HALF + 3, "an id has the version of other weights"
    if mode == "abort":
        assert middle == len(TRUTH.token_ids) - first.calls[1].sampled


def test_ids_sampled_from_weights_that_nobody_vouches_for_fail_the_call_once_they_were_seen():
    told, error, _, fleet = watched(
        engine(slow={"factor": 5}), engine(), during=update("keep"), known=frozenset()
    )
    assert isinstance(error, BrokenCall) and "'step-1'" in str(error)
    assert told.ids == TRUTH.token_ids and fleet.suspected == ["engine0"]


@pytest.mark.parametrize(
    ("kept", "kind", "route", "version"),
    [
        (True, "cut", "generate", "default"),
        (None, "cut", "generate", None),
        (None, "abort", "generate", "default"),  # it says so itself
        (True, "cut", "completions", "default"),
        (None, "cut", "completions", None),
        (None, "abort", "completions", "default"),  # it was ended before the new weights came
    ],
)
def test_a_piece_that_names_no_weights_has_those_that_its_backend_is_known_to_have_kept(
    kept, kind, route, version
):
    faulty = engine(route, **{kind: {"calls": 1, "tokens": HALF}})
    told, completion, *_ = watched(faulty, engine(route), kept_=kept)
    middle = len(TRUTH.token_ids) - ([*faulty.calls[1:]] or [None])[0].sampled if kind == "abort" else HALF
    spans = WHOLE.spans if version else [(None, 0, middle), ("default", middle, len(TRUTH.token_ids))]
    check(told, completion, spans=spans, cached=0 if kind == "abort" else None)


@pytest.mark.parametrize(("kind", "route"), [("cut", "generate"), ("abort", "completions")])
def test_a_piece_of_a_backend_whose_new_weights_are_wrong_is_no_piece(kind, route):
    faulty = engine(route, **{kind: {"calls": 1, "tokens": HALF}})
    told, error, _, fleet = watched(faulty, engine(route), kept_=False)
    assert isinstance(error, BrokenCall) and "do not count" in str(error)
    assert len(told.ids) >= HALF and fleet.suspected == ["engine0"]


# -- lies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_a_stream_is_met_elsewhere_or_ends_the_call_and_no_impossible_id_is_told(lie):
    liar = engine(lie={"name": lie})
    told, outcome, _, fleet = watched(liar, engine())
    assert liar.lies_told
    # All that is wrong with this one is the word for the end, behind a stop id.
    assert ("engine0" in fleet.suspected) == (lie != "ends_every_call_itself")
    assert all(type(token) is int and 0 <= token < 384 for token in told.ids)
    if isinstance(outcome, BrokenCall):
        assert told, "nobody had seen anything"
        return
    check(told, outcome, spans=outcome.spans, cached=outcome.cached_tokens)
    assert {version for version, *_ in outcome.spans} == {"default"}


def test_lies_are_found_before_anything_of_them_is_told_or_the_call_fails():
    """So that the test above does not hold because one of both never happens."""
    lies = ("an_id_just_outside_the_vocabulary", "a_log_prob_above_zero", "spans_with_a_gap", "nothing")
    outcomes = [watched(engine(lie={"name": lie}), engine())[1] for lie in lies]
    assert [isinstance(outcome, BrokenCall) for outcome in outcomes] == [False, False, True, False]


# -- bytes -----------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(ids, **fields):
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": None, **fields}
    return line({"request_id": "generate-tokens-call-1", "choices": [choice]})


def line(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


GOOD = event([21, 22]) + event([23]) + event([STOP], finish_reason="stop") + DONE


def of_bytes(*chunks, request=REQUEST, timeout_s=PLENTY, pause_s=0.0):
    """What a client is told by, and makes of, a server that sends these bytes: told, completion or error, and
    the client."""

    async def main():
        async def reply(_, writer):
            with suppress(ConnectionError):
                for chunk in chunks:
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(pause_s)

        async with raw_server(reply) as url, session() as http:
            backend = Backend(
                id="b", url=url, model="m", tokenizer="t", max_model_len=2048, policy_version="v1"
            )
            client, told = EngineClient(http, backend), Told()
            try:
                return told, await client.generate(request, timeout_s, told), client
            except BackendUnavailable as error:
                return told, error, client

    return asyncio.run(asyncio.wait_for(main(), PLENTY))


@pytest.mark.parametrize(
    "stream",
    [
        GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        b": ping\n\n" * 100 + GOOD,
        GOOD.replace(b"data: {", b"event: message\nid: 7\nretry: 5\ndata:{"),
        GOOD + b"data: no json\n\n",
    ],
)
def test_events_are_read_however_they_are_written(stream):
    for size in (1, 7, len(stream)):
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        told, completion, _ = of_bytes(HEAD, *parts)
        assert told == [[21, 22], [23], [STOP]]
        assert completion.token_ids == told.ids
        assert completion.logprobs == [-0.5] * 4


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"", "before its time"),
        (event([24])[:30], "before its time"),
        (b"data: {nonsense\n\n", "no JSON"),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n' + DONE, "out of memory"),
        (b"<html>502 Bad Gateway</html>\n", "before its time"),
    ],
)
def test_a_stream_that_breaks_off_keeps_what_it_had_told(tail, message):
    told, error, client = of_bytes(HEAD, event([21, 22]) + event([23]) + tail)
    assert message in str(error) and not isinstance(error, BrokenCall) and not error.aborted
    piece = client.cut()
    assert told.ids == piece.token_ids == [21, 22, 23]
    assert (piece.finish_reason, piece.spans, piece.logprobs) == ("cut", [(None, 0, 3)], [-0.5] * 3)


@pytest.mark.parametrize(
    "ends",
    [
        event([23], finish_reason="abort") + DONE,
        event([23]) + DONE,  # vLLM's other route, of a call that was ended in the queue
    ],
)
def test_a_stream_that_the_engine_ended_itself_may_be_taken_up_there(ends):
    told, error, client = of_bytes(HEAD, event([21, 22]) + ends)
    assert error.aborted and client.cut().token_ids == told.ids == [21, 22, 23]


@pytest.mark.parametrize(
    "bad",
    [
        event([400]),
        event([-1]),
        event([True]),
        event([24], logprobs={"content": [{"token_id": 24, "logprob": 0.5}]}),
        event([24], logprobs={"content": [{"token_id": 24, "logprob": -math.inf}]}),
        event([24], logprobs={"content": [{"token_id": 25, "logprob": -0.5}]}),
        event([24], logprobs=None),
        event([24], index=1),
        event([STOP, 24]),
        event([24] * 59),
        event([24]).replace(b"call-1", b"call-2"),
        b"data: []\n\n",
        b"data: 7\n\n",
        b'data: {"choices": {"0": 1}}\n\n',
        b'data: {"choices": [], "usage": 7}\n\n',
        b"data: {}\n\n",
    ],
)
def test_what_is_wrong_with_an_event_is_found_before_its_ids_are_told(bad):
    told, error, client = of_bytes(HEAD, event([21, 22]) + bad + GOOD)
    assert isinstance(error, BrokenCall)
    assert told.ids == client.cut().token_ids == [21, 22]


@pytest.mark.parametrize(
    "stream",
    [
        event([STOP]) + event([24]) + DONE,
        event([21], finish_reason="length") + DONE,
        event([21]) + event([STOP], finish_reason="stop") + event([24]) + DONE,
        event([21], finish_reason="tired") + DONE,
        event([21], finish_reason=["stop"]) + DONE,
        event([STOP], finish_reason="stop", stop_reason="\n") + DONE,
        event([STOP], finish_reason="stop", weight_versions=[{"version": "v1", "start": 0, "end": 9}]) + DONE,
        event([STOP], finish_reason="stop", routed_experts="no base64") + DONE,
        event([21]) + event([], finish_reason="stop") + DONE,
        event([STOP], finish_reason="stop") + line({"choices": [], "usage": {"prompt_tokens": 5}}) + DONE,
        event([], finish_reason="stop") + DONE,
    ],
)
def test_what_is_wrong_with_the_whole_breaks_the_call(stream):
    _, error, _ = of_bytes(HEAD, stream)
    assert isinstance(error, BrokenCall)


def test_an_end_that_was_told_is_an_end_though_the_connection_broke_behind_it():
    _, error, client = of_bytes(HEAD, GOOD.removesuffix(DONE))
    assert isinstance(error, BackendUnavailable)
    assert (client.cut().finish_reason, client.cut().token_ids) == ("stop", [21, 22, 23, STOP])


def test_a_whole_answer_where_a_stream_was_asked_for_is_read_as_one():
    body = json.dumps(
        {
            "choices": [
                {
                    "token_ids": [21, STOP],
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in (21, STOP)]},
                }
            ]
        }
    ).encode()
    told, completion, client = of_bytes(answer(body=body))
    assert completion.token_ids == [21, STOP]
    assert told == [] and client.cut() is None, "the router tells it, once the weights are known"


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (b"x" * 50_000, "too many bytes"),
        (b"\n" * 50_000, "too many lines"),
        (b": ping\n\n" * 5_000, "too many lines"),
        (b"data: " + b"[" * 50_000, "too many bytes"),
    ],
)
def test_a_stream_without_end_is_left(monkeypatch, chunk, message):
    monkeypatch.setattr(llm, "MAX_ANSWER_BYTES", 1_000_000)
    monkeypatch.setattr(pieces, "BASE_LINES", 100_000)
    _, error, _ = of_bytes(HEAD, *[chunk] * 1000)
    assert isinstance(error, BrokenCall) and message in str(error)


def test_a_stream_that_goes_on_for_ever_is_left_when_the_time_is_over():
    told, error, client = of_bytes(HEAD, event([21]), *[b": ping\n\n"] * 1000, timeout_s=0.5, pause_s=0.05)
    assert "no answer within 0.5 s" in str(error)
    assert told.ids == client.cut().token_ids == [21]


def test_one_line_of_many_chunks_is_not_read_again_and_again():
    """40 MB in one line; what is read anew with each chunk would take minutes."""
    long = b'data: {"choices": [], "padding": "' + b"x" * (40 << 20) + b'"}\n\n'
    request = replace(REQUEST, max_tokens=10_000)
    told, completion, _ = of_bytes(HEAD, long, GOOD, request=request)
    assert told.ids == completion.token_ids


# -- joining ---------------------------------------------------------------------------------------


def piece(ids, spans, finish="cut", **fields):
    return Completion("call-1", ids, [-0.1 * token for token in ids], finish, spans, **fields)


BACKEND = Backend(id="b", url="http://b", model="m", tokenizer="t", max_model_len=20)


def test_pieces_are_joined_with_their_spans_shifted_and_neighbours_merged():
    call = Pieces(replace(REQUEST, seed=7))
    assert call.rest.seed == 7
    assert call.add(piece([3, 4], [("a", 0, 2)], cached_tokens=3), BACKEND) is None
    assert (call.rest.prompt, call.rest.max_tokens) == ([*PROMPT, 3, 4], 14 + 44)
    first = call.rest.seed
    assert call.add(piece([5, 6, 7], [("a", 0, 1), ("b", 1, 3)], cached_tokens=4), BACKEND) is None
    assert (call.rest.prompt, call.rest.max_tokens) == ([*PROMPT, 3, 4, 5, 6, 7], 55)
    assert len({7, first, call.rest.seed}) == 3, "an engine would draw the same numbers again"
    joined = call.joined(piece([8, STOP], [("b", 0, 1), (None, 1, 2)], "stop", routed_experts="x"))
    assert joined.token_ids == [3, 4, 5, 6, 7, 8, STOP]
    assert joined.logprobs == pytest.approx([-0.3, -0.4, -0.5, -0.6, -0.7, -0.8, -0.2])
    assert joined.spans == [("a", 0, 3), ("b", 3, 6), (None, 6, 7)]
    assert (joined.call_id, joined.finish_reason, joined.cached_tokens) == ("call-1", "stop", 3)
    assert joined.routed_experts is None


def test_a_call_in_one_piece_is_left_as_it_is():
    whole = piece([5, STOP], [("a", 0, 2)], "stop", routed_experts="x")
    assert Pieces(REQUEST).joined(whole) is whole


@pytest.mark.parametrize(
    ("ids", "request_", "finish"),
    [
        ([5, STOP], REQUEST, "stop"),
        ([5, 9], replace(REQUEST, end_ids=frozenset([9])), None),  # `<tool_call>`, for one
        ([5, 6], replace(REQUEST, max_tokens=2), "length"),
        ([5] * 16, REQUEST, "length"),
        ([5] * 15, REQUEST, None),
    ],
)
def test_a_piece_with_nothing_left_to_sample_ends_the_call(ids, request_, finish):
    done = Pieces(request_).add(piece(ids, [("a", 0, len(ids))]), BACKEND)
    assert (done and done.finish_reason) == finish


# -- whole answers, by the router ------------------------------------------------------------------


@asynccontextmanager
async def two_whole(finish="stop"):
    """Two servers that do not stream."""
    body = json.dumps(
        {
            "choices": [
                {
                    "token_ids": [21, STOP],
                    "finish_reason": finish,
                    "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in (21, STOP)]},
                    "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
                }
            ]
        }
    ).encode()

    async def reply(_, writer):
        writer.write(answer(body=body))
        await writer.drain()

    async with raw_server(reply) as one, raw_server(reply) as two:
        backends = [
            Backend(id=name, url=url, model="m", tokenizer="t", max_model_len=2048, policy_version=version)
            for name, url, version in (("a", one, "old"), ("b", two, "v1"))
        ]
        fleet = Fares(backends)
        yield fleet


@pytest.mark.parametrize("known", [True, False])
def test_who_does_not_stream_tells_all_ids_at_once_when_they_are_known_to_count(known):
    async def main():
        told = Told()
        async with two_whole() as fleet, session() as http:
            fleet.known = frozenset(["v1"] if known else [])
            router = BackendRouter("r", fleet, http)
            return told, await router.generate(REQUEST, PLENTY, told), router

    told, completion, router = asyncio.run(main())
    assert told == [[21, STOP]] and completion.token_ids == [21, STOP]
    assert router.metrics.get("failed_calls", 0) == (0 if known else 1)


def test_a_call_that_is_refused_is_the_models_error_when_it_is_watched_too():
    async def main():
        async with served([engine()]) as fleet, session() as http:
            bad = replace(REQUEST, prompt=[2**40])
            await BackendRouter("r", fleet, http).generate(bad, PLENTY, Told())

    with pytest.raises(ModelError, match="HTTP 400"):
        asyncio.run(main())
