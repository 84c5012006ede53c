#!/usr/bin/env python3
"""Seconds of every step over a limited link where routers are skewed, with experts that change ranks and without.

  benches/network/replacing.py PROGRAM [--rate 100mbit] [--every 10] [--steps 30] [--rounds 2]

As benches/network/run.py, whose recipe and namespaces it uses. Steps that move experts are told apart: what they take beyond
the median is what a move costs. Prints Markdown, and below each pair whether the last loss is the same to the last digit.
"""

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

import run

SKEWED = [*run.SKEWED, "moe.experts=16"]


def row(lines, every):
    seconds = [run.TOKENS / line["tokens_per_s"] for line in lines]
    moved = [line.get("replaced") or [] for line in lines]
    later = statistics.median(took for took, layers in zip(seconds[every:], moved[every:]) if not layers)
    moves = [took - later for took, layers in zip(seconds, moved) if layers]
    told = [f"{layer['imbalance_before']:.2f} to {layer['imbalance_after']:.2f}" for layers in moved for layer in layers]
    return f"{later:.2f} | {', '.join(f'{took:.1f}' for took in moves) or '-'} | {', '.join(told) or '-'} | {sum(seconds):.1f}"


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("program")
    flags.add_argument("--rate", default="100mbit")
    flags.add_argument("--every", type=int, default=10)
    flags.add_argument("--steps", type=int, default=30)
    flags.add_argument("--rounds", type=int, default=2)
    flags = flags.parse_args()
    if flags.steps <= flags.every + 1:
        raise SystemExit(f"--steps {flags.steps}: none is left after the first move, at step {flags.every}")
    flags.program = str(Path(flags.program).resolve())
    print("| | a step after the first move, s | moves cost, s | busiest rank of the layers that moved | all steps, s |")
    print("|---|---|---|---|---|")
    subprocess.run([run.LINKS, "down", "4"], check=True)
    subprocess.run([run.LINKS, "up", "4", flags.rate], check=True)
    try:
        with tempfile.TemporaryDirectory() as flags.cache:
            for _ in range(flags.rounds):
                shared, losses = [*SKEWED, f"train.steps={flags.steps}"], []
                for every in (0, flags.every):
                    gain = ["parallel.replace_gain=0.1"] if every else []
                    lines, _ = run.launched(flags, [*shared, f"parallel.replace_every={every}", *gain])
                    losses.append(lines[-1]["loss"])
                    print(f"| {f'every {every}' if every else 'never'} | {row(lines, flags.every)} |", flush=True)
                print(f"losses {'equal' if losses[0] == losses[1] else f'differ: {losses}'}", flush=True)
    finally:
        subprocess.run([run.LINKS, "down", "4"], check=True)


if __name__ == "__main__":
    main()
