"""tau2 as an environment: its orchestrator, user and evaluator; the agent's turns are the model's.

The words of the user, and of a judge, are asked of the worker. So there is no network here and no key, and
neither litellm nor pandas, which the package imports for nothing else that happens here.
"""

import os
import sys
from types import ModuleType, SimpleNamespace


class Completion(SimpleNamespace):
    """What tau2 reads of an answer of litellm."""

    get = SimpleNamespace.__getattribute__
    asked = None

    @classmethod
    def make(cls, model, messages, **options):
        message = SimpleNamespace(
            role="assistant", content=cls.asked({"messages": messages}), tool_calls=None
        )
        choice = SimpleNamespace(finish_reason="stop", message=message, to_dict=dict)
        return cls(choices=[choice], model="", usage=None)


for name in ("litellm", "litellm.main", "litellm.caching", "litellm.caching.caching", "pandas"):
    sys.modules[name] = ModuleType(name)
vars(sys.modules["litellm"]).update(
    completion=Completion.make, completion_cost=lambda **_: 0.0, disable_cache=int
)
vars(sys.modules["litellm.main"]).update(ModelResponse=Completion, Usage=Completion)
sys.modules["litellm.caching.caching"].Cache = sys.modules["pandas"].DataFrame = object
os.environ["LOGURU_LEVEL"] = "ERROR"  # else each call is a line of the log

from tau2.agent.base import is_valid_agent_history_message  # noqa: E402
from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent  # noqa: E402
from tau2.config import DEFAULT_MAX_ERRORS, DEFAULT_MAX_STEPS  # noqa: E402
from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage  # noqa: E402
from tau2.data_model.simulation import SimulationRun, TerminationReason  # noqa: E402
from tau2.data_model.tasks import RewardType  # noqa: E402
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation  # noqa: E402
from tau2.orchestrator.orchestrator import Orchestrator, Role  # noqa: E402
from tau2.registry import registry  # noqa: E402
from tau2.user.base import STOP  # noqa: E402
from tau2.user.user_simulator import DummyUser, UserSimulator  # noqa: E402


class Ours:
    """An agent whose next message was put there."""

    said = None

    def generate_next_message(self, message, state):
        return self.said, state

    def set_seed(self, seed):
        """The model's seed is the rollout's."""


Agent, SoloAgent = type("Agent", (Ours, LLMAgent), {}), type("SoloAgent", (Ours, LLMSoloAgent), {})


class Obliging(UserSimulator):
    """A user that needs no endpoint: asks for help, and is content with the first answer."""

    asked = False

    def generate_next_message(self, message, state):
        content, self.asked = STOP if self.asked else "Please help me.", True
        return UserMessage(role="user", content=content, cost=0.0), state


