"""Chat formats by the library `renderers`: which of them fits a tokenizer, and its ids."""

from __future__ import annotations

import base64
import operator
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from typing import Any

import structlog

from rollout.trajectory import Message
from workers.agent.formats import PROBE_CALL, PROBE_TOOL, Codec, CodecError
from workers.agent.guard import CUT, TokenizerGuard
from workers.agent.parsing import SHOWN, Malformed, ParsedTurn, parse_text, parsed_turn, tool_call

log = structlog.get_logger("codec")

HARMONY = "gpt-oss"
"""The renderer that brings an encoder of its own."""
HARMONY_DATE = "2025-08-05"
"""Of every prompt; by itself the library takes today, and prompts of a group could differ."""
_HARMONY_TURN = "<|start|>assistant"
_HARMONY_CHANNEL = "<|channel|>analysis<|message|>"
"""The library ends a prompt with both; the channel is the model's to choose."""
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_CALL_ENDS = ("<|call|>", "<|eom_id|>")
"""Tokens that end a turn only where the model calls something."""
_FINAL = "<|channel|>final"
_TO_TOOL = re.compile(r"(?:^|[\s>])to=(?!(?:assistant|user|all)(?:[\s<]|$))[^\s<]")
"""In a header of gpt-oss: a recipient other than those of an answer, or of a tool's result."""
_CODE = "<|python_tag|>"
"""Llama begins some calls with it, and writes them as bare JSON."""

_ASKED = {"role": "user", "content": "Hi 12."}
_CALLED = {"role": "assistant", "content": "So.", "tool_calls": [PROBE_CALL]}
_ANSWERED = {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"}
_PAST = [_ASKED, _CALLED, _ANSWERED, _CALLED, _ANSWERED, {"role": "assistant", "content": "So."}, _ASKED]
"""A conversation with a past, for what is put behind its end."""
_PROBE: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([_ASKED], []),
    ([{"role": "system", "content": "Be brief."}, _ASKED], []),
    ([_ASKED], [PROBE_TOOL]),
    ([{"role": "system", "content": "Be brief."}, _ASKED], [PROBE_TOOL]),
    ([_ASKED, _CALLED, _ANSWERED, _ANSWERED], [PROBE_TOOL]),
    ([_ASKED, {"role": "assistant", "content": "So."}, _ASKED], []),
]
"""Conversations, with their tools, on which a renderer must agree with the tokenizer's own template."""


