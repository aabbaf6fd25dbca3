#!/usr/bin/env bash
# Lay the readers of the formats that `rollout export` writes below a directory, for tests: `export_readers.sh DIR`.
# Of what they depend on only what the environment of the tests lacks: installed whole they take 800 MB, this 32.

SCRIPT_NAME=export-readers
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

READERS=(atif==1.8.0 harbor==0.26.0 inspect-ai==0.3.285 opentelemetry-proto==1.45.2)
NEEDS=(
    botocore==1.44.8 ijson==3.6.0 jsonlines==4.0.0 jsonpath-ng==1.16.0 jsonref==1.1.0 mmh3==5.3.1 pathlib-abc==0.5.2
    pathspec==1.1.1 protobuf==7.36.2 semver==3.1.2 shortuuid==1.0.13 textual==8.2.8 universal-pathlib==0.3.10
    zipfile-zstd==0.0.4 zipp==4.1.2
)

target="${1:?a directory}"
# Harbor asks for a later Python; its models and the scanner of its viewer run on this one (tests/helpers/readers.py).
"$ROLLOUT_HOME/venv/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off --no-compile \
    --no-deps --ignore-requires-python --upgrade --target "$target" "${READERS[@]}" "${NEEDS[@]}"
# Half of it are programs, pages and descriptions of a cloud's services.
rm -rf "$target"/{bin,botocore/data,harbor/viewer/static,inspect_ai/{_view/dist,binaries}}
