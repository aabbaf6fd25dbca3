"""Calls of a handler to other policies than the agent's: a judge, a simulated user, an opponent, a reference.

Each conversation has a place of its own on a backend of its policy and, where that one tells token ids, a
loop and a trajectory of its own, as exact as the agent's. What was said joins the rollout's trajectory when
the stage ends, in front of the agent's chains. Whatever goes wrong with another policy is never scored:
another attempt may mend it, and where none does the sample is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from rollout.schema import Backend, RolloutRequest, SamplingParams, Stage, new_id
from rollout.schema.trajectory import Chain, FinishReason, Message, OtherRole, Trajectory
from sandbox.client import SandboxClient
from sandbox.errors import SandboxError
from services.engines.chat import TextRequest
from services.state.rollouts.store import Claim
from workers.agent.cautions import logprob_warnings
from workers.agent.formats import CodecError
from workers.agent.loop import AgentLoop
from workers.agent.parsing import ParsedTurn
from workers.agent.router import Router
from workers.agent.tools import Tool
from workers.errors import (
    HandlerError,
    InfrastructureError,
    ModelError,
    StageError,
    StageTimeout,
    TaskError,
    laid,
)
from workers.patience import ask, stopped

MAX_CONVERSATIONS = 64
"""With other policies, of one rollout in one stage."""
MAX_TEXT_TOKENS = 4096
"""Of a text-only policy's answer where nobody says how long it may be: its context is not known."""


class OtherRefused(ModelError):
    """Another policy's engine refused a call, or gave no usable answer. The agent is not scored for it."""

    retry = True


class Asker(Protocol):
    """Who asks: a `workers.stage.StageRun`."""

    claim: Claim
    services: Any

    @property
    def handler(self) -> Any: ...
    @property
    def can_pass_on(self) -> bool: ...


class Others:
    """What one stage of a rollout asks other policies."""

    def __init__(self, run: Asker) -> None:
        self.run = run
        self.faults: dict[BaseException | None, str] = {}
        """Failures of sandboxes that came about in a call to another policy, which they name."""
        self.waited_for: str | None = None
        """The policy in a call to which the stage was interrupted."""
        self._begun: list[Conversation] = []
        self._spoke = 0

    def open(self, policy: str, role: OtherRole, sampling: SamplingParams | None) -> Conversation:
        """See `Asking.model`."""
        if self.run.claim.stage is Stage.INIT:
            raise HandlerError("other policies are asked in RUN and EVAL, and this is INIT")
        if self.run.can_pass_on:
            raise HandlerError(
                f"{self.run.handler.name}: RUN asks policy {policy!r}, and no worker could go through that "
                "again: override `run` and leave `run` out of `repeatable`, or ask in EVAL"
            )
        return Conversation(self, policy, role, sampling)

    async def enter(self, conversation: Conversation) -> int:
        """Give a conversation that begins its number.

        Raises:
            TaskError: The rollout's tenant may not use the policy.
        """
        self._begun.append(conversation)
        number = len(self._begun)  # before others that begin beside it
        tenant = await ask(self.run.services.tenant, self.run.claim.tenant)
        if not tenant.may_use("policies", conversation.policy):
            allowed = ", ".join(tenant.policies or ()) or "none"
            raise TaskError(
                f"policy {conversation.policy!r}: tenant {tenant.name!r} may not use it; allowed policies: "
                f"{allowed}; ask the operator for it (`rollout tenants set`)"
            )
        return number

    def admit(self) -> None:
        """Count a conversation before its first call.

        Raises:
            HandlerError: There are too many.
        """
        self._spoke += 1
        if self._spoke > MAX_CONVERSATIONS:
            raise HandlerError(f"more than {MAX_CONVERSATIONS} conversations with other policies in a stage")

    def check(self, error: Exception) -> None:
        """Refuse to lay it to the agent, if it came about in a call to another policy."""
        late = self.waited_for if isinstance(error, StageTimeout) else None
        if policy := late or self.faults.get(error) or self.faults.get(error.__cause__):
            raise InfrastructureError(f"in a call to policy {policy!r}: {error}") from error

    async def close(self, trajectory: Trajectory, metrics: dict[str, float]) -> None:
        """End all conversations. What was said joins the trajectory, and its amount the metrics."""
        begun, self._begun = self._begun, []
        for conversation in begun:
            await conversation.close()
            for name, by in conversation.amounts().items():
                metrics[name] = metrics.get(name, 0) + by
            trajectory.warnings += [w for w in conversation.warnings() if w not in trajectory.warnings]
        chains = [chain for conversation in begun for chain in conversation.chains()]
        own = trajectory.own
        for chain in own:
            chain.parent = None if chain.parent is None else chain.parent + len(chains)
        trajectory.chains[len(trajectory.chains) - len(own) :] = [*chains, *own]


