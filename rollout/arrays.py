"""Trajectories as typed arrays: the record that Redis keeps and that answers carry, and NumPy's view of it.

A record is a msgpack map:

    v         version of the form, 1
    chains    one map a chain:
                ids       bin: int32, little-endian, every token of the chain
                logprobs  bin: one number a token from the first sampled one on, 0.0 where none was sampled
                width     bytes of such a number: 4 (float32) or 8 (float64), little-endian
                runs      [tokens, version] a segment; version indexes `versions`, -1 = not sampled
                own       false: it is another policy's than the agent's; left out where it is true
    versions  policy versions, str or nil
    document  everything else: the trajectory's JSON without `token_ids` and `logprobs`; str, or bin = zlib

Nothing is rounded: log-probs go as float32 only where that is exact, as it is for engines, which compute
them as float32; else as float64. The rest stays JSON, so that one model validates both forms.

An answer is a msgpack map `{v, json, ids, records}`: the JSON answer with its trajectories left out, and
records in the order of their rollouts' ids.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder
from pydantic_core import from_json

from rollout.schema import Chain, Trajectory
from rollout.schema.trajectory import TRAINED

if TYPE_CHECKING:
    import numpy as np

MEDIA_TYPE = "application/msgpack"
VERSION = 1
"""Of records."""
ANSWER_VERSION = 2
NOT_SAMPLED = -1
LEAST_COMPRESSED = 1024
"""Bytes; a shorter document gains next to nothing."""
LEVEL = 1
"""Of zlib: messages are text, of which higher levels save a few percent more for twice the time."""

_LOGPROB = {4: "f", 8: "d"}
_LEFT_OUT = {"chains": {"__all__": {"segments": {"__all__": {"token_ids", "logprobs"}}}}}
T = TypeVar("T")


class WireError(ValueError):
    """Bytes are no record or answer that this release can read; the message says why."""


# ---------------------------------------------------------------------------------- records


class ChainRecord(Struct, frozen=True, omit_defaults=True):
    """One chain, its arrays still bytes."""

    ids: bytes
    logprobs: bytes
    width: Literal[4, 8]
    runs: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=NOT_SAMPLED)]]]
    """Tokens of each segment, and the index of its policy version or -1."""
    own: bool = True
    """Whether it is the agent's."""

    def __post_init__(self) -> None:
        tokens = sum(length for length, _ in self.runs)
        if len(self.ids) != 4 * tokens or len(self.logprobs) != (tokens - self.prompt_tokens) * self.width:
            raise ValueError(f"the arrays do not have the length of its {tokens} tokens")

    @property
    def first_sampled(self) -> int:
        """Segments before the first sampled one."""
        sampled = (at for at, (_, version) in enumerate(self.runs) if version != NOT_SAMPLED)
        return next(sampled, len(self.runs))

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first sampled one."""
        return sum(tokens for tokens, _ in self.runs[: self.first_sampled])

    def fill(self, segments: list[dict[str, Any]]) -> None:
        """Put ids and log-probs back into the segments of a document."""
        ids, logprobs = unpack_ids(self.ids), unpack_logprobs(self.logprobs, self.width)
        at, first = 0, self.prompt_tokens
        for segment, (tokens, version) in zip(segments, self.runs, strict=True):
            segment["token_ids"] = ids[at : at + tokens]
            if version != NOT_SAMPLED:
                segment["logprobs"] = logprobs[at - first : at - first + tokens]
            at += tokens


class Record(Struct, frozen=True):
    """A trajectory as it is stored, its arrays still bytes."""

    v: int
    chains: list[ChainRecord]
    versions: list[str | None]
    document: Any
    """JSON: str, or bytes compressed by zlib; msgspec knows no such union."""

    def __post_init__(self) -> None:
        if not isinstance(self.document, str | bytes):
            raise ValueError(f"its document is {type(self.document).__name__}, neither str nor bytes")
        if any(version >= len(self.versions) for chain in self.chains for _, version in chain.runs):
            raise ValueError("its table names a policy version that is not there")

    def trajectory(self) -> Trajectory:
        """The trajectory with Python lists, equal to that of the JSON answer.

        Raises:
            WireError: The document is damaged.
            ValidationError: It is no trajectory.
        """
        with self._opened() as document:
            for chain, record in zip(document["chains"], self.chains, strict=True):
                record.fill(chain["segments"])
        return Trajectory.model_validate(document)

    def taught(self) -> list[bool]:
        """What `Chain.teaches` is of each chain.

        Raises:
            WireError: The document is damaged.
        """
        with self._opened() as document:
            said = [(chain.get("trained"), chain.get("role", "agent")) for chain in document["chains"]]
        return [role in TRAINED if trained is None else bool(trained) for trained, role in said]

    def tokenizers(self) -> list[str | None]:
        """The tokenizer of each chain.

        Raises:
            WireError: The document is damaged.
        """
        with self._opened() as document:
            return [chain.get("tokenizer") or document.get("tokenizer") for chain in document["chains"]]

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            yield from_json(
                zlib.decompress(self.document) if isinstance(self.document, bytes) else self.document
            )
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WireError(f"the document of a record is damaged: {error}") from error


def is_record(stored: bytes) -> bool:
    """Whether these bytes begin as a record does, of this release or a newer one: as a msgpack map, which no
    text does."""
    return bool(stored) and stored[0] & 0xF0 == 0x80


def encode(trajectory: Trajectory) -> bytes:
    """The record of a trajectory.

    Raises:
        WireError: A token id does not fit into 32 bits, or a sampled segment lacks log-probs.
    """
    versions: dict[str | None, int] = {}
    chains = [_chain_record(chain, versions) for chain in trajectory.chains]
    document: str | bytes = trajectory.model_dump_json(exclude=_LEFT_OUT)
    if len(document) >= LEAST_COMPRESSED:
        document = zlib.compress(document.encode(), LEVEL)
    return msgspec.msgpack.encode(Record(VERSION, chains, list(versions), document))


def _chain_record(chain: Chain, versions: dict[str | None, int]) -> ChainRecord:
    """The record of a chain, whose policy versions are entered into `versions`."""
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
    return ChainRecord(pack_ids(ids), *pack_logprobs(logprobs), runs, chain.policy is None)


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as int32, little-endian.

    Raises:
        WireError: One does not fit into 32 bits.
    """
    try:
        return _packed(array("i", ids))
    except OverflowError as error:
        raise WireError(f"a token id does not fit into 32 bits: {error}") from error


