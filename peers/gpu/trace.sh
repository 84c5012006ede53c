#!/usr/bin/env bash
# Has a program write down what it has a GPU do, and sums its training steps up: trace.sh FILE STEPS COMMAND...
# Takes a C compiler, CUDA's headers and CUPTI, which come with a toolkit or with the wheels nvidia-cuda-cupti, nvidia-cuda-runtime
# and nvidia-cuda-crt: CUPTI_ROOT is the folder above their include/ and lib/.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 3 ] || { echo "trace.sh FILE STEPS COMMAND...: what is to be traced?" >&2; exit 2; }
file=$1 steps=$2
shift 2
root=${CUPTI_ROOT:-/usr/local/cuda}
library=$(find -L "$root" -name "libcupti.so*" 2>/dev/null | sort | head -n 1)
header=$(find -L "$root" -name cupti.h 2>/dev/null | head -n 1)
driver=$(find -L "$root" -name cuda.h 2>/dev/null | head -n 1)
[ -n "$library" ] && [ -n "$header" ] && [ -n "$driver" ] || { echo "trace.sh: no CUPTI under $root; name another folder by CUPTI_ROOT" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -O1 -shared -fPIC -I "$(dirname "$header")" -I "$(dirname "$driver")" "$here/trace.c" "$library" -o "$work/trace.so"
TRACE_OUT=$file CUDA_INJECTION64_PATH=$work/trace.so LD_LIBRARY_PATH=$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"
[ -s "$file" ] || { echo "trace.sh: it asked no GPU for anything" >&2; exit 1; }
python3 "$here/timeline.py" "$file" "$steps"
