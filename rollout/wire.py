"""Trajectories as typed arrays: the record that Redis keeps, and the answers that carry records as msgpack.

A record is a msgpack map:

    v         version of the form, 1
    chains    one map a chain:
                ids       bin: int32, little-endian, every token of the chain
                logprobs  bin: one number a token from the first sampled one on, 0.0 where none was sampled
                width     bytes of such a number: 4 (float32) or 8 (float64), little-endian
                runs      [tokens, version] a segment; version indexes `versions`, -1 = not sampled
    versions  policy versions, str or nil
    document  everything else: the trajectory's JSON without `token_ids` and `logprobs`; str, or bin = zlib

Nothing is rounded: log-probs go as float32 only where that is exact, as it is for engines, which compute
them as float32; else as float64. The rest stays JSON, so that one model validates both forms.

An answer is a msgpack map `{v, json, records}`: the JSON answer with its trajectories left out, and records
by rollout id.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import msgpack
from pydantic_core import from_json

from rollout.trajectory import Chain, Trajectory

MEDIA_TYPE = "application/msgpack"
VERSION = 1
NOT_SAMPLED = -1
LEAST_COMPRESSED = 1024
"""Bytes; a shorter document gains next to nothing."""
LEVEL = 1
"""Of zlib: messages are text, of which higher levels save a few percent more for twice the time."""

_IDS = 4
_LOGPROB = {4: "f", 8: "d"}
_LEFT_OUT = {"chains": {"__all__": {"segments": {"__all__": {"token_ids", "logprobs"}}}}}


class WireError(ValueError):
    """Bytes are no record or answer that this release can read; the message says why."""


@dataclass(frozen=True, slots=True)
class ChainRecord:
    """One chain, its arrays still bytes."""

    ids: bytes
    logprobs: bytes
    width: int
    runs: list[tuple[int, int]]
    """Tokens of each segment, and the index of its policy version or -1."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first sampled one."""
        total = 0
        for tokens, version in self.runs:
            if version != NOT_SAMPLED:
                break
            total += tokens
        return total


@dataclass(frozen=True, slots=True)
class Record:
    """A trajectory as it came, its arrays still bytes."""

    chains: list[ChainRecord]
    versions: list[str | None]
    document: str | bytes

    def trajectory(self) -> Trajectory:
        """The trajectory with Python lists, equal to that of the JSON answer.

        Raises:
            WireError: The document is damaged.
            ValidationError: It is no trajectory.
        """
        try:
            text = zlib.decompress(self.document) if isinstance(self.document, bytes) else self.document
            found = from_json(text)
            for chain, record in zip(found["chains"], self.chains, strict=True):
                _fill(chain["segments"], record)
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise WireError(f"the document of a record is damaged: {error}") from error
        return Trajectory.model_validate(found)


def _fill(segments: list[dict[str, Any]], record: ChainRecord) -> None:
    """Put ids and log-probs back where they were."""
    ids, logprobs = _numbers("i", record.ids), _numbers(_LOGPROB[record.width], record.logprobs)
    at, first = 0, record.prompt_tokens
    for segment, (tokens, version) in zip(segments, record.runs, strict=True):
        segment["token_ids"] = ids[at : at + tokens]
        if version != NOT_SAMPLED:
            segment["logprobs"] = logprobs[at - first : at - first + tokens]
        at += tokens


