#!/usr/bin/env python3
"""Runs Guildhall's benchmarks and its rivals' alternately on this machine and prints ratios as Markdown.

  peers/compare.py gpt|layer|sweep|sweep16|rows|rows16|moe1|moe2|comm|gemm|tape|gpt16|moe16|gemm16|roof|all --python VENV/bin/python --bin DIR

Every round runs ours and then each rival, each in a process of its own, so that whatever else slows the machine
slows all of them; a figure is the median over rounds of the processes' own medians, and a ratio is the median over
rounds of the ratios within a round. Ratios above 1 mean that Guildhall is faster; in `roof`, that the roof of our step
is. Standard library only."""

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parent
PROCESS_SECONDS_MAX = 900


def arguments():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", nargs="+", choices=[*COMPARISONS, "all"])
    flags.add_argument("--python", default=sys.executable, help="the interpreter that has torch and transformers")
    flags.add_argument("--bin", type=Path, default=ROOT / "target/release/deps", help="folder of built benchmarks")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--steps", type=int, default=9, help="timed steps of a process, after 3 others")
    flags.add_argument("--raw", type=Path, help="append every JSON line to this file")
    return flags.parse_args()


# --- what is compared: ours first ---------------------------------------------------------------------------------

def ours(flags, bench, *options):
    built = [path for path in flags.bin.glob(f"{bench}-*") if path.suffix == "" and os.access(path, os.X_OK)]
    if not built:
        sys.exit(f"no {bench}-* in {flags.bin}: run\n  cargo build --release --workspace --bench step --bench layer "
                 "--bench gemm --bench collectives")
    return "guildhall", [str(max(built, key=lambda path: path.stat().st_mtime)), *options]


def script(flags, path, env, *options):
    name = " ".join([Path(path).stem, *(option for option in options if not option.startswith("--"))])
    return f"{path.split('/')[0]} {name}, {env}", [flags.python, str(PEERS / path), "--env", env, *options,
                                                   "--steps", str(flags.steps)]


def gpt(flags):
    yield ours(flags, "step", "--workload", "gpt", "--steps", str(flags.steps))
    for env in ["stock", "unlocked", "best"]:
        yield script(flags, "pytorch/gpt.py", env)


def layer(flags):
    yield ours(flags, "layer", "--steps", str(flags.steps))
    for impl, env in [("loop", "stock"), ("loop", "best"), ("grouped", "best")]:
        yield script(flags, "pytorch/layer.py", env, "--impl", impl)


def sweep(flags):
    yield ours(flags, "layer", "--sweep", "--steps", str(flags.steps))
    for impl in ["loop", "grouped"]:
        label, command = script(flags, "pytorch/layer.py", "best", "--impl", impl)
        yield label, [*command, "--model", "512", "--inner", "2048", "--experts", "4,8,16,32,64"]


def sweep16(flags):
    yield ours(flags, "layer", "--sweep", "--dtype", "bf16", "--steps", str(flags.steps))
    for impl, dtype in [("loop", "bf16"), ("grouped", "bf16"), ("grouped", "autocast")]:
        label, command = script(flags, "pytorch/layer.py", "best", "--impl", impl, "--dtype", dtype)
        yield label, [*command, "--model", "512", "--inner", "2048", "--experts", "4,8,16,32,64"]


# 8192 tokens a step, in rows of 128 to 8192
SHAPES = "64x128,16x512,4x2048,1x8192"


def rows(flags):
    yield ours(flags, "step", "--workload", "gpt", "--shapes", SHAPES, "--steps", str(flags.steps))
    label, command = script(flags, "pytorch/gpt.py", "best")
    yield label, [*command, "--shapes", SHAPES]


def rows16(flags):
    yield ours(flags, "step", "--workload", "gpt", "--dtype", "bf16", "--shapes", SHAPES, "--steps", str(flags.steps))
    for dtype in ["bf16", "autocast"]:
        label, command = script(flags, "pytorch/gpt.py", "best", "--dtype", dtype)
        yield label, [*command, "--shapes", SHAPES]


def moe1(flags):
    yield ours(flags, "step", "--workload", "moe", "--ranks", "1", "--steps", str(flags.steps))
    for moe, env in [("loop", "stock"), ("loop", "best"), ("grouped", "best")]:
        yield script(flags, "pytorch/decoder.py", env, "--moe", moe)
    for impl in ["eager", "grouped_mm"]:
        yield script(flags, "transformers/mixtral.py", "best", "--impl", impl)


def moe2(flags):
    yield ours(flags, "step", "--workload", "moe", "--ranks", "2", "--steps", str(flags.steps))
    for moe, env in [("loop", "stock"), ("loop", "best"), ("grouped", "best")]:
        yield script(flags, "pytorch/decoder.py", env, "--moe", moe, "--procs", "2")


def gemm(flags):
    yield ours(flags, "gemm", "--steps", str(flags.steps))
    yield script(flags, "pytorch/mm.py", "best")


def gpt16(flags):
    yield ours(flags, "step", "--workload", "gpt", "--dtype", "bf16", "--steps", str(flags.steps))
    for dtype in ["bf16", "autocast"]:
        yield script(flags, "pytorch/gpt.py", "best", "--dtype", dtype)


def moe16(flags):
    yield ours(flags, "step", "--workload", "moe", "--dtype", "bf16", "--steps", str(flags.steps))
    for moe in ["loop", "grouped"]:
        for dtype in ["bf16", "autocast"]:
            yield script(flags, "pytorch/decoder.py", "best", "--moe", moe, "--dtype", dtype)


def gemm16(flags):
    yield ours(flags, "gemm", "--dtype", "bf16", "--steps", str(flags.steps))
    yield script(flags, "pytorch/mm.py", "best", "--dtype", "bf16")


