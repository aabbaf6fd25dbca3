#!/usr/bin/env bash
# Build $ROLLOUT_HOME/images/base.sif (sandbox/recipes/base.def) from this machine's own Debian mirror: no registry.
#
# Does nothing when the image is there and base.recipe beside it holds the hash of today's recipe; `image.sh --force`
# builds it anew in any case. As root the root file system is made by mmdebstrap; as a plain user by mmdebstrap in a
# user namespace where /etc/subuid and newuidmap allow that, and else by unpacking the packages without running their
# scripts.

SCRIPT_NAME=image
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

IMAGES="$ROLLOUT_HOME/images"
RECIPES="$REPO_ROOT/sandbox/recipes"
STAMP="$IMAGES/base.recipe"
# Documentation and translations are left out: they double the number of files.
LEFT_OUT=('/usr/share/doc/*' '/usr/share/man/*' '/usr/share/locale/*' '/usr/share/info/*')

WORK=""
cleanup() { [ -z "$WORK" ] || { chmod -R u+rwX "$WORK" 2>/dev/null || true; rm -rf "$WORK"; }; }
trap cleanup EXIT

# What the image is made from; this script is a part of it.
recipe() { cat "$RECIPES/base.def" "$RECIPES/base.packages" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1; }

image_file() { ls -d "$IMAGES/base.sif" "$IMAGES/base" 2>/dev/null | head -1; }

