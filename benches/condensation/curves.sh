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
    grep -qs '"status": "done"' "$dir/summary.json" && return
    local own=()
    case $family in
        transformer_xl) own=(--set model.segment=32 --set model.memory=64) ;;
        # One token in seven is predicted: it learns more slowly.
        bert) own=(--set train.steps=600 --set train.eval_every=600) ;;
    esac
    local sets=()
    for set in "$@"; do sets+=(--set "$set"); done
    rm -rf "$dir"
    "$program" train "$recipe" --set run.dir="$dir" --set model.family="$family" --set train.seed="$seed" \
        "${own[@]}" "${sets[@]}" >/dev/null 2>&1 || echo "failed: $dir"
}

for seed in 1 2 3; do
    for family in gpt2 transformer_xl bert; do
        # Compares, and condenses nothing.
        run $family $seed off moe.condense=static moe.condense_threshold=2
        for threshold in 0.99 0.95 0.9 0.8 0.3; do
            run $family $seed $threshold moe.condense=static moe.condense_threshold=$threshold
        done
        run $family $seed paper moe.condense=paper
        run $family $seed adaptive moe.condense=adaptive
        for end in 0.85 0.75; do
            run $family $seed adaptive-$end moe.condense=adaptive "moe.condense_range=[0.95, $end]"
        done
        run $family $seed rising moe.condense=adaptive 'moe.condense_range=[0.6, 0.98]' moe.condense_slope=8
    done
done
