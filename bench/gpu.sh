#!/usr/bin/env bash
# Builds, tests and benchmarks on a machine with an NVIDIA GPU, without a network. README.md says how to use it.
set -uo pipefail

stages=(build test fuzz sanitize kernels decode serve)
usage="usage: bench/gpu.sh [--stage NAME]... [--minutes N] [--dry-run]; stages: ${stages[*]} (default: all)"
chosen=() minutes=9.5 dry=
fail() { echo "gpu.sh: $1" >&2; exit 2; }
while (($#)); do
  case $1 in
    --stage) [[ " ${stages[*]} " == *" ${2:-} "* ]] || fail "--stage: got '${2:-}', allowed: ${stages[*]}"; chosen+=("$2"); shift 2 ;;
    --minutes) [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?$ && $2 =~ [1-9] ]] || fail "--minutes: got '${2:-}', allowed: > 0"; minutes=$2; shift 2 ;;
    --dry-run) dry=1; shift ;;
    --help) echo "$usage"; exit 0 ;;
    *) fail "got '$1'; $usage" ;;
  esac
done
((${#chosen[@]})) || chosen=("${stages[@]}")
python=$(command -v "${PYTHON:-python3}") || fail "no '${PYTHON:-python3}' here or on the PATH; set PYTHON to a Python >= 3.11 with torch"
[[ $python == /* ]] || python=$PWD/$python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "PYTHON: '$python' is older than 3.11"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
results=${OUT:-$root/bench/results}
[[ $results == /* ]] || results=$PWD/$results
cd "$root"
export PYTHONPATH="$root/python:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
name=$(gpu name | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' '-')
folder=$results/$(date -u +%Y-%m-%d)-${name:-none}
deadline=$(awk "BEGIN {print int($minutes * 60)}")
failed=()

# step NAME SECONDS COMMAND...: runs a command, at most so long and never past --minutes, with its output in a log. What
# runs out of time gets an interrupt first, so that pytest still reports; benchmarks write their JSON after every row.
step() {
  local name=$1 limit=$2 begun=$SECONDS code=0 left=$((deadline - SECONDS))
  shift 2
  ((limit < left)) || limit=$left
  echo "== $name (at most $limit s): $*"
  [[ -z $dry ]] || return 0
  if ((limit > 5)); then
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$folder/$name.log" 2>&1 </dev/null || code=$?
    tail -n 15 "$folder/$name.log"
  else
    echo "no time was left (--minutes)" >"$folder/$name.log"; code=124
  fi
  echo "$name,$code,$((SECONDS - begun))" >>"$folder/steps.csv"
  ((code == 0)) || failed+=("$name")
  return "$code"
}
# How long a program may begin new work that gets SECONDS in all; what it has begun then may take 90 seconds.
begin_until() { local left=$((deadline - SECONDS)); echo $((($1 < left ? $1 : left) - 90)) | sed 's/^-.*/0/'; }
bench() { # NAME SECONDS SCRIPT ARGUMENTS...: a benchmark, with its JSON
  local name=$1 limit=$2 script=$3
  shift 3
  step "$name" "$limit" "$python" "bench/$script.py" "$@" --json "$folder/$name.json"
}

environment() { git describe --always --dirty; nvidia-smi; nvcc --version; "$python" -m pip list; }

# In a copy without pyproject.toml, whose setuptools and torch may not be there. ninja builds only what has changed.
build() {
  local capability architectures=${TORCH_CUDA_ARCH_LIST:-}
  capability=$(gpu compute_cap)
  if [[ -z $architectures && $capability =~ ^([89]|1[0-9])\.[0-9]$ ]]; then architectures=${capability/#9.0/9.0a}; fi
  if [[ -z $dry ]]; then
    mkdir -p build/gpu && rm -rf build/gpu/csrc && cp -pR setup.py csrc build/gpu/ && mkdir -p build/gpu/specdec_kernels
  fi
  local command=("$python" setup.py -q build_ext --inplace)
  local flags=("NVCC_APPEND_FLAGS=-Xptxas=-v") # the log has the registers and spills of every kernel
  [[ -z $architectures ]] || flags+=("TORCH_CUDA_ARCH_LIST=$architectures")
  step build 400 env -C build/gpu "${flags[@]}" "${command[@]}" ||
    step build-without-cuda 400 env -C build/gpu SPECDEC_CUDA=0 "${command[@]}" || return
  [[ -n $dry ]] || for built in build/gpu/specdec_kernels/_C*.so; do
    cp "$built" "specdec_kernels/.${built##*/}" && mv "specdec_kernels/.${built##*/}" "specdec_kernels/${built##*/}"
  done
}
loads() { "$python" -c 'import torch; from specdec_kernels.backends import native as n
raise SystemExit(bool(n.missing() or (torch.cuda.is_available() and n.missing_cuda())))' 2>/dev/null; }

run_test() {
  local parallel=()
  if "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n "$(($(nproc) < 8 ? $(nproc) : 8))"); fi
  step test 400 "$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors "${parallel[@]}" \
    --junitxml="$folder/junit.xml"
}
run_fuzz() { # a step may take 25 s beyond what it is told, for imports and the first kernels
  local fuzz=("$python" -m tests.fuzz --device cuda --json)
  step fuzz-cuda 115 "${fuzz[@]}" "$folder/fuzz-cuda.json" --backends cuda,cpu --seconds 90
  # Triton compiles every mix of rule, dtypes and form, so it gets few of them, and a process of its own.
  step fuzz-triton 85 "${fuzz[@]}" "$folder/fuzz-triton.json" --backends triton --variants 12 --seconds 60
}
run_sanitize() { # each tensor an allocation of its own, so that what is beyond it is seen
  for tool in memcheck racecheck synccheck initcheck; do
    step "sanitize-$tool" 95 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 86 \
      "$python" -m tests.fuzz.sanitize --device cuda --seconds 60
  done
}
run_kernels() {
  if [[ -n $dry ]] || "$python" -c 'import flashinfer' 2>/dev/null; then # it compiles at its first call
    step kernels-flashinfer 180 "$python" bench/peers.py || export SPECDEC_BENCH_WITHOUT_FLASHINFER=1
  fi
  bench kernels-goals 180 bench_kernels goals --device cuda --seconds 3 --compile-seconds 25
  bench kernels-settings 60 bench_kernels settings --device cuda -B 8 --dtypes bfloat16 --seconds 15
  bench kernels-draft 60 bench_kernels draft --device cuda --seconds 0.3 --compile-seconds 20
  bench kernels-step 240 bench_kernels step --device cuda --seconds 0.3 --compile-seconds 60
}
run_decode() { # the goals of one sequence; the pair with the draft's layers inside the target
  bench decode-loop 400 bench_decoding loop --device cuda --pair 8b+1b -B 1 --rounds 3 --limit "$(begin_until 400)" \
    --modes compiled+graphs+deferred,graphs+deferred,graphs,eager,compiled+graphs
  bench decode-1b 90 bench_decoding loop --device cuda --pair 1b -B 1,8 --contexts 64 --rounds 3 --modes eager --new-tokens 64
}
run_serve() {
  bench serve-throughput 60 bench_throughput --device cuda --parts rows --rows 1,8,32 --rounds 3
  bench serve-lengths 90 bench_lengths --device cuda --drafters model --rows 1,8,32 --temperatures 0 --rounds 2
  bench serve-loop 400 bench_decoding loop --device cuda --pair 8b+1b -B 8,32 --rounds 2 --new-tokens 64 --limit "$(begin_until 400)" \
    --modes compiled+graphs+deferred,graphs+deferred
}

[[ -n $dry ]] || { mkdir -p "$folder" && environment >"$folder/environment.txt" 2>&1; }
if [[ -z $dry ]] && ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null
then failed+=("check: torch finds no GPU"); fi
if [[ " ${chosen[*]} " == *" build "* ]] || ! { [[ -n $dry ]] || loads; }; then build; fi
for stage in "${stages[@]:1}"; do
  [[ " ${chosen[*]} " == *" $stage "* ]] && "run_$stage"
done
echo "results: $folder"
if ((${#failed[@]})); then printf 'not ok: %s\n' "${failed[@]}"; exit 1; fi
