"""What speaks to the agent in an environment: users, opponents. One model plays them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from services.settings import settings
from workers.errors import HandlerError, InfrastructureError

TIMEOUT_S = 300.0
MAX_REPLY_BYTES = 1 << 20


class SimulatorError(InfrastructureError):
    """The simulator's endpoint does not answer as one of OpenAI's would."""


async def ask_simulator(messages: Any) -> str:
    """The next words of a conversation, in the form of chat completions.

    Raises:
        HandlerError: The deployment has no simulator.
        SimulatorError: It failed.
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
    body = {"model": config.simulator_model, "messages": messages}
    url = config.simulator_url.rstrip("/") + "/chat/completions"
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, json=body, headers=headers) as reply,
        ):
            text = await reply.content.read(MAX_REPLY_BYTES)
            if reply.status != 200:
                raise SimulatorError(f"{url} answered {reply.status}: {text[:300].decode(errors='replace')}")
            said = (await reply.json())["choices"][0]["message"]["content"]
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise SimulatorError(f"{url}: {type(error).__name__}: {error}") from error
    if not isinstance(said, str):
        raise SimulatorError(f"{url}: no text in its answer")
    return said
