#!/usr/bin/env python3
"""What a step would take on this machine with products at the ceiling and all else at the speed of memory, by
`guildhall bench`, as one JSON line of the form that compare.py reads. Standard library only."""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--program", required=True, help="the built guildhall")
    flags.add_argument("--recipe", required=True, help="in the folder of this project")
    flags.add_argument("--workload", required=True, help="as the rivals call it")
    flags.add_argument("--steps", default="9")
    flags = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [flags.program, "bench", flags.recipe, "--steps", flags.steps, "--json", "--set", f"run.dir={folder}/run"]
        speed = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(json.dumps({"workload": flags.workload, "ms_per_step": 1e3 * speed["roof"], "step_ms": 1e3 * speed["mean"],
                      "ceiling_gflops": speed["ceilings"]["beside"] / 1e9,
                      "streamed_gbs": speed["ceilings"]["streamed_beside"] / 1e9}))
