"""A tokenizer that keeps text from outside from becoming control tokens.

Text that comes from outside (task, tool output) is data: a `<|im_end|>` in it must stay text, or
output could forge a turn. Such text is cut inside everything that spells an added token, and the
pieces are encoded apart, so that no added token can form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollout.trajectory import Message

CUT = "\U0010fffe"
"""A Unicode noncharacter, never valid in text: marks where untrusted text is cut before encoding."""

REPLACEMENT = "\ufffd"

_SPACE = "\u2581"
"""How SentencePiece writes a space in the names of its tokens."""


class TokenizerGuard:
    """Encodes text piecewise at `CUT`; everything else is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special = set(tokenizer.all_special_tokens)
        # Runs of spaces, which some tokenizers add, control nothing, and indented code needs them.
        tokens = {
            text: token_id
            for text, token_id in tokenizer.get_added_vocab().items()
            if text and not (text.replace(_SPACE, " ").isspace() and text not in special)
        }
        self.control_ids = frozenset(tokens.values())
        """Ids that text from outside must never become."""
        self.control_tokens: Sequence[str] = sorted(tokens, key=len, reverse=True)
        self._long = _either([text for text in self.control_tokens if len(text) > 1])
        # A single character cannot be cut. It is a letter if it was added as text, control if as special.
        special |= {text for text, token in flags.items() if token.special}
        single = [text for text in tokens if len(text) == 1]
        letters = {text for text in single if text not in special}
        self.control_ids -= {tokens[text] for text in letters}
        self._single = _either([text for text in single if text not in letters])
        self._verify = any(token.normalized for token in flags.values())
        if not self._verify:
            pieces = self.encode(self.escape("".join(self.control_tokens)))
            self._verify = not self.control_ids.isdisjoint(pieces)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Not callable on purpose: renderers then encode through `encode`, where the cuts count.
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def escape(self, text: str) -> str:
        """Untrusted text with a cut inside everything that would become a control token."""
        text = text.replace(CUT, REPLACEMENT).encode("utf-8", "replace").decode()
        text = self._single.sub(REPLACEMENT, text)
        pieces, at = [], 0
        while match := self._long.search(text, at):
            pieces.append(text[at : match.start() + 1])
            # Going on right behind the cut finds tokens that overlap this one, too.
            at = match.start() + 1
        text = CUT.join([*pieces, text[at:]])
        return CUT.join(map(self._verified, text.split(CUT))) if self._verify else text

    def _verified(self, piece: str) -> str:
        """A piece that encodes without control tokens, also where the tokenizer normalises text first."""
        if self.control_ids.isdisjoint(self.encode(piece)):
            return piece
        safe = (REPLACEMENT if not self.control_ids.isdisjoint(self.encode(c)) else c for c in piece)
        return CUT.join(safe)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of the pieces between cuts. Never adds a start or end token."""
        ids: list[int] = []
        for piece in text.split(CUT):
            if piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        return ids

    def encode_as_is(self, text: str) -> list[int]:
        """Ids of the text, cuts and all."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text as it is: the clean-up that some tokenizers ask for turns `ls .` into `ls.`."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("tokenize", True):
            return self.encode(self._tokenizer.apply_chat_template(*args, tokenize=False, **kwargs))
        return self._tokenizer.apply_chat_template(*args, tokenize=False, **kwargs)

    def chat(self, message: Message) -> dict[str, Any]:
        """The message for a template, every text in it escaped."""
        out = message.to_chat()
        for key in ("content", "reasoning_content", "tool_call_id", "name"):
            if key in out:
                out[key] = self.escape(out[key])
        for call in out.get("tool_calls", ()):
            call["id"], call["function"] = self.escape(call["id"]), self._escaped(call["function"])
        return out

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self._escaped(item) for item in value]
        if isinstance(value, dict):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        return value


def _either(texts: list[str]) -> re.Pattern[str]:
    # Of none: what is looked through has no `CUT` any more.
    return re.compile("|".join(map(re.escape, texts)) or CUT)