def comm(flags):
    yield ours(flags, "collectives", "4")
    program = Path(tempfile.gettempdir()) / f"peers-comm-{os.getuid()}"
    subprocess.run(["mpicc", "-O3", str(PEERS / "openmpi/comm.c"), "-o", str(program)], check=True)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "vader,self"]
    both = [" ".join([shlex.join(mpirun), "-n", ranks, str(program)]) for ranks in "24"]
    yield "Open MPI, shared memory", ["sh", "-c", " && ".join(both)]


def roof(flags):
    """In the place of ours what this machine allows."""
    places = [flags.bin / "guildhall", flags.bin.parent / "guildhall"]
    program = next((place for place in places if place.exists()), None)
    if program is None:
        sys.exit(f"no guildhall in {flags.bin} or above it: run\n  cargo build --release --bins")
    workload = "gpt d256 L4 F1024 V4096 b16x128 f32 x1"
    yield "roof", [sys.executable, str(PEERS / "roof.py"), "--program", str(program.resolve()), "--recipe",
                   "benches/step/dense.toml", "--workload", workload, "--steps", str(flags.steps)]
    yield ours(flags, "step", "--workload", "gpt", "--steps", str(flags.steps))
    yield script(flags, "pytorch/gpt.py", "best")


def tape(flags):
    for workload in ["gpt", "moe"]:
        label, command = ours(flags, "step", "--workload", workload, "--tape-overhead", "--steps", str(flags.steps))
        yield f"{label} {workload}", command


COMPARISONS = {f.__name__: f for f in [gpt, layer, sweep, sweep16, rows, rows16, moe1, moe2, comm, gemm, tape, gpt16, moe16, gemm16, roof]}


# --- running ------------------------------------------------------------------------------------------------------

def run(label, command, raw):
    """The JSON lines of one process, by workload; none if it fails, which is said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        print(f"{label} took more than {PROCESS_SECONDS_MAX} s", file=sys.stderr)
        return {}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        print(f"{label} failed ({done.returncode}): {last}", file=sys.stderr)
        return {}
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if raw:
        with raw.open("a") as file:
            file.writelines(json.dumps({"label": label, **line}) + "\n" for line in lines)
    return {line["workload"]: line for line in lines}


def interleaved(commands, flags, name):
    """`rounds[i][label]`: what `run` gives."""
    rounds = []
    for number in range(flags.rounds):
        print(f"{name}: round {number + 1} of {flags.rounds}, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
        rounds.append({label: run(label, command, flags.raw) for label, command in commands})
    return rounds


# --- tables -------------------------------------------------------------------------------------------------------

def milliseconds(line):
    return line["us"] / 1e3 if "us" in line else line["ms_per_step"]


def table(name, commands, rounds):
    labels = [label for label, _ in commands]
    workloads = list(dict.fromkeys(workload for one in rounds for label in labels for workload in one[label]))
    print(f"\n### {name}\n")
    print("| workload | system | ms | spread | tokens/s | peak MB | loss first, last | ours is faster by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for workload in workloads:
        for label in labels:
            lines = [one[label][workload] for one in rounds if workload in one[label]]
            if lines:
                pairs = [(one[labels[0]].get(workload), one[label].get(workload)) for one in rounds]
                print(f"| {workload} | {label} | {' | '.join(cells(lines))} | {ratio(pairs, label == labels[0])} |")


def cells(lines):
    ms = [milliseconds(line) for line in lines]
    digits = 6 if max(ms) < 0.01 else 4 if max(ms) < 1 else 2 if max(ms) < 100 else 0
    peaks = [line["peak_rss_mb"] for line in lines if line.get("peak_rss_mb")]
    rate = statistics.median(line.get("tokens_per_s", 0) for line in lines)
    first, last = lines[-1].get("loss_first"), lines[-1].get("loss_last")
    return [f"{statistics.median(ms):.{digits}f}", f"{min(ms):.{digits}f} to {max(ms):.{digits}f}",
            f"{rate:.0f}" if rate else "", str(max(peaks)) if peaks else "", f"{first}, {last}" if first else ""]


def ratio(pairs, is_ours):
    ratios = [milliseconds(rival) / milliseconds(own) for own, rival in pairs if own and rival]
    return "" if is_ours or not ratios else f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def notes(rounds):
    """What the tape costs is said in notes."""
    for label, lines in rounds[-1].items():
        for line in lines.values():
            print(f"\n{label}: {line['notes']}")


def machine():
    fields = dict(line.split(":", 1) for line in subprocess.getoutput("lscpu").splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    commit = subprocess.getoutput(f"git -C {shlex.quote(str(ROOT))} describe --always --dirty --abbrev=10 --match=none")
    now = datetime.datetime.now(datetime.timezone.utc)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    vector = "AVX-512" if "avx512f" in fields.get("Flags", "") else "no AVX-512"
    return (f"{fields.get('Model name', 'unknown CPU')} (family {fields.get('CPU family')}, model "
            f"{fields.get('Model')}, {vector}), {os.cpu_count()} cores, {memory:.0f} GiB; "
            f"commit {commit}; {now:%Y-%m-%d %H:%M} UTC")


def main():
    flags = arguments()
    names = list(COMPARISONS) if "all" in flags.what else list(dict.fromkeys(flags.what))
    print(f"{machine()}. {flags.rounds} rounds of {flags.steps} steps, interleaved; medians.")
    for name in names:
        commands = list(COMPARISONS[name](flags))
        rounds = interleaved(commands, flags, name)
        table(name, commands, rounds)
        if name == "tape":
            notes(rounds)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
