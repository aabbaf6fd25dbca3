#!/usr/bin/env bash
# Make the virtual environment $ROLLOUT_HOME/venv and install the project into it, editable, with all extras
# but vLLM and trainer. Does nothing when neither setup.cfg nor the interpreter has changed since.

SCRIPT_NAME=python
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROLLOUT_HOME/venv"
STAMP="$VENV/.rollout-stamp"
EXTRAS=gateway,worker,inference,images,dev
# An open-ended `torch` may bring several GB of CUDA packages; this one is known to work.
TORCH=torch==2.13.0

have "$PYTHON" || die "there is no $PYTHON; install Python 3.11 or newer, or name one: PYTHON=/path/to/python make setup"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$PYTHON" -V) is too old, 3.11 or newer is needed; name another: PYTHON=/path/to/python make setup"

fingerprint() {
    {
        "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$REPO_ROOT/setup.cfg" "$REPO_ROOT/pyproject.toml" "${BASH_SOURCE[0]}"
        echo "$REPO_ROOT"
    } | sha256sum | cut -d' ' -f1
}

lock 8 "$ROLLOUT_HOME/.python.lock"

wanted="$(fingerprint)"
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] &&
    # `pip install .` in it leaves a copy instead, which finds no file of the checkout.
    compgen -G "$VENV/lib/python3*/site-packages/__editable__.rollout_service-*" >/dev/null; then
    say "up to date"
    exit 0
fi

if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    say "making the environment $VENV"
    "$PYTHON" -m venv "$VENV" ||
        die "$PYTHON cannot make virtual environments; on Debian: apt-get install python3-venv"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off "$@"; }

# The user's own torch in the environment stands. First and alone, so that the extras below find it there.
"$VENV/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    pip "$TORCH"
pip -e "$REPO_ROOT[$EXTRAS]"
echo "$wanted" >"$STAMP"
say "installed into $VENV"
