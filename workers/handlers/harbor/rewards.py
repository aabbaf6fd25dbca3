"""The reward that a verifier wrote: `reward.json`, else `reward.txt`. What is no number is none, and no 0."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError

FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
MAX_BYTES = 64 << 10
MAX_KEYS = 200
MAX_KEY_CHARS = 200
MAIN = "reward"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class NoReward(Exception):
    """The verifier wrote none that counts; the message says why."""


async def read(box: SandboxClient) -> dict[str, float]:
    """The rewards by name; a plain number is `reward`.

    Raises:
        NoReward: There is no file, or what it holds is no finite number.
    """
    for path in FILES:
        info = await box.stat(path, follow=False)
        if info.kind is None:
            continue
        if info.kind != "file":
            raise NoReward(f"{path} is no file but a {info.kind}")
        if info.size > MAX_BYTES:
            raise NoReward(f"{path} has {info.size} bytes")
        try:
            text = (await box.read_file(path, MAX_BYTES)).decode()
        except (SandboxRequestError, UnicodeDecodeError) as error:
            raise NoReward(f"{path} cannot be read: {error}") from error
        return parse(text, path)
    raise NoReward("the verifier wrote neither reward.json nor reward.txt")


def parse(text: str, path: str) -> dict[str, float]:
    """What the text of a reward file says.

    Raises:
        NoReward: It says no finite number.
    """
    if not text.strip():
        raise NoReward(f"{path} is empty")
    if path.endswith(".txt"):
        if not _NUMBER.fullmatch(text.strip()):
            raise NoReward(f"{path} holds {text.strip()[:80]!r}, no number")
        return {MAIN: _finite(float(text), path)}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        value = {MAIN: value}
    if not value or len(value) > MAX_KEYS or any(len(key) > MAX_KEY_CHARS for key in value):
        raise NoReward(f"{path} has {len(value)} rewards, or one of a very long name")
    if not all(key.isprintable() for key in value):  # half a surrogate pair, which no record carries, is not
        raise NoReward(f"{path} has a reward of a name that cannot be printed")
    return {key: _finite(number, f"{path}: {key}") for key, number in value.items()}


def _finite(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoReward(f"{where} is {str(value)[:80]!r}, no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoReward(f"{where} is not finite")
    return number


def choose(rewards: dict[str, float], key: str | None) -> float:
    """Which of them is the score: the one that the task names, the only one, or `reward`.

    Raises:
        NoReward: It cannot be told.
    """
    if key is not None and key not in rewards:
        raise NoReward(f"there is no reward {key!r} among {', '.join(rewards)}")
    if key is None and len(rewards) > 1 and MAIN not in rewards:
        raise NoReward(f"which of {', '.join(rewards)} is the score? Name it in reward_key")
    return rewards[key if key is not None else MAIN if MAIN in rewards else next(iter(rewards))]
