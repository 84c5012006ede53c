#!/usr/bin/env python3
"""note.py STAGE CODE SECONDS LIMIT LOG OUT: adds a stage's line to OUT/stages.jsonl and what it printed to OUT/logs.txt."""

import json
import sys
from pathlib import Path

LINES, BYTES_MAX = 12, 400_000

stage, code, seconds, limit, log, out = sys.argv[1:]
text = Path(log).read_text(errors="replace")
lines = [line[:300] for line in text.splitlines() if line.strip()]
last = lines[-1] if lines else ""
verdict = "passed" if code == "0" else "out of time" if code in ("124", "137") else "failed"
if code == "0" and last.startswith("SKIPPED"):
    verdict = "skipped"
line = {"stage": stage, "verdict": verdict, "rc": int(code), "seconds": int(seconds), "limit": int(limit),
        "last": lines[-LINES:]}
with (Path(out) / "stages.jsonl").open("a") as file:
    file.write(json.dumps(line) + "\n")
if len(text) > BYTES_MAX:
    text = text[:BYTES_MAX // 2] + "\n[... cut ...]\n" + text[-BYTES_MAX // 2:]
with (Path(out) / "logs.txt").open("a") as file:
    file.write(f"==== {stage}: {verdict}, exit code {code}, {seconds} s\n{text}\n")
print(f"== {stage}: {verdict} after {seconds} s\n   " + "\n   ".join(lines[-LINES:]), flush=True)
