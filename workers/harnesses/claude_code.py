"""Claude Code, in its print mode."""

from __future__ import annotations

from workers.harnesses.base import Harness, Job, Launch, fed, npm_program

SIZES = ("HAIKU", "OPUS", "SONNET")


class ClaudeCode(Harness):
    name = "claude_code"
    packages = ("npm:@anthropic-ai/claude-code",)

    def launch(self, job: Job) -> Launch:
        argv = (npm_program(self.name, "claude"), "-p", "--verbose", "--output-format=stream-json")
        argv += ("--dangerously-skip-permissions",)
        wait_ms = str(int(job.timeout_s * 1000))
        env = {
            "CLAUDE_CONFIG_DIR": f"{job.home}/.claude",
            "ANTHROPIC_BASE_URL": job.base_url,
            "ANTHROPIC_API_KEY": job.key,
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": job.model for size in SIZES},
            **dict.fromkeys(("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), job.model),
            **dict.fromkeys(("API_TIMEOUT_MS", "BASH_MAX_TIMEOUT_MS"), wait_ms),
            # Without it root may not skip permissions, and it ends without a word and without a call.
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # A line of its own in the system prompt, another one in each session: no prefix would repeat.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            # What goes on in the background may outlive the last turn.
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(job.context_tokens),
        }
        return fed(job, argv, env, {}, ".claude/projects")
