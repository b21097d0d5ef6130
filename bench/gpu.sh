#!/usr/bin/env bash
# Check, build, test and benchmark on a machine with an NVIDIA GPU, without a network: one command, JSON under
# ${OUT:-bench/results}/<date>-<gpu>/. bench/gpu.sh --help lists the options; PYTHON names another interpreter.
set -euo pipefail

if ! python="$(command -v "${PYTHON:-python3}")"; then
  echo "gpu.sh: no '${PYTHON:-python3}' here or on the PATH; set PYTHON to a Python >= 3.11 that has torch" >&2
  exit 2
fi
# Names are relative to where the caller stands, not to the repository.
[[ $python == /* ]] || python="$PWD/$python"
if [[ -n "${OUT:-}" && $OUT != /* ]]; then export OUT="$PWD/$OUT"; fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "gpu.sh: '$python' is $("$python" --version 2>&1); needs Python >= 3.11 (set PYTHON)" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "$python" bench/gpu.py "$@"
