"""Qwen Code, without a terminal."""

from __future__ import annotations

import json

from workers.harnesses.base import NODE, Harness, Job, Launch, fed, npm_program

SETTINGS = {"general": {"enableAutoUpdate": False}, "privacy": {"usageStatisticsEnabled": False}}


class QwenCode(Harness):
    name = "qwen_code"
    packages = ("npm:@qwen-code/qwen-code",)

    def launch(self, job: Job) -> Launch:
        program = npm_program(self.name, "qwen")
        argv = (NODE, program, "--yolo", "--auth-type=openai", "--output-format=stream-json")
        env = {
            "OPENAI_BASE_URL": f"{job.base_url}/v1",
            "OPENAI_API_KEY": job.key,
            "OPENAI_MODEL": job.model,
            # It would start itself once more, for a larger heap.
            "QWEN_CODE_NO_RELAUNCH": "true",
        }
        asked = {"timeout": int(job.timeout_s * 1000), "contextWindowSize": job.context_tokens}
        settings = {**SETTINGS, "model": {"generationConfig": asked}}
        return fed(job, argv, env, {".qwen/settings.json": json.dumps(settings)}, ".qwen/projects")
