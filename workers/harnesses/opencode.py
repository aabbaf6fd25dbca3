"""opencode, by `opencode run`."""

from __future__ import annotations

import json

from workers.harnesses.base import ANSWER_SHARE, KEY_VARIABLE, Harness, Job, Launch, fed, npm_program

PROVIDER = "rollout"
"""Not `openai`: for that name it takes another API, and settings of its own."""
DENIED = ("question", "webfetch", "websearch")
"""What asks a person, or another host, gets no answer."""
INSTALLED = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
"""It installs what its configuration needs, unless a lock file names it beside a directory of modules."""


class Opencode(Harness):
    name = "opencode"
    packages = ("npm:opencode-ai",)

    def launch(self, job: Job) -> Launch:
        # A title is given, else it has the model make one.
        program, model = npm_program(self.name, "opencode"), f"{PROVIDER}/{job.model}"
        argv = (program, "run", "--pure", "--format=json", "--title=rollout", f"--model={model}")
        limit = {"context": job.context_tokens, "output": job.context_tokens // ANSWER_SHARE}
        options = {"baseURL": f"{job.base_url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {**options, "timeout": int(job.timeout_s * 1000)},
            "models": {job.model: {"tool_call": True, "limit": limit}},
        }
        config = {
            **{"model": model, "small_model": model, "autoupdate": False, "share": "disabled"},
            **{"provider": {PROVIDER: provider}, "enabled_providers": [PROVIDER]},
            "permission": {"*": "allow", **dict.fromkeys(DENIED, "deny")},
        }
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        env = {KEY_VARIABLE: job.key, **{f"OPENCODE_DISABLE_{what}": "1" for what in off}}
        files = {
            ".config/opencode/opencode.json": json.dumps(config),
            ".config/opencode/package-lock.json": json.dumps(INSTALLED),
            ".config/opencode/node_modules/.keep": "",
        }
        return fed(job, argv, env, files, ".local/share/opencode")
