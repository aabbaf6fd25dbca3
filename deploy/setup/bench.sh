#!/usr/bin/env bash
# Install what only the benchmarks need into the virtual environment: the extra `bench`, i.e. the programs that the
# sandbox is compared with. tmux comes with the system packages (setup.sh). Does nothing when neither setup.cfg nor
# the environment has changed since.

SCRIPT_NAME=bench
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROLLOUT_HOME/venv"
STAMP="$VENV/.rollout-bench-stamp"

have tmux || note "tmux: the benchmark shell_latency cannot run; on Debian: apt-get install tmux"

[ -x "$VENV/bin/python" ] || die "there is no $VENV yet; run deploy/setup/setup.sh first"

fingerprint() {
    {
        "$VENV/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$REPO_ROOT/setup.cfg" "$REPO_ROOT/pyproject.toml" "${BASH_SOURCE[0]}"
        echo "$REPO_ROOT"
    } | sha256sum | cut -d' ' -f1
}

exec 8>"$ROLLOUT_HOME/.python.lock"
flock 8

wanted="$(fingerprint)"
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    say "up to date"
else
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off -e "$REPO_ROOT[bench]"
    echo "$wanted" >"$STAMP"
    say "installed into $VENV"
fi
summary
