#!/usr/bin/env bash
# Trains the three models of docs/luffy.md with and without condensation, over three seeds, and leaves a run folder for
# each below the folder given. A run that is there is not repeated. Usage: curves.sh PROGRAM FOLDER
set -euo pipefail
program=$1
folder=$2
recipe="$(dirname "${BASH_SOURCE[0]}")/base.toml"

run() { # family, seed, name, then --set arguments
    local family=$1 seed=$2 name=$3
    shift 3
    local dir="$folder/$family/$name/$seed"
    [ -e "$dir/summary.json" ] && return
    local own=()
    if [ "$family" = transformer_xl ]; then
        own=(--set model.segment=32 --set model.memory=64)
    fi
    local sets=()
    for set in "$@"; do sets+=(--set "$set"); done
    rm -rf "$dir"
    "$program" train "$recipe" --set run.dir="$dir" --set model.family="$family" --set train.seed="$seed" \
        "${own[@]}" "${sets[@]}" >/dev/null 2>&1 || echo "failed: $dir"
}

for seed in 1 2 3; do
    for family in gpt2 transformer_xl bert; do
        run $family $seed off moe.condense=static moe.condense_threshold=2
        for threshold in 0.3 0.8 0.6 0.9 0.5 0.7 0.95; do
            run $family $seed $threshold moe.condense=static moe.condense_threshold=$threshold
        done
        run $family $seed paper moe.condense=paper
        run $family $seed adaptive moe.condense=adaptive
    done
    # The paper's rule, in models in which it looks ahead.
    for family in gpt2 transformer_xl; do
        for threshold in 0.5 0.8; do
            run $family $seed star-$threshold moe.condense=static moe.condense_threshold=$threshold \
                moe.condense_clusters=star
        done
    done
    run gpt2 $seed literal-0.5 moe.condense=static moe.condense_threshold=0.5 moe.condense_gradient=literal
    run gpt2 $seed history-0.5 moe.condense=static moe.condense_threshold=0.5 'moe.condense_history=[0.8, 0.2]'
done
