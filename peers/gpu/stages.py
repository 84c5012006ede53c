#!/usr/bin/env python3
"""stages.py STAGE: one of run.sh's, which says what it is to use. The last line printed is the result in short; exit code 0 if
all is well, also where a tool is missing, which the last line says (SKIPPED)."""

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

KIT = Path(__file__).resolve().parent
WORK, OUT = KIT / "work", Path(os.environ["KIT_OUT"])
TINY, BACKEND, TORCH = os.environ["KIT_TINY"] == "1", os.environ["KIT_BACKEND"], os.environ["KIT_TORCH"]
OURS = {**os.environ, "HOME": str(WORK / "home"), "LD_LIBRARY_PATH": os.environ["KIT_LIBRARIES"]}
THREADS = str(os.cpu_count())
GUILDHALL = str(WORK / "bin/guildhall")
TEXT = ["--set", 'data.sources=["text/*.md"]', "--set", f"data.cache={WORK}/data"]

# Dense bf16 products of tensor cores by NVIDIA's data sheets, TFLOP/s. The first that the card's name contains.
PEAKS = [("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989.4), ("H200", 989.4), ("GH200", 989.4), ("B200", 2250),
         ("A100", 312)]

# Losses of f32 runs with the same routing differ by the order of sums; bf16 has eight significant bits. Training magnifies
# differences: after some twenty steps two runs of the processor are farther apart than NEAR, too, and those of a GPU may be
# SPREADS times as far.
NEAR, NEAR_BF16, SPREADS = 1e-4, 2e-2, 3


def start(command, env, seconds=None):
    """Runs a command, printing each line when it comes. Its exit code (-9 if it was ended after so many seconds) and output."""
    print("$", " ".join(map(str, command)), flush=True)
    begun, lines = time.monotonic(), []
    child = subprocess.Popen(command, cwd=KIT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace")
    clock = threading.Timer(seconds, child.kill) if seconds else None
    if clock:
        clock.start()
    for line in child.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = child.wait()
    if clock:
        clock.cancel()
    print(f"[exit code {code} after {time.monotonic() - begun:.1f} s]", flush=True)
    return code, "".join(lines)


def finish(is_well, words):
    print(("" if is_well else "WRONG: ") + words, flush=True)
    sys.exit(0 if is_well else 1)


def skip(words):
    print(f"SKIPPED: {words}", flush=True)
    sys.exit(0)


def tool(name):
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def peak():
    """The card's name and its peak, if known."""
    if not tool("nvidia-smi"):
        return "no card", None
    asked = [tool("nvidia-smi"), "--query-gpu=name", "--format=csv,noheader"]
    name = (subprocess.run(asked, capture_output=True, text=True).stdout.splitlines() or ["no card"])[0].strip()
    return name, next((peak for part, peak in PEAKS if part in name), None)


# --- training against the processor's run ------------------------------------------------------------------------------

def losses(run, file="metrics.jsonl"):
    return [json.loads(line)["loss"] for line in (run / file).read_text().splitlines()]


def train(name, steps, tolerance, *options, ranks=1):
    """Trains with the routing of the processor's run and compares the losses."""
    steps, run = 2 if TINY else steps, WORK / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    fixed = (KIT / "reference/options").read_text().split()
    # Steps are the first of the processor's.
    command = [GUILDHALL, "train", "recipes/quickstart.toml", "--backend", BACKEND, "--ranks", str(ranks), *TEXT, *fixed,
               "--set", f"train.steps={steps}", "--set", f"parallel.expert={ranks}",
               "--set", "moe.replay=reference/routes", "--set", f"run.dir={run}", *options]
    code, _ = start(command, OURS)
    if code != 0:
        finish(False, f"exit code {code}")
    want, got = losses(KIT / "reference")[:steps], losses(run)
    rows = list(enumerate(zip(want, got), 1))
    print("step, processor's loss, this loss:")
    for step, (a, b) in rows if steps <= 10 else rows[:3] + rows[4::5]:
        print(f"{step:5} {a:.7f} {b:.7f} {abs(a - b) / a:.1e}")
    apart = [abs(a - b) / a for a, b in zip(want, got)]
    spread = [abs(a - b) / a for a, b in zip(want, losses(KIT / "reference", "two_ranks.jsonl"))]
    # The farthest that two runs of the processor have been up to a step.
    allowed = [max(tolerance, SPREADS * max(spread[:step + 1])) for step in range(steps)]
    worst = max(apart)
    is_well = len(got) == steps and all(far <= most for far, most in zip(apart, allowed))
    speeds = [json.loads(line)["tokens_per_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    finish(is_well, f"{len(got)} of {steps} steps, losses within {worst:.1e} of the processor's "
                    f"(at most {tolerance:.0e}, later {allowed[-1]:.0e}: two runs of the processor differ by {max(spread):.0e}); "
                    f"median {statistics.median(speeds):.0f} tokens/s")


def devices():
    if tool("nvidia-smi"):
        start([tool("nvidia-smi")], os.environ)
    commit, python = (KIT / "commit").read_text().strip(), sys.version.split()[0]
    print(f"commit {commit}; python {python}; libraries by {OURS['LD_LIBRARY_PATH']}")
    code, told = start([GUILDHALL, "devices"], OURS)
    lines = [line for line in told.splitlines() if line.split()[:2] == [BACKEND, "ready"]]
    finish(code == 0 and bool(lines), lines[0] if lines else f"{BACKEND} is not ready")


def ops():
    program, filters = str(WORK / "bin/ops_accelerators"), ["golden", "swiglu"] if TINY else []
    # Without a compiler the suite runs on the GPU alone, unless there is none.
    env = {**OURS, "PATH": str(WORK / "lib")} if BACKEND == "cuda" else {**OURS, "PATH": os.environ["KIT_PATH"]}
    code, told = start([program, *filters, "--test-threads", "8"], env)
    lines = [line.split() for line in told.splitlines() if line.startswith("test ") and " ... " in line]
    failed = [words[1] for words in lines if words[-1] == "FAILED"]
    # One that breaks the device breaks those after it, so each again alone.
    alone = []
    for name in failed[:12]:
        again, said = start([program, "--exact", name, "--test-threads", "1"], env, 15)
        if again != 0:
            alone.append(name)
    passed = sum(words[-1] == "ok" for words in lines)
    words = f"{passed} of {len(lines)} tests passed"
    if failed:
        words += f"; failed: {' '.join(failed)}; alone, of the first {min(12, len(failed))}: {' '.join(alone) or 'none'}"
    finish(code == 0 and passed > 0, words)


def quickstart():
    train("quickstart", 50, NEAR)


def two_ranks():
    train("two_ranks", 20, NEAR, ranks=2)


def offload():
    train("offload", 20, NEAR, "--set", "memory.offload=host")


def bf16():
    train("bf16", 50, NEAR_BF16, "--set", "train.dtype=bf16")


# --- speed -------------------------------------------------------------------------------------------------------------

def profile():
    """Which kernels take how much of a step. Each is waited for, so short ones seem longer than they are."""
    profiles, problem = {}, None
    one_rank = ["--ranks", "1", "--set", "parallel.expert=1", *(KIT / "reference/options").read_text().split()]
    for name, recipe, options in [("decoder, bf16", "decoder.toml", []),
                                  ("quickstart, f32", "recipes/quickstart.toml", one_rank)]:
        small = ["--set", "model.d_model=32", "--set", "model.heads=2", "--set", "model.kv_heads=2", "--set", "model.layers=2",
                 "--set", "moe.d_expert=16", "--set", "moe.experts=4", "--set", "moe.top_k=2", "--set", "model.seq=32",
                 "--set", "train.batch_tokens=64"] if TINY else []
        steps = "1" if TINY else "5"
        code, told = start([GUILDHALL, "bench", recipe, "--backend", BACKEND, "--json", "--steps", steps, *TEXT, *options, *small,
                            "--set", f"run.dir={WORK}/runs/profile"], OURS)
        begin = told.find("\n{") + 1 if not told.startswith("{") else 0
        if code != 0:
            problem = f"{name}: exit code {code}"
            continue
        profiles[name], _ = json.JSONDecoder().raw_decode(told[begin:])
    (OUT / "profile.json").write_text(json.dumps(profiles, indent=1))
    for name, found in profiles.items():
        seconds = found["seconds"]
        print(f"\n{name}: {seconds * 1e3:.2f} ms a step, {found['tokens_per_s']:.0f} tokens/s, "
              f"{found['model_flop'] / seconds / 1e12:.2f} TFLOP/s of the model (with a wait after each kernel)")
        print(f"{'ms a step':>10} {'share':>6} {'calls':>7} {'us each':>9}  kernel")
        kernels = [found["products"], found["attention"], *found["others"]]
        for kernel in sorted(kernels, key=lambda kernel: -kernel["seconds"]):
            took, calls = kernel["seconds"], kernel["calls"]
            if calls:
                print(f"{took * 1e3:10.3f} {took / seconds:6.1%} {calls:7.1f} {took / calls * 1e6:9.1f}  {kernel['name']}")
        rest = seconds - sum(kernel["seconds"] for kernel in kernels)
        print(f"{rest * 1e3:10.3f} {rest / seconds:6.1%}                    outside of kernels")
    if problem:
        finish(False, problem)
    first = profiles["decoder, bf16"]
    longest = sorted([first["products"], first["attention"], *first["others"]], key=lambda one: -one["seconds"])[:5]
    words = ", ".join(f"{one['name']} {one['seconds'] / first['seconds']:.0%}" for one in longest)
    finish(True, f"decoder, bf16: {words}")


def bench(stage, label, command, env):
    """The JSON lines of a benchmark; none if it fails."""
    code, told = start(command, env)
    if code != 0:
        print(f"[{label}: exit code {code}]", flush=True)
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"')] if code == 0 else []
    with (OUT / "lines.jsonl").open("a") as file:
        file.writelines(json.dumps({"stage": stage, "label": label, **line}) + "\n" for line in lines)
    return lines


def ours(name, *options):
    return [str(WORK / "bin" / name), "--backend", BACKEND, "--threads", THREADS, *options]


def theirs(script, *options):
    return [sys.executable, str(KIT / "pytorch" / script), "--device", TORCH, "--threads", THREADS, *options]


def interleaved(stage, commands, rounds, flop_of):
    """Runs ours and theirs alternately and prints a table; `flop_of` a line is a step's floating-point operations."""
    commands = [one for one in commands if TORCH != "none" or one[0].startswith("guildhall")]
    found = {}
    for number in range(1 if TINY else rounds):
        for label, command, once in commands:
            if once and number > 0:
                continue
            for line in bench(stage, label, command, OURS if label.startswith("guildhall") else os.environ):
                found.setdefault((line["workload"], label), []).append(line)
    card, most = peak()
    print(f"\n{card}; peak {most or 'unknown'} TFLOP/s of bf16. Medians over rounds of each process's median.")
    print(f"{'ms':>10} {'fastest':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'of peak':>8}  of PyTorch's time | system | workload")
    short, fastest_of_torch = [], {}
    for (workload, label), lines in found.items():
        if not label.startswith("guildhall"):
            ms = statistics.median(line["ms_per_step"] for line in lines)
            fastest_of_torch[workload] = min(ms, fastest_of_torch.get(workload, ms))
    for (workload, label), lines in sorted(found.items(), key=lambda item: item[0]):
        ms = statistics.median(line["ms_per_step"] for line in lines)
        tflops = flop_of(lines[0]) / ms / 1e9
        share = f"{tflops / most:8.1%}" if most and "f32" not in workload else " " * 8
        rival = fastest_of_torch.get(workload)
        ratio = f"{ms / rival:6.2f}" if rival else "   -  "
        fastest = min(line["ms_min"] for line in lines)
        print(f"{ms:10.3f} {fastest:9.3f} {lines[0]['tokens_per_s']:10.0f} {tflops:8.2f} {share}  {ratio} | {label} | {workload}")
        if label.startswith("guildhall") and rival:
            short.append(f"{workload}: {ms:.2f} ms, {tflops:.2f} TFLOP/s, {ms / rival:.2f} of PyTorch's time")
    missing = [label for label, *_ in commands if not any(label == of for _, of in found)]
    if missing:
        finish(False, f"nothing from {', '.join(missing)}; " + "; ".join(short))
    without = " (PyTorch left out)" if TORCH == "none" else ""
    finish(True, ("; ".join(short) or "see above") + without)


def layer():
    """The experts' layer of Qwen3-30B-A3B's sizes."""
    tokens, model, inner, experts, k = (64, 32, 16, 4, 2) if TINY else (16384, 2048, 768, 128, 8)
    sizes = ["--gated", "--dtype", "bf16", "--tokens", str(tokens), "--model", str(model), "--inner", str(inner),
             "--experts", str(experts), "--k", str(k), "--steps", "1" if TINY else "9"]
    interleaved("layer", [
        ("guildhall", ours("layer", *sizes), False),
        ("torch grouped_mm", theirs("layer.py", "--impl", "grouped", *sizes), False),
    ], 2, lambda _: 18 * tokens * k * model * inner)


def step():
    """A whole training step of a decoder with 0.7 G parameters. PyTorch: weights in f32 under autocast, or all in bf16."""
    names = ["width", "inner", "layers", "heads", "experts", "k", "vocab"]
    numbers = (32, 24, 2, 2, 4, 2, 300) if TINY else (1024, 768, 8, 16, 32, 4, 32768)
    rows, seq = (2, 16) if TINY else (8, 2048)
    width, inner, layers, _, experts, k, vocab = numbers
    sizes = [word for name, number in zip(names, numbers) for word in (f"--{name}", str(number))]
    sizes += ["--steps", "1" if TINY else "6"]
    shape = f"{rows}x{seq}"
    active = layers * (4 * width * width + 3 * k * width * inner + width * experts) + vocab * width
    # Attention to what comes before, forward and back.
    flop = rows * seq * (6 * active + 6 * layers * seq * width)
    ours_sizes, torch_sizes = [*sizes, "--shapes", shape], [*sizes, "--shape", shape, "--moe", "grouped"]
    interleaved("step", [
        ("guildhall bf16", ours("step", "--workload", "moe", "--dtype", "bf16", *ours_sizes), False),
        ("torch autocast", theirs("decoder.py", "--dtype", "autocast", *torch_sizes), False),
        ("torch bf16", theirs("decoder.py", "--dtype", "bf16", *torch_sizes), True),
    ], 2, lambda _: flop)


def gemm():
    half = "64x32x32" if TINY else "8192x8192x8192,16384x4096x2048,16384x2048x2048,1024x1536x2048"
    whole = "32x32x32" if TINY else "4096x4096x4096"
    steps = ["--steps", "1" if TINY else "9"]
    experts = ("2", "8", "32", "32") if TINY else ("128", "1024", "1536", "2048")
    grouped = [word for pair in zip(["--experts", "--rows", "--outer", "--inner"], experts) for word in pair]

    def flop(line):
        return line["gflops"] * line["ms_per_step"] * 1e6

    interleaved("gemm", [
        ("guildhall", ours("gemm", "--dtype", "bf16", "--shapes", half, *steps), False),
        ("torch", theirs("mm.py", "--dtype", "bf16", "--shapes", half, *steps), False),
        ("guildhall f32", ours("gemm", "--shapes", whole, *steps), True),
        ("torch f32", theirs("mm.py", "--shapes", whole, *steps), True),
        ("guildhall experts", ours("gemm", "--dtype", "bf16", *grouped, *steps), True),
    ], 1, flop)


# --- the vendor's tools ------------------------------------------------------------------------------------------------

def small_run(name):
    """A few kernels of each kind."""
    return [GUILDHALL, "train", "recipes/small.toml", "--backend", BACKEND, *TEXT, "--set", "train.steps=1",
            "--set", "train.batch_tokens=128", "--set", "train.dtype=bf16", "--set", f"run.dir={WORK}/runs/{name}"]


def sanitizer():
    program = tool("compute-sanitizer")
    if not program:
        code, _ = start(small_run("sanitizer"), OURS)
        if code != 0:
            finish(False, f"no compute-sanitizer, and the run that it would watch ends with exit code {code}")
        skip("no compute-sanitizer on this machine")
    verdicts, is_well = [], True
    for checks in ["memcheck", "racecheck"]:
        watched = ["--print-limit", "20", "--error-exitcode", "9", *small_run("sanitizer")]
        code, told = start([program, "--tool", checks, *watched], OURS, 28)
        summary = [line.strip("= ") for line in told.splitlines() if "SUMMARY" in line]
        refused = [line.strip("= ") for line in told.splitlines() if "not supported" in line]
        verdicts.append(f"{checks}: {(summary or refused or [f'exit code {code}'])[-1]}")
        is_well &= code == 0 and bool(summary)
    finish(is_well, "; ".join(verdicts))


def ncu():
    """Times of kernels by the device's own counters, cuBLAS's by name."""
    program = tool("ncu")
    if not program:
        skip("no ncu on this machine")
    counters = ["gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
                "sm__throughput.avg.pct_of_peak_sustained_elapsed"]
    # The first step takes memory.
    watch = [program, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(counters),
             "--launch-skip", "1300", "--launch-count", "2000"]
    code, told = start([*watch, GUILDHALL, "train", "decoder.toml", "--backend", BACKEND, *TEXT, "--set", "model.layers=2",
                        "--set", "train.batch_tokens=8192", "--set", "train.steps=3", "--set", f"run.dir={WORK}/runs/ncu"], OURS)
    lines = told.splitlines()
    header = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        finish(False, f"exit code {code}, and no table of ncu's")
    kernels = {}
    for row in csv.DictReader(line for line in lines[header:] if line.startswith('"')):
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue
        kernels.setdefault(row["Kernel Name"], {}).setdefault(row["Metric Name"], []).append(value)
    print(f"\n{'ms':>9} {'calls':>6} {'us each':>9} {'DRAM %':>7} {'SM %':>6}  kernel")
    total = sum(sum(found.get(counters[0], [])) for found in kernels.values())
    order = sorted(kernels.items(), key=lambda item: -sum(item[1].get(counters[0], [])))
    for name, found in order[:40]:
        times = found.get(counters[0], [0.0])
        dram, busy = (statistics.mean(found.get(counter, [0.0])) for counter in counters[1:])
        print(f"{sum(times) / 1e6:9.3f} {len(times):6} {statistics.mean(times) / 1e3:9.1f} {dram:7.1f} {busy:6.1f}  {name[:110]}")
    if not total:
        finish(False, "no times")
    finish(True, ", ".join(f"{name[:40]} {sum(found.get(counters[0], [])) / total:.0%}" for name, found in order[:4]))


STAGES = [devices, ops, quickstart, two_ranks, offload, bf16, profile, layer, step, gemm, sanitizer, ncu]

if __name__ == "__main__":
    {stage.__name__: stage for stage in STAGES}[sys.argv[1]]()
