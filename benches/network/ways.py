#!/usr/bin/env python3
"""Seconds of a step by each way of all-to-alls from node to node.

  benches/network/ways.py PROGRAM [--rates 1gbit 100mbit] [--rounds 3] [--emulated]

Four ranks on two nodes: processes of Open MPI, two in each of two network namespaces (peers/network/links.sh: root,
iproute2), whose link they share. With --emulated, 8 and 16 thread ranks on nodes of 4 instead, each with links of its own that
are charged (parallel.node_link) for latency, for each message and for bytes. In every round each way runs once, in turn; a figure
is the median over rounds of the medians over steps, the first three left out, a ratio the median of the ratios within rounds.
Messages and bytes are the program's count, of all ranks in a step. Prints Markdown.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from run import LINKS, RECIPE, ROOT, SECONDS_MAX, WARM_UP, options, train

WAYS = ["direct", "two_level", "two_d"]
LONG = ["parallel.expert=4"]
SHORT = ["parallel.expert=4", "model.d_model=32", "moe.d_expert=64", "train.micro_batch=4"]
# Latency, microseconds of a message, GB/s; rows of few and of more tokens.
LINK_KINDS = [(50, 0, 1), (50, 20, 1), (50, 200, 1)]
SMALL = ["moe.experts=16", "model.d_model=32", "moe.d_expert=32", "model.layers=2", "train.steps=12", "train.dtype=f32"]


def emulated(flags, settings):
    """As `train`, of thread ranks."""
    with tempfile.TemporaryDirectory() as run:
        command = [flags.program, "train", RECIPE, *options(settings), "--set", f"run.dir={run}",
                   "--set", f"data.cache={flags.cache}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX)
        if done.returncode != 0:
            raise SystemExit(f"{settings}: {done.stderr}")
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(run, "summary.json").read_text())
    return statistics.median(2048 / line["tokens_per_s"] for line in lines[WARM_UP:]), 0, 0, summary


def crossing(summary):
    """Messages and bytes of rows over the expert group itself: between nodes, but for those of the direct way within them."""
    sent = summary["traffic_by_group"]["expert"]["all_to_all"]
    return sent["messages"] / summary["steps"], sent["bytes"] / summary["steps"]


def rows(what, flags, run):
    rounds = [[run(way) for way in WAYS] for _ in range(flags.rounds)]
    for place, way in enumerate(WAYS):
        seconds = statistics.median(ways[place][0] for ways in rounds)
        ratio = statistics.median(ways[0][0] / ways[place][0] for ways in rounds)
        messages, sent = crossing(rounds[0][place][3])
        wire = rounds[0][place][1] / 1e6
        print(f"| {what} | {way} | {seconds:.3f} | {ratio:.2f} | {messages:.0f} | {sent / 1e6:.2f} | {wire:.2f} |", flush=True)


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("program")
    flags.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--emulated", action="store_true")
    flags = flags.parse_args()
    flags.program = str(Path(flags.program).resolve())
    print("| | way | s a step | direct/way | messages | MB of rows | MB between nodes |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as flags.cache:
        if flags.emulated:
            for ranks in (8, 16):
                for latency, message, rate in LINK_KINDS:
                    link = f"ranks_per_node=4,latency_us={latency},message_us={message},gbytes_per_s={rate}"
                    settings = [f"parallel.ranks={ranks}", f"parallel.expert={ranks}", *SMALL,
                                f"parallel.node_link={{{link}}}"]
                    rows(f"{ranks} ranks, {message} us a message", flags,
                         lambda way: emulated(flags, [*settings, f"parallel.all_to_all={way}"]))
            return
        for rate in flags.rates:
            subprocess.run([LINKS, "down", "2"], check=True)
            subprocess.run([LINKS, "up", "2", rate], check=True)
            try:
                for name, settings in [("rows of 192", LONG), ("rows of 32, four micro-batches", SHORT)]:
                    rows(f"{rate}, {name}", flags, lambda way: train(flags, [*settings, f"parallel.all_to_all={way}"], "2x2"))
            finally:
                subprocess.run([LINKS, "down", "2"], check=True)


if __name__ == "__main__":
    main()
