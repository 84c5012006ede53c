#!/usr/bin/env bash
# The measured inputs of benches/luffy_table.rs: trains small models with as many experts as ranks at a threshold,
# and prints the share of routes without a row and the concentration of sequences.
# Usage: inputs.sh PROGRAM FOLDER [THRESHOLD] [RANKS...] > table.csv
set -euo pipefail
program=$1
folder=$2
recipe="$(dirname "${BASH_SOURCE[0]}")/base.toml"
threshold=${3:-0.8}
all_ranks=("${@:4}")
[ ${#all_ranks[@]} -gt 0 ] || all_ranks=(2 4 8 16)
steps=150

echo "model,ranks,condensed,concentration"
for model in xl bert gpt2; do
    own=()
    case $model in
        xl) own=(--set model.family=transformer_xl --set model.segment=32 --set model.memory=64) ;;
        *) own=(--set model.family=$model) ;;
    esac
    for ranks in "${all_ranks[@]}"; do
        dir="$folder/$model-$ranks"
        sets=("${own[@]}" --set "train.steps=$steps" --set train.eval_every=0 --set "moe.experts=$ranks"
            --set "parallel.expert=$ranks" --set moe.condense=static --set "moe.condense_threshold=$threshold")
        grep -qs '"status": "done"' "$dir/summary.json" || {
            rm -rf "$dir"
            "$program" train "$recipe" --ranks "$ranks" "${sets[@]}" --set "run.dir=$dir" --set "moe.record=$dir.routes" >&2
        }
        plan=$("$program" plan "$recipe" --ranks "$ranks" "${sets[@]}" --recording "$dir.routes" --json)
        condensed=$(sed -n "s/.*\"uncomputed_share\": \([0-9.]*\).*/\1/p" "$dir/summary.json" | head -1)
        concentration=$(grep -o '"concentration": *[0-9.]*' <<<"$plan" | grep -o '[0-9.]*$')
        printf '%s,%s,%.3f,%.3f\n' "$model" "$ranks" "$condensed" "$concentration"
    done
done
