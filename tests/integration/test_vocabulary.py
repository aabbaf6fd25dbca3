"""What token ids stand for: joined, it is the text that they are of."""

from __future__ import annotations

import gzip
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.state import keys
from tests.helpers.lazy import Lazy
from tests.helpers.published import directory
from tests.helpers.stack import CHECKPOINT
from tests.integration.conftest import emptied
from workers.agent import codec
from workers.agent.vocabulary import KEEP_S, Keeper, texts_of

transformers = Lazy("transformers")
client = emptied

TEXT = "def f(x):\n\treturn  x + 1  # héllo – 你好 🙂 \u202eabc 1234\n<|im_end|> <b>ok</b>"


def joined(texts: list, ids: list[int]) -> bytes:
    said = [texts[token_id] for token_id in ids]
    return b"".join(text.encode() if isinstance(text, str) else bytes.fromhex(text["bytes"]) for text in said)


@pytest.mark.parametrize("model", ["demo", "Qwen3", "Llama 3", "Gemma 3", "DeepSeek-V3"])
def test_the_texts_of_ids_are_the_text_that_they_are_of(model, tmp_path):
    place = CHECKPOINT if model == "demo" else directory(model, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    texts = texts_of(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert joined(texts, ids).decode() == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    for text, token_id in tokenizer.get_added_vocab().items():
        assert texts[token_id] == text or set(text) == {"▁"}, "Gemma adds runs of spaces"
    assert len(texts) >= len(tokenizer)
    assert any(isinstance(text, dict) for text in texts) or model == "Gemma 3"


def fast(model, decoder, **parts):
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens([AddedToken("<end>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_with_a_mark_for_spaces_and_bytes_by_their_names():
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    tokenizer = fast(
        models.BPE({name: at for at, name in enumerate(names)}, [("▁", "a")], byte_fallback=True),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizer=normalizers.Replace(" ", "▁"),
    )
    texts = texts_of(tokenizer)
    assert texts[names.index("<0xE2>")] == {"bytes": "e2"} and texts[names.index("<0x0A>")] == "\n"
    ids = tokenizer.encode("a a  é\n<end>a")
    assert joined(texts, ids).decode() == tokenizer.decode(ids) == "a a  é\n<end>a"


def test_plain_words_are_what_they_are_called_and_a_gap_is_nothing():
    tokenizer = fast(
        models.WordLevel({"ein": 0, "▁x": 2, "Ġ": 4}, "ein"), None, pre_tokenizer=pre_tokenizers.Whitespace()
    )
    assert texts_of(tokenizer) == ["ein", None, "▁x", "<end>", "Ġ"]


def test_they_are_written_once_and_said_to_be_used(client, monkeypatch):
    monkeypatch.setattr(codec, "loaded", {})
    digest = codec.load_codec(str(CHECKPOINT)).digest
    name = keys.vocabulary(digest.rpartition("@")[2])
    Keeper(client).look()
    stored = client.execute_command("GET", name, NEVER_DECODE=True)
    texts = json.loads(gzip.decompress(stored))["texts"]
    assert texts == texts_of(codec.load_codec(str(CHECKPOINT)).tokenizer)
    client.set(name, "kept", ex=10)
    keeper = Keeper(client)
    keeper.look()
    assert client.get(name) == "kept" and client.ttl(name) > KEEP_S - 60
    client.delete(name)
    keeper.look()
    assert not client.exists(name), "for a day it does not ask again"


def test_a_tokenizer_that_cannot_be_told_fails_nobody(client, monkeypatch, capfd):
    class Odd:
        digest = "odd@0123"
        tokenizer = None

    monkeypatch.setattr(codec, "loaded", {"odd": Odd()})
    Keeper(client).look()
    assert not client.keys("vocabulary:*")
