"""pi, in its print mode."""

from __future__ import annotations

import json

from workers.harnesses.base import Harness, Job, Launch
from workers.harnesses.starting import NODE, fed, instruction_file, npm_program

PROVIDER = "rollout"
ANSWER_SHARE = 4
"""The answer may take one part in so many of the context."""


class Pi(Harness):
    name = "pi"
    packages = ("npm:@mariozechner/pi-coding-agent",)

    def launch(self, job: Job) -> Launch:
        argv = (
            *(NODE, npm_program(self.name, "pi"), "--print", "--mode", "json"),
            *("--provider", PROVIDER, "--model", job.model),
        )
        model = {
            "id": job.model,
            "name": job.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": job.context_tokens,
            "maxTokens": job.context_tokens // ANSWER_SHARE,
            "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        }
        provider = {
            "baseUrl": f"{job.base_url}/v1",
            "api": "openai-completions",
            "apiKey": "ROLLOUT_MODEL_KEY",
            "models": [model],
        }
        home, path = f"{job.home}/.pi/agent", instruction_file(job.home)
        files = {
            path: job.instruction,
            f"{home}/models.json": json.dumps({"providers": {PROVIDER: provider}}),
        }
        env = {
            "PI_CODING_AGENT_DIR": home,
            "ROLLOUT_MODEL_KEY": job.key,
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            **job.env,
        }
        return Launch(fed(argv, path), env, files, (".pi/agent/sessions",))
