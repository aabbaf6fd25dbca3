"""Flat NumPy views of a trajectory: `rollout.arrays`, for trainers that want no Python lists."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rollout.trajectory import Trajectory
from rollout.wire import NOT_SAMPLED, ChainRecord, Record, decode, encode

if TYPE_CHECKING:
    import numpy as np


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

    `prompt_ids`, `response_ids` and `logprobs` lie in the bytes of the answer itself; `loss_mask` and
    `policy_versions` are spread out from its table of segments at the first look.
    """

    def __init__(self, record: ChainRecord, versions: list[str | None]) -> None:
        self._record = record
        self.versions = versions
        """Policy versions, which `policy_versions` indexes."""
        self.prompt_tokens = record.prompt_tokens

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
    """The arrays of a trajectory: those of its last chain, and of each in `chains`."""

    def __init__(self, record: Record) -> None:
        """
        Raises:
            LookupError: No model call was made: there are no chains.
        """
        if not record.chains:
            raise LookupError("the trajectory is empty: no model call was made")
        self.record = record
        self.chains = [ChainArrays(chain, record.versions) for chain in record.chains]
        super().__init__(record.chains[-1], record.versions)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Arrays:
        """The arrays of a trajectory that came as lists; this copies."""
        return cls(decode(encode(trajectory)))

    def trajectory(self) -> Trajectory:
        """The whole trajectory, messages too, with Python lists."""
        return self.record.trajectory()