up_to_date() { [ -n "$(image_file)" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(recipe)" ]; }

# An older image is better than none: say so and go on with it.
give_up() {
    [ -n "$(image_file)" ] || die "$@"
    note "the new base image ($*); $(image_file), made from an older recipe, stays in use"
    summary
    exit 0
}

packages() { grep -vE '^(#|$)' "$RECIPES/base.packages"; }

apptainer_program() {
    echo "${ROLLOUT_APPTAINER:-$(command -v apptainer || command -v singularity || true)}"
}

has_subids() {
    have newuidmap && grep -qsE "^($(id -un)|$(id -u)):" /etc/subuid && grep -qsE "^($(id -un)|$(id -u)):" /etc/subgid
}

# make_rootfs_mmdebstrap MODE OUTPUT SUITE
make_rootfs_mmdebstrap() {
    local options=() pattern
    for pattern in "${LEFT_OUT[@]}"; do
        options+=(--dpkgopt="path-exclude=$pattern")
    done
    mmdebstrap --quiet --mode="$1" --variant=minbase --include="$(packages | paste -sd,)" "${options[@]}" \
        --dpkgopt=force-unsafe-io --aptopt='Acquire::Languages "none"' "$3" "$2" >"$WORK/mmdebstrap.log" 2>&1 || {
        tail -5 "$WORK/mmdebstrap.log" >&2
        return 1
    }
}

# Without root and subordinate ids: fetch the packages with all they depend on, unpack them, and write by hand the few
# files that their scripts would have made. Good for running tools; `apt-get install` inside is not expected to work.
make_rootfs_unpacked() {
    local rootfs="$1" suite="$2" state="$WORK/apt" deb
    have dpkg-deb || return 1
    write_sources "$state" "$suite"
    apt_private "$state" update || return 1
    mkdir -p "$WORK/debs" "$rootfs"/usr/{bin,sbin,lib,lib64} "$rootfs"/{etc,root,tmp,var/tmp,var/lib/dpkg,proc,sys,dev,run,home,opt,srv,mnt}
    local name
    for name in bin sbin lib lib64; do
        ln -s "usr/$name" "$rootfs/$name"
    done
    # An empty dpkg status: everything counts as missing, so apt names the whole closure.
    # shellcheck disable=SC2046
    apt_private "$state" -y --no-install-recommends -o Debug::NoLocking=1 -o Dir::Cache::archives="$WORK/debs" \
        --download-only install $(packages) libc-bin base-files base-passwd bash dash coreutils debianutils grep gzip hostname \
        login mawk ncurses-base ncurses-bin passwd perl-base sed tar util-linux findutils >"$WORK/apt.log" 2>&1 ||
        { tail -5 "$WORK/apt.log" >&2; return 1; }
    for deb in "$WORK"/debs/*.deb; do
        # tar, not dpkg -x: it can leave files out, and directory symlinks (/bin) stay what they are.
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$rootfs" --keep-directory-symlink --no-same-owner \
            --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
            --exclude='./usr/share/info/*' --exclude='./dev/*' || return 1
    done
    finish_unpacked "$rootfs"
}

# Python starts faster with its bytecode there, which a sandbox could only keep for itself. The image's own interpreter
# does it, through its own loader: no container, hence no privilege, and the right version. Packages whose scripts ran
# have theirs already.
byte_compile() {
    local rootfs="$1" loader lib
    loader="$(echo "$rootfs"/usr/lib*/ld-linux*.so.* | cut -d' ' -f1)"
    lib="$(echo "$rootfs"/usr/lib/*-linux-gnu* | tr ' ' ':')"
    # Files that cannot be compiled (templates, tests of syntax errors) make it fail; they are of no consequence.
    PYTHONHOME="$rootfs/usr" "$loader" --library-path "$lib" "$rootfs/usr/bin/python3" -S -m compileall -q -j 0 \
        -s "$rootfs" -p / "$rootfs"/usr/lib/python3.*/ "$rootfs"/usr/lib/python3/dist-packages >"$WORK/compile.log" 2>&1 || true
}

# What the packages' scripts would have done, as far as a sandbox needs it.
finish_unpacked() {
    local rootfs="$1" manual link
    cp "$rootfs/usr/share/base-passwd/passwd.master" "$rootfs/etc/passwd"
    cp "$rootfs/usr/share/base-passwd/group.master" "$rootfs/etc/group"
    [ -e "$rootfs/etc/nsswitch.conf" ] || printf 'passwd: files\ngroup: files\nhosts: files dns\n' >"$rootfs/etc/nsswitch.conf"
    [ -e "$rootfs/usr/bin/sh" ] || ln -s dash "$rootfs/usr/bin/sh"
    [ -e "$rootfs/usr/bin/awk" ] || ln -s mawk "$rootfs/usr/bin/awk"
    [ -e "$rootfs/usr/bin/which" ] || ln -s which.debianutils "$rootfs/usr/bin/which"
    [ -e "$rootfs/etc/bash.bashrc" ] || : >"$rootfs/etc/bash.bashrc"
    if [ -d "$rootfs/usr/share/ca-certificates" ]; then
        mkdir -p "$rootfs/etc/ssl/certs"
        find "$rootfs/usr/share/ca-certificates" -name '*.crt' -exec cat {} + >"$rootfs/etc/ssl/certs/ca-certificates.crt"
    fi
    chmod 1777 "$rootfs/tmp" "$rootfs/var/tmp"
    chmod -R u+rwX "$rootfs"
}

make_rootfs() {
    local rootfs="$1" suite="$2"
    if [ "$(id -u)" -eq 0 ] && have mmdebstrap; then
        say "making the root file system with mmdebstrap (about 40 s)"
        make_rootfs_mmdebstrap root "$rootfs" "$suite" && return 0
        give_up "mmdebstrap failed; the lines above say why"
    fi
    if have mmdebstrap && has_subids; then
        say "making the root file system with mmdebstrap in a user namespace (about 40 s)"
        # A directory made there belongs to subordinate ids; a tar archive unpacks as ours.
        if make_rootfs_mmdebstrap unshare "$WORK/rootfs.tar" "$suite"; then
            mkdir -p "$rootfs"
            tar -x -f "$WORK/rootfs.tar" -C "$rootfs" --no-same-owner --exclude='./dev/*' && chmod -R u+rwX "$rootfs"
            return 0
        fi
        say "mmdebstrap cannot use a user namespace here; unpacking the packages instead"
        rm -rf "$rootfs"
    else
        say "no root, no subordinate ids for $(id -un) or no mmdebstrap: unpacking the packages (about 30 s)"
    fi
    make_rootfs_unpacked "$rootfs" "$suite" || give_up "cannot fetch or unpack the packages; ask an administrator for" \
        "lines for $(id -un) in /etc/subuid and /etc/subgid, or copy base.sif and base.recipe from another machine to $IMAGES"
}

# The stamp goes first and comes last, so that an interrupted exchange is repaired by the next run.
install_image() {
    mkdir -p "$IMAGES"
    rm -rf "$STAMP" "$IMAGES/.$2.new"
    mv "$1" "$IMAGES/.$2.new" # may copy from another file system; what has the final name must be complete
    rm -rf "$IMAGES/base"
    mv "$IMAGES/.$2.new" "$IMAGES/$2"
    recipe >"$STAMP"
}

main() {
    local program suite
    # A second run asks before it waits for the lock, and again in case the holder has done the work meanwhile.
    for attempt in before_lock after_lock; do
        if [ "${1:-}" != --force ] && up_to_date; then
            say "the base image is there: $(image_file)"
            return 0
        fi
        [ "$attempt" = after_lock ] || lock_home
    done
    have apt-get || give_up "no apt-get here to make a Debian image with; copy base.sif and base.recipe from another" \
        "machine to $IMAGES"
    WORK="$(mktemp -d "${TMPDIR:-/tmp}/rollout-image-XXXXXX")"
    suite="$(machine_archives | awk 'NR == 1 { print $2 }')"
    [ -n "$suite" ] || give_up "no 'main' archive in this machine's apt configuration; run apt-get update as root first"
    make_rootfs "$WORK/rootfs" "$suite"
    byte_compile "$WORK/rootfs"
    chmod 755 "$WORK/rootfs"
    program="$(apptainer_program)"
    if [ -n "$program" ] && have mksquashfs; then
        say "packing base.sif"
        "$program" -q build --userns --force --build-arg ROOTFS="$WORK/rootfs" \
            --mksquashfs-args "-comp zstd -Xcompression-level 3" "$WORK/base.sif" "$RECIPES/base.def" \
            >"$WORK/build.log" 2>&1 || { tail -5 "$WORK/build.log" >&2; give_up "apptainer build failed"; }
        install_image "$WORK/base.sif" base.sif
        say "built $IMAGES/base.sif ($(du -h "$IMAGES/base.sif" | cut -f1))"
    else
        rm -f "$IMAGES/base.sif"
        install_image "$WORK/rootfs" base
        say "made the directory image $IMAGES/base"
        note "apptainer or mksquashfs: the image is a directory, which works but is slow to copy to other machines"
    fi
    summary
}

main "$@"
