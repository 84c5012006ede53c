#!/usr/bin/env python3
"""What a checkpoint costs a run on disks of several speeds, where training waits for it and where it goes on.

  benches/storage/run.py PROGRAM [--rates 0 40 10] [--rounds 3]

PROGRAM is built with `cargo build --release`. Needs root: the run's folder is an ext4 in a file behind a loop device, which
the kernel's I/O controller (cgroup v1, blkio.throttle.write_bps_device) lets a run write so many MB a second; 0 is the
machine's own speed. In every round each rate is run both ways, in turn; figures are medians over rounds. `parallel.timeout_s`
is 2, less than most of the writes take. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = str(ROOT / "recipes/quickstart.toml")
BLKIO = Path("/sys/fs/cgroup/blkio/guildhall-storage")
# 30 million parameters: 362 MB a checkpoint.
SETTINGS = ["model.d_model=512", "moe.d_expert=512", "train.batch_tokens=512", "train.eval_every=0", "parallel.timeout_s=2",
            "train.warmup_steps=4"]
# One checkpoint, and the last.
EVERY, BEHIND = 40, 39
MANNERS = {"waits": "false", "goes on": "true"}


def run(*command, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout.strip()


def train(flags, rate, manner, disk):
    """Seconds behind which each step ended, and of the whole run."""
    settings = [*SETTINGS, f"run.dir={disk}/run", f"train.checkpoint_every={EVERY}", f"train.steps={EVERY + BEHIND}",
                "train.keep=1", f"train.checkpoint_async={MANNERS[manner]}"]
    options = [word for setting in settings for word in ("--set", setting)]

    def join():
        if rate:
            (BLKIO / "cgroup.procs").write_text(str(os.getpid()))

    run(flags.program, "train", RECIPE, *options, cwd=ROOT, preexec_fn=join)
    lines = (disk / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines]


def measure(flags, rate, manner):
    """Seconds of a step before the checkpoint, of the one behind it, of those while it is written, and of all behind it."""
    with tempfile.TemporaryDirectory() as folder:
        image, disk = Path(folder) / "image", Path(folder) / "disk"
        with open(image, "wb") as file:
            file.truncate(4 << 30)
        disk.mkdir()
        device = run("losetup", "--find", "--show", str(image))
        try:
            run("mkfs.ext4", "-q", device)
            run("mount", device, str(disk))
            BLKIO.mkdir()
            numbers = run("lsblk", "-no", "MAJ:MIN", device)
            (BLKIO / "blkio.throttle.write_bps_device").write_text(f"{numbers} {rate * 10**6}")
            ends = train(flags, rate, manner, disk)
        finally:
            subprocess.run(["umount", str(disk)])
            subprocess.run(["losetup", "-d", device])
            BLKIO.rmdir()
    took = [after - before for before, after in zip(ends, ends[1:])]
    before, behind = took[2:EVERY - 1], took[EVERY - 1:]
    return statistics.median(before), behind[0], statistics.median(behind[1:]), sum(behind)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 40, 10])
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    run(flags.program, "prepare", RECIPE, cwd=ROOT)
    seen = {}
    for _ in range(flags.rounds):
        for rate in flags.rates:
            for manner in MANNERS:
                seen.setdefault((rate, manner), []).append(measure(flags, rate, manner))
    print(f"| disk, MB/s | training | step before | step behind the checkpoint | median step behind | {BEHIND} steps behind |")
    print("|---|---|---|---|---|---|")
    for (rate, manner), rounds in seen.items():
        figures = [f"{statistics.median(column):.2f} s" for column in zip(*rounds)]
        print(f"| {rate or 'its own'} | {manner} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
