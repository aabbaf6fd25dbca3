#!/usr/bin/env bash
# `extras.sh bench`: what only the benchmarks need, i.e. the programs that the sandbox is compared with; tmux comes
# with the system packages (setup.sh). `extras.sh tasks`: what the handlers math, stem, reasoning_gym and swe score
# with, and readers of datasets. `extras.sh trainer`: what the example trainers need, and below .local/trainers the
# source of those whose classes the tests of adapters construct, and below .local/compose the schema that
# docker-compose.dev.yml is tested against. Into the virtual environment; nothing to do when neither setup.cfg nor
# the environment has changed since.

SCRIPT_NAME="${1:?which: bench, tasks or trainer}"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TRAINER_SOURCES=(verl==0.9.1 skyrl==0.3.0 verifiers==0.4.0)
COMPOSE=docker-compose==1.29.2 # 0.1 MB; only its schema of the Compose specification is read

VENV="$ROLLOUT_HOME/venv"
STAMP="$VENV/.rollout-$SCRIPT_NAME-stamp"

case "$SCRIPT_NAME" in
    bench)
        EXTRAS=bench
        have tmux || note "tmux: the benchmark shell_latency cannot run; on Debian: apt-get install tmux"
        ;;
    tasks) EXTRAS=math,stem,reasoning-gym,swe,datasets ;;
    trainer) EXTRAS=trainer,trl ;;
    *) die "there is no $SCRIPT_NAME: bench, tasks or trainer" ;;
esac

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
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off \
        -e "$REPO_ROOT[$EXTRAS]"
    if [ "$SCRIPT_NAME" = trainer ]; then
        # Only their source, for the tests that hand them our records: to import them takes gigabytes.
        "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off \
            --no-deps --upgrade --target "$ROLLOUT_HOME/trainers" "${TRAINER_SOURCES[@]}"
        "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off \
            --no-deps --upgrade --target "$ROLLOUT_HOME/compose" "$COMPOSE"
    fi
    echo "$wanted" >"$STAMP"
    say "installed into $VENV"
fi
summary
