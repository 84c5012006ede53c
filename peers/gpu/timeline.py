#!/usr/bin/env python3
"""timeline.py TRACE [STEPS]: of the last STEPS (3) training steps of trace.sh's file, how long the GPU was busy and idle, with what, and
before what it was idle. A step ends with the last of its kernels named adamw."""

import collections
import sys

# Between two of a step's updates lie no more kernels than these.
WITHIN_UPDATES = 200

lines = [line.rstrip("\n").split("\t", 4) for line in open(sys.argv[1])]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
work = sorted((int(start), int(end), name) for kind, start, end, _, name in lines if kind in "KM")
calls = [(int(start), int(end), name) for kind, start, end, _, name in lines if kind == "D"]
updates = [place for place, (_, _, name) in enumerate(work) if "adamw" in name]
ends = [place for place, after in zip(updates, [*updates[1:], len(work) + WITHIN_UPDATES]) if after - place >= WITHIN_UPDATES]
if len(ends) <= steps:
    sys.exit(f"timeline.py: {len(ends)} steps are no {steps} after the first")
begun = work[ends[-steps - 1]][1]
work = work[ends[-steps - 1] + 1:ends[-1] + 1]
ended = max(end for _, end, _ in work)


def table(title, durations):
    sums = collections.defaultdict(lambda: [0, 0])
    for name, took in durations:
        sums[name][0] += took
        sums[name][1] += 1
    print(title)
    for name, (took, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:40]:
        print(f"{took / 1e6 / steps:9.3f} ms {count / steps:7.1f} of {took / count / 1e3:8.1f} us  {name[:90]}")


busy, until, gaps = 0, begun, []
for start, end, name in work:
    if start > until:
        gaps.append((name, start - until))
    busy += max(0, end - max(start, until))
    until = max(until, end)
wall = (ended - begun) / 1e6 / steps
print(f"{wall:.2f} ms a step, busy {busy / 1e6 / steps:.2f}, idle {wall - busy / 1e6 / steps:.2f}, {len(work) / steps:.0f} launches and copies")
table("work, a step:", [(name, end - start) for start, end, name in work])
table("idle before:", gaps)
table("the driver's calls:", [(name, end - start) for start, end, name in calls if start >= begun and end <= ended])
