#!/usr/bin/env python3
"""The decoder step of two processes on a limited link: Guildhall under mpirun against PyTorch, DeepSpeed and Tutel over gloo.

  peers/network/decoder.py --python VENV/bin/python --bin target/release/deps [--rates local none 1gbit 100mbit]

`local` is one machine without namespaces: shared memory for Open MPI, the loopback for gloo. In every round each system
runs once, in turn; figures are medians over rounds, ratios medians of the ratios within a round, to Guildhall dropping
nothing and, for systems that drop routes beyond a capacity, to Guildhall with the same capacity: with its default schedule where
links are not limited, with the smart one where they are. Needs root (links.sh), and Guildhall's benchmark built with
`cargo build --release --features mpi --bench step`. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINKS, PEERS = str(HERE / "links.sh"), HERE.parent
WARM_UP, SECONDS_MAX = 3, 300
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def flags():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--python", default=sys.executable, help="the interpreter that has torch and deepspeed")
    flags.add_argument("--bin", type=Path, default=PEERS.parent / "target/release/deps")
    flags.add_argument("--rates", nargs="+", default=["local", "none", "1gbit", "100mbit"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=7)
    flags.add_argument("--only", nargs="+", default=[""], help="systems whose names contain one of these words")
    flags.add_argument("--raw", type=Path, help="append every JSON line to this file")
    return flags.parse_args()


def last_json(text):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def guildhall(*options):
    def run(flags, rate):
        built = [path for path in flags.bin.glob("step-*") if path.suffix == "" and os.access(path, os.X_OK)]
        program = [str(max(built, key=lambda path: path.stat().st_mtime)), "--workload", "moe", "--ranks", "2",
                   "--steps", str(flags.steps), *options]
        start = ["mpirun", "-n", "2", "--bind-to", "none", "--oversubscribe"] if rate == "local" else [LINKS, "mpirun", "2"]
        done = subprocess.run([*start, *program], env={**os.environ, **ROOT_MAY}, capture_output=True, text=True,
                              timeout=SECONDS_MAX)
        return last_json(done.stdout)
    return run


def rival(script, *options):
    def run(flags, rate):
        command = [flags.python, str(PEERS / script), "--env", "best", "--procs", "2", "--steps", str(flags.steps), *options]
        if rate == "local":
            return last_json(subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX).stdout)
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29655", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = [subprocess.Popen([LINKS, "in", str(rank), *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": "0"}, text=True)
                 for rank in range(2)]
        return last_json([rank.communicate(timeout=SECONDS_MAX)[0] for rank in ranks][0])
    return run


DROPPING = "capacity 1"
SYSTEMS = {
    "Guildhall, rows at once": guildhall(),
    "Guildhall, rows at once, capacity 1": guildhall("--capacity", "1"),
    "Guildhall, smart schedule": guildhall("--smart"),
    "Guildhall, smart schedule, capacity 1": guildhall("--smart", "--capacity", "1"),
    "PyTorch, data parallel, plain loop": rival("pytorch/decoder.py"),
    "PyTorch, data parallel, grouped products": rival("pytorch/decoder.py", "--moe", "grouped"),
    "DeepSpeed, expert parallel, capacity 1": rival("deepspeed/decoder.py"),
    "DeepSpeed, expert parallel, nothing dropped": rival("deepspeed/decoder.py", "--capacity", "0"),
    "Tutel, expert parallel, capacity 1": rival("tutel/decoder.py"),
    "Tutel, expert parallel, nothing dropped": rival("tutel/decoder.py", "--capacity", "0"),
}


def references(rate):
    """What the others are compared with, dropping nothing and dropping: the default schedule, on limited links the one for them."""
    schedule = "rows at once" if rate in ("local", "none") else "smart schedule"
    return f"Guildhall, {schedule}", f"Guildhall, {schedule}, {DROPPING}"


def sent():
    return [int(n) for n in subprocess.run([LINKS, "sent", "2"], capture_output=True, text=True, check=True).stdout.split()]


def measure(flags, rate):
    """By system: tokens a second, and bytes that the first rank sent a step, of every round."""
    chosen = lambda name: name in references(rate) or any(word in name for word in flags.only)
    systems = {name: run for name, run in SYSTEMS.items() if chosen(name)}
    results = {name: ([], []) for name in systems}
    for _ in range(flags.rounds):
        for name, run in systems.items():
            before = None if rate == "local" else sent()[0]
            line = run(flags, rate)
            results[name][0].append(line["tokens_per_s"])
            if before is not None:
                results[name][1].append((sent()[0] - before) / (flags.steps + WARM_UP))
            if flags.raw:
                with flags.raw.open("a") as raw:
                    raw.write(json.dumps({"rate": rate, "name": name, **line}) + "\n")
    return results


def table(flags):
    print("| link | system | tokens/s | MB sent a step | Guildhall's ratio | with the same capacity |")
    print("|---|---|---|---|---|---|")
    for rate in flags.rates:
        ours, ours_dropping = references(rate)
        if rate != "local":
            subprocess.run([LINKS, "down", "2"], check=True)
            subprocess.run([LINKS, "up", "2", rate], check=True)
        try:
            results = measure(flags, rate)
        finally:
            if rate != "local":
                subprocess.run([LINKS, "down", "2"], check=True)
        for name, (tokens, moved) in results.items():
            def ratio(to):
                return "" if name == to else f"{statistics.median(a / b for a, b in zip(results[to][0], tokens)):.2f}"

            bytes_sent = f"{statistics.median(moved) / 1e6:.1f}" if moved else ""
            same = ratio(ours_dropping if name.endswith(DROPPING) else ours)
            print(f"| {rate} | {name} | {statistics.median(tokens):.0f} | {bytes_sent} | {ratio(ours)} | {same} |", flush=True)


table(flags())
