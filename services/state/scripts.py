"""Lua in Redis: named operations, each of which is done whole or not at all.

A file of Lua lies beside the Python of its structure. Its first line may name the files that it builds on
(`-- needs: full rollouts/fair`), which are put before it, each once. Keys are spelled in `keys.py` alone: Lua
has them as `KEY.DUE` and `KEY.record(id)`.

    local function lift(weight) … end
    function operations.put(ask) … return {load = lift(ask.weight)} end

Redis runs a script from its first line at each call, so each operation is a script of its own, of the
definitions that it needs.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any

import redis
from pydantic_core import PydanticSerializationError, from_json, to_json
from redis.commands.core import Script

from services.state import keys
from services.state.together import Together
from services.version import STAMP

_KEY = re.compile(r"\bKEY\.(\w+)(?:\(((?:[^()]|\([^()]*\))*)\))?")
_COMMA = re.compile(r", (?![^()]*\))")  # not one within a call
_NEEDS = re.compile(r"-- needs: (.*)\n")
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
_BEGINS = re.compile(r"^(?=\w)(?!end\b)", re.MULTILINE)
_DEFINED = re.compile(r"(?:local function |local |function operations\.)(\w+(?:, *\w+)*)")
_WORD = re.compile(r"\w+")
_LAZY = " -- lazy\n"
_CLOCK = f"""-- stamp {STAMP}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local operations = {{}}
"""
_ANSWER = """
local answer = operations.%s(cjson.decode(ARGV[2]))
return cjson.encode(answer)
"""


@cache
def text(name: str) -> str:
    """What is in a file of Lua, by its path below `services/state` without `.lua`."""
    return (resources.files("services.state") / f"{name}.lua").read_text()


def source(name: str, operation: str, constants: str = "") -> str:
    """The script of one operation of a file.

    Args:
        constants: Lua that defines what the file takes from Python.
    """
    files: dict[str, str] = {}
    _gather(name, files)
    stamp, _, clock = _CLOCK.partition("\n")
    parts = _BEGINS.split(_COMMENT.sub("", clock + constants + "".join(files.values())))
    return f"{stamp}\n{_KEY.sub(_spelled, _needed(parts, {operation}))}" + _ANSWER % operation


def _needed(parts: list[str], words: set[str], made: frozenset[int] = frozenset()) -> str:
    """What words need of definitions in Lua, where some are made: each comes before what speaks of it.

    What only a function with `-- lazy` behind its head needs goes into it, and is made when that is called.
    """
    needed, words = set(made), {*words}
    for at, part in reversed([*enumerate(parts)]):
        defined = _DEFINED.match(part)
        if at not in made and (not words.isdisjoint(_WORD.findall(defined[1])) if defined else not made):
            needed.add(at)
            words.update(() if _LAZY in part else _WORD.findall(part))
    body = ""
    for at in sorted(needed - made):
        head, lazy, rest = parts[at].partition(_LAZY)
        inside = _needed(parts[:at], {*_WORD.findall(rest)}, frozenset(needed)) if lazy else ""
        body += f"{head}{lazy}{inside}{rest}"
    return body


def _gather(name: str, files: dict[str, str]) -> None:
    """Put a file behind those that it needs."""
    needs = _NEEDS.match(text(name))
    for needed in needs[1].split() if needs else ():
        if needed not in files:
            _gather(needed, files)
    files[name] = text(name)


def _spelled(spoken: re.Match[str]) -> str:
    """A key in Lua, its places filled with values or calls."""
    key = getattr(keys, spoken[1])
    if isinstance(key, str):
        return _literal(key)
    parts = key(*(f"\0{place}\0" for place in _COMMA.split(spoken[2]))).split("\0")
    spelled = (part if at % 2 else _literal(part) for at, part in enumerate(parts) if part)
    return f"({' .. '.join(spelled)})"


def _literal(value: Any) -> str:
    """Texts, numbers, and lists and dicts of them as Lua writes them."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_literal(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{{{', '.join(map(_literal, value))}}}"
    return json.dumps(value)


class Operations:
    """What a file of Lua defines as `operations.NAME(ask)`, to be called by name.

    Lua has `now`, the time (ms) of Redis' own clock, so that nodes need not agree on theirs.
    """

    def __init__(
        self, client: redis.Redis, name: str, together: Together | None = None, **constants: Any
    ) -> None:
        """
        Args:
            together: By which operations are sent that may be done twice, as all of the file's then.
            constants: Values that the file takes from Python, under these names.
        """
        self._client, self._name, self._together = client, name, together
        self._constants = "".join(f"local {name} = {_literal(value)}\n" for name, value in constants.items())
        self._scripts: dict[str, Script] = {}

    def _script(self, operation: str) -> Script:
        script = self._scripts.get(operation)
        if script is None:
            code = source(self._name, operation, self._constants)
            script = self._scripts[operation] = self._client.register_script(code)
        return script

    def __call__(self, operation: str, *blobs: bytes | str, **ask: Any) -> Any:
        """Do an operation; its answer, of which an empty list may come as an empty dict.

        Args:
            blobs: Large values, or bytes that are no JSON: `ARGV[3]` and on.
        """
        return self.send(request(operation, *blobs, **ask))

    def send(self, request: list[Any]) -> Any:
        """The answer to a `request`."""
        script = self._script(request[0])
        if self._together is not None:
            with suppress(redis.exceptions.NoScriptError):
                return from_json(self._together.send("EVALSHA", script.sha, 0, *request))
        return from_json(script(args=request))


Call = tuple[Operations, list[Any]]


def send_many(client: redis.Redis, calls: list[Call]) -> list[Any]:
    """Answers to several `request`s in one round trip, in order; of one that failed the error.

    Others are served between them.
    """
    replies = _send(client, calls)
    # A Redis that was restarted has forgotten the scripts, and has done none of these.
    missing = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
    if missing:
        for script in {calls[i][0]._script(calls[i][1][0]) for i in missing}:
            client.script_load(script.script)
        for i, reply in zip(missing, _send(client, [calls[i] for i in missing]), strict=True):
            replies[i] = reply
    return [reply if isinstance(reply, Exception) else from_json(reply) for reply in replies]


def _send(client: redis.Redis, calls: list[Call]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for command in commands(calls):
            pipe.execute_command(*command)
        return pipe.execute(raise_on_error=False)


def commands(calls: list[Call]) -> list[tuple[Any, ...]]:
    """What `send_many` sends where all goes well."""
    return [("EVALSHA", operations._script(args[0]).sha, 0, *args) for operations, args in calls]


def request(operation: str, *blobs: bytes | str, **ask: Any) -> list[Any]:
    """The arguments of a script for an operation; its name is for those who read Redis' slow log.

    What is None is left out. A model, a sandbox or a handler may have written half a character into a text:
    `?` stands for it.
    """
    given = {name: value for name, value in ask.items() if value is not None}
    try:
        encoded = to_json(given)
    except PydanticSerializationError:
        encoded = json.dumps(given, ensure_ascii=False).encode(errors="replace")
    return [operation, encoded, *blobs]
