#!/usr/bin/env bash
# Lay the source of trainers below a directory, without what they depend on, which takes gigabytes: the tests
# construct their classes. `trainer_sources.sh DIR`: the releases that the adapters were checked with.
# `trainer_sources.sh DIR newest URL`: those of today, of TRL too and, where URL answers, of what is in no index: it
# serves the files of GitHub's repositories.
# `trainer_sources.sh pinned`: says which were checked.

SCRIPT_NAME=trainer-sources
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PINNED=(verl==0.9.1 skyrl==0.4.0 verifiers==0.4.0 areal==1.0.4)
GYM=nemo-gym==0.7.0 # extras.sh lays the pinned one, whose collector is run
UNPACKAGED=( # repository, folder of the source in it, file
    "PrimeIntellect-ai/prime-rl src prime_rl/transports/rollouts/types.py"
    "THUDM/slime . slime/utils/types.py"
)

[ "${1:-}" != pinned ] || { printf '%s\n' "${PINNED[@]}" "$GYM"; exit; }
target="${1:?a directory, or pinned}"

pip() { "$ROLLOUT_HOME/venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

place() {
    pip install --progress-bar off --no-compile --no-deps --ignore-requires-python --upgrade --target "$target" "$@"
}

if [ "${2:-}" = newest ]; then
    place "${PINNED[@]%%=*}" "${GYM%%=*}" trl
    # NeMo Gym brings 110 MB of environments.
    rm -rf "$target"/{benchmarks,environments,environment_servers,resources_servers,responses_api_agents,responses_api_models}
    for source in "${UNPACKAGED[@]}"; do
        read -r repository folder file <<<"$source"
        mkdir -p "$target/${file%/*}"
        curl -fsSL --max-time 30 -o "$target/$file" "$3/$repository/HEAD/$folder/$file" ||
            { rm -f "$target/$file"; say "notice: $repository is out of reach, so its fields were not compared"; }
    done
else
    place "${PINNED[@]}"
fi
