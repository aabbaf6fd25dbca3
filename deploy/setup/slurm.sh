#!/usr/bin/env bash
# Slurm without root under $ROLLOUT_HOME/slurm, for the virtual cluster of the tests (tests/slurm/cluster.py).
#
# A Slurm on PATH is used as it is. Otherwise Debian's packages (slurmctld, slurmd, their clients, munge and the
# libraries this machine lacks) are unpacked, never installed: nothing is started and no user is made. Programs and
# plugins get the paths of their libraries written in, so that no LD_LIBRARY_PATH leaks into jobs. A second run does
# nothing.

SCRIPT_NAME=slurm
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

SLURM_PREFIX="$ROLLOUT_HOME/slurm"
STAMP="$SLURM_PREFIX/.unpacked"
PACKAGES=(slurmctld slurmd slurm-client munge)
PROGRAMS=(slurmctld slurmd sbatch munged)

WORK=""
cleanup() { [ -z "$WORK" ] || rm -rf "$WORK"; }
trap cleanup EXIT

on_path() {
    local program
    for program in "${PROGRAMS[@]}"; do
        have "$program" || return 1
    done
}

fingerprint() { echo "$SLURM_PREFIX $(sha256sum <"${BASH_SOURCE[0]}")"; }

# With the machine's own record of what is installed, apt fetches only what is missing here.
fetch() {
    have apt-get || die "no apt-get here: install slurm and munge with this machine's package manager"
    write_sources "$WORK/apt" "$(machine_archives | awk 'NR == 1 { print $2 }')"
    apt_private "$WORK/apt" update || die "apt-get update failed for this machine's mirror"
    apt_private "$WORK/apt" -o Dir::State::status=/var/lib/dpkg/status -o Debug::NoLocking=1 \
        install --yes --download-only --no-install-recommends "${PACKAGES[@]}" ||
        die "apt-get could not fetch ${PACKAGES[*]}; see the message above"
}

# The paths are those of the final prefix. Plugins are loaded by programs and load libraries themselves, and a run path
# counts only for the file that holds it: so every one gets it.
write_library_paths() {
    local prefix="$1" paths="" directory file
    have patchelf || die "patchelf is missing: run deploy/setup/setup.sh first, or apt-get install patchelf"
    for directory in $(cd "$prefix" && echo usr/lib/*-linux-gnu usr/lib/*-linux-gnu/slurm-wlm lib/*-linux-gnu); do
        [ ! -d "$prefix/$directory" ] || paths="$paths${paths:+:}$SLURM_PREFIX/$directory"
    done
    while IFS= read -r -d '' file; do
        # Scripts and static files have none; patchelf says so and that is fine.
        patchelf --set-rpath "$paths" "$file" 2>/dev/null || true
    done < <(find "$prefix" -type f \( -name '*.so*' -o -perm -u+x \) -print0)
}

unpack() {
    local package program prefix="$WORK/prefix"
    say "fetching" "${PACKAGES[@]}"
    fetch
    mkdir -p "$prefix"
    for package in "$WORK"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$prefix"
    done
    # Debian's usual names are links that only an installation makes.
    for program in "$prefix"/usr/sbin/slurm*-wlm; do
        ln -s "$(basename "$program")" "${program%-wlm}"
    done
    write_library_paths "$prefix"
    rm -rf "$SLURM_PREFIX"
    mkdir -p "$SLURM_PREFIX"
    cp -a "$prefix"/. "$SLURM_PREFIX"/
    "$SLURM_PREFIX/usr/sbin/slurmd" -V || die "$SLURM_PREFIX/usr/sbin/slurmd does not run here"
    fingerprint >"$STAMP"
    say "unpacked into $SLURM_PREFIX"
}

main() {
    if on_path; then
        say "using the installed $(slurmd -V)"
        return
    fi
    lock 9 "$ROLLOUT_HOME/.slurm.lock"
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]; then
        say "up to date"
        return
    fi
    WORK="$(mktemp -d)"
    unpack
}

main "$@"
