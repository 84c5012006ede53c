"""The tables of docs/translation.md from the run folders that run.py leaves: python3 table.py FOLDER TABLE..."""

import json
import statistics
import sys
from pathlib import Path

# Of Student's t distribution, the 97.5 % quantile by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def scores(folder, name):
    """By seed, what evaluation told of a run."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted((folder / name).glob("*/scores.json"))}


def loss(score):
    return score["eval_loss"]


def chrf(score):
    """The mean over directions."""
    return statistics.mean(row["chrf"] for row in score["tasks"] if "chrf" in row)


def chrf_from(score):
    return statistics.mean(row["chrf"] for row in score["tasks"] if "chrf" in row and row["to"] != "en")


def denoising(score):
    """Held-out loss of denoising, the mean over tokens."""
    rows = [row for row in score["tasks"] if row["task"] == "denoising"]
    return sum(row["loss"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows) if rows else None


def interval(values, digits):
    """The mean and its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.{digits}f}"
    half = T[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.{digits}f} ± {half:.{digits}f}"


def rows(folder, names, against):
    """A row for each of `names`, and its difference from `against`, paired by seed."""
    print("| model | seeds | held-out loss | difference | chrF | difference |")
    print("|---|---|---|---|---|---|")
    base = scores(folder, against)
    for label, name in names:
        own = scores(folder, name)
        if not own:
            continue
        pairs = [(own[seed], base[seed]) for seed in own if seed in base]
        cells = [label, str(len(own))]
        for of, digits in ((loss, 3), (chrf, 2)):
            cells.append(f"{statistics.mean(map(of, own.values())):.{digits}f}")
            differences = [of(a) - of(b) for a, b in pairs]
            cells.append("" if name == against else interval(differences, digits))
        print("| " + " | ".join(cells) + " |")
    print()


def decoding(folder):
    print("| model | parameters, MB | seconds for 200 lines | peak memory, MB |")
    print("|---|---|---|---|")
    for name, rounds in json.loads((folder / "decoding.json").read_text()).items():
        size = sum(path.stat().st_size for path in (folder / name / "1").glob("**/model.safetensors")) / 1e6
        seconds, memory = (statistics.median(column) for column in zip(*rounds))
        print(f"| {name} | {size:.1f} | {seconds:.2f} | {memory / 1024:.0f} |")
    print()


TABLES = {
    "experts": ([("8 experts", "multitask"), ("dense", "dense")], "dense"),
    "denoising": (
        [("translation and denoising", "multitask"), ("translation alone", "translation")],
        "translation",
    ),
    "tokens": (
        [("random", "multitask"), ("position", "position"), ("dropless", "dropless")],
        "position",
    ),
    "aggregation": (
        [
            ("aggregated, 16 experts", "aggregated"),
            ("16 experts from scratch", "scratch"),
            ("8 experts, one branch", "single"),
            ("branch 1", "branch-1"),
            ("branch 2", "branch-2"),
            ("aggregated, not trained on", "aggregated-start"),
        ],
        "scratch",
    ),
    "pruning": (
        [("all 8", "multitask")]
        + [
            (f"{keep}, {by}{said}", f"keep-{keep}-{by}{tuned}")
            for keep in (4, 2)
            for said, tuned in (("", ""), (", tuned", "-tuned"))
            for by in ("utilization", "gate", "random")
        ],
        "multitask",
    ),
}


def show(table, folder):
    names, against = TABLES[table]
    print(f"### {table}\n")
    rows(folder, names, against)
    if table == "denoising":
        losses = [denoising(score) for score in scores(folder, "multitask").values()]
        print(f"Held-out loss of denoising: {statistics.mean(losses):.3f}\n")
    if table == "pruning":
        for keep in (4, 2):
            rows(folder, [(f"{keep}, {by}", f"keep-{keep}-{by}") for by in ("utilization", "gate")], f"keep-{keep}-random")
        decoding(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        show(name, Path(sys.argv[1]))
