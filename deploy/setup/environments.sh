#!/usr/bin/env bash
# Packages of environments for the tests, each in a virtual environment below $ROLLOUT_HOME/environments: `rollout
# environments install`, 0.8 GB. A second run does nothing. Others are installed by name: `environments.sh verifiers-old`.

SCRIPT_NAME=environments
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PACKAGES=(bfcl gem openenv tau2 textarena verifiers)

[ -x "$ROLLOUT_HOME/venv/bin/rollout" ] || die "there is no $ROLLOUT_HOME/venv yet; run deploy/setup/setup.sh first"
[ "$#" -gt 0 ] || set -- "${PACKAGES[@]}"
ROLLOUT_HOME="$(cd "$ROLLOUT_HOME" && pwd)" "$ROLLOUT_HOME/venv/bin/rollout" environments install "$@"
say "up to date"
