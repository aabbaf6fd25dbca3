"""One of many workers does what must be done once: whoever holds a lock in Redis, also in a full one."""

from __future__ import annotations

import redis

from services.state import scripts

LOCK_S = 10.0
"""Another worker takes over when the elected one was silent for so long."""

_WIN = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  -- Redis' clock went back: a holder that lives says so anew, and a dead one must not hold on for hours.
  if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
  return 0
end
though_full()
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"


class Election:
    """A lock that its holder extends by asking again."""

    def __init__(
        self, client: redis.Redis, key: str, owner: str, interval_s: float, lock_s: float = LOCK_S
    ) -> None:
        """
        Args:
            interval_s: How often the holder will ask.
            lock_s: How long a silent holder stays elected, three intervals at least.
        """
        self._key = key
        self._owner = owner
        self._millis = int(max(lock_s, 3 * interval_s) * 1000)
        self._win = client.register_script(scripts.text("full") + _WIN)
        self._resign = client.register_script(_RESIGN)

    def won(self) -> bool:
        """Whether the caller is the elected one now."""
        return bool(self._win(keys=[self._key], args=[self._owner, self._millis]))

    def resign(self) -> None:
        """Let another one be elected at once; nothing happens to a lock that is not the caller's."""
        self._resign(keys=[self._key], args=[self._owner])
