"""The tables of docs/luffy.md from the run folders that curves.sh leaves: python3 table.py FOLDER"""

import json
import statistics
import sys
from pathlib import Path

FAMILIES = ["gpt2", "transformer_xl", "bert"]
# The rule without condensation, against whose run of the same seed the others are measured.
PLAIN = "off"
# Shares of pairs whose cosine is above.
ABOVE = [0.5, 0.7, 0.8, 0.9]


def runs(folder):
    """For each rule, its runs by seed: the summary, and the record of the last step."""
    found = {}
    for summary in sorted(folder.glob("*/*/summary.json")):
        run = json.loads(summary.read_text())
        if run["status"] != "done":
            continue
        lines = (summary.parent / "metrics.jsonl").read_text().splitlines()
        last = next(record for record in map(json.loads, reversed(lines)) if "moe" in record)
        found.setdefault(summary.parent.parent.name, {})[summary.parent.name] = (run, last)
    return found


def spread(values, form):
    """The mean, and the least and the most."""
    return f"{form(statistics.mean(values))} ({form(min(values))} to {form(max(values))})"


def percent(value):
    return f"{100 * value:.1f} %"


def change(value):
    return f"{100 * value:+.2f} %"


def unsaved(all_runs):
    print("| rule | seeds | rows removed | all-to-all bytes | training loss | held-out loss |")
    print("|---|---|---|---|---|---|")
    plain = all_runs[PLAIN]
    removed = lambda rule: statistics.mean(run["condensed"]["uncomputed_share"] for run, _ in all_runs[rule].values())
    for rule in sorted(all_runs, key=removed):
        pairs = [(run, plain[seed][0]) for seed, (run, _) in all_runs[rule].items()]
        ratio = lambda of: [of(run) / of(base) - 1 for run, base in pairs]
        row = [
            rule,
            str(len(pairs)),
            spread([run["condensed"]["uncomputed_share"] for run, _ in pairs], percent),
            percent(1 + statistics.mean(ratio(lambda run: run["traffic"]["all_to_all"]["bytes"]))),
            spread(ratio(lambda run: run["loss_last"]), change),
            spread(ratio(lambda run: run["eval_loss"]), change),
        ]
        print("| " + " | ".join(row) + " |")
    losses = [run["eval_loss"] for run, _ in plain.values()]
    print(f"\nHeld-out loss without condensation: {spread(losses, lambda loss: f'{loss:.3f}')}\n")


def similar(all_runs):
    print("| block | " + " | ".join(f"above {above}" for above in ABOVE) + " |")
    print("|---" * (1 + len(ABOVE)) + "|")
    for block in range(len(next(iter(all_runs[PLAIN].values()))[1]["moe"])):
        bins = [last["moe"][block]["condensed"]["similarity"] for _, last in all_runs[PLAIN].values()]
        pairs = [sum(counts) for counts in zip(*bins)]
        share = lambda above: sum(pairs[round((above + 1) * len(pairs) / 2) :]) / sum(pairs)
        print(f"| {block} | " + " | ".join(percent(share(above)) for above in ABOVE) + " |")
    print()


if __name__ == "__main__":
    for family in FAMILIES:
        all_runs = runs(Path(sys.argv[1]) / family)
        if PLAIN in all_runs:
            print(f"### {family}\n")
            unsaved(all_runs)
            similar(all_runs)
