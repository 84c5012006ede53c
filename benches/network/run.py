#!/usr/bin/env python3
"""Seconds and bytes of a step over limited links, with and without each thing that saves messages.

  benches/network/run.py PROGRAM [--rates 1gbit 100mbit] [--rounds 3] [--only NAME..]

PROGRAM is built with `cargo build --release --features mpi`. Every rank is a process of Open MPI in a network namespace of
its own (peers/network/links.sh: root, iproute2), so that bytes are those that its device has sent, acknowledgements
included. In every round each case runs without and with, in turn; a figure is the median over rounds of the medians over
steps, the first three left out, a ratio the median of the ratios within rounds. Counted bytes are the program's, of all ranks in a
step. Planned ones are those of `guildhall plan` for the routing that the run recorded, with what was condensed, shadowed and
migrated. The planned ratio of seconds is for a device with this machine's measured rates and the limited link; it is told what
share of the rows was condensed, and takes the routing to be even. Prints Markdown.
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
LINK_LATENCY_US = 30
LINKS, RECIPE = str(ROOT / "peers/network/links.sh"), str(HERE / "decoder.toml")
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WARM_UP, SECONDS_MAX = 3, 400
# Of a step of the recipe.
TOKENS = 2048

EXPERTS = ["parallel.expert=4"]
SLICES = ["parallel.tensor=2", "parallel.expert=2"]
BLOCKS = ["memory.recompute=block"]
SKEWED = [*EXPERTS, "moe.balance_weight=0"]
# name: what all have, what is without, what is with; of four nodes, or of two with two ranks each
CASES = {
    "smart schedule": (EXPERTS, ["moe.schedule=plain"], ["moe.schedule=smart"]),
    "overlapped gradients": (EXPERTS, ["parallel.overlap=false"], ["parallel.overlap=true"]),
    "training in bf16": (EXPERTS, ["train.dtype=f32"], ["train.dtype=bf16"]),
    "duplicates dropped (DTD)": (SLICES, ["moe.drop_duplicates=false"], ["moe.drop_duplicates=true"]),
    "communication kept (CAC)": ([*EXPERTS, *BLOCKS], ["memory.keep_communication=false"],
                                 ["memory.keep_communication=true"]),
    "condensation at 0.8": (EXPERTS, ["moe.condense=off"], ["moe.condense=static", "moe.condense_threshold=0.8"]),
    "migration, forced": (EXPERTS, ["parallel.migrate=off"], ["parallel.migrate=force"]),
    "migration, auto": (EXPERTS, ["parallel.migrate=off"], ["parallel.migrate=auto"]),
    "shadowing, auto": (SKEWED, ["moe.shadowing=off"], ["moe.shadowing=auto"]),
    "experts travel (EXT)": (EXPERTS, ["parallel.exchange=tokens"], ["parallel.exchange=experts"]),
    "experts change ranks": ([*SKEWED, "moe.experts=16"], ["parallel.replace_every=0"],
                             ["parallel.replace_every=3", "parallel.replace_gain=0"]),
    "all-to-all in two levels": (EXPERTS, ["parallel.all_to_all=direct"], ["parallel.all_to_all=two_level"]),
    "all-to-all in two dimensions": (EXPERTS, ["parallel.all_to_all=direct"], ["parallel.all_to_all=two_d"]),
}
ON_TWO_NODES = {"duplicates dropped (DTD)", "all-to-all in two levels", "all-to-all in two dimensions"}


def options(settings):
    return [word for setting in settings for word in ("--set", setting)]


def sent(nodes):
    text = subprocess.run([LINKS, "sent", nodes.split("x")[0]], capture_output=True, text=True, check=True).stdout
    return sum(map(int, text.split()))


def recorded(flags, settings):
    """The file with the routing of a run."""
    return Path(flags.cache, f"{abs(hash(tuple(settings)))}.routes")


def launched(flags, settings, nodes="4"):
    """The lines of metrics and the summary of a run on so many nodes, or NxK ranks on them."""
    for old in Path(flags.cache).glob(recorded(flags, settings).name + "*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as run:
        command = [flags.program, "train", RECIPE, *options(settings), "--set", f"run.dir={run}",
                   "--set", f"data.cache={flags.cache}", "--set", f"moe.record={recorded(flags, settings)}"]
        done = subprocess.run([LINKS, "mpirun", nodes, *command], cwd=ROOT, env={**os.environ, **ROOT_MAY},
                              capture_output=True, text=True, timeout=SECONDS_MAX)
        if done.returncode != 0:
            raise SystemExit(f"{settings}: {done.stderr}")
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        return lines, json.loads(Path(run, "summary.json").read_text())


def train(flags, settings, nodes="4"):
    """Seconds of a step and bytes that all nodes sent in it, of so many nodes or NxK ranks on them; bytes it counts; its summary."""
    before = sent(nodes)
    lines, summary = launched(flags, settings, nodes)
    seconds = statistics.median(TOKENS / line["tokens_per_s"] for line in lines[WARM_UP:])
    counted = sum(of_kind["bytes"] for of_kind in summary["traffic"].values()) / len(lines)
    return seconds, (sent(nodes) - before) / len(lines), counted, summary


def plan(flags, settings, *more):
    command = [flags.program, "plan", RECIPE, "--json", *options(settings), "--set", f"data.cache={flags.cache}"]
    command += map(str, more)
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def device(flags, rate, nodes):
    """A file with this machine's rates, of which each rank has its part, and a limited link between its nodes."""
    file = Path(flags.cache, f"{rate}-{nodes}.toml")
    if file.exists():
        return file
    here = plan(flags, EXPERTS)["device"]
    per_node = 4 // int(nodes.split("x")[0])
    share = min(1, os.cpu_count() / 4)
    gbytes = {"gbit": 1e-9 * 1e9 / 8, "mbit": 1e-9 * 1e6 / 8}[rate.lstrip("0123456789")] * int(rate[:-4]) / per_node
    file.write_text(f"""[device]
memory_gb = {here["memory"] / 1e9}
f32_tflops = {here["flops"][0] / 1e12}
bf16_tflops = {here["flops"][1] / 1e12}
efficiency = {share}
memory_gbytes_per_s = {here["bandwidth"] / 1e9 * share}
ranks_per_node = {per_node}
within = {{ latency_us = {here["within"]["latency_s"] * 1e6}, gbytes_per_s = {here["within"]["bandwidth"] / 1e9} }}
between = {{ latency_us = {LINK_LATENCY_US}, gbytes_per_s = {gbytes} }}
host_gbytes_per_s = {here["host"] / 1e9}
host_memory_gb = 8
""")
    return file


