#!/usr/bin/env bash
# What there is to do on an NVIDIA GPU that is at hand for minutes, without a network: three parts, each of which is
# complete in itself and ends within --minutes. README.md says how to use it.
set -uo pipefail

usage="usage: bench/gpu.sh A|B|C [--step NAME]... [--minutes N] [--dry-run] [--rehearse]"
part='' only=() minutes=9 dry='' device=cuda pair=8b+1b quick=() paths=(tests/kernels tests/loop tests/models tests/fuzz)
fail() { echo "gpu.sh: $1" >&2; exit 2; }
while (($#)); do
  case $1 in
    A | B | C) part=$1; shift ;;
    --step) only+=("${2:-}"); shift $(($# > 1 ? 2 : 1)) ;;
    --minutes) [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?$ && $2 =~ [1-9] ]] || fail "--minutes: got '${2:-}', allowed: > 0"; minutes=$2; shift 2 ;;
    --dry-run) dry=1; shift ;;
    --rehearse) device=cpu pair=tiny quick=(--quick) paths=(tests/kernels/test_imports.py tests/kernels/test_numbers_for_all.py); shift ;;
    --help) echo "$usage"; exit 0 ;;
    *) fail "got '$1'; $usage" ;;
  esac
done
[[ -n $part ]] || fail "no part is named; $usage"
python=$(command -v "${PYTHON:-python3}") || fail "no '${PYTHON:-python3}' here or on the PATH; set PYTHON to a Python >= 3.11 with torch"
[[ $python == /* ]] || python=$PWD/$python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "PYTHON: '$python' is older than 3.11"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$root/build/gpu}
[[ $out == /* ]] || out=$PWD/$out
cd "$root"
export PYTHONPATH="$root/python:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
card=$(gpu name | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' '-')
card=${card:-none}
folder=$root/build/gpu/results/$card/$part
deadline=$(awk "BEGIN {print int($minutes * 60)}")
# A tool says so where it may not look at this device; that is no failure of ours.
refusals='ERR_NVGPUCTRPERM|LibraryNotLoaded|Device not supported'

chosen() { ((${#only[@]} == 0)) || [[ $1 == build* || " ${only[*]} " == *" $1 "* ]]; } # what does not load is always built
note() { echo "$1,$2,$3,${4:-}" | tee -a "$folder/steps.csv" >>"$out/$part.csv"; } # NAME CODE SECONDS [WHY]
pack() { # after every step, as whoever lends the GPU may end all of this at any time; 1: a log grew meanwhile
  local packed=$out/.$part.$BASHPID
  (cd "$root/build/gpu/results" && find "$card/$part" -type f -size -8M -print0 | tar --null -T - -czf "$packed" 2>/dev/null)
  (($? <= 1)) && mv "$packed" "$out/$part.tar.gz"
}
# step NAME SECONDS COMMAND...: runs a command, at most so long and never past --minutes, with its output in a log. What
# runs out of time gets an interrupt first, so that pytest still reports; benchmarks write their JSON after every row.
step() {
  local name=$1 limit=$2 begun=$SECONDS code=0 left=$((deadline - SECONDS)) why='' refused
  shift 2
  chosen "$name" || return 0
  [[ $device == cuda ]] || limit=$((4 * limit)) # on a CPU, which others may use
  limit=$((limit < left ? limit : left))
  echo "== $name (at most $limit s): $*"
  [[ -z $dry ]] || return 0
  if ((limit < 2)); then
    code=124 why='no time was left (--minutes)'
  elif ! command -v "$1" >/dev/null; then
    code=skipped why="$1 is not there"
  else
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$folder/$name.log" 2>&1 </dev/null || code=$?
    tail -n 15 "$folder/$name.log"
    ((code != 124 && code != 137)) || why="stopped after $limit s"
    if ((code)) && refused=$(grep -m1 -oE "$refusals" "$folder/$name.log"); then code=skipped why=$refused; fi
  fi
  [[ -z $why ]] || echo "$name: $why"
  note "$name" "$code" $((SECONDS - begun)) "$why"
  pack
  [[ $code == 0 || $code == skipped ]]
}
beside() { # a step beside the next ones: what is not timed shares the GPU
  if [[ -n $dry ]]; then "$@"; else "$@" & fi
}
bench() { # NAME SECONDS SCRIPT ARGUMENTS...: a benchmark, with its JSON
  local name=$1 limit=$2 script=$3
  shift 3
  step "$name" "$limit" "$python" "bench/$script.py" "$@" "${quick[@]}" --json "$folder/$name.json"
}
compare() { # NAME SECONDS BACKENDS ARGUMENTS...: random cases; a step may take 20 s beyond what it is told
  local name=$1 limit=$2 backends=$3
  shift 3
  [[ $device == cuda ]] || backends=cpu
  step "$name" "$limit" "$python" -m tests.fuzz --device "$device" --backends "$backends" --seconds $((limit - 20)) \
    --disagreements 50 --json "$folder/$name.json" "$@"
}
sanitize() { # TOOL SECONDS: each tensor is an allocation of its own, so that what is beyond it is seen
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$1" "$2" compute-sanitizer --tool "$1" --error-exitcode 86 \
    "$python" -m tests.fuzz.sanitize --device "$device" --seconds $(($2 - 50))
}
profile() { # GOAL SECONDS: what ncu sees of one launch, as a report, and as tables for who has no ncu
  local page report=$folder/ncu-$1
  step "ncu-$1" "$2" ncu --clock-control none --set full --kernel-name "regex:measure_kernel|decide_kernel" --launch-skip 8 \
    --launch-count 2 -f -o "$report" "$python" bench/watched_step.py "$1" --device "$device" "${quick[@]}" || return
  for page in details source; do
    [[ -e $report.ncu-rep ]] && ((deadline - SECONDS > 60)) || continue
    timeout 60 ncu --import "$report.ncu-rep" --page "$page" --csv >"$report.$page.csv" 2>&1
  done
}
tests() { # NAME SECONDS WHICH: those of the everyday tests that have this in their names
  local parallel=()
  if [[ -n $dry ]] || "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n "$(($(nproc) < 8 ? $(nproc) : 8))"); fi
  step "$1" "$2" "$python" -m pytest -v --tb=short --all-cases -p tests.support.failures_at_once -p no:cacheprovider \
    --continue-on-collection-errors "${parallel[@]}" -k "$3" --durations 15 --junitxml="$folder/$1.xml" "${paths[@]}"
}
decode() { # NAME SECONDS BATCHES TOKENS MODES ARGUMENTS...: what has begun when its time is up may take 60 s more
  local modes=(--modes "$5")
  [[ $device == cuda ]] || modes=() # these are of GPUs
  bench "$1" "$2" bench_loop --device "$device" --pair "$pair" -B "$3" --contexts 512 --new-tokens "$4" --rounds 3 \
    "${modes[@]}" --limit $(($2 - 60)) "${@:6}"
}

# In a copy without pyproject.toml, whose setuptools and torch may not be there. ninja builds only what has changed.
build() {
  local package built capability architectures=${TORCH_CUDA_ARCH_LIST:-}
  capability=$(gpu compute_cap)
  if [[ -z $architectures && $capability =~ ^([89]|1[0-9])\.[0-9]$ ]]; then architectures=${capability/#9.0/9.0a}; fi
  if [[ -z $dry ]]; then
    mkdir -p build/gpu && rm -rf build/gpu/csrc && cp -pR setup.py csrc build/gpu/ && mkdir -p build/gpu/specdec_{kernels,layers}
  fi
  local command=("$python" setup.py -q build_ext --inplace)
  local flags=("NVCC_APPEND_FLAGS=-Xptxas=-v") # the log has the registers and spills of every kernel
  [[ -z $architectures ]] || flags+=("TORCH_CUDA_ARCH_LIST=$architectures")
  step build 100 env -C build/gpu "${flags[@]}" "${command[@]}" ||
    step build-without-cuda 100 env -C build/gpu SPECDEC_CUDA=0 "${command[@]}" || return
  [[ -n $dry ]] || for package in specdec_kernels python/specdec_layers; do
    for built in build/gpu/"${package##*/}"/_C*.so; do
      [[ ! -e $built ]] || { cp "$built" "$package/.${built##*/}" && mv "$package/.${built##*/}" "$package/${built##*/}"; }
    done
  done
}
loads() { "$python" -c 'import torch; from specdec_kernels.backends import native as a; from specdec_layers.backends import native as b
raise SystemExit(any(n.missing() or (torch.cuda.is_available() and n.missing_cuda()) for n in (a, b)))' 2>/dev/null; }
environment() { git describe --always --dirty; nvidia-smi; nvcc --version; "$python" -m pip list; }

part_A() { # is it right: all that the tests know, side by side
  bench smoke 60 smoke --device "$device"
  beside tests test-cuda 200 "cuda or gpu"
  # Triton compiles every mix of rule, dtypes and form, so fuzzing gets few of them, and a process of its own.
  # Of its tests those that compare most for each kernel that they compile: steps of many kinds with the reference.
  beside tests test-triton 200 "triton and not cuda and (parity or faults or recurrent or trees_corners)"
  beside compare fuzz-cuda 100 cuda,cpu
  beside compare fuzz-triton 150 triton --variants 8
  beside sanitize memcheck 150
  beside sanitize synccheck 150
  beside sanitize racecheck 150
  wait
}
part_B() { # how fast is it
  bench goals 150 bench_kernels goals --device "$device" --seconds 2 --compile-seconds 0
  bench products 70 bench_products --device "$device"
  profile latency 30
  profile token 30
  bench step 120 bench_kernels step --device "$device" -V 128256 -K 5 --dtypes bfloat16 --seconds 1 --compile-seconds 60
}
part_C() { # decoding
  local modes=graphs+deferred,graphs
  decode decode-1 180 1 336 "$modes" # 1,008 tokens of each method
  decode decode-8-bits 100 1 112 graphs+deferred --draft-bits 8 --no-assisted
  decode decode-32 160 8,32 64 "$modes"
}

known=$(dry=1 only=() && "part_$part")
for name in "${only[@]}"; do
  [[ $known == *"== $name ("* ]] || fail "--step: part $part has no step '$name'"
done
if [[ -z $dry ]]; then
  rm -rf "$folder" "$out/$part".*
  mkdir -p "$folder" "$out"
  environment >"$folder/environment.txt" 2>&1
  if [[ $device == cuda ]] && ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null
  then echo 'torch finds no GPU'; note check 1 0 'torch finds no GPU'; fi
fi
if [[ -n $dry ]] || ! loads; then build; fi
"part_$part"
[[ -z $dry ]] || exit 0
pack && echo "results: $out/$part.tar.gz"
! awk -F, '$2 != 0 && $2 != "skipped" {print "not ok: " $1; bad = 1} END {exit !bad}' "$folder/steps.csv"
