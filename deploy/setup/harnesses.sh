#!/usr/bin/env bash
# Agent programs for the tests, as a pack below $ROLLOUT_HOME/harnesses that sandboxes show read-only: `rollout harness
# build` of those whose dialects are all four, 0.9 GB. A second run does nothing. Others are built by name:
# `harnesses.sh pi`.

SCRIPT_NAME=harnesses
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PROGRAMS=(claude_code codex gemini_cli qwen_code)

[ -x "$ROLLOUT_HOME/venv/bin/rollout" ] || die "there is no $ROLLOUT_HOME/venv yet; run deploy/setup/setup.sh first"
[ "$#" -gt 0 ] || set -- "${PROGRAMS[@]}"
ROLLOUT_HOME="$(cd "$ROLLOUT_HOME" && pwd)" "$ROLLOUT_HOME/venv/bin/rollout" harness build "$@"
say "up to date"
