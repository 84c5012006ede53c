"""Trains what a table of docs/translation.md is of, over three seeds, and prints the table:

    python3 benches/translation/run.py PROGRAM FOLDER experts|denoising|tokens|aggregation|pruning

Its seeds run side by side, of one rank each. Every run leaves a folder below FOLDER; one that is there is not repeated,
and tables share runs. Needs nothing but Python.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import table

RECIPE = Path(__file__).parent / "base.toml"
SEEDS = [1, 2, 3]
STEPS = 1000
# Of each direction, the texts that are translated.
SENTENCES = 30
# A branch, and what goes on from it.
PHASE = STEPS // 3
FINE_TUNING = 100


def experts(count, **keys):
    """Experts in every other block, each of the size of a dense feed-forward: a token has as much computation."""
    keys = {
        "experts": count,
        "top_k": 1,
        "layers": "{every=2}",
        "capacity_factor": 1.0,
        "eval_capacity_factor": 2.0,
        "overflow": "random",
        "jitter": 0.01,
        "balance_weight": 0.01,
        "balance_scope": "micro_batch",
    } | keys
    return [f"moe.{key}={value}" for key, value in keys.items() if value is not None]


TRANSLATION = """{kind="translation", directions=["en-*", "*-en"], max_chars=100,
    languages=["en", "de", "es", "fr", "it", "ja", "ru", "sv", "uk", "zh_CN"],
    sources=["${GUILDHALL_CATALOGUES:-/usr/share/locale}/*/LC_MESSAGES/*.mo"]}"""
DENOISING = '{kind="denoising", weight=0.3}'


class Runs:
    """Runs of one seed, made when they are asked for."""

    def __init__(self, program, folder, seed):
        self.program, self.folder, self.seed = program, folder, seed

    def place(self, name):
        return self.folder / name / str(self.seed)

    def call(self, name, *arguments):
        """Runs the program, and returns what it printed."""
        self.place(name).parent.mkdir(parents=True, exist_ok=True)
        log = self.place(name).with_suffix(".log")
        with log.open("a") as err:
            done = subprocess.run([self.program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=err, text=True)
        if done.returncode:
            sys.exit(f"failed: {name}, seed {self.seed}: see {log}")
        return done.stdout

    def train(
        self,
        name,
        keys,
        steps=STEPS,
        init=None,
        order=0,
        recipe=RECIPE,
        is_scored=True,
        tasks=(TRANSLATION, DENOISING),
    ):
        """Trains a model, scores it, and returns its checkpoint. Each `order` takes the texts in another order."""
        dir = self.place(name)
        summary = dir / "summary.json"
        if not (summary.exists() and json.loads(summary.read_text())["status"] == "done"):
            shutil.rmtree(dir, ignore_errors=True)
            keys = [f"run.dir={dir}", f"train.seed={self.seed + 100 * order}", f"train.steps={steps}", *keys]
            keys.append(f"data.tasks=[{', '.join(tasks)}]")
            keys += [f"train.init={init}"] if init else []
            self.call(name, "train", recipe, *(word for key in keys for word in ("--set", key)))
        if is_scored and not (dir / "scores.json").exists():
            self.score(name, dir / "checkpoints/latest")
        return dir / "checkpoints/latest"

    def score(self, name, checkpoint):
        """Held-out losses and chrF beside the model, with the time and the memory of decoding."""
        started = time.monotonic()
        scores = self.call(name, "evaluate", checkpoint, "--chrf", "--sentences", SENTENCES)
        (self.place(name) / "scores.json").write_text(scores)
        print(f"{name}, seed {self.seed}: scored in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def pruned(self, name, of, keep, by):
        """A model that keeps some of its experts, scored as it is and after a short training."""
        dir = self.place(name)
        if not (dir / "scores.json").exists():
            shutil.rmtree(dir, ignore_errors=True)
            self.call(name, "surgery", "prune", of, "--keep", keep, "--by", by, "--rows", 100, "-o", dir)
            self.score(name, dir)
        keys = [f"train.warmup_steps={FINE_TUNING // 5}", "train.lr=5e-4"]
        self.train(f"{name}-tuned", keys, FINE_TUNING, init=dir, order=3, recipe=dir / "config.toml")


def train_experts(runs):
    runs.train("multitask", experts(8))
    runs.train("dense", [])


def train_denoising(runs):
    runs.train("multitask", experts(8))
    runs.train("translation", experts(8), tasks=[TRANSLATION])


def train_tokens(runs):
    runs.train("multitask", experts(8))
    runs.train("position", experts(8, overflow="position"))
    runs.train("dropless", experts(8, capacity_factor=None, eval_capacity_factor=None, overflow=None))


def train_aggregation(runs):
    """Three phases of equal length. The optimizer begins anew in each, also where there is no surgery."""
    level, falling = ["train.schedule=constant"], ["train.schedule=linear"]
    phase = lambda name, count, schedule, init, order, is_scored=True: runs.train(
        name, ["train.warmup_steps=60", *schedule, *experts(count)], PHASE, init, order, is_scored=is_scored
    )
    stem = phase("stem", 8, level, None, 0, False)
    branches = [phase(f"branch-{order}", 8, level, stem, order) for order in (1, 2)]
    both = runs.place("aggregated-start")
    if not (both / "manifest.json").exists():
        shutil.rmtree(both, ignore_errors=True)
        runs.call("aggregated-start", "surgery", "aggregate", *branches, "-o", both)
    if not (both / "scores.json").exists():
        runs.score("aggregated-start", both)
    phase("aggregated", 16, falling, both, 3)
    phase("single", 8, falling, branches[0], 3)
    stem = phase("scratch-stem", 16, level, None, 0, False)
    phase("scratch", 16, falling, phase("scratch-branch", 16, level, stem, 1, False), 3)


def train_pruning(runs):
    whole = runs.train("multitask", experts(8))
    for keep in (4, 2):
        for by in ("utilization", "gate", "random"):
            runs.pruned(f"keep-{keep}-{by}", whole, keep, by)


def checkpoint(dir):
    """That of a run, or a folder that surgery made."""
    newest = dir / "checkpoints/latest"
    return str(newest if newest.exists() else dir)


def time_decoding(program, folder, rounds=5):
    """Translates the same lines with every pruned model of the first seed in turns: seconds and peak memory of each."""
    names = ["multitask"] + [f"keep-{keep}-utilization" for keep in (4, 2)]
    lines = "".join(f"{line}\n" for line in LINES)
    measured = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            command = [program, "translate", checkpoint(folder / name / str(SEEDS[0])), "--from", "en", "--to", "de"]
            started = time.monotonic()
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            child.stdin.write(lines)
            child.stdin.close()
            _, status, usage = os.wait4(child.pid, 0)
            if status:
                sys.exit(f"failed: {' '.join(command)}")
            measured[name].append([time.monotonic() - started, usage.ru_maxrss])
    (folder / "decoding.json").write_text(json.dumps(measured))


# Ordinary messages of programs.
LINES = [
    f"{verb} the {noun} {where}"
    for verb in ("Open", "Close", "Save", "Delete", "Rename", "Could not read", "Could not write", "Select")
    for noun in ("file", "folder", "current document", "selected items", "list of users")
    for where in ("now", "before you quit", "in a new window", "from the network", "without asking")
]

TABLES = {
    "experts": train_experts,
    "denoising": train_denoising,
    "tokens": train_tokens,
    "aggregation": train_aggregation,
    "pruning": train_pruning,
}

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in TABLES:
        sys.exit(__doc__)
    program, folder = (str(Path(path).resolve()) for path in sys.argv[1:3])
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        list(pool.map(lambda seed: TABLES[sys.argv[3]](Runs(program, Path(folder), seed)), SEEDS))
    if sys.argv[3] == "pruning":
        time_decoding(program, Path(folder))
    table.show(sys.argv[3], Path(folder))
