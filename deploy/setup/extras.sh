#!/usr/bin/env bash
# `extras.sh bench`: what only the benchmarks need, i.e. the programs that the sandbox is compared with; tmux comes
# with the system packages (setup.sh). `extras.sh tasks`: what the handlers math, stem, reasoning_gym and swe score
# with, and readers of datasets. `extras.sh trainer`: what the example trainers need. Into the virtual environment;
# nothing to do when neither setup.cfg nor the environment has changed since. `extras.sh sources`, for tests: below
# .local/trainers the source of trainers whose classes the tests of adapters construct, below .local/nemo-gym NeMo
# Gym's collectors, below .local/compose the schema that docker-compose.dev.yml is tested against, and below
# .local/readers what reads the formats of `rollout export`.

[ $# -gt 0 ] || set -- ""
SCRIPT_NAME="$*"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GYM_RELEASES=(0.4.0 0.7.0) # 75 MB to fetch, of which 7 stay: their collectors are run against the gateway
GYM_NEEDS=(antlr4-python3-runtime==4.9.3 httptools==0.7.1 hydra-core==1.3.2 omegaconf==2.3.0 orjson==3.11.6)
COMPOSE=docker-compose==1.29.2 # 0.1 MB; only its schema of the Compose specification is read

VENV="$ROLLOUT_HOME/venv"
[ -x "$VENV/bin/python" ] || die "there is no $VENV yet; run deploy/setup/setup.sh first"

extras_of() {
    case "$1" in
        bench) echo bench ;;
        tasks) echo math,stem,reasoning-gym,swe,datasets ;;
        trainer) echo trainer,trl,agents ;;
        sources) echo dev ;;
        *) die "there is no ${1:-empty name}: bench, tasks, trainer or sources" ;;
    esac
}

fingerprint() {
    {
        "$VENV/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$REPO_ROOT/setup.cfg" "$REPO_ROOT/pyproject.toml" "${BASH_SOURCE[0]}" "$SETUP_DIR/trainer_sources.sh" \
            "$SETUP_DIR/export_readers.sh"
        echo "$REPO_ROOT"
    } | sha256sum | cut -d' ' -f1
}

# Of its environments the tests need none, and of other packages names alone (tests/helpers/gym_collector.py).
gym_collectors() {
    local home="$ROLLOUT_HOME/nemo-gym" release
    local into=(--progress-bar off --no-compile --no-deps --upgrade --target)
    for release in "${GYM_RELEASES[@]}"; do
        [ ! -d "$home/$release/nemo_gym" ] || continue
        # It asks for a later Python, and runs on this one.
        pip install "${into[@]}" "$home/$release" --ignore-requires-python "nemo-gym==$release"
        find "$home/$release" -mindepth 1 -maxdepth 1 ! -name 'nemo_gym*' -exec rm -rf {} +
    done
    pip install "${into[@]}" "$home/needs" "${GYM_NEEDS[@]}"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

lock 8 "$ROLLOUT_HOME/.python.lock"

wanted="$(fingerprint)"
extras=""
new=()
for name in "$@"; do
    named="$(extras_of "$name")"
    if [ "$(cat "$VENV/.rollout-$name-stamp" 2>/dev/null)" != "$wanted" ]; then
        extras="$extras${extras:+,}$named"
        new+=("$name")
    fi
    [ "$name" != bench ] || have tmux ||
        note "tmux: the benchmark shell_latency cannot run; on Debian: apt-get install tmux"
done

if [ -z "$extras" ]; then
    say "up to date"
else
    # All at once: each call of pip looks through the whole environment again.
    pip install --progress-bar off -e "$REPO_ROOT[$extras]"
    for name in "${new[@]}"; do
        case "$name" in
            bench) # Kernel Gateway brings it for a format that nobody here checks, and it builds its grammar
                # whenever jsonschema is imported: 1.3 s for every process that checks a task.
                pip uninstall --yes rfc3987-syntax ;;
            sources)
                "$SETUP_DIR/trainer_sources.sh" "$ROLLOUT_HOME/trainers"
                pip install --progress-bar off --no-compile --no-deps --upgrade --target "$ROLLOUT_HOME/compose" "$COMPOSE"
                "$SETUP_DIR/export_readers.sh" "$ROLLOUT_HOME/readers"
                gym_collectors ;;
        esac
        echo "$wanted" >"$VENV/.rollout-$name-stamp"
    done
    say "installed into $VENV"
fi
summary
