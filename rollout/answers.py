"""Reading answers with trajectories, whether they came as JSON or as typed arrays (`rollout.wire`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel

from rollout import bodies
from rollout.batch import GroupPage
from rollout.calls import Call, Operation, send
from rollout.errors import RolloutError
from rollout.schema import CompletionPage, Rollout

if TYPE_CHECKING:
    from rollout.wire import Record

M = TypeVar("M", bound=BaseModel)


def fetch_rollouts(
    call: Call, model: type[M], include: str, retry_for: float, begun: Any = None
) -> Operation[M]:
    """As `rollout.calls.fetch`, for a model with rollouts in it.

    Args:
        include: `arrays` leaves trajectories out and gives their arrays alone.
        begun: See `rollout.calls.send`.
    """
    response = yield from send(call, retry_for, begun)
    return _read(response, model, arrays_only=include == "arrays")


def _read(response: httpx.Response, model: type[M], *, arrays_only: bool) -> M:
    text, records = bodies.take(response), {}
    if response.headers.get("content-type", "").startswith("application/msgpack"):
        from rollout.wire import WireError, unpack_answer

        try:
            text, records = unpack_answer(text)
        except WireError as error:
            raise RolloutError(
                f"{response.url}: {error}; Client(wire='json') asks for JSON instead"
            ) from error
    found = model.model_validate_json(text)
    for rollout in _rollouts(found):
        if rollout.id in records:
            _attach(rollout, records[rollout.id], arrays_only=arrays_only)
        elif arrays_only:
            leave_arrays(rollout)
    return found


def _rollouts(found: BaseModel) -> Iterable[Rollout]:
    if isinstance(found, Rollout):
        return [found]
    if isinstance(found, CompletionPage):
        return found.rollouts
    if isinstance(found, GroupPage):
        return [rollout for group in found.groups for rollout in group.rollouts]
    raise TypeError(f"{type(found).__name__} has no rollouts")


def _attach(rollout: Rollout, record: Record, *, arrays_only: bool) -> None:
    from rollout.arrays import Arrays

    if record.chains:
        # Where the cached property looks for it: these arrays lie in the bytes of the answer.
        rollout.__dict__["arrays"] = Arrays(record)
    if not (arrays_only and record.chains):
        rollout.trajectory = record.trajectory()


def leave_arrays(rollout: Rollout) -> None:
    """Turn the trajectory of a rollout into its arrays; one without chains stays as it is."""
    if rollout.trajectory is not None and rollout.trajectory.chains:
        _ = rollout.arrays
        rollout.trajectory = None
