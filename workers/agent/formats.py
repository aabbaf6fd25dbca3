"""Chat formats: messages to token ids and sampled ids to messages, nothing sampled encoded again."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from rollout.schema import Blame
from rollout.trajectory import Message
from workers.agent.guard import CUT, TokenizerGuard
from workers.agent.parsing import THOUGHT, ParsedTurn, parse_text
from workers.errors import StageError


class CodecError(StageError):
    """The model's chat format cannot do what is asked of it; the message says why.

    The deployment is to blame, which serves this model to this handler, and no other attempt goes better.
    """

    blame = Blame.INFRASTRUCTURE


class TokenizerMissing(CodecError):
    """The tokenizer is not on this node; it may be on the next attempt's."""

    retry = True


PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "It is.", "parameters": {"type": "object", "properties": {}}},
}
PROBE_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}


class Codec(ABC):
    """Renders and parses one model's chat format."""

    digest: str = ""
    """Name and a digest of format, tokenizer and template: rollouts with the same digest share token ids."""
    stop_token_ids: list[int]
    vocab_size: int | None = None
    """Rows of the model's output: an engine samples ids below it. None = not known."""
    end_ids: frozenset[int] | None = None
    """Ids that may end a turn beside the stop ids, for an engine knows further ones; None = not known."""

    def __init__(self, name: str, guard: TokenizerGuard) -> None:
        self.name = name
        self._guard = guard
        self._refused: dict[str, CodecError] = {}
        """Why messages of a role cannot follow a turn."""
        self._obstacle: str | None = None
        """Why tools cannot be offered; empty = they can, None = not yet looked at."""

    @property
    def tokenizer(self) -> TokenizerGuard:
        """What its ids are of."""
        return self._guard

    def encode(self, text: str) -> list[int]:
        """Ids of what a model might say; names of control tokens in it are these tokens."""
        return self._guard.encode_as_is(text)

    @abstractmethod
    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Ids of the conversation's start, generation prompt included."""

    @abstractmethod
    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        """Ids to append to `prompt + sampled` for new messages, generation prompt included.

        Where the sampled turn was ended by another token than the format's own, that one comes first.

        Raises:
            CodecError: They cannot be appended without changing what is there.
        """

    @abstractmethod
    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        """The message that the sampled ids say. Never raises: anything may have been sampled."""

    def check_tools(self, offered: bool) -> None:
        """Whether a rollout with tools can be told in this format, before anything is sampled.

        Args:
            offered: The prompt is to describe them; else the task's text does.

        Raises:
            CodecError: The format has no place for them, or for what they answer.
        """
        if "tool" in self._refused:
            raise CodecError(f"{self.name}: this model takes no tool answers: {self._refused['tool']}")
        if not offered:
            return
        if self._obstacle is None:
            self._obstacle = self._tools_obstacle() or ""
        if self._obstacle:
            raise CodecError(
                f"{self.name}: tools cannot be offered in this format: {self._obstacle}; use another "
                "model, or a handler that describes its tools itself (`advertise_tools = False`)"
            )

    def _tools_obstacle(self) -> str | None:
        """Why a prompt cannot offer tools, in words."""
        asked = [Message(role="user", content="x")]
        ignored = self.render(asked, [PROBE_TOOL]) == self.render(asked, [])
        return "the format leaves tools out of the prompt" if ignored else None

    def _check_forging(self) -> None:
        """Text that spells every control token must not become one, neither in a prompt nor behind a turn.

        Raises:
            CodecError: It does, for the format changes text in a way that the cuts do not survive; or
                nothing can be appended to a turn.
        """
        nasty = " ".join(self._guard.control_tokens)
        plain, forged = (self.render([Message(role="user", content=text)], []) for text in ("x", nasty))
        self._compare(plain, forged, "a prompt")
        for role in ("user", "tool"):
            refusals = []
            for end in self.stop_token_ids:
                # Some formats end a turn that calls a tool with a token of its own, and take no other answer.
                try:
                    deltas = [
                        self.bridge(plain, [end], [Message(role=role, content=text, name="f")])
                        for text in ("x", nasty)
                    ]
                except CodecError as error:
                    refusals.append(error)
                    continue
                self._compare(*deltas, f"role {role!r}")
            if len(refusals) == len(self.stop_token_ids):
                self._refused[role] = refusals[0]
        if len(self._refused) == 2:
            raise CodecError(f"{self.name}: no message can be appended to a turn")

    def _compare(self, plain: list[int], forged: list[int], where: str) -> None:
        controls = [[token for token in ids if token in self._guard.control_ids] for ids in (plain, forged)]
        if controls[0] != controls[1]:
            raise CodecError(f"{self.name}: text of {where} can become control tokens")
        if CUT in self._guard.decode(forged):
            raise CodecError(f"{self.name}: text of {where} is changed")

    def _chat(self, messages: list[Message]) -> list[dict[str, Any]]:
        return [self._guard.chat(message) for message in messages]

    def text_of(self, sampled: list[int]) -> str:
        """All that a turn says, its end left out."""
        return self._guard.decode([token for token in sampled if token not in self.stop_token_ids])


