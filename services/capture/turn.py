"""One model call in a process: who listens, what is shown of it, and what its program is told it says."""

from __future__ import annotations

import asyncio
import time

from rollout.trajectory import Message
from services.capture import metrics
from services.capture.call import Answer
from services.engines.base import Completion
from workers.agent.formats import Codec

SHOW_S = 0.05
"""Between two looks at what was sampled so far, to show it; more where many are shown …"""
SHOW_SHARE = 0.25
"""… so that all looks together take at most so much of the process' time."""
LONGEST_MARK = 32
"""Characters of the longest word of a chat format that begins a call."""


class Turn:
    """One call in this process."""

    def __init__(self, call_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.call_id = call_id
        self.created = int(time.time())
        self.began = time.monotonic()
        self.prompt_tokens = 0
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done when the model is asked: no error of the call itself comes any more."""
        self.result: asyncio.Future[Answer] = loop.create_future()
        """The answer, once it is written; or a `Refusal`."""
        self.text = self.reasoning = ""
        """Of the answer, as far as it may be shown."""
        self._changed = asyncio.Event()

    def show(self, text: str, reasoning: str) -> None:
        """Let listeners see more. Only what goes on where the last one ended is taken."""
        if text.startswith(self.text) and reasoning.startswith(self.reasoning):
            self.text, self.reasoning = text, reasoning
            self._changed.set()

    def end(self, outcome: Answer | Exception) -> None:
        """The call has ended, so."""
        if self.result.done():
            return
        if isinstance(outcome, Answer):
            self.result.set_result(outcome)
        else:
            self.result.set_exception(outcome)
            self.result.exception()  # nobody may be listening
        if not self.begun.done():
            self.begun.set_result(None)
        self._changed.set()

    async def change(self, timeout_s: float) -> bool:
        """Wait until there is more to see, or the end; False: not within so many seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class Shown:
    """Shows listeners what is sampled, as far as it can be told already what it says."""

    live = 0
    """How many there are in the process: together they look for a share of its time."""

    def __init__(self, turn: Turn, codec: Codec, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self._turn, self._codec, self._prompt = turn, codec, prompt
        self._looking = False
        self._pause_s = SHOW_S

    def watch(self, ids: list[int]) -> None:
        """Ids were sampled."""
        self.ids += ids
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        self._looking = False
        if self._turn.result.done():
            return
        began = time.monotonic()
        message = self._codec.parse(self._prompt, self.ids).message
        text, reasoning = _settled(message.text), message.reasoning or ""
        self._turn.show(text, reasoning if text else _settled(reasoning))
        self._pause_s = max(SHOW_S, (time.monotonic() - began) * Shown.live / SHOW_SHARE)


def _settled(text: str) -> str:
    """What of a text stands: its last characters may yet begin a call, or be half a character."""
    mark = text.rfind("<", max(0, len(text) - LONGEST_MARK))
    return (text[:mark] if mark >= 0 else text).rstrip("\ufffd").rstrip()


def told(codec: Codec, prompt: list[int], completion: Completion, shown: Turn | None) -> Message:
    """A sampled turn as the program is told it: what was meant as a call and is none is text.

    `shown`: the turn that was shown while it was sampled; what was said is not taken back.
    """
    parsed = codec.parse(prompt, completion.token_ids)
    text = codec.text_of(completion.token_ids) if parsed.malformed else parsed.message.text
    reasoning = parsed.message.reasoning
    if shown and not (text.startswith(shown.text) and (reasoning or "").startswith(shown.reasoning)):
        metrics.MISSHOWN.inc()
        text, reasoning = shown.text, shown.reasoning or None
    # Programs drop a call whose id they have seen, and some formats count from 0 in each turn.
    name = completion.call_id.replace("-", "")[-16:]
    calls = [
        call.model_copy(update={"id": f"call_{name}{number}"})
        for number, call in enumerate(parsed.message.tool_calls)
    ]
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)
