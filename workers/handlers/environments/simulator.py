"""What speaks to the agent in an environment: users, opponents. One model plays them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.settings import settings
from workers.errors import HandlerError
from workers.handlers.environments import servers
from workers.handlers.environments.base import EnvironmentLost

TIMEOUT_S = 300.0


async def ask_simulator(messages: Any) -> str:
    """The next words of a conversation, in the form of chat completions.

    Raises:
        HandlerError: The deployment has no simulator.
        EnvironmentLost, EnvironmentFault: It does not answer as an endpoint of that form would.
    """
    config = settings()
    if not config.simulator_url:
        raise HandlerError(
            "this environment needs somebody to speak with the agent: set ROLLOUT_SIMULATOR_URL (an endpoint "
            "of the OpenAI form, such as http://host:8000/v1) and ROLLOUT_SIMULATOR_MODEL"
        )
    headers = {}
    if config.simulator_key_file:
        key = Path(config.simulator_key_file).read_text(encoding="utf-8").strip()
        headers["Authorization"] = f"Bearer {key}"
    url = config.simulator_url.rstrip("/") + "/chat/completions"
    body = {"model": config.simulator_model, "messages": messages}
    async with servers.session(TIMEOUT_S, **headers) as http:
        answer = await servers.asked(http, "POST", url, body)
    try:
        said = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        said = None
    if not isinstance(said, str):
        raise EnvironmentLost(f"{url} says nothing: {str(answer)[:500]}")
    return said
