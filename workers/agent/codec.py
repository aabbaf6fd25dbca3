"""Messages to token ids and sampled ids to messages, without ever encoding a sampled id again.

Text that comes from outside (task, tool output) is data: a `<|im_end|>` in it must stay text, or
output could forge a turn. Such text is cut inside every added token of the tokenizer, and the
pieces are encoded apart, so that no added token can form.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from rollout.schema import new_id
from rollout.trajectory import Message, ToolCall

log = structlog.get_logger("codec")

CUT = "\U0010fffe"
"""A Unicode noncharacter, never valid in text: marks where untrusted text is cut before encoding."""


class CodecError(RuntimeError):
    """The tokenizer's template cannot be continued token by token; the message says why."""


@dataclass
class ParsedTurn:
    """What the model said, from the ids it sampled."""

    message: Message
    malformed: list[str] = field(default_factory=list)
    """One line for each tool call that could not be parsed."""


class Codec(Protocol):
    """Renders and parses one model's chat format."""

    name: str
    digest: str
    """Name and a digest of vocabulary and template: rollouts with the same one share token ids."""
    stop_token_ids: list[int]

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Ids of the conversation's start, generation prompt included."""

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        """Ids to append to `prompt + sampled` for new messages, generation prompt included.

        Raises:
            CodecError: They cannot be appended without changing what is there.
        """

    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        """The message that the sampled ids say."""


class TokenizerGuard:
    """A tokenizer that encodes text piecewise at `CUT`. Decoding is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Not callable on purpose: renderers then encode through `encode`, where the cuts count.
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def escape(self, text: str) -> str:
        """Untrusted text with a cut inside everything that would become an added token."""
        text = text.replace(CUT, "\ufffd")
        if self._added is None:
            return text
        at = 0
        while found := self._added.search(text, at):
            # Going on right behind the cut finds tokens that overlap this one, too.
            at = found.start() + 2
            text = text[: found.start() + 1] + CUT + text[found.start() + 1 :]
        return text

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        ids: list[int] = []
        for piece in text.split(CUT):
            if piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("tokenize", True):
            return self.encode(self._tokenizer.apply_chat_template(*args, tokenize=False, **kwargs))
        return self._tokenizer.apply_chat_template(*args, tokenize=False, **kwargs)

    def chat(self, message: Message) -> dict[str, Any]:
        """The message for a template, with its text escaped."""
        out = message.to_chat()
        out["content"] = self.escape(out["content"])
        return out


class RendererCodec:
    """Uses the library `renderers`, which knows the model's format in Python."""

    def __init__(self, guard: TokenizerGuard, renderer: Any) -> None:
        self.name = f"renderers/{type(renderer).__name__}"
        self.digest = ""
        self._guard = guard
        self._renderer = renderer
        self.stop_token_ids = list(renderer.get_stop_token_ids())

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        chat = [self._guard.chat(message) for message in messages]
        return self._renderer.render_ids(chat, tools=tools or None, add_generation_prompt=True)

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        rendered = self._renderer.bridge_to_next_turn(
            prompt, sampled, [self._guard.chat(message) for message in new]
        )
        known = len(prompt) + len(sampled)
        if rendered is None or rendered.token_ids[:known] != prompt + sampled:
            raise CodecError(
                f"{self.name} cannot append {[m.role for m in new]} messages to {known} ids unchanged"
            )
        return rendered.token_ids[known:]

    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        parsed = self._renderer.parse_response(sampled, prompt_ids=prompt)
        calls, malformed = [], []
        for call in parsed.tool_calls:
            if str(call.status) == "ok" and call.name and isinstance(call.arguments, dict):
                calls.append(ToolCall(id=call.id or _call_id(), name=call.name, arguments=call.arguments))
            else:
                malformed.append(f"{call.status}: {call.raw.strip()[:200]}")
        message = Message(
            role="assistant",
            content=parsed.content or "",
            reasoning=parsed.reasoning_content or None,
            tool_calls=calls,
        )
        return ParsedTurn(message, malformed)


