# Shared by the set-up scripts; source it, do not run it.
# Everything installed goes under $ROLLOUT_HOME (default: <repository>/.local). No mirror address is written here:
# it is read from the machine's own apt configuration at run time.

set -euo pipefail

SETUP_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPO_ROOT="$(cd "$SETUP_DIR/../.." && pwd)"
ROLLOUT_HOME="${ROLLOUT_HOME:-$REPO_ROOT/.local}"
# An interpreter that was named once need not be named again: the environment was made with it.
[ -n "${PYTHON:-}" ] || { PYTHON="$ROLLOUT_HOME/venv/bin/python"; "$PYTHON" -c "" 2>/dev/null || PYTHON=python3; }

# Whether everybody may enter a directory.
is_open() {
    local place="$1"
    while [ "$place" != / ]; do
        case "$(stat -c %A "$place")" in *[xt]) ;; *) return 1 ;; esac
        place="$(dirname "$place")"
    done
}

# Root's sandboxes are `nobody`'s, who must get to the program; apptainer.sh leaves a link at the usual place.
APPTAINER_PREFIX="$ROLLOUT_HOME/apptainer"
mkdir -p "$ROLLOUT_HOME"
if [ "$(id -u)" -eq 0 ] && ! is_open "$(cd "$ROLLOUT_HOME" && pwd -P)"; then
    APPTAINER_PREFIX=/opt/rollout-apptainer
fi
TOOLS_PREFIX="$APPTAINER_PREFIX/tools"
export PATH="$APPTAINER_PREFIX/usr/bin:$PATH:$TOOLS_PREFIX/usr/bin:$TOOLS_PREFIX/usr/sbin:/usr/sbin:/sbin"

# What Apptainer and images want, program:package.
HELPERS=(
    unsquashfs:squashfs-tools bwrap:bubblewrap fuse-overlayfs:fuse-overlayfs squashfuse:squashfuse
    mmdebstrap:mmdebstrap newuidmap:uidmap patchelf:patchelf
)

NOTES=()

say() { printf '%s: %s\n' "${SCRIPT_NAME:-setup}" "$*"; }
note() { NOTES+=("$*"); }
die() { printf '%s: ERROR: %s\n' "${SCRIPT_NAME:-setup}" "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# lacking PROGRAM:PACKAGE… : print the packages of the programs that are not here.
lacking() {
    local pair
    for pair in "$@"; do
        have "${pair%%:*}" || echo "${pair#*:}"
    done
}

# Print what is missing and what follows from it; call last.
summary() {
    if [ "${#NOTES[@]}" -eq 0 ]; then
        say "nothing is missing"
    else
        printf "${SCRIPT_NAME:-setup}: missing: %s\n" "${NOTES[@]}"
    fi
}

# Print the prefix that gives root rights ("" as root, "sudo -n" when it needs no password); fail without them.
root_prefix() {
    if [ "$(id -u)" -eq 0 ]; then
        echo ""
    elif have sudo && sudo -n true 2>/dev/null; then
        echo "sudo -n"
    else
        return 1
    fi
}

# lock FD FILE: hold the file for as long as FD is open. Where another set-up holds it, say which, and wait.
lock() {
    mkdir -p "$(dirname "$2")"
    eval "exec $1<>\"\$2\""
    flock -n "$1" || { say "waits for another set-up: $(cat "$2")"; flock "$1"; }
    echo "process ${SETUP_PID:-$$} of $(id -un 2>/dev/null || id -u), at work since $(date +%T)" >"$2"
}

# needs_room MB DIR WHAT: end, before anything is downloaded, where the disk of DIR has less room.
needs_room() {
    local available
    available="$(df -Pm "$2" | awk 'NR == 2 { print $4 }')"
    [ "$available" -ge "$1" ] ||
        die "$3 takes $1 MB, and the disk of $2 has $available MB free: free some, or set ROLLOUT_HOME to a larger disk"
}

# Only one set-up at a time may write below ROLLOUT_HOME.
lock_home() { lock 9 "$ROLLOUT_HOME/.setup.lock"; }

# apt_private STATE_DIR COMMAND… : apt-get with its own lists, cache and sources; the system's are only read.
apt_private() {
    local state="$1"
    shift
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/sources.d" "$state/dpkg"
    touch "$state/dpkg/status"
    apt-get -qq \
        -o Dir::State="$state" -o Dir::State::Lists="$state/lists" -o Dir::State::status="$state/dpkg/status" \
        -o Dir::Cache="$state/cache" -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$state/sources.d" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

# The machine's own archive, one "URI SUITE" a line, without its security and updates suites.
machine_archives() {
    local found only_main='$1 == "Packages" && $2 == "main" && $4 !~ /-/ { print $3, $4 }'
    found="$(apt-get indextargets --format '$(CREATED_BY) $(COMPONENT) $(REPO_URI) $(CODENAME)' 2>/dev/null |
        awk "$only_main" | sort -u)"
    if [ -z "$found" ]; then
        # Nobody has run `apt-get update` yet, so apt knows the addresses but not the codename of "stable".
        found="$(apt-get indextargets --no-release-info \
            --format '$(CREATED_BY) $(COMPONENT) $(REPO_URI) $(RELEASE)' 2>/dev/null | awk "$only_main" | sort -u |
            sed -E "s/ (old)?stable$/ $(. /etc/os-release && echo "${VERSION_CODENAME:-}")/")"
    fi
    printf '%s\n' "$found"
}

# write_sources STATE_DIR SUITE… : private sources for these suites at the machine's own mirror.
write_sources() {
    local state="$1" uri suite signed="" keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    shift
    mkdir -p "$state/sources.d"
    uri="$(machine_archives | awk 'NR == 1 { print $1 }')"
    [ -n "$uri" ] || die "no 'main' archive in this machine's apt configuration; is this a Debian?"
    [ ! -r "$keyring" ] || signed="[signed-by=$keyring] "
    for suite in "$@"; do
        echo "deb $signed$uri $suite main"
    done >"$state/sources.d/private.list"
}
