"""What each id of a tokenizer stands for, for who looks at ids. The first process that has loaded a tokenizer
writes it to Redis.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from typing import Any

import redis
import structlog

from services.state import keys
from workers.agent import codec

log = structlog.get_logger("vocabulary")

LOOK_S = 2.0
KEEP_S, AGAIN_S = 30 * 86400, 86400.0
"""For how long the texts are kept after a process has said that it has the tokenizer, and when it says so
again; what failed is tried again then."""
PIECE = 1000
"""Ids that are looked at at once: the process has other things to do."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Text = str | dict[str, str] | None


class Keeper:
    """Keeps what the ids of a process' tokenizers stand for."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._kept_at: dict[str, float] = {}

    def look(self) -> None:
        """Write the texts of tokenizers that were loaded, where they are not kept. Never raises."""
        now = time.monotonic()
        for each in list(codec.loaded.values()):
            if now < self._kept_at.get(each.digest, float("-inf")) + AGAIN_S:
                continue
            self._kept_at[each.digest] = now
            try:
                name = keys.vocabulary(each.digest.rpartition("@")[2])
                if not self._redis.expire(name, KEEP_S):
                    self._redis.set(name, packed(texts_of(each.tokenizer)), ex=KEEP_S)
            except redis.RedisError as error:
                log.warning("the texts of a tokenizer are not kept", tokenizer=each.digest, error=str(error))
            except Exception:
                log.exception("the texts of a tokenizer cannot be told", tokenizer=each.digest)

    def run(self) -> None:
        """Look again and again, in a thread."""
        while True:
            self.look()
            time.sleep(LOOK_S)


def packed(texts: list[Text]) -> bytes:
    """As `GET /v1/tokenizers/<digest>` gives them."""
    return gzip.compress(json.dumps({"texts": texts}, separators=(",", ":")).encode(), mtime=0)


def texts_of(tokenizer: Any) -> list[Text]:
    """The text of each id, from 0 on; {"bytes": …} in hexadecimal digits where it is no whole UTF-8; None
    where there is no such id. Joined, the bytes of ids are those of their text, but for a space that some
    tokenizers drop at its beginning.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "▁" if backend is None else str(backend.decoder)
    pieces = "▁" in decoder or "Metaspace" in decoder
    bytes_of = _by_alphabet if "ByteLevel" in decoder else _by_pieces if pieces else str.encode
    count = 1 + max(tokenizer.get_vocab().values(), default=-1)
    texts: list[Text] = []
    for first in range(0, count, PIECE):
        names = tokenizer.convert_ids_to_tokens(list(range(first, min(first + PIECE, count))))
        texts += [name and _told(bytes_of(name)) for name in names]
    return texts


def _told(data: bytes) -> Text:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"bytes": data.hex()}


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that stand for themselves in byte-level BPE (Radford et al. 2019); others are characters from 256
on."""
_ALPHABET = {chr(byte): byte for byte in _PRINTED}
_ALPHABET |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))}


def _by_alphabet(name: str) -> bytes:
    """Of byte-level BPE."""
    try:
        return bytes(_ALPHABET[character] for character in name)
    except KeyError:
        return name.encode()  # of one that was added as it is


def _by_pieces(name: str) -> bytes:
    """Of SentencePiece and its like."""
    if byte := _BYTE.fullmatch(name):
        return bytes.fromhex(byte[1])
    return name.replace("▁", " ").encode()