def placed(settings, nodes):
    """The settings of a plan for so many nodes: a single machine would be planned as one."""
    return settings if nodes == "4" else [*settings, "parallel.node_link={ranks_per_node=2,latency_us=0,gbytes_per_s=1000}"]


def planned_bytes(flags, settings, nodes):
    """Bytes that all ranks send in a step by the plan, routed as the last run with these settings was."""
    run = plan(flags, placed(settings, nodes), "--recording", recorded(flags, settings))["recorded"]
    return sum(sent["bytes"] for sent in run["traffic"]) / (run["last"] - run["first"] + 1)


def planned_seconds(flags, settings, rate, nodes, summary):
    """Seconds of a step by the plan, condensed as a run was."""
    told = (summary.get("condensed") or {}).get("uncomputed_share")
    return plan(flags, placed(settings, nodes), "--device", device(flags, rate, nodes), *(["--condensed", told] if told else []))["seconds_total"]


def row(flags, name, rate):
    shared, *both = CASES[name]
    both = [[*shared, *more] for more in both]
    nodes = "2x2" if name in ON_TWO_NODES else "4"
    # What is chosen by measured links may differ from round to round, and the plan of its bytes with it.
    measure = lambda settings: (*train(flags, settings, nodes), planned_bytes(flags, settings, nodes))
    rounds = [[measure(settings) for settings in both] for _ in range(flags.rounds)]
    of = lambda place, what: statistics.median(pair[place][what] for pair in rounds)
    without, with_it = (planned_seconds(flags, settings, rate, nodes, rounds[0][place][3]) for place, settings in enumerate(both))
    ratio = statistics.median(pair[0][0] / pair[1][0] for pair in rounds)
    counted, planned, sent_by_devices = 2, 4, 1
    sizes = [f"{of(place, what) / 1e6:.1f}" for place in (0, 1) for what in (counted, planned, sent_by_devices)]
    return [f"{of(0, 0):.2f}", f"{of(1, 0):.2f}", f"{ratio:.2f}", f"{without / with_it:.2f}", *sizes]


def table(flags):
    print("| link | | without, s | with, s | without/with | planned | counted MB | planned MB | sent MB | with: counted MB | planned MB | sent MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for rate in flags.rates:
        subprocess.run([LINKS, "down", "4"], check=True)
        subprocess.run([LINKS, "up", "4", rate], check=True)
        try:
            for name in flags.only or CASES:
                print(f"| {rate} | {name} | {' | '.join(row(flags, name, rate))} |", flush=True)
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
