#!/usr/bin/env bash
# run.sh without a GPU: the libraries of tests/fake_cuda in front, tiny sizes, PyTorch on the processor.
#   rehearse.sh KIT OUT [run.sh's options and stages]
# KIT is a folder of pack.sh's. --backend simulated takes the simulated device instead, --torch none leaves PyTorch out; PYTHON
# names the interpreter that has it (python3). Needs a C++ compiler. How long something takes here means nothing.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -ge 2 ] || { echo "rehearse.sh: name a folder of pack.sh's, and one for results" >&2; exit 2; }
fakes=$(mktemp -d)
trap 'rm -rf "$fakes"' EXIT
# A copy: what the substitutes leave behind must not travel to a GPU.
mkdir "$fakes/kit"
tar -C "$1" --exclude ./work -c . | tar -C "$fakes/kit" -x
kit=$fakes/kit out=$2
shift 2
for made in driver:libcuda.so.1 nvrtc:libnvrtc.so cublas:libcublas.so \
    cublaslt:libcublasLt.so; do
    c++ -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -Wl,-z,nodelete "$root/tests/fake_cuda/${made%%:*}.cpp" -ldl \
        -o "$fakes/${made#*:}"
done
mkdir "$fakes/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "${PYTHON:-python3}")" >"$fakes/bin/python3"
chmod +x "$fakes/bin/python3"
# NVRTC's substitute takes the kernels of the simulated device, which keeps them in the kit's home once it has made them.
FAKE_CUDA_KERNELS=$kit/work/home/.cache/guildhall KIT_LIBRARIES=$fakes PATH=$fakes/bin:$PATH
export FAKE_CUDA_KERNELS KIT_LIBRARIES PATH
mkdir -p "$kit/work/home" "$fakes/program"
tar -C "$fakes/program" -xJf "$kit/bin.tar.xz" ./guildhall
HOME=$kit/work/home "$fakes/program/guildhall" train "$kit/recipes/small.toml" --backend simulated --set train.steps=1 \
    --set train.batch_tokens=64 --set "data.sources=[\"$kit/text/README.md\"]" --set "data.cache=$fakes/data" \
    --set "run.dir=$fakes/run" >"$fakes/log" 2>&1 || { cat "$fakes/log"; exit 1; }
bash "$kit/run.sh" "$out" --tiny --torch cpu --seconds 3600 "$@"