_SENTINEL = "SENTINELanswerSENTINEL"
_ASKED = {"role": "user", "content": "x"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}


class TemplateCodec(Codec):
    """Uses the tokenizer's own chat template, for models that `renderers` does not know.

    The ids to append come from rendering `[user, assistant SENTINEL, new messages …]` and keeping
    what follows the sentinel's end of turn. Whether the template allows that is checked here, once.
    Tool calls are parsed in the Hermes form (`<tool_call>{json}</tool_call>`).

    Raises:
        CodecError: The tokenizer has no template, or one that takes neither tool nor user messages so.
    """

    def __init__(self, guard: TokenizerGuard) -> None:
        super().__init__("chat-template", guard)
        if not guard.chat_template:
            raise CodecError("the tokenizer has no chat template")
        self._check_lead()
        self._closing = self._end_of_turn()
        self._close = guard.encode(self._closing)[-1]
        self.stop_token_ids = [self._close]
        if guard.eos_token_id not in (None, self._close):
            self.stop_token_ids.append(guard.eos_token_id)
        for role in ("tool", "user"):
            try:
                self._check(role)
            except CodecError as error:
                # A model without tools may still be talked to, and the other way round.
                self._refused[role] = error
        if len(self._refused) == 2:
            raise self._refused["user"]
        self._check_forging()

    def _text(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        try:
            return self._guard.apply_chat_template(
                chat, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            # Templates raise errors of their own for roles they do not take.
            raise CodecError(f"the chat template fails on {[m['role'] for m in chat]}: {error}") from error

    def _after(self, new: list[dict[str, Any]]) -> str:
        """What follows the sentinel's text, its end of turn included."""
        text = self._text([_ASKED, {"role": "assistant", "content": _SENTINEL}, *new])
        # The first one: later ones, if any, are somebody's attempt.
        _, separator, after = text.partition(_SENTINEL)
        if not separator:
            raise CodecError("the chat template drops or rewrites an assistant's text")
        return after

    def _check_lead(self) -> None:
        """A turn must be a thought and an answer: one with channels would seem to end with its first."""
        prompt = self._text([_ASKED])
        whole, _, _ = self._text([_ASKED, {"role": "assistant", "content": _SENTINEL}]).partition(_SENTINEL)
        same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        lead = whole[same:]
        parts = [token for token in self._guard.control_tokens if token in lead and token not in THOUGHT]
        if parts:
            raise CodecError(
                f"the chat template writes {' '.join(parts)} before an answer; turns in such parts take a "
                "renderer, which is chosen by `model_type` of the config.json beside the tokenizer"
            )

    def _tools_obstacle(self) -> str | None:
        if reason := super()._tools_obstacle():
            return reason
        try:
            calls = parse_text(self._text([_ASKED, _CALLED, _ASKED])).message.tool_calls
        except CodecError as error:
            return str(error)
        if [(call.name, call.arguments) for call in calls] == [("f", {"a": 1})]:
            return None
        return (
            "the chat template does not write calls as <tool_call>{json}</tool_call>, and no renderer fits it"
        )

    def _end_of_turn(self) -> str:
        """Spaces, if any, and the control token behind an assistant's text."""
        after = self._after([{"role": "user", "content": "1"}])
        tokens = "|".join(map(re.escape, self._guard.control_tokens))
        match = re.match(rf"\s*(?:{tokens})", after) if tokens else None
        if match is None:
            raise CodecError("the chat template does not end an assistant's turn with a special token")
        return match[0]

    def _delta(self, new: list[dict[str, Any]]) -> str:
        after = self._after(new)
        if not after.startswith(self._closing):
            raise CodecError(f"the chat template does not end every turn with {self._closing!r}")
        return after[len(self._closing) :]

    def _check(self, role: str) -> None:
        message = {"role": role, "content": "1"}
        for new in ([message], [message, {**message, "content": "2"}] if role == "tool" else [message]):
            whole = self._text([_ASKED, {"role": "assistant", "content": "y"}, *new])
            if not whole.endswith(self._closing + self._delta(new)):
                raise CodecError(f"the chat template is not prefix-consistent for role {role!r}")

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        return self._guard.encode(self._text(self._chat(messages), tools))

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        for message in new:
            if message.role in self._refused:
                raise self._refused[message.role]
        delta = self._guard.encode(self._delta(self._chat(new)))
        return delta if sampled and sampled[-1] == self._close else [self._close, *delta]

    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        thinking = self._guard.decode(prompt[-8:]).rstrip().endswith("<think>")
        return parse_text(self.text_of(sampled), thinking)