def _numbers(kind: str, raw: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _bytes(numbers: array) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


# ---------------------------------------------------------------------------------- records


def encode(trajectory: Trajectory) -> bytes:
    """The record of a trajectory.

    Raises:
        WireError: A token id does not fit into 32 bits, or a sampled segment lacks log-probs.
    """
    versions: dict[str | None, int] = {}
    chains = [_encode_chain(chain, versions) for chain in trajectory.chains]
    document: str | bytes = trajectory.model_dump_json(exclude=_LEFT_OUT)
    if len(document) >= LEAST_COMPRESSED:
        document = zlib.compress(document.encode(), LEVEL)
    record = {"v": VERSION, "chains": chains, "versions": list(versions), "document": document}
    return msgpack.packb(record)


def _encode_chain(chain: Chain, versions: dict[str | None, int]) -> dict[str, Any]:
    ids: list[int] = []
    logprobs: list[float] = []
    runs = []
    begun = False
    for segment in chain.segments:
        tokens = len(segment.token_ids)
        ids += segment.token_ids
        begun = begun or segment.sampled
        if not segment.sampled:
            runs.append((tokens, NOT_SAMPLED))
            if begun:
                logprobs += repeat(0.0, tokens)
            continue
        if segment.logprobs is None or len(segment.logprobs) != tokens:
            raise WireError(f"a sampled segment of {tokens} tokens does not have as many log-probs")
        runs.append((tokens, versions.setdefault(segment.policy_version, len(versions))))
        logprobs += segment.logprobs
    try:
        packed_ids = _bytes(array("i", ids))
    except OverflowError as error:
        raise WireError(f"a token id does not fit into 32 bits: {error}") from error
    single = array("f", logprobs)
    width = 4 if single.tolist() == logprobs else 8
    packed = _bytes(single if width == 4 else array("d", logprobs))
    return {"ids": packed_ids, "logprobs": packed, "width": width, "runs": runs}


def decode(raw: bytes) -> Record:
    """The record in these bytes.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    return _record(_unpack(raw, "record"))


def _unpack(raw: bytes, what: str) -> dict[str, Any]:
    try:
        found = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"{len(raw)} bytes are no msgpack of a {what}: {error}") from error
    version = found.get("v") if isinstance(found, dict) else None
    if not isinstance(version, int):
        raise WireError(f"{len(raw)} bytes are no {what}: there is no version in them")
    if version > VERSION:
        raise WireError(
            f"{what} of version {version}; this release reads up to {VERSION}: upgrade rollout-service"
        )
    return found


def _record(found: dict[str, Any]) -> Record:
    try:
        chains = [
            ChainRecord(one["ids"], one["logprobs"], one["width"], [(n, v) for n, v in one["runs"]])
            for one in found["chains"]
        ]
        record = Record(chains, found["versions"], found["document"])
        for chain in chains:
            tokens = sum(length for length, _ in chain.runs)
            numbers = tokens - chain.prompt_tokens
            if len(chain.ids) != tokens * _IDS or len(chain.logprobs) != numbers * chain.width:
                raise WireError(f"a record's arrays do not have the length of its {tokens} tokens")
            if chain.width not in _LOGPROB or any(
                length < 0 or not NOT_SAMPLED <= version < len(record.versions)
                for length, version in chain.runs
            ):
                raise WireError("a record's table names what is not in it")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"a record is damaged: {error!r}") from error
    return record


# ---------------------------------------------------------------------------------- answers


class PackedAnswer:
    """The bytes of an answer, in pieces that are made one by one as they are sent.

    Each holds a record. To join them all would copy every trajectory once more, into memory that is new: that
    takes several times as long as to copy into memory that was in use just before.
    """

    def __init__(self, document: str, records: Mapping[str, bytes | memoryview]) -> None:
        """
        Args:
            document: The JSON answer without trajectories.
            records: By rollout id, as `encode` made them: they are passed on as they are.
        """
        pack = msgpack.Packer(autoreset=False)
        pack.pack_map_header(3)
        for item in ("v", VERSION, "json", document, "records"):
            pack.pack(item)
        pack.pack_map_header(len(records))
        self._head = pack.bytes()
        self._records = [(msgpack.packb(rollout_id), record) for rollout_id, record in records.items()]
        self.nbytes = len(self._head) + sum(len(name) + len(record) for name, record in self._records)

    def __len__(self) -> int:
        """The number of pieces."""
        return 1 + len(self._records)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for pair in self._records:
            yield b"".join(pair)


def unpack_answer(raw: bytes) -> tuple[str, dict[str, Record]]:
    """The JSON of an answer, and its records by rollout id.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    found = _unpack(raw, "answer")
    try:
        return found["json"], {rollout_id: _record(one) for rollout_id, one in found["records"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"an answer is damaged: {error!r}") from error
