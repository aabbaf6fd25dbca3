"""What a chat format or a node cannot do is refused by name, before anything is sampled."""

from __future__ import annotations

import asyncio

import pytest

from rollout.schema import Blame, RolloutRequest
from rollout.trajectory import Message
from tests.helpers.chat_formats import save
from tests.helpers.scripted import Look, ScriptedRouter, backend, loop
from workers.agent.formats import CodecError
from workers.agent.loop import AgentLoop

ASKED = [Message(role="user", content="1 plus 1")]


@pytest.mark.parametrize(
    ("family", "advertised", "reason"),
    [
        ("hermes", True, "the format leaves tools out of the prompt; .*`advertise_tools = False`"),
        ("turns", False, "this model takes no tool answers: .*only user and model turns"),
    ],
)
def test_tools_that_a_format_has_no_place_for_are_refused_before_anything_is_sampled(
    tmp_path, family, advertised, reason
):
    tokenizer = str(save(family, tmp_path / "model"))
    router = ScriptedRouter([], backend(id="b-7", tokenizer=tokenizer))
    request = RolloutRequest(handler="scripted")
    agent = AgentLoop(request, 0, router, (Look(),), advertise_tools=advertised)
    with pytest.raises(CodecError, match=f"^backend b-7, tokenizer {tokenizer!r}: .*{reason}") as caught:
        asyncio.run(agent.run(ASKED))
    assert (caught.value.blame, caught.value.retry) == (Blame.INFRASTRUCTURE, False)
    assert router.prompts == [] and agent.trajectory.chains == []


def test_a_tokenizer_that_is_not_on_this_node_may_be_on_another():
    router = ScriptedRouter([], backend(id="b-7", tokenizer="/nowhere/at/all"))
    with pytest.raises(CodecError, match=r"^backend b-7, .*cannot be loaded on this node") as caught:
        asyncio.run(loop(router).run(ASKED))
    assert (caught.value.blame, caught.value.retry) == (Blame.INFRASTRUCTURE, True)