def unpack_ids(raw: bytes) -> list[int]:
    """What `pack_ids` packed."""
    return _unpacked("i", raw)


def pack_logprobs(logprobs: list[float]) -> tuple[bytes, Literal[4, 8]]:
    """Log-probs as float32 where that is exact, else as float64; and the bytes of each."""
    single = array("f", logprobs)
    exact = single.tolist() == logprobs
    return (_packed(single), 4) if exact else (_packed(array("d", logprobs)), 8)


def unpack_logprobs(raw: bytes, width: Literal[4, 8]) -> list[float]:
    """What `pack_logprobs` packed."""
    return _unpacked(_LOGPROB[width], raw)


def _packed(numbers: array) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(kind: str, raw: bytes) -> list[Any]:
    numbers = array(kind, raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


# ---------------------------------------------------------------------------------- answers


class _Answer(Struct):
    v: int
    json: str
    ids: list[str]
    records: list[Record]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.records):
            raise ValueError(f"{len(self.records)} records of {len(self.ids)} rollouts")


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
        head = msgspec.msgpack.encode({"v": ANSWER_VERSION, "json": document, "ids": [*sizes], "records": []})
        # In place of the empty list that it ends with: how a list of so many begins (array 32).
        self._head = head[:-1] + b"\xdd" + len(sizes).to_bytes(4, "big")
        self._sizes, self._records = sizes, records
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


# ---------------------------------------------------------------------------------- reading


class _Version(Struct):
    v: int


_RECORDS, _ANSWERS, _VERSIONS = Decoder(Record), Decoder(_Answer), Decoder(_Version)


