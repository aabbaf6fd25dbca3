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

An answer is a msgpack map `{v, json, ids, records}`: the JSON answer with its trajectories left out, and
records in the order of their rollouts' ids.

Readers take arrays as views of the answer, so what is written here lies at multiples of 8 bytes: `pad` and
`pad2`, bins of zeros, move what follows. Readers need not look at them.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from pydantic_core import from_json

from rollout.trajectory import Chain, Trajectory

MEDIA_TYPE = "application/msgpack"
VERSION = 1
"""Of records."""
ANSWER_VERSION = 2
NOT_SAMPLED = -1
LEAST_COMPRESSED = 1024
"""Bytes; a shorter document gains next to nothing."""
LEVEL = 1
"""Of zlib: messages are text, of which higher levels save a few percent more for twice the time."""
ALIGNED = 8
"""Bytes, of which the place of every array in an answer is a multiple."""

_IDS = 4
_LOGPROB = {4: "f", 8: "d"}
_LEFT_OUT = {"chains": {"__all__": {"segments": {"__all__": {"token_ids", "logprobs"}}}}}


class WireError(ValueError):
    """Bytes are no record or answer that this release can read; the message says why."""


class ChainRecord(Struct, frozen=True):
    """One chain, its arrays still bytes."""

    ids: memoryview
    logprobs: memoryview
    width: Literal[4, 8]
    runs: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=NOT_SAMPLED)]]]
    """Tokens of each segment, and the index of its policy version or -1."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A view cannot be pickled, and trainers pass rollouts between processes.
        return type(self), (bytes(self.ids), bytes(self.logprobs), self.width, self.runs)

    @property
    def first_sampled(self) -> int:
        """Segments before the first sampled one."""
        for at, (_, version) in enumerate(self.runs):
            if version != NOT_SAMPLED:
                return at
        return len(self.runs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first sampled one."""
        return sum([tokens for tokens, _ in self.runs[: self.first_sampled]])

    def __post_init__(self) -> None:
        tokens = sum([length for length, _ in self.runs])
        numbers = tokens - self.prompt_tokens
        if len(self.ids) != tokens * _IDS or len(self.logprobs) != numbers * self.width:
            raise ValueError(f"the arrays do not have the length of its {tokens} tokens")


class Record(Struct, frozen=True):
    """A trajectory as it came, its arrays still bytes: views of what was decoded."""

    v: int
    chains: list[ChainRecord]
    versions: list[str | None]
    document: msgspec.Raw

    def __post_init__(self) -> None:
        known = len(self.versions)
        for chain in self.chains:
            if chain.runs and max([version for _, version in chain.runs]) >= known:
                raise ValueError("its table names a policy version that is not there")

    def trajectory(self) -> Trajectory:
        """The trajectory with Python lists, equal to that of the JSON answer.

        Raises:
            WireError: The document is damaged.
            ValidationError: It is no trajectory.
        """
        try:
            document = msgspec.msgpack.decode(self.document)
            text = zlib.decompress(document) if isinstance(document, bytes) else document
            found = from_json(text)
            for chain, record in zip(found["chains"], self.chains, strict=True):
                _fill(chain["segments"], record)
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise WireError(f"the document of a record is damaged: {error}") from error
        return Trajectory.model_validate(found)


class _Answer(Struct):
    v: int
    json: str
    ids: list[str]
    records: list[Record]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.records):
            raise ValueError(f"{len(self.records)} records of {len(self.ids)} rollouts")


class _Version(Struct):
    v: int


_RECORDS = msgspec.msgpack.Decoder(Record)
_ANSWERS = msgspec.msgpack.Decoder(_Answer)
_VERSIONS = msgspec.msgpack.Decoder(_Version)
T = TypeVar("T")


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


def is_record(stored: bytes) -> bool:
    """Whether these bytes begin as a record does, of this release or a newer one: as a msgpack map, which no
    text does."""
    return bool(stored) and stored[0] & 0xF0 == 0x80


def encode(trajectory: Trajectory) -> bytes:
    """The record of a trajectory, whose length is a multiple of 8 bytes.

    Raises:
        WireError: A token id does not fit into 32 bits, or a sampled segment lacks log-probs.
    """
    versions: dict[str | None, int] = {}
    out = _Writer()
    out.raw(_RECORD_BEGINS)
    out.put("v", VERSION, "chains")
    out.raw(_list_of(len(trajectory.chains)))
    for chain in trajectory.chains:
        _encode_chain(out, chain, versions)
    document: str | bytes = trajectory.model_dump_json(exclude=_LEFT_OUT)
    if len(document) >= LEAST_COMPRESSED:
        document = zlib.compress(document.encode(), LEVEL)
    out.put("versions", list(versions), "document", document)
    out.pad("pad")
    return bytes(out.bytes)


