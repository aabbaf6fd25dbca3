"""What each token id stands for, as a worker wrote it."""

from __future__ import annotations

import gzip
import json

from services.state import keys
from services.state.api_keys import Scope

TEXTS = {"texts": ["a", " b", {"bytes": "e298"}, None, "\u0000"]}


def test_texts_come_as_they_are_kept_and_unpacked_to_who_does_not_take_them_so(world):
    world.key("a", Scope.READ)
    stored = gzip.compress(json.dumps(TEXTS).encode())
    world.redis.set(keys.vocabulary("0123456789ab"), stored)
    packed = world.get("/v1/tokenizers/0123456789ab", "a", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip" and packed.data == stored
    assert packed.content_type == "application/json" and "immutable" in packed.headers["Cache-Control"]
    assert world.get("/v1/tokenizers/0123456789ab", "a").json == TEXTS


def test_where_there_are_none_the_answer_says_so_and_is_kept_by_nobody(world):
    world.key("a", Scope.READ)
    world.key("sender", Scope.SUBMIT)
    answer = world.get("/v1/tokenizers/0123456789ab", "a")
    assert answer.json == {"texts": None} and "immutable" not in answer.headers.get("Cache-Control", "")
    assert world.get("/v1/tokenizers/0123456789ab", "sender").status_code == 403
    assert world.get("/v1/tokenizers/0123456789ab").status_code == 401
