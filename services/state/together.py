"""What the threads of a process ask of Redis at the same time, in one round trip.

Who asks while nobody sends does so at once; who asks meanwhile is in the next round trip. So nobody waits for
others to come, and where many ask, Redis reads and answers many at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import redis
from hiredis import pack_command

from services.state.redis import SHORT_ANSWER_S

MOST_AT_ONCE = 64
"""Commands of one round trip."""
ALONE_BYTES = 64 << 10
"""A command with a larger value goes by another connection: the others need not wait for it."""

Command = Sequence[str | bytes | int]


class _Asked:
    """A command, and the thread that waits with it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.answered = False
        self.answer: Any = None
        self.turn = threading.Lock()
        """Free once it is answered, or is the first of those that are to be sent next."""
        self.turn.acquire()


class Together:
    """Commands of many threads over one connection. Where that fails each goes by another one, with patience,
    and holds up nobody: a command may be done twice.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._connection = client.connection_pool.make_connection()
        self._connection.socket_timeout = SHORT_ANSWER_S
        self._lock = threading.Lock()
        self._asked: list[_Asked] = []
        self._sending = False

    def send(self, *command: str | bytes | int) -> Any:
        """The answer to a command.

        Raises:
            redis.RedisError: Redis refuses it, or is away.
        """
        if any(isinstance(part, bytes | str) and len(part) > ALONE_BYTES for part in command):
            return self._client.execute_command(*command)
        mine = _Asked(command)
        with self._lock:
            self._asked.append(mine)
            waits, self._sending = self._sending, True
        if waits:
            mine.turn.acquire()
        if not mine.answered:
            self._send_first()
        if isinstance(mine.answer, redis.ConnectionError | redis.TimeoutError):
            return self._client.execute_command(*command)
        if isinstance(mine.answer, BaseException):
            raise mine.answer
        return mine.answer

    def _send_first(self) -> None:
        with self._lock:
            batch, self._asked = self._asked[:MOST_AT_ONCE], self._asked[MOST_AT_ONCE:]
        try:
            answers = self._answers([asked.command for asked in batch])
        except BaseException as error:
            answers = [error] * len(batch)
        with self._lock:
            self._sending = bool(self._asked)
            if self._asked:
                self._asked[0].turn.release()
        for asked, answer in zip(batch, answers, strict=True):
            asked.answer, asked.answered = answer, True
            asked.turn.release()

    def _answers(self, commands: list[Command]) -> list[Any]:
        try:
            self._connection.send_packed_command([b"".join(map(pack_command, map(tuple, commands)))])
            return [self._answer() for _ in commands]
        except BaseException:
            self._connection.disconnect()  # what else it has to say is nobody's answer
            raise

    def _answer(self) -> Any:
        """The next one; a refusal is the answer to its command alone, and those after it still come."""
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error
