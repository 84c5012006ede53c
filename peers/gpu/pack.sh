#!/usr/bin/env bash
# Packs what run.sh needs on a machine without Rust and without a network into a folder: pack.sh FOLDER
# Programs are built, stripped and compressed; PyTorch's scripts, recipes and this repository's documents, which are the text to
# learn, travel as they are. The processor's run, which others are compared with, is made here: some minutes.
# What CARGO_TARGET_DIR, CARGO_BUILD_JOBS say holds.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -eq 1 ] || { echo "pack.sh: name a folder to pack into" >&2; exit 2; }
[ ! -e "$1/bin.tar.xz" ] || rm -rf "$1"
mkdir -p "$1"
kit=$(cd "$1" && pwd)
[ -z "$(ls -A "$kit")" ] || { echo "pack.sh: $kit is not empty, and no folder of this script's" >&2; exit 2; }
cd "$root"

# The names of programs as cargo tells them.
built() {
    cargo "$@" --release --message-format json | python3 -c '
import json, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable"):
        print(made["target"]["name"], made["executable"])'
}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
{
    built build --bin guildhall --bench gemm --bench layer --bench step
    built test -p guildhall-tensor --test ops_accelerators --no-run
} | while read -r name path; do
    strip -o "$bin/$name" "$path"
done
for name in guildhall gemm layer step ops_accelerators; do
    [ -x "$bin/$name" ] || { echo "pack.sh: cargo made no $name" >&2; exit 1; }
done
tar -C "$bin" -cJf "$kit/bin.tar.xz" .

mkdir "$kit/text" "$kit/recipes" "$kit/pytorch" "$kit/reference"
cp ./*.md docs/*.md "$kit/text"
cp recipes/quickstart.toml "$kit/recipes"
cp recipes/verify/decoder.toml "$kit/recipes/small.toml"
cp peers/pytorch/*.py "$kit/pytorch"
cp peers/gpu/{run.sh,stages.py,note.py,libraries.py,decoder.toml,trace.sh,trace.c,timeline.py} "$kit"
git describe --always --dirty --abbrev=10 --match=none >"$kit/commit"

# With a rate that does not depend on the number of steps, the first steps of a run are those of a shorter one.
options="--set train.schedule=constant --set train.eval_every=1000 --set train.checkpoint_every=1000
    --set train.batch_tokens=2048"
echo "$options" >"$kit/reference/options"
cd "$kit"
train() {
    # shellcheck disable=SC2086
    "$bin/guildhall" train recipes/quickstart.toml --backend cpu $options --set train.steps=50 --set 'data.sources=["text/*.md"]' \
        --set "data.cache=$bin/data" "$@"
}
train --ranks 1 --set parallel.expert=1 --set moe.record=reference/routes --set "run.dir=$bin/run"
cp "$bin/run/metrics.jsonl" reference/
# How far sums in another order lead from it, with the same routing.
train --ranks 2 --set parallel.expert=2 --set moe.replay=reference/routes --set "run.dir=$bin/two"
cp "$bin/two/metrics.jsonl" reference/two_ranks.jsonl

bytes=$(du -sb . | cut -f1)
echo "$kit: $((bytes / 1024)) KiB, at most 61440; $(find . -type f | wc -l) files"
[ "$bytes" -lt $((60 * 1024 * 1024)) ]
