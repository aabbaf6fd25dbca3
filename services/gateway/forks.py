"""Forks: the requests that they stand for, or why nothing can go on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rollout.schema import EXTERNAL, FieldError, ForkRequest, Rollout, RolloutRequest, State
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.metrics import FORKS
from services.gateway.problems import ApiProblem, absent, invalid
from services.gateway.tasks import check_submission, why_not_forked
from services.state.redis import now

RESUMING = ("claude_code", "codex", "gemini_cli", "opencode", "openhands", "pi", "qwen_code")
"""Harnesses whose programs take up a session of their own files, though only to answer a further message."""
INSTEAD = (
    'set by the service; to go on from a turn of another rollout send "from": {"rollout": ID, "turn": T}'
)
GONE = "No such checkpoint"


def requests_of(
    entries: Sequence[RolloutRequest | ForkRequest],
    listed_in: str | None = None,
    n: int | None = None,
    *,
    tenant: str | None = None,
    wait_s: float = 0.0,
) -> list[RolloutRequest]:
    """Requests of the caller that can be worked on, in place of forks those that they stand for.

    Args:
        listed_in: Field of the body that they come in; None: the one request is the body.
        n: Members of each group; None = as the requests say.
        tenant: Whose rollouts forks may go on from; None = the caller's.
        wait_s: Seconds for which they may wait before they are submitted.

    Raises:
        ApiProblem: As `check_submission` says; and 404 or 409 for a turn from which nothing can go on.
    """
    prefixes = ["" if listed_in is None else f"{listed_in}.{place}." for place in range(len(entries))]
    named = [*zip(prefixes, entries, strict=True)]
    for prefix, entry in named:
        if isinstance(entry, RolloutRequest) and entry.origin is not None:
            raise invalid(f"{prefix}origin", INSTEAD)
    forks = {prefix: entry for prefix, entry in named if isinstance(entry, ForkRequest)}
    try:
        with _named_as_written(forks):
            resolver = _Resolver(forks, tenant or caller().tenant.name, wait_s)
            requests = [
                resolver.request(prefix, entry) if isinstance(entry, ForkRequest) else entry
                for prefix, entry in named
            ]
            check_submission([*zip(prefixes, requests, strict=True)], n)
    except ApiProblem:
        FORKS.labels("refused").inc(len(forks))
        raise
    FORKS.labels("accepted").inc(len(forks))
    return requests


class _Resolver:
    """Makes requests of the forks of one call."""

    def __init__(self, forks: Mapping[str, ForkRequest], tenant: str, wait_s: float) -> None:
        self._gate, self._tenant = gateway(), tenant
        ids = {fork.from_.rollout for fork in forks.values()}
        sources = self._gate.rollouts.get_many(ids, trajectory=False, tenant=tenant) if ids else ()
        self._sources = {source.id: (source, self._gate.checkpoints.list(source.id)) for source in sources}
        self._nodes = self._gate.fleet.nodes() if ids else {}
        self._from = now(self._gate.redis) + wait_s if ids else 0.0

    def request(self, prefix: str, fork: ForkRequest) -> RolloutRequest:
        """What a fork stands for.

        Raises:
            ApiProblem: Nothing can go on from there.
        """
        try:
            return self._made(f"{prefix}from.", fork)
        except ApiProblem:
            if (there := self._there(fork)) is None:
                raise
            return there

    def _made(self, prefix: str, fork: ForkRequest) -> RolloutRequest:
        def refused(
            name: str, message: str, status: int = 409, title: str = "Cannot be forked"
        ) -> ApiProblem:
            field = FieldError(field=f"{prefix}{name}", message=message)
            return ApiProblem(status, title, f"{field.field}: {message}", [field])

        turn = fork.from_.turn
        if fork.from_.rollout not in self._sources:
            # Also somebody else's: another answer would say that it exists.
            problem = absent(fork.from_.rollout).problem
            raise refused("rollout", problem.detail, problem.status, problem.title)
        source, every = self._sources[fork.from_.rollout]
        if reason := self._unfit(source):
            raise refused("rollout", reason)
        kept = next((checkpoint for checkpoint in every if checkpoint.turn == turn), None)
        if kept is None:
            there = ", ".join(str(checkpoint.turn) for checkpoint in every) or "none"
            message = f"turn {turn} is not kept; those that are: {there}"
            if (origin := source.request.origin) and turn <= origin.turn:
                message += f" (up to {origin.turn} they are turns of {origin.rollout}: fork that one)"
            raise refused("turn", message, 404, GONE)
        if kept.error:
            raise refused("turn", f"the files of turn {turn} were not kept: {kept.error}")
        if kept.node is not None and kept.node not in self._nodes:
            raise refused("turn", f"the files of turn {turn} are on node {kept.node}, which is not there now")
        request = fork.applied(source.request)
        if turn >= (most := request.limits.max_turns):
            message = f"{turn} turns are shared, of limits.max_turns = {most}: give limits with more"
            raise refused("turn", message, 400, "Invalid request")
        if not self._gate.checkpoints.hold(source.id, kept.attempt, self._from + request.limits.deadline_s):
            raise refused("turn", f"turn {turn} is kept no longer", 404, GONE)
        return request

    def _there(self, fork: ForkRequest) -> RolloutRequest | None:
        """Of a fork whose rollouts were accepted before: sent again it is what it was, whatever has become of
        the other rollout since."""
        if fork.id is None:
            return None
        first = fork.rollout_ids()[1][0]
        rollout = self._gate.rollouts.get(first, trajectory=False, tenant=self._tenant)
        return rollout.request if rollout and fork.applied(rollout.request) == rollout.request else None

    def _unfit(self, source: Rollout) -> str | None:
        """Why nothing goes on from any of its turns; None = something may."""
        request = source.request
        if source.drop or (source.state.terminal and source.state is not State.COMPLETED):
            word = "dropped" if source.state is State.COMPLETED else source.state.value
            why = f" ({source.drop_reason})" if source.drop_reason else ""
            return f"it is {word}{why}: what it did is not to be trusted"
        if request.agent is not None:
            return _driven(request.agent.harness)
        info = self._gate.tasks.handlers().get(request.handler)
        if reason := info and why_not_forked(info):
            return reason
        if request.checkpoints == "never":
            return 'no checkpoints were asked for; submit it with "checkpoints": "every_turn" or "on_tools"'
        return None


def _driven(harness: str) -> str:
    """Why nothing goes on from the turns of a program."""
    if harness in RESUMING:
        return (
            f"{harness} drives it, which takes up a session of its own files only with a further message of "
            "the user, and the shared turns have none"
        )
    where = " elsewhere" if harness == EXTERNAL else ""
    return f"a program{where} drives it (agent.harness {harness!r}), and keeps the conversation to itself"


@contextmanager
def _named_as_written(forks: Mapping[str, ForkRequest]) -> Iterator[None]:
    """Have a problem name what a fork says, and not what it has from the other rollout."""
    try:
        yield
    except ApiProblem as error:
        if not forks or not error.problem.errors:
            raise
        errors = [_as_written(item, forks) for item in error.problem.errors]
        raise ApiProblem(error.problem.status, error.problem.title, errors=errors) from None


def _as_written(error: FieldError, forks: Mapping[str, ForkRequest]) -> FieldError:
    for prefix, fork in forks.items():
        if error.field.startswith(prefix):
            path = error.field.removeprefix(prefix)
            name = path.partition(".")[0]
            if name == "n":
                return FieldError(field=f"{prefix}from.n", message=error.message)
            if name != "from" and name not in fork.model_fields_set:
                return FieldError(field=f"{prefix}from.rollout", message=f"its {path}: {error.message}")
    return error
