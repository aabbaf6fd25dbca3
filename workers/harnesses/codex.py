"""Codex, by `codex exec`."""

from __future__ import annotations

import json

from workers.harnesses.base import KEY_VARIABLE, NODE, Harness, Job, Launch, fed, npm_program

COMPACTION_SHARE = 0.8
"""Of the context; past it the program shortens its history."""
OFF = ("shell_snapshot", "plugins", "remote_plugin", "apps")
"""Features that look at other hosts, and one that runs a shell before the first turn."""


class Codex(Harness):
    name = "codex"
    packages = ("npm:@openai/codex",)

    def launch(self, job: Job) -> Launch:
        argv = (NODE, npm_program(self.name, "codex"), "exec", "--json", "--skip-git-repo-check")
        argv += ("--dangerously-bypass-approvals-and-sandbox", "-")
        env = {"CODEX_HOME": f"{job.home}/.codex", KEY_VARIABLE: job.key}
        return fed(job, argv, env, {".codex/config.toml": self._config(job)}, ".codex/sessions")

    def _config(self, job: Job) -> str:
        """As TOML, whose basic strings are JSON's. A variable for the address is not read any more."""
        sections = {
            "": {
                "model": job.model,
                "model_provider": "rollout",
                "model_context_window": job.context_tokens,
                "model_auto_compact_token_limit": int(job.context_tokens * COMPACTION_SHARE),
                "check_for_update_on_startup": False,
                "web_search": "disabled",
            },
            "[model_providers.rollout]": {
                "name": "rollout",
                "base_url": f"{job.base_url}/v1",
                "env_key": KEY_VARIABLE,
                "wire_api": "responses",
                "supports_websockets": False,
                "stream_idle_timeout_ms": int(job.timeout_s * 1000),
            },
            "[features]": dict.fromkeys(OFF, False),
            "[analytics]": {"enabled": False},
        }
        lines = []
        for section, values in sections.items():
            texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
            lines += [section, *(f"{name} = {text}" for name, text in texts.items())]
        return "\n".join(lines) + "\n"
