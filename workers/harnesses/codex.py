"""Codex, by `codex exec`."""

from __future__ import annotations

import json

from workers.harnesses.base import Harness, Job, Launch
from workers.harnesses.starting import NODE, fed, instruction_file, npm_program

KEY_VARIABLE = "ROLLOUT_MODEL_KEY"
OFF = ("shell_snapshot", "plugins", "remote_plugin", "apps")
"""Features that look at other hosts, and one that runs a shell before the first turn."""
SHARE_BEFORE_COMPACTION = 0.9
"""Of the context; past it the program shortens its history by itself."""


class Codex(Harness):
    name = "codex"
    packages = ("npm:@openai/codex",)

    def launch(self, job: Job) -> Launch:
        argv = (
            *(NODE, npm_program(self.name, "codex"), "exec", "--json", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "-"),
        )
        path, home = instruction_file(job.home), f"{job.home}/.codex"
        files = {path: job.instruction, f"{home}/config.toml": self._config(job)}
        env = {"CODEX_HOME": home, KEY_VARIABLE: job.key, **job.env}
        return Launch(fed(argv, path), env, files, (".codex/sessions",))

    def _config(self, job: Job) -> str:
        """As TOML, whose basic strings are JSON's. A variable for the address is not read any more."""
        wait_ms = int(job.timeout_s * 1000)
        provider = {
            "name": "rollout",
            "base_url": f"{job.base_url}/v1",
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
            "stream_idle_timeout_ms": wait_ms,
            "supports_websockets": False,
        }
        settings = {
            "model": job.model,
            "model_provider": "rollout",
            "model_context_window": job.context_tokens,
            "model_auto_compact_token_limit": int(job.context_tokens * SHARE_BEFORE_COMPACTION),
            "check_for_update_on_startup": False,
            "web_search": "disabled",
        }
        sections = {
            "": settings,
            "[model_providers.rollout]": provider,
            "[features]": dict.fromkeys(OFF, False),
            "[analytics]": {"enabled": False},
        }
        lines = [
            line
            for section, values in sections.items()
            for line in (section, *(f"{name} = {json.dumps(value)}" for name, value in values.items()))
        ]
        return "\n".join(lines) + "\n"