class Episode:
    def __init__(self, ask):
        Completion.asked = staticmethod(ask)

    def rows(self, env, args):
        return [
            {"env": env, "index": place, **args} for place, _ in enumerate(registry.get_tasks_loader(env)())
        ]

    def reset(self, task, seed, known=False):
        """The policy as system prompt, and what was said until it is the agent's turn."""
        self._row, self._known = task, known
        self._domain, self._solo, self._begun = task["env"], task["solo"], not task["solo"]
        self._task = registry.get_tasks_loader(self._domain)()[task["index"]]
        if self._solo and not LLMSoloAgent.check_valid_task(self._task):
            raise ValueError(f"task {self._task.id} of tau2's {self._domain} cannot be solved without a user")
        world = registry.get_env_constructor(self._domain)(solo_mode=self._solo)
        theirs = world.get_user_tools() if world.user_tools else []
        if theirs and not self._solo:
            raise ValueError(f"the users of tau2's {self._domain} call tools, which no simulator here does")
        kinds = {"tools": world.get_tools() + theirs, "domain_policy": world.get_policy()}
        agent = SoloAgent(**kinds, task=self._task) if self._solo else Agent(**kinds)
        user = DummyUser if self._solo else Obliging if task["user"] == "obliging" else UserSimulator
        user = user(instructions=str(self._task.user_scenario), llm="user", llm_args={})
        more = {"seed": seed, "solo_mode": self._solo}
        self._play = Orchestrator(self._domain, agent, user, world, self._task, **more)
        self._read, messages = 0, [{"role": "system", "content": agent.system_prompt}]
        if self._solo:  # its first message is wanted where it begins
            messages.append({"role": "user", "content": "Solve the ticket."})
        else:
            self._play.initialize()
            if lost := self._go_on():
                return lost
            messages += self._news(opening=True)
        return {"messages": messages, "tools": [tool.openai_schema for tool in agent.tools]}

    def step(self, text, calls):
        """Take the agent's message on, until it is the agent's turn again or the conversation is over."""
        play, made = self._play, [ToolCall(**call) for call in calls] or None
        if play.done:  # the user had no word for the agent
            return {"done": True}
        if self._solo and made and any(call.name == LLMSoloAgent.STOP_FUNCTION_NAME for call in made):
            text, made = LLMSoloAgent.STOP_TOKEN, None
        if not made and not text.strip():
            play.done, play.termination_reason = True, TerminationReason.AGENT_ERROR
            return {"done": True}
        play.agent.said = AssistantMessage(role="assistant", content=text or None, tool_calls=made, cost=0.0)
        play.step() if self._begun else play.initialize()
        self._begun = True
        return self._go_on() or {"messages": self._news(), "done": play.done}

    def _go_on(self):
        """All that is not the agent's, within tau2's own limits; what to answer where the user failed."""
        play = self._play
        while not play.done and play.to_role != Role.AGENT:
            asked = play.to_role == Role.USER
            try:
                play.step()
            except Exception as error:
                if not asked:
                    raise
                return {"lost": f"tau2's user: {type(error).__name__}: {error}"}
            if play.to_role == Role.ENV or play.done:
                continue
            if play.step_count >= DEFAULT_MAX_STEPS:
                play.done, play.termination_reason = True, TerminationReason.MAX_STEPS
            elif play.num_errors >= DEFAULT_MAX_ERRORS:
                play.done, play.termination_reason = True, TerminationReason.TOO_MANY_ERRORS
        return None

    def _news(self, opening=False):
        """What the agent has not read yet; its own words only in the history that a task begins with."""
        new = [one for one in self._play.trajectory[self._read :] if is_valid_agent_history_message(one)]
        self._read, news = len(self._play.trajectory), []
        for one in new:
            if isinstance(one, ToolMessage):
                news.append({"role": "tool", "tool_call_id": one.id, "content": one.content or ""})
            elif opening or isinstance(one, UserMessage):
                calls = [
                    call.model_dump(include={"id", "name", "arguments"}) for call in one.tool_calls or []
                ]
                news.append({"role": one.role, "content": one.content or "", "tool_calls": calls})
        return news

    def score(self, messages):
        """What tau2's evaluator says of the conversation; one that a limit ended is worth what it says, 0."""
        play, criteria = self._play, self._task.evaluation_criteria
        judged = criteria is not None and RewardType.NL_ASSERTION in criteria.reward_basis
        reason = play.termination_reason or TerminationReason.MAX_STEPS
        run = {"start_time": "", "end_time": "", "duration": 0.0, "messages": play.get_trajectory()}
        run = SimulationRun(id="rollout", task_id=self._task.id, termination_reason=reason, **run)
        kind = EvaluationType.ALL_WITH_NL_ASSERTIONS if judged else EvaluationType.ALL
        try:
            verdict = evaluate_simulation(run, self._task, kind, self._solo, self._domain)
        except Exception as error:
            if judged:
                return {"lost": f"tau2's judge: {type(error).__name__}: {error}"}
            if self._known or not self._blames_the_agent():
                raise
            return {"reward": 0.0, "parts": {"unjudged": 1.0}}
        parts = {kind.value.lower(): value for kind, value in (verdict.reward_breakdown or {}).items()}
        return {"reward": verdict.reward, "parts": parts}

    def _blames_the_agent(self):
        """Whether the evaluator, which failed on what the agent left, gives the task's own actions all."""
        known = Episode(Completion.asked)
        known.reset(dict(self._row, user="obliging"), 0, known=True)
        for turn in known.solution() or []:
            known.step(**turn)
        return known.score([])["reward"] == 1.0

    def solution(self):
        """The turns that the task's own actions are, with all that has to be said; None: there are none."""
        criteria = self._task.evaluation_criteria
        actions = criteria.actions if criteria else None
        if actions is None or any(action.requestor != "assistant" for action in actions):
            return None
        calls = [{"name": action.name, "arguments": action.arguments} for action in actions]
        if self._solo:
            calls.append({"name": LLMSoloAgent.STOP_FUNCTION_NAME, "arguments": {}})
        turns = [{"text": "", "calls": [{"id": f"call-{place}", **call}]} for place, call in enumerate(calls)]
        said = "It is done. " + " ".join(criteria.communicate_info or [])
        return turns if self._solo else [*turns, {"text": said, "calls": []}]
