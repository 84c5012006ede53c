#!/usr/bin/env python3
"""Seconds and bytes of a step over limited links, with and without each thing that saves messages.

  benches/network/run.py PROGRAM [--rates 1gbit 100mbit] [--rounds 3] [--only NAME..]

PROGRAM is built with `cargo build --release --features mpi`. Every rank is a process of Open MPI in a network namespace of
its own (peers/network/links.sh: root, iproute2), so that bytes are those that its device has sent, acknowledgements
included. In every round each case runs without and with, in turn; a figure is the median over rounds of the medians over
steps, the first three left out, a ratio the median of the ratios within rounds. Counted bytes are the program's, which `guildhall plan` predicts.
Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LINKS, RECIPE = str(ROOT / "peers/network/links.sh"), str(HERE / "decoder.toml")
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WARM_UP, SECONDS_MAX = 3, 400

EXPERTS = ["parallel.expert=4"]
SLICES = ["parallel.tensor=2", "parallel.expert=2"]
BLOCKS = ["memory.recompute=block"]
SKEWED = [*EXPERTS, "moe.balance_weight=0"]
# name: what all have, what is without, what is with
CASES = {
    "smart schedule": (EXPERTS, ["moe.schedule=plain"], ["moe.schedule=smart"]),
    "overlapped gradients": (EXPERTS, ["parallel.overlap=false"], ["parallel.overlap=true"]),
    "16-bit rows": (EXPERTS, ["train.dtype=f32"], ["train.dtype=bf16"]),
    "duplicates dropped (DTD)": (SLICES, ["moe.drop_duplicates=false"], ["moe.drop_duplicates=true"]),
    "communication kept (CAC)": ([*EXPERTS, *BLOCKS], ["memory.keep_communication=false"],
                                 ["memory.keep_communication=true"]),
    "condensation at 0.8": (EXPERTS, ["moe.condense=off"], ["moe.condense=static", "moe.condense_threshold=0.8"]),
    "migration, forced": (EXPERTS, ["parallel.migrate=off"], ["parallel.migrate=force"]),
    "migration, auto": (EXPERTS, ["parallel.migrate=off"], ["parallel.migrate=auto"]),
    "shadowing, auto": (SKEWED, ["moe.shadowing=off"], ["moe.shadowing=auto"]),
    "experts travel (EXT)": (EXPERTS, ["parallel.exchange=tokens"], ["parallel.exchange=experts"]),
}


def options(settings):
    return [word for setting in settings for word in ("--set", setting)]


def sent(nodes):
    text = subprocess.run([LINKS, "sent", nodes.split("x")[0]], capture_output=True, text=True, check=True).stdout
    return sum(map(int, text.split()))


def train(flags, settings, nodes="4"):
    """Seconds of a step and bytes that all nodes sent in it, of so many nodes or NxK ranks on them; bytes it counts; its summary."""
    with tempfile.TemporaryDirectory() as run:
        before = sent(nodes)
        command = [flags.program, "train", RECIPE, *options(settings), "--set", f"run.dir={run}",
                   "--set", f"data.cache={flags.cache}"]
        done = subprocess.run([LINKS, "mpirun", nodes, *command], cwd=ROOT, env={**os.environ, **ROOT_MAY},
                              capture_output=True, text=True, timeout=SECONDS_MAX)
        if done.returncode != 0:
            raise SystemExit(f"{settings}: {done.stderr}")
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(run, "summary.json").read_text())
    seconds = statistics.median(2048 / line["tokens_per_s"] for line in lines[WARM_UP:])
    counted = sum(of_kind["bytes"] for of_kind in summary["traffic"].values()) / len(lines)
    return seconds, (sent(nodes) - before) / len(lines), counted, summary


def table(flags):
    print("| link | | without, s | with, s | without/with | counted MB | with, MB | sent MB | with, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for rate in flags.rates:
        subprocess.run([LINKS, "down", "4"], check=True)
        subprocess.run([LINKS, "up", "4", rate], check=True)
        try:
            for name in flags.only or CASES:
                shared, without, with_it = CASES[name]
                rounds = [[train(flags, [*shared, *more]) for more in (without, with_it)] for _ in range(flags.rounds)]
                of = lambda place, what: statistics.median(both[place][what] for both in rounds)
                ratio = statistics.median(both[0][0] / both[1][0] for both in rounds)
                figures = [f"{of(0, 0):.2f}", f"{of(1, 0):.2f}", f"{ratio:.2f}",
                           *(f"{of(place, what) / 1e6:.1f}" for what in (2, 1) for place in (0, 1))]
                print(f"| {rate} | {name} | {' | '.join(figures)} |", flush=True)
        finally:
            subprocess.run([LINKS, "down", "4"], check=True)


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("program")
    flags.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--only", nargs="+", choices=list(CASES))
    flags = flags.parse_args()
    flags.program = str(Path(flags.program).resolve())
    with tempfile.TemporaryDirectory() as flags.cache:
        table(flags)


if __name__ == "__main__":
    main()
