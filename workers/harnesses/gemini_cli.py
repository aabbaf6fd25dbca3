"""Gemini CLI, without a terminal."""

from __future__ import annotations

import json

from workers.harnesses.base import NODE, Harness, Job, Launch, fed, npm_program

SETTINGS = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "gemini-api-key"}},
}
ASSUMED_CONTEXT = 1_048_576
"""Tokens that it takes every model's context for that it does not know."""
SHARE_BEFORE_COMPRESSION = 0.6
"""Of the context; past it the program shortens its history by itself."""


class GeminiCli(Harness):
    name = "gemini_cli"
    packages = ("npm:@google/gemini-cli",)

    def launch(self, job: Job) -> Launch:
        argv = (
            *(NODE, npm_program(self.name, "gemini"), "--approval-mode=yolo", "--skip-trust"),
            *("--output-format=stream-json", f"--model={job.model}"),
        )
        # It would start itself once more, for a larger heap.
        env = {"GEMINI_CLI_NO_RELAUNCH": "true"}
        env |= {"GOOGLE_GEMINI_BASE_URL": job.base_url, "GEMINI_API_KEY": job.key}
        threshold = job.context_tokens * SHARE_BEFORE_COMPRESSION / ASSUMED_CONTEXT
        settings = {**SETTINGS, "model": {"compressionThreshold": threshold}}
        return fed(job, argv, env, {".gemini/settings.json": json.dumps(settings)}, ".gemini/tmp")
