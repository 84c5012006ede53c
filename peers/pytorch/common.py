"""What these scripts share: environments, timing, the token stream, and one JSON line a workload.

An environment is set before the process starts, since allocator and MKL read theirs then; a script replaces itself
with a copy that has the variables:

  stock     PyTorch as pip installs it
  malloc    glibc keeps freed blocks instead of returning them to the system, so no step faults its pages in again
  unlocked  MKL is told that the CPU is Intel's, so that it takes its AVX-512 kernels on AMD too (no effect on Intel)
  best      malloc and unlocked
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GIB = 1 << 30
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 * GIB),
    "MALLOC_TOP_PAD_": str(GIB // 4),
}


def parser(about):
    flags = argparse.ArgumentParser(description=about)
    flags.add_argument("--env", default="stock", choices=["stock", "malloc", "unlocked", "best"])
    flags.add_argument("--threads", type=int, default=2, help="of the whole run")
    flags.add_argument("--warmup", type=int, default=3)
    flags.add_argument("--steps", type=int, default=9)
    flags.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    flags.add_argument("--lr", type=float, default=1e-3)
    flags.add_argument("--dtype", default="f32", choices=["f32", "bf16", "autocast"],
                       help="of weights and activations; autocast: f32 weights, products in bf16")
    return flags


def enter(flags, processes=1):
    """Restarts in the chosen environment and, for more than one process, as that many ranks. Call before torch."""
    if os.environ.get("PEERS_ENV") != flags.env:
        threads = str(max(1, flags.threads // processes))
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PEERS_ENV": flags.env}
        if flags.env in ("malloc", "best"):
            variables |= KEEP_MEMORY
        if flags.env in ("unlocked", "best"):
            variables["LD_PRELOAD"] = unlocking_library()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})
    if processes > 1 and "RANK" not in os.environ:
        sys.exit(run_ranks(processes))
    return int(os.environ.get("RANK", 0))


def unlocking_library():
    """A library whose only function answers MKL's question after the CPU's maker."""
    library = Path(tempfile.gettempdir()) / f"peers-unlock-{os.getuid()}.so"
    if not library.exists():
        source = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", fresh], input=source, text=True, check=True)
        fresh.replace(library)
    return str(library)


def run_ranks(processes):
    """This script once a rank, on this machine; the number of ranks that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **world, "RANK": str(rank)})
             for rank in range(processes)]
    return sum(rank.wait() != 0 for rank in ranks)


def finished(flags):
    """Waits for the GPU, which runs on by itself."""
    if flags.device == "cuda":
        import torch
        torch.cuda.synchronize()


def stream(length):
    """Tokens that any language reproduces: a walk modulo 251 with two random bits a token, from a 64-bit LCG.

    Its entropy is ln 4 a token; a few steps of training go from ln(vocabulary) towards ln 251."""
    state, token, tokens = 1, 0, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        token = (5 * token + 7 + (state >> 62)) % 251
        tokens.append(token)
    return tokens


def timed(step, flags):
    """Milliseconds of the timed steps, and what every step returned, the warm-up's included."""
    ms, results = [], []
    for _ in range(flags.warmup + flags.steps):
        begun = time.perf_counter()
        results.append(step())
        ms.append((time.perf_counter() - begun) * 1e3)
    return ms[flags.warmup:], results


def peak_rss_mb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return -(-int(line.split()[1]) // 1024)
    return None


def emit(system, workload, tokens, ms, losses, notes, peak=None, **more):
    median = statistics.median(ms)
    line = {
        "system": system,
        "workload": workload,
        "tokens_per_s": round(tokens / median * 1e3, 1),
        "ms_per_step": round(median, 3),
        "ms_min": round(min(ms), 3),
        "peak_rss_mb": peak or peak_rss_mb(),
        "loss_first": round(losses[0], 4) if losses else None,
        "loss_last": round(losses[-1], 4) if losses else None,
        "env": os.environ.get("PEERS_ENV", "stock"),
        "notes": notes,
    }
    print(json.dumps(line | more), flush=True)
