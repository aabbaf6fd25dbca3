#!/usr/bin/env bash
# The image $ROLLOUT_HOME/images/programs for the tests: the base image with programs that are hard on a sandbox (a
# debugger, sanitizers, a JVM, Node, Go, pytest-xdist), which have to run under its filter of system calls.
#
# Debian's packages are unpacked over a copy of the base image; nothing is installed and no script of theirs is run, so
# no root rights are needed. A second run does nothing.

SCRIPT_NAME=programs
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

IMAGE="$ROLLOUT_HOME/images/programs"
STAMP="$IMAGE.recipe"
PACKAGES=(gdb gcc libc6-dev openjdk-17-jdk-headless nodejs golang-go python3-pytest-xdist strace)
# Documentation, and what only builds Go and JDKs themselves: half of all.
LEFT_OUT=(usr/share/doc usr/share/man usr/share/locale usr/share/info usr/share/gocode usr/lib/jvm/*/jmods
    usr/lib/go-*/pkg/*/cmd usr/share/go-*/test usr/share/go-*/src/cmd)

WORK=""
cleanup() { [ -z "$WORK" ] || { chmod -R u+rwX "$WORK" 2>/dev/null || true; rm -rf "$WORK"; }; }
trap cleanup EXIT

recipe() {
    { cat "${BASH_SOURCE[0]}"; cat "$ROLLOUT_HOME/images/base.recipe" 2>/dev/null; } | sha256sum | cut -d' ' -f1
}

unpack_base() {
    local images="$ROLLOUT_HOME/images"
    if [ -d "$images/base" ]; then
        cp -a "$images/base" "$1"
    else
        "$ROLLOUT_HOME/venv/bin/python" -c \
            'import sys; from pathlib import Path; from sandbox.images import squashfs; squashfs.unpack(*map(Path, sys.argv[1:]))' \
            "$images/base.sif" "$1"
    fi
}

# With the image's record of what is installed, apt fetches only what it lacks.
fetch() {
    write_sources "$WORK/apt" "$(machine_archives | awk 'NR == 1 { print $2 }')"
    apt_private "$WORK/apt" update || return 1
    apt_private "$WORK/apt" -o Dir::State::status="$1/var/lib/dpkg/status" -o Debug::NoLocking=1 \
        install --yes --download-only --no-install-recommends "${PACKAGES[@]}"
}

make_image() {
    local package part tree="$WORK/programs"
    unpack_base "$tree"
    chmod -R u+rwX "$tree"
    say "fetching" "${PACKAGES[@]}"
    fetch "$tree" || die "apt-get could not fetch ${PACKAGES[*]}; see the message above"
    for package in "$WORK"/apt/cache/archives/*.deb; do
        # Through tar, because links of the image (/lib -> usr/lib) must stay links.
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$tree" --keep-directory-symlink --no-same-owner \
            "${LEFT_OUT[@]/#/--exclude=./}"
    done
    rm -rf "$IMAGE"
    mkdir -p "$(dirname "$IMAGE")"
    mv "$tree" "$IMAGE"
    chmod -R a+rX "$IMAGE"
    # A directory serves only whoever it belongs to: root's sandboxes run as nobody.
    [ "$(id -u)" -ne 0 ] || chown -R "${ROLLOUT_SANDBOX_UID:-65534}:${ROLLOUT_SANDBOX_UID:-65534}" "$IMAGE"
    recipe >"$STAMP"
    say "made $IMAGE ($(du -sh "$IMAGE" | cut -f1))"
}

main() {
    if [ -d "$IMAGE" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(recipe)" ]; then
        say "up to date"
        return
    fi
    have apt-get || { say "no apt-get here: the tests of these programs are skipped"; return; }
    [ -e "$ROLLOUT_HOME/images/base.sif" ] || [ -d "$ROLLOUT_HOME/images/base" ] ||
        die "there is no base image; run deploy/setup/image.sh first"
    lock 7 "$ROLLOUT_HOME/.programs.lock"
    WORK="$(mktemp -d -p "$ROLLOUT_HOME")"
    make_image
}

main "$@"
