"""opencode, by `opencode run`."""

from __future__ import annotations

import json

from workers.harnesses.base import Harness, Job, Launch
from workers.harnesses.starting import fed, instruction_file, npm_program

PROVIDER = "rollout"
"""Not `openai`: for that name it takes another API, and settings of its own."""
INSTALLED = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
"""It installs what its configuration needs, unless a lock file names it beside a directory of modules."""
ANSWER_SHARE = 4
"""The answer may take one part in so many of the context."""


class Opencode(Harness):
    name = "opencode"
    packages = ("npm:opencode-ai",)

    def launch(self, job: Job) -> Launch:
        model = f"{PROVIDER}/{job.model}"
        argv = (
            npm_program(self.name, "opencode"),
            "run",
            "--pure",
            "--format=json",
            "--title=rollout",
            f"--model={model}",
        )
        wait_ms = int(job.timeout_s * 1000)
        limit = {"context": job.context_tokens, "output": job.context_tokens // ANSWER_SHARE}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": PROVIDER,
            "options": {
                "baseURL": f"{job.base_url}/v1",
                "apiKey": "{env:ROLLOUT_MODEL_KEY}",
                "timeout": wait_ms,
            },
            "models": {job.model: {"name": job.model, "tool_call": True, "limit": limit}},
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "model": model,
            "small_model": model,
            "provider": {PROVIDER: provider},
            "enabled_providers": [PROVIDER],
            "permission": {"*": "allow", **dict.fromkeys(("question", "webfetch", "websearch"), "deny")},
            "autoupdate": False,
            "share": "disabled",
        }
        env = {
            "ROLLOUT_MODEL_KEY": job.key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            **job.env,
        }
        path = instruction_file(job.home)
        home = f"{job.home}/.config/opencode"
        files = {
            path: job.instruction,
            f"{home}/opencode.json": json.dumps(config),
            f"{home}/package-lock.json": json.dumps(INSTALLED),
            f"{home}/node_modules/.keep": "",
        }
        return Launch(fed(argv, path), env, files, (".local/share/opencode",))
