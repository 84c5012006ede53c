#!/usr/bin/env bash
# What is to be known of a GPU in nine minutes, on a machine with a driver and PyTorch and without Rust: run it in a folder
# that pack.sh made.
#   run.sh OUT [--seconds N] [--tiny] [--backend NAME] [--torch cpu|cuda|none] [stage...]
# OUT gets stages.jsonl (a line a stage: verdict, exit code, seconds, its last lines), logs.txt (what each stage printed, cut
# where it is long), lines.jsonl (a line a timing) and profile.json. A stage that fails ends nothing. --seconds is the time for
# all (540). --tiny takes sizes for a processor, with --torch cpu, which rehearse.sh uses.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)

out= seconds=540 tiny=0 backend=cuda torch=cuda stages=
while [ $# -gt 0 ]; do
    case $1 in
    --seconds) seconds=$2; shift ;;
    --backend) backend=$2; shift ;;
    --torch) torch=$2; shift ;;
    --tiny) tiny=1 ;;
    -*) echo "run.sh: what is $1?" >&2; exit 2 ;;
    *) if [ -z "$out" ]; then out=$1; else stages="$stages $1"; fi ;;
    esac
    shift
done
[ -n "$out" ] || { echo "run.sh: name a folder for the results" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)

# The most seconds of each, the most valuable first; less where the time for all ends.
limit_of() {
    case $1 in
    devices) echo 60 ;;
    ops) echo 140 ;;
    quickstart | two_ranks | offload | bf16) echo 45 ;;
    profile) echo 60 ;;
    layer) echo 100 ;;
    step) echo 110 ;;
    gemm | sanitizer | ncu) echo 60 ;;
    *) echo "run.sh: no stage $1" >&2; exit 2 ;;
    esac
}
[ -n "$stages" ] || stages="devices ops quickstart two_ranks offload bf16 sanitizer profile layer step gemm ncu"
for stage in $stages; do limit_of "$stage" >/dev/null; done

# Programs travel packed.
work=$kit/work
mkdir -p "$work/home" "$work/lib"
if [ ! -e "$work/bin" ]; then
    mkdir -p "$work/bin.part"
    tar -C "$work/bin.part" -xJf "$kit/bin.tar.xz" ||
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$kit/bin.tar.xz" "$work/bin.part"
    mv "$work/bin.part" "$work/bin"
fi

# For ours: NVRTC and cuBLAS of PyTorch's wheels by the names that are tried first, and what KIT_LIBRARIES names before them.
folders=$(python3 "$kit/libraries.py" "$work/lib")
KIT_LIBRARIES=${KIT_LIBRARIES:+$KIT_LIBRARIES:}$work/lib:$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
KIT_OUT=$out KIT_TINY=$tiny KIT_BACKEND=$backend KIT_TORCH=$torch KIT_PATH=$PATH
export KIT_LIBRARIES KIT_OUT KIT_TINY KIT_BACKEND KIT_TORCH KIT_PATH PYTHONDONTWRITEBYTECODE=1

for stage in $stages; do
    limit=$(limit_of "$stage")
    # A processor that plays the GPU takes its time.
    [ "$tiny" = 0 ] || limit=$((10 * limit))
    left=$((seconds - SECONDS))
    [ "$limit" -le "$left" ] || limit=$left
    log=$work/$stage.log begun=$SECONDS code=0
    if [ "$limit" -lt 5 ]; then
        echo "SKIPPED: $left of $seconds seconds are left" >"$log"
    else
        echo "== $stage: at most $limit s"
        (cd "$kit" && timeout -k 5 "$limit" python3 stages.py "$stage") >"$log" 2>&1 </dev/null || code=$?
    fi
    python3 "$kit/note.py" "$stage" "$code" $((SECONDS - begun)) "$limit" "$log" "$out"
done
echo "== all after $SECONDS s"