class Asking:
    """What a handler has of this: `ctx.model`."""

    others: Others

    def model(
        self, policy: str, role: OtherRole = "judge", sampling: SamplingParams | None = None
    ) -> Conversation:
        """A conversation with another policy, in RUN and EVAL: `async with ctx.model("judge") as judge:`.

        Args:
            sampling: None = as the request has it, which also holds for a role that is trained, but for
                `max_tokens`. Each conversation derives its own seed.

        Raises:
            HandlerError: This is INIT, or a RUN that another worker may go on with.
        """
        return self.others.open(policy, role, sampling)


class Conversation:
    """With one other policy. An async context manager that gives its place back, as the stage's end does.

    `ask` is enough for most. `start`, `query`, `append` and `run` are those of the agent's loop.
    """

    def __init__(self, others: Others, policy: str, role: OtherRole, sampling: SamplingParams | None) -> None:
        self.policy, self.role = policy, role
        self.text_only = False
        """Whether its backend tells no token ids; known from `start` on."""
        self._others = others
        self._request = others.run.claim.request
        self._trained = role in self._request.trained_roles
        self._sampling = sampling or self._request.sampling
        self._router: Router | None = None
        self._loop: AgentLoop | None = None
        self._model: str | None = None
        self._texts: list[Message] = []
        self._calls = self._tokens = 0
        self._admitted = self._cut = False

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def messages(self) -> list[Message]:
        """What was said so far."""
        return list(self._texts) if self._loop is None else self._loop.trajectory.messages

    @property
    def budget(self) -> int:
        """Ids that the next call may sample."""
        return self._sampling.max_tokens or MAX_TEXT_TOKENS if self._loop is None else self._loop.budget

    async def ask(self, messages: Sequence[Message], max_tokens: int | None = None) -> Message:
        """What the policy says to messages, which begin the conversation or go on with it.

        Raises:
            OtherRefused: Its engine refuses the call, or its context has no room.
            InfrastructureError: No backend of the policy answered.
            TaskError: The rollout's tenant may not use the policy.
        """
        if self._model is None:
            await self.start(messages)
        elif not self.append(messages):
            raise OtherRefused(
                f"policy {self.policy!r}: its last turn was cut off, or there is no room for more"
            )
        turn, _ = await self.query(max_tokens)
        return turn.message

    async def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Wait for a place on a backend of the policy and render the messages. Raises as `ask` does."""
        if self._router is not None:
            raise HandlerError(f"the conversation with policy {self.policy!r} has begun: `append` to it")
        run = self._others.run
        with self._calling():
            number = await self._others.enter(self)
            self._router = run.services.router(run.claim, policy=self.policy, slot=f"{self.role}{number}")
            # In EVAL a rollout holds nothing that others wait for: it waits as in a queue.
            with stopped() if run.claim.stage is Stage.EVAL else nullcontext():
                backend = await self._router.acquire()
            request = self._request_of(number)
            self.text_only = backend.api == "chat"
            if self.text_only:
                self._router.accepts, self._texts = _text_only, list(messages)
            else:
                loop = AgentLoop(request, run.claim.index, self._router, tools, run.handler.advertise_tools)
                await loop.start(list(messages))
                self._loop = loop
            self._model = backend.model

    def _request_of(self, number: int) -> RolloutRequest:
        """The rollout's request as the conversation has it: its own sampling, and the agent's budget away."""
        own = self._request
        seed = self._sampling.seed if self._sampling.seed is not None else own.sampling.seed
        if seed is not None:
            claim = self._others.run.claim
            named = f"{seed}/{claim.index}/{claim.stage.value}/{self.role}/{number}"
            seed = int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big") >> 1
        self._sampling = self._sampling.model_copy(update={"seed": seed})
        if self._trained:
            # A trainer divides the logits of all its samples by one temperature.
            same = {name: getattr(own.sampling, name) for name in ("temperature", "top_p", "top_k")}
            self._sampling = self._sampling.model_copy(update=same)
        limits = own.limits.model_copy(update={"max_response_tokens": None})
        return own.model_copy(update={"sampling": self._sampling, "limits": limits})

    async def query(self, max_tokens: int | None = None) -> tuple[ParsedTurn, str]:
        """One call: the turn, and the engine's word for its end, `stop` or `length`. Raises as `ask` does."""
        most = self.budget if max_tokens is None else min(max_tokens, self.budget)
        if most <= 0:
            raise OtherRefused(f"policy {self.policy!r}: its context has no room for an answer")
        self._admit()
        with self._calling():
            if self._loop is not None:
                turn, completion = await self._loop.query(most)
                self._cut = completion.finish_reason == "length"
                return turn, completion.finish_reason
            request = TextRequest(
                call_id=new_id(),
                prompt=[],
                max_tokens=most,
                sampling=self._sampling,
                seed=None if self._sampling.seed is None else self._sampling.seed + self._calls,
                messages=self._texts,
            )
            answer = await self._router.generate(request, self._request.limits.call_timeout_s)
        self._calls, self._tokens = self._calls + 1, self._tokens + answer.tokens
        self._texts = [*self._texts, answer.message]
        return ParsedTurn(answer.message), answer.finish_reason

    def append(self, messages: Sequence[Message]) -> bool:
        """Append messages behind the last turn; False: the context has no room, or that turn was cut off."""
        if self._loop is not None:
            with self._calling():
                # Behind a turn without an end nothing goes on without invented tokens.
                return not self._cut and self._loop.append(list(messages))
        self._texts = [*self._texts, *messages]
        return True

    async def run(
        self, messages: Sequence[Message], sandbox: SandboxClient | None = None, tools: Sequence[Tool] = ()
    ) -> FinishReason:
        """Turns with tools from the messages to the end. Raises as `ask` does."""
        await self.start(messages, tools)
        if self._loop is None:
            if tools:
                raise OtherRefused(f"policy {self.policy!r} is text only, and cannot be given tools")
            await self.query()
            return FinishReason.STOP
        self._admit()
        with self._calling():
            return await self._loop.go_on(sandbox)

    def _admit(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._others.admit()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._others.waited_for = self.policy
            raise
        except SandboxError as error:
            self._others.faults[error] = self.policy
            raise
        except OtherRefused:
            raise
        except ModelError as error:
            raise OtherRefused(f"policy {self.policy!r}: {error}") from error
        except CodecError as error:
            raise InfrastructureError(f"policy {self.policy!r}: {error}") from error
        except StageError:
            raise
        except Exception as error:
            # The handler has asked, but only a tool of its own can be at fault.
            raise laid(error, self._others.run.handler) from error.__cause__

    async def close(self) -> None:
        """Give the place on the backend back. Harmless without one."""
        if self._router is not None:
            await self._router.release()

    # -- what is kept of it ------------------------------------------------------------------

    def chains(self) -> list[Chain]:
        """Its chains in which something was sampled, as the rollout's trajectory has them."""
        about = {"role": self.role, "policy": self.policy, "model": self._model}
        if self._loop is None:
            return [Chain(text_only=True, texts=self._texts, trained=False, **about)] if self._calls else []
        made = self._loop.trajectory
        about |= {"tokenizer": made.tokenizer, "trained": self._trained}
        spoke = (chain for chain in made.chains if any(segment.sampled for segment in chain.segments))
        return [chain.model_copy(update=about) for chain in spoke]

    def amounts(self) -> dict[str, float]:
        """Its calls and the ids that were sampled in them, for the metrics."""
        if self._loop is not None:
            counts = self._loop.metrics
            self._calls, self._tokens = counts.get("model_calls", 0), counts.get("sampled_tokens", 0)
        return {f"{self.role}_calls": self._calls, f"{self.role}_tokens": self._tokens}

    def warnings(self) -> list[str]:
        """What a trainer should know before it trusts the log-probs of a trained one."""
        if not self._trained or self._loop is None:
            return []
        lines = logprob_warnings(self._sampling, self._loop.trajectory.logprobs_mode)
        return [f"{self.role}: {line}" for line in lines]


def refuse_text(backend: Backend) -> None:
    """
    Raises:
        TaskError: The backend is text only: it can serve no agent.
    """
    if backend.api == "chat":
        raise TaskError(f"policy {backend.policy!r} is text only on backend {backend.id}: it serves no agent")


async def _text_only(other: Backend) -> str | None:
    return None if other.api == "chat" else f"backend {other.id}: it takes token ids, not text"
