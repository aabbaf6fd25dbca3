"""pi, in its print mode."""

from __future__ import annotations

import json

from workers.harnesses.base import ANSWER_SHARE, KEY_VARIABLE, NODE, Harness, Job, Launch, fed, npm_program

PROVIDER = "rollout"


class Pi(Harness):
    name = "pi"
    packages = ("npm:@mariozechner/pi-coding-agent",)

    def launch(self, job: Job) -> Launch:
        argv = (NODE, npm_program(self.name, "pi"), "--print", "--mode", "json")
        argv += ("--provider", PROVIDER, "--model", job.model)
        room = {"contextWindow": job.context_tokens, "maxTokens": job.context_tokens // ANSWER_SHARE}
        provider = {
            **{"baseUrl": f"{job.base_url}/v1", "api": "openai-completions", "apiKey": KEY_VARIABLE},
            "models": [{"id": job.model, **room}],
        }
        env = {"PI_CODING_AGENT_DIR": f"{job.home}/.pi/agent", "PI_OFFLINE": "1", KEY_VARIABLE: job.key}
        files = {".pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}})}
        return fed(job, argv, env, files, ".pi/agent/sessions")