class RendererCodec(Codec):
    """Uses the library `renderers`, which knows the model's format in Python."""

    def __init__(self, guard: TokenizerGuard, renderer: Any) -> None:
        super().__init__(f"renderers/{type(renderer).__name__}", guard)
        self._renderer = renderer
        self.stop_token_ids = list(renderer.get_stop_token_ids())
        self._ends = frozenset(self.stop_token_ids)
        eos = guard.eos_token_id
        self._close = eos if eos in self.stop_token_ids else self.stop_token_ids[0]
        self._thought = guard.convert_tokens_to_ids("</think>")
        self._cut = _as_text(guard.encode_as_is(CUT))
        harmony = renderer.config.name == HARMONY
        self._turn, self._channel = (
            guard.encode(text) if harmony else [] for text in (_HARMONY_TURN, _HARMONY_CHANNEL)
        )
        added = guard.get_added_vocab()
        self._end = added.get("<|end|>")
        self._call_ends = {added.get(text) for text in _CALL_ENDS}
        self._code = added.get(_CODE)
        self._check_forging()
        self._looks_back = not self._sees_the_end_alone()

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        return self.render_chat(self._chat(messages), tools)

    def render_chat(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """As `render`, of messages in a template's form whose text is trusted."""
        with self._refusals():
            ids = self._renderer.render_ids(chat, tools=tools or None, add_generation_prompt=True)
        return self._uncut(ids)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Whatever the library raises, it refuses the messages: there is no class for that."""
        try:
            yield
        except Exception as error:
            raise CodecError(f"{self.name}: {error}") from error

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        chat, prompt = self._chat(new), self._end_of(prompt)
        delta = self._delta(prompt, sampled, chat)
        if delta is not None:
            return delta
        # The library declines a turn that ends within a thought, or that goes on behind an end token. What
        # follows a turn does not depend on its content, so an empty turn may stand in for it.
        lead = [] if sampled and sampled[-1] in self.stop_token_ids else [self._close]
        for thought, stop in product(([], [self._thought]), [self._close, *self.stop_token_ids]):
            if None not in thought and (delta := self._delta(prompt, [*thought, stop], chat)) is not None:
                return lead + delta
        raise CodecError(f"{self.name} cannot append {[m.role for m in new]} messages to a turn unchanged")

    _looks_back = True
    """Whether what follows a turn depends on what is far before it."""

    def _sees_the_end_alone(self) -> bool:
        """Whether the renderer puts behind the end of a conversation what it puts behind the whole."""
        try:
            whole = self.render_chat(_PAST, [PROBE_TOOL])
            ends = self._cut_off(whole)
            return all(
                self._delta(whole, [stop], new) == self._delta(ends, [stop], new)
                for stop in self.stop_token_ids
                for new in ([_ANSWERED], [_ANSWERED, _ANSWERED], [_ASKED])
            )
        except CodecError:
            return False

    def _end_of(self, prompt: list[int]) -> list[int]:
        """What of a prompt the renderer looks at."""
        return prompt if self._looks_back else self._cut_off(prompt)

    def _cut_off(self, prompt: list[int]) -> list[int]:
        """A prompt from its last end of a turn but one on."""
        ends = (at for at in range(len(prompt) - 1, -1, -1) if prompt[at] in self._ends)
        next(ends, 0)
        return prompt[next(ends, 0) :]

    def _delta(self, prompt: list[int], sampled: list[int], chat: list[dict[str, Any]]) -> list[int] | None:
        with self._refusals():
            rendered = self._renderer.bridge_to_next_turn(prompt, sampled, chat)
        known = len(prompt) + len(sampled)
        if rendered is None or rendered.token_ids[:known] != prompt + sampled:
            return None
        return self._uncut(rendered.token_ids[known:])

    def _uncut(self, ids: list[int]) -> list[int]:
        """Ids without the cuts, and the channel, that a renderer with an encoder of its own writes."""
        if self._channel and ids[-len(self._channel) :] == self._channel:
            ids = ids[: -len(self._channel)]
        return [*map(ord, _as_text(ids).replace(self._cut, ""))]

    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        turn = self._parsed(prompt, sampled)
        if not turn.attempts and self._calls(sampled):
            # As an answer it would end the rollout, and be scored.
            turn.attempts.append(Malformed(f"not a call of a function: {self.text_of(sampled)[:SHOWN]}"))
        return turn

    def _calls(self, sampled: list[int]) -> bool:
        """Whether a turn is meant as a call, whatever can be read of it."""
        if (sampled and sampled[-1] in self._call_ends) or (self._channel and self._names_tool(sampled)):
            return True
        if self._code is None:
            return False
        text = self.text_of(sampled).lstrip()
        at = text.find('{"name"')
        return text.startswith(_CODE) or at == 0 or (at > 0 and '"parameters"' in text[at:])

    def _names_tool(self, sampled: list[int]) -> bool:
        """Whether a header of gpt-oss says whom its message is for, as calls do; `final` is an answer."""
        start, message = self._turn[0], self._channel[-1]
        parts = (list(part) for is_start, part in groupby(sampled, start.__eq__) if not is_start)
        headers = (self._guard.decode(part[: part.index(message)]) for part in parts if message in part)
        return any(_TO_TOOL.search(header) and _FINAL not in header for header in headers)

    def _parsed(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        # A header without a message is none: the library would drop the text.
        lead = self._turn if self._channel and self._channel[0] in sampled else []
        body = sampled[1:] if sampled and sampled[0] == self._code else sampled
        if lead and body[-1] in self.stop_token_ids:
            # Calls often end with <|return|>. OpenAI's parser reads them, the library as never closed.
            body = [*body[:-1], self._end]
        try:
            parsed = self._renderer.parse_response([*lead, *body], prompt_ids=self._end_of(prompt))
        except Exception as error:
            # Seen: nesting beyond the stack, and integers beyond what Python converts.
            log.info("the renderer cannot parse a turn", renderer=self.name, error=str(error)[:200])
            return parse_text(self.text_of(sampled))
        attempts = [
            tool_call(call.name, call.arguments, call.raw, call.id)
            if str(call.status) == "ok"
            else Malformed(f"{call.status}: {call.raw.strip()[:SHOWN]}")
            for call in parsed.tool_calls
        ]
        return parsed_turn(parsed.content or "", parsed.reasoning_content, attempts)


def _as_text(ids: list[int]) -> str:
    """Ids as characters, for what Python does with texts alone."""
    return "".join(map(chr, ids))


def renderer_codec(guard: TokenizerGuard, path: str, model_type: str) -> RendererCodec | None:
    """The codec by a renderer of the library, or None where none fits this tokenizer and it has a template.

    The library maps hub names. Of any other model, the renderers of its architecture are tried, and one is
    taken that renders some conversations exactly as the template does.

    Raises:
        CodecError: There is no template either.
    """
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(path)
    kind = model_type.replace("_", "-")
    reasons = []
    for name in [known] if known else _named_like(kind, set(MODEL_RENDERER_MAP.values())):
        # Nothing says more of gpt-oss than its own encoder: the template is but near to it.
        named = known or kind == name.replace(".", "-")
        trusted = name == HARMONY or (named and not guard.chat_template)
        try:
            config = _renderer_config(name)
            codec = _create(guard, config)
            if trusted or all(_agree(codec, guard, config, *probe) for probe in _PROBE):
                return codec
            reasons.append(f"renderer {name} disagrees with the tokenizer's chat template")
        except Exception as error:
            # Such as a token that the renderer writes and this tokenizer lacks, or text that can forge.
            reasons.append(f"renderer {name} cannot be used: {str(error)[:200]}")
            if name == HARMONY and kind == name:
                raise CodecError(
                    "the format of gpt-oss cannot be used (do this tokenizer's ids differ from "
                    f"o200k_harmony?): {error}"
                ) from error
    if not guard.chat_template:
        raise CodecError("; ".join(["the tokenizer has no chat template", *reasons]))
    if reasons:
        log.warning("no renderer fits; using the chat template", tokenizer=path, reasons=reasons)
    return None


def _named_like(kind: str, names: set[str]) -> list[str]:
    """Renderers of an architecture, the most specific first; `llama-3` is one of `llama`, too."""
    plain = {name: name.replace(".", "-") for name in names}
    fitting = [name for name in names if kind and (kind.startswith(plain[name]) or name.startswith(kind))]
    return sorted(fitting, key=lambda name: (not kind.startswith(plain[name]), -len(name), name))


def _renderer_config(name: str) -> Any:
    from renderers import config_from_name

    config = config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        # Dropping old reasoning from the history would rewrite ids that were sampled.
        config = config.model_copy(update={"thinking_retention": "all"})
    if name == HARMONY:
        config = config.model_copy(update={"conversation_start_date": HARMONY_DATE})
    return config


def _create(guard: TokenizerGuard, config: Any) -> RendererCodec:
    from renderers import create_renderer

    if config.name != HARMONY:
        return RendererCodec(guard, create_renderer(guard, config))
    # This encoder wants a vocabulary file, else downloads it, and holds it against a digest. So a file
    # that is made of the tokenizer also proves that both mean the same by an id.
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    added = guard.get_added_vocab()
    lines = [
        f"{base64.b64encode(bytes(byte_of[char] for char in text)).decode()} {rank}\n"
        for text, rank in sorted(guard.get_vocab().items(), key=operator.itemgetter(1))
        if text not in added
    ]
    with tempfile.TemporaryDirectory() as directory, _environment("TIKTOKEN_ENCODINGS_BASE", directory):
        (Path(directory) / "o200k_base.tiktoken").write_text("".join(lines))
        encoder = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        # The digest is of the vocabulary without the control tokens.
        for token in _HARMONY_TOKENS:
            if encoder.encode(token, allowed_special="all") != [guard.convert_tokens_to_ids(token)]:
                raise CodecError(f"{token} has another id")
        return RendererCodec(guard, create_renderer(guard, config))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _agree(
    codec: RendererCodec, guard: TokenizerGuard, config: Any, chat: list[Any], tools: list[Any]
) -> bool:
    # What a renderer holds fixed, a template may take from the clock.
    fixed = {"date_string": config.date_string} if hasattr(config, "date_string") else {}
    ids = guard.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True, **fixed)
    return codec.render_chat(chat, tools) == ids