_SENTINEL = "SENTINELanswerSENTINEL"
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class TemplateCodec:
    """Uses the tokenizer's own chat template, for models that `renderers` does not know.

    The ids to append come from rendering `[user, assistant SENTINEL, new messages …]` and keeping
    what follows the sentinel's end of turn. Whether the template allows that is checked here, once.
    Tool calls are parsed in the Hermes form (`<tool_call>{json}</tool_call>`).
    """

    def __init__(self, guard: TokenizerGuard) -> None:
        self.name = "chat-template"
        self.digest = ""
        self._guard = guard
        if guard.eos_token_id is None:
            raise CodecError("the tokenizer names no end-of-turn token (eos_token)")
        self.stop_token_ids = [guard.eos_token_id]
        self._check()

    def _text(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self._guard.apply_chat_template(
            chat, tools=tools or None, add_generation_prompt=True, tokenize=False
        )

    def _delta(self, new: list[dict[str, Any]]) -> str:
        start = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}]
        text = self._text(start + new)
        _, found, after = text.rpartition(_SENTINEL + self._guard.eos_token)
        if not found:
            raise CodecError("the chat template does not end an assistant turn with the eos token")
        return after

    def _check(self) -> None:
        for role in ("tool", "user"):
            one = [{"role": role, "content": "1"}]
            whole = self._text(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, *one]
            )
            if not whole.endswith(self._delta(one)):
                raise CodecError(f"the chat template is not prefix-consistent for role {role!r}")

    def render(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        return self._guard.encode(self._text([self._guard.chat(message) for message in messages], tools))

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        if not sampled or sampled[-1] not in self.stop_token_ids:
            raise CodecError("the sampled turn has no end-of-turn token")
        return self._guard.encode(self._delta([self._guard.chat(message) for message in new]))

    def parse(self, prompt: list[int], sampled: list[int]) -> ParsedTurn:
        ids = [token for token in sampled if token not in self.stop_token_ids]
        text = self._guard.decode(ids, skip_special_tokens=False)
        reasoning, closed, answer = text.rpartition("</think>")
        if not closed:
            reasoning, answer = "", text
        calls, malformed = [], []
        for raw in _TOOL_CALL.findall(answer):
            try:
                call = json.loads(raw)
                calls.append(
                    ToolCall(id=_call_id(), name=call["name"], arguments=call.get("arguments") or {})
                )
            except (ValueError, KeyError, TypeError) as error:
                malformed.append(f"{type(error).__name__}: {raw[:200]}")
        if answer.count("<tool_call>") > len(calls) + len(malformed):
            malformed.append("unclosed <tool_call>")
        content = _TOOL_CALL.sub("", answer).strip()
        return ParsedTurn(
            Message(
                role="assistant",
                content=content,
                reasoning=reasoning.removeprefix("<think>").strip() or None,
                tool_calls=calls,
            ),
            malformed,
        )


def _call_id() -> str:
    return "call-" + new_id()[-12:]


_PROBE = [
    [{"role": "user", "content": "Hi 12."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
]
"""Conversations on which a renderer must agree with the tokenizer's own template to be trusted."""


def _renderer_for(tokenizer: Any, guard: TokenizerGuard, path: str) -> Any | None:
    """A renderer of the library for this tokenizer, or None.

    The library maps hub names; a fine-tune in a local directory has none. There, the renderer of the
    model's architecture is taken if it renders some conversations exactly as the template does.
    """
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    name = MODEL_RENDERER_MAP.get(path)
    if name is None:
        config = Path(path) / "config.json"
        model_type = json.loads(config.read_text()).get("model_type", "") if config.is_file() else ""
        name = model_type if model_type in set(MODEL_RENDERER_MAP.values()) else None
    if name is None:
        return None
    config = config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        # Dropping old reasoning from the history would rewrite ids that were sampled.
        config = config.model_copy(update={"thinking_retention": "all"})
    renderer = create_renderer(guard, config)
    if path in MODEL_RENDERER_MAP:
        return renderer
    for chat in _PROBE:
        theirs = guard.apply_chat_template(chat, add_generation_prompt=True)
        if renderer.render_ids(chat, add_generation_prompt=True) != theirs:
            log.warning(
                "renderer disagrees with the tokenizer's chat template; using the template",
                renderer=name,
                tokenizer=path,
            )
            return None
    return renderer


def _digest(tokenizer: Any, path: str) -> str:
    body = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template], default=str)
    return f"{Path(path).name}@{hashlib.sha256(body.encode()).hexdigest()[:12]}"


_codecs: dict[str, Codec] = {}
_loading = threading.Lock()


def preload() -> None:
    """Import what loading a codec takes: seconds, which the first rollouts need not wait for."""
    with _loading:
        importlib.import_module("renderers.qwen3")
        importlib.import_module("transformers").AutoTokenizer  # noqa: B018 (the access is the import)


def load_codec(path: str) -> Codec:
    """The codec of a tokenizer (directory or hub name); loaded once a process.

    Raises:
        CodecError: It cannot be loaded, or its template cannot be continued token by token.
    """
    # One at a time: the imports of transformers are lazy and not safe from several threads.
    with _loading:
        if path not in _codecs:
            _codecs[path] = _load(path)
        return _codecs[path]


def _load(path: str) -> Codec:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise CodecError(
            f"tokenizer {path!r} cannot be loaded on this node ({reason}); register the backend with "
            "`tokenizer` set to a path that the RUN workers see"
        ) from error
    guard = TokenizerGuard(tokenizer)
    renderer = _renderer_for(tokenizer, guard, path)
    codec = RendererCodec(guard, renderer) if renderer is not None else TemplateCodec(guard)
    codec.digest = _digest(tokenizer, path)
    return codec
