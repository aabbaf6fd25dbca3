"""The key-value cache of the engine model: blocks by the hash of what stands before them, evicted by age."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens; vLLM's default on GPUs."""
ID_BYTES = array("I").itemsize


def block_hashes(ids: Sequence[int], salt: str | None) -> list[int]:
    """One number per whole block, which stands for the block and everything before it."""
    digest = hash(salt)
    text = array("I", ids).tobytes()
    hashes = []
    for end in range(BLOCK * ID_BYTES, len(text) + 1, BLOCK * ID_BYTES):
        digest = hash((digest, text[end - BLOCK * ID_BYTES : end]))
        hashes.append(digest)
    return hashes


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


class BlockCache:
    """Counts blocks; a block in use is either shared by its hash or private to one sequence."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody uses, the next one to be evicted first."""
        self._private = 0

    @property
    def in_use(self) -> int:
        return len(self._users) + self._private

    @property
    def available(self) -> int:
        """Blocks that can be had, by eviction if need be."""
        return self.blocks - self.in_use

    def hits(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are cached."""
        for count, digest in enumerate(hashes):
            if digest not in self._users and digest not in self._idle:
                return count
        return len(hashes)

    def idle(self, hashes: Sequence[int]) -> int:
        """How many of these cached blocks nobody uses: to take them costs room."""
        return sum(digest in self._idle for digest in hashes)

    def take(self, hashes: Sequence[int]) -> None:
        """Use cached blocks."""
        for digest in hashes:
            self._idle.pop(digest, None)
            self._users[digest] = self._users.get(digest, 0) + 1

    def allocate(self, count: int) -> bool:
        """`count` empty blocks; False, and none taken, when there are not so many."""
        if count > self.available:
            return False
        self._private += count
        while self.in_use + len(self._idle) > self.blocks:
            self._idle.popitem(last=False)
        return True

    def publish(self, digest: int) -> None:
        """A private block is full now and others may share it."""
        self._private -= 1
        self._idle.pop(digest, None)
        self._users[digest] = self._users.get(digest, 0) + 1

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Give blocks back; what is cached stays until its room is needed, the end of a sequence shortest."""
        self._private -= private
        for digest in reversed(hashes):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._idle[digest] = None

    def reset(self) -> None:
        """Forget what nobody uses."""
        self._idle.clear()