def decode(raw: bytes) -> Record:
    """The record in these bytes.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    return _decode(_RECORDS, raw, "record", VERSION)


def unpack_answer(raw: bytes) -> tuple[str, dict[str, Record]]:
    """The JSON of an answer, and its records by rollout id.

    Raises:
        WireError: It is damaged, or a newer release wrote it.
    """
    answer = _decode(_ANSWERS, raw, "answer", ANSWER_VERSION)
    return answer.json, dict(zip(answer.ids, answer.records, strict=True))


def _decode(decoder: Decoder[T], raw: bytes, kind: str, newest: int) -> T:
    try:
        version = _VERSIONS.decode(raw).v
        if version > newest:
            raise WireError(
                f"{kind} of version {version}; this release reads up to {newest}: upgrade rollout-service"
            )
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(raw)} bytes are no {kind} that can be read: {error}") from error


# ---------------------------------------------------------------------------------- NumPy


def _numpy():
    try:
        import numpy
    except ImportError as error:
        raise ImportError(
            "arrays need NumPy: pip install 'rollout-service[arrays]', or use rollout.trajectory"
        ) from error
    return numpy


class ChainArrays:
    """The arrays of one chain. They are read-only: copy what you want to change.

    `prompt_ids`, `response_ids` and `logprobs` are views of the record; `loss_mask` and `policy_versions` are
    spread out from its table of segments at the first look.
    """

    def __init__(self, record: ChainRecord, versions: list[str | None]) -> None:
        self._record = record
        self.versions = versions
        """Policy versions, which `policy_versions` indexes."""
        self.prompt_tokens = record.prompt_tokens
        self.own = record.own
        """Whether it is the agent's."""

    @cached_property
    def token_ids(self) -> np.ndarray:
        """int32: every token."""
        return _numpy().frombuffer(self._record.ids, "<i4")

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32: what comes before the first sampled token."""
        return self.token_ids[: self.prompt_tokens]

    @property
    def response_ids(self) -> np.ndarray:
        """int32: from the first sampled token on, observations included."""
        return self.token_ids[self.prompt_tokens :]

    @cached_property
    def logprobs(self) -> np.ndarray:
        """Parallel to `response_ids`: float32, or float64 where that rounds; 0.0 where not sampled."""
        return _numpy().frombuffer(self._record.logprobs, f"<f{self._record.width}")

    @cached_property
    def policy_versions(self) -> np.ndarray:
        """Parallel to `response_ids`, int32: index into `versions`, -1 where not sampled."""
        return self._spread("<i4", [version for _, version in self._record.runs])

    @cached_property
    def loss_mask(self) -> np.ndarray:
        """Parallel to `response_ids`, uint8: 1 where the engine sampled the token."""
        return self._spread("u1", [int(version != NOT_SAMPLED) for _, version in self._record.runs])

    def _spread(self, dtype: str, values: list[int]) -> np.ndarray:
        """The segments' values, one a token of the response."""
        np, runs = _numpy(), self._record.runs
        first = self._record.first_sampled
        spread = np.repeat(np.array(values[first:], dtype), [tokens for tokens, _ in runs[first:]])
        spread.flags.writeable = False
        return spread


class Arrays(ChainArrays):
    """The arrays of a trajectory: those of the agent's last chain, and of each in `chains`."""

    def __init__(self, record: Record) -> None:
        """
        Raises:
            LookupError: No model call was made: there is no chain of the agent.
        """
        if not record.chains or not record.chains[-1].own:
            raise LookupError("the trajectory is empty: no model call was made")
        self.record = record
        self.chains = [ChainArrays(chain, record.versions) for chain in record.chains]
        super().__init__(record.chains[-1], record.versions)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Arrays:
        """The arrays of a trajectory that came as lists; this copies."""
        return cls(decode(encode(trajectory)))

    @cached_property
    def trained(self) -> list[ChainArrays]:
        """The chains to learn from: something was sampled in them, and they teach.

        The document says which, and is read where there are several: the agent's alone does.
        """
        taught = self.record.taught() if len(self.chains) > 1 else [True]
        pairs = zip(self.chains, taught, strict=True)
        return [chain for chain, teaches in pairs if teaches and chain.loss_mask.any()]

    def trajectory(self) -> Trajectory:
        """The whole trajectory, messages too, with Python lists."""
        return self.record.trajectory()