_RECORD_BEGINS = b"\x85"
"""A map of v, chains, versions, document and pad."""
_CHAIN_BEGINS = b"\x86"
"""A map of width, runs, pad, ids, pad2 and logprobs."""
_ANSWER_BEGINS = b"\x85"
"""A map of v, json, ids, pad and records."""


def _encode_chain(out: _Writer, chain: Chain, versions: dict[str | None, int]) -> None:
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
    out.raw(_CHAIN_BEGINS)
    out.put("width", width, "runs", runs)
    out.array("pad", "ids", packed_ids)
    out.array("pad2", "logprobs", packed)


def _list_of(items: int) -> bytes:
    """How a list of so many items begins."""
    if items < 16:
        return bytes([0x90 | items])
    return b"\xdd" + items.to_bytes(4, "big")


class _Writer:
    """A msgpack map, written piece by piece: no packer tells where what it writes will lie."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._encoder = msgspec.msgpack.Encoder()

    def raw(self, piece: bytes) -> None:
        self.bytes += piece

    def put(self, *values: Any) -> None:
        for value in values:
            self._encoder.encode_into(value, self.bytes, -1)

    def pad(self, name: str, after: int = 0) -> None:
        """Zeros, so that what begins `after` bytes later lies at a multiple of `ALIGNED`."""
        self.put(name)
        self.put(bytes(-(len(self.bytes) + 2 + after) % ALIGNED))

    def array(self, pad: str, name: str, data: bytes) -> None:
        """An aligned bin."""
        head = msgspec.msgpack.encode(name) + b"\xc6" + len(data).to_bytes(4, "big")
        self.pad(pad, len(head))
        self.raw(head)
        self.raw(data)


def decode(raw: bytes) -> Record:
    """The record in these bytes.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    return _decode(_RECORDS, raw, "record", VERSION)


def _decode(decoder: msgspec.msgpack.Decoder[T], raw: bytes | bytearray, what: str, known: int) -> T:
    # Read-only, and so are the arrays: they may be shared.
    view = memoryview(raw).toreadonly()
    try:
        found = decoder.decode(view)
        version = found.v
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Perhaps because a newer one is something else altogether.
        version = _version(view)
        if version is None or version <= known:
            raise WireError(f"{len(raw)} bytes are no {what} that can be read: {error}") from error
    if version > known:
        raise WireError(
            f"{what} of version {version}; this release reads up to {known}: upgrade rollout-service"
        )
    return found


def _version(view: memoryview) -> int | None:
    try:
        return _VERSIONS.decode(view).v
    except msgspec.MsgspecError:
        return None


# ---------------------------------------------------------------------------------- answers


class PackedAnswer:
    """The bytes of an answer, in pieces: to join them would copy every trajectory once more.

    Its records are taken while it is sent, so that it needs no more memory than one of them.
    """

    def __init__(self, document: str, sizes: Mapping[str, int], records: Iterable[bytes]) -> None:
        """
        Args:
            document: The JSON answer without trajectories.
            sizes: Bytes of each record, by rollout id.
            records: In the same order, as `encode` made them: they are passed on as they are.
        """
        head = _Writer()
        head.raw(_ANSWER_BEGINS)
        head.put("v", ANSWER_VERSION, "json", document, "ids", list(sizes))
        begin = msgspec.msgpack.encode("records") + _list_of(len(sizes))
        head.pad("pad", len(begin))
        head.raw(begin)
        self._head, self._sizes, self._records = bytes(head.bytes), sizes, records
        self.nbytes = len(self._head) + sum(sizes.values())

    def __iter__(self) -> Iterator[bytes]:
        """The pieces, once.

        Raises:
            WireError: A record has not the size that was said: the answer is cut off, to be asked for again.
        """
        yield self._head
        for (name, size), record in zip(self._sizes.items(), self._records, strict=True):
            if len(record) != size:
                raise WireError(f"rollout {name}: its record has {len(record)} bytes now, and not {size}")
            yield record

    def close(self) -> None:
        """Let go of what the records are taken from; WSGI servers call it in the end."""
        if isinstance(self._records, Generator):
            self._records.close()


def unpack_answer(raw: bytes | bytearray) -> tuple[str, dict[str, Record]]:
    """The JSON of an answer, and its records by rollout id, whose arrays are views of `raw`.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    found = _decode(_ANSWERS, raw, "answer", ANSWER_VERSION)
    return found.json, dict(zip(found.ids, found.records, strict=True))
