"""The picture of docs/luffy.md from the run folders that curves.sh leaves: python3 draw.py FOLDER > docs/condensation.svg"""

import statistics
import sys
from pathlib import Path

from table import FAMILIES, PLAIN, runs

# Rules in the order in which lines join them; others are points by themselves.
STATIC = ["0.99", "0.95", "0.9", "0.8", "0.3"]
POINTS = {"adaptive": "adaptive", "paper": "printed formula"}
WIDTH, HEIGHT, LEFT, TOP = 300, 240, 56, 34
FRAME = "#888"
COLOURS = {"static": "#2a6fb0", "adaptive": "#1b8a5a", "paper": "#c2571a"}


def measured(all_runs, rule):
    """Rows removed, and changes of held-out loss against the same seed without condensation, in percent."""
    plain, of_rule = all_runs[PLAIN], all_runs[rule].items()
    removed = [100 * run["condensed"]["uncomputed_share"] for _, (run, _) in of_rule]
    losses = [100 * (run["eval_loss"] / plain[seed][0]["eval_loss"] - 1) for seed, (run, _) in of_rule]
    return statistics.mean(removed), losses


def text(x, y, words, anchor="middle", size=11):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def line(x1, y1, x2, y2, colour, width=1.0):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def panel(family, all_runs, left):
    rules = {rule: measured(all_runs, rule) for rule in STATIC + list(POINTS) if rule in all_runs}
    most = max(max(losses) for _, losses in rules.values()) * 1.1
    least = min(0.0, min(min(losses) for _, losses in rules.values()) * 1.1)
    x = lambda removed: left + removed / 100 * WIDTH
    y = lambda loss: TOP + HEIGHT * (most - loss) / (most - least)
    yield text(left + WIDTH / 2, TOP - 12, family, size=13)
    for removed in range(0, 101, 25):
        yield line(x(removed), TOP + HEIGHT, x(removed), TOP + HEIGHT + 4, FRAME)
        yield text(x(removed), TOP + HEIGHT + 18, f"{removed} %")
    for step in range(5):
        loss = most * step / 4
        yield line(left - 4, y(loss), left, y(loss), FRAME)
        yield text(left - 7, y(loss) + 4, f"{loss:+.1f} %", "end")
    yield line(left, y(0), left + WIDTH, y(0), FRAME)
    # What a default may cost.
    yield f'<line x1="{left}" y1="{y(0.5):.1f}" x2="{left + WIDTH}" y2="{y(0.5):.1f}" stroke="{FRAME}" stroke-dasharray="4 3"/>'
    yield line(left, TOP, left, TOP + HEIGHT, FRAME)
    joined = [rules[rule] for rule in STATIC if rule in rules]
    places = " ".join(f"{x(removed):.1f},{y(statistics.mean(losses)):.1f}" for removed, losses in joined)
    yield f'<polyline points="{places}" fill="none" stroke="{COLOURS["static"]}" stroke-width="1.5"/>'
    for rule, (removed, losses) in rules.items():
        colour = COLOURS.get(rule, COLOURS["static"])
        yield line(x(removed), y(min(losses)), x(removed), y(max(losses)), colour, 1.5)
        yield f'<circle cx="{x(removed):.1f}" cy="{y(statistics.mean(losses)):.1f}" r="3.5" fill="{colour}"/>'
        if rule not in POINTS:
            yield text(x(removed) + 6, y(statistics.mean(losses)) - 6, rule, "start", 10)


def legend(top):
    left = LEFT
    for rule, name in [("static", "static threshold"), *POINTS.items()]:
        yield f'<circle cx="{left}" cy="{top - 4}" r="3.5" fill="{COLOURS[rule]}"/>'
        yield text(left + 8, top, name, "start")
        left += 130
    yield text(left + 8, top, "bars: the least and the most of three seeds; dashed: +0.5 %", "start")


parts = []
for place, family in enumerate(FAMILIES):
    parts += panel(family, runs(Path(sys.argv[1]) / family), LEFT + place * (WIDTH + LEFT + 14))
total = len(FAMILIES) * (WIDTH + LEFT + 14) + 10
parts += [text(total / 2, TOP + HEIGHT + 36, "rows removed; vertically, held-out loss against the same seed without condensation")]
parts += legend(TOP + HEIGHT + 60)
print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{TOP + HEIGHT + 70}" font-family="sans-serif" fill="#444">')
print(f'<rect width="{total}" height="{TOP + HEIGHT + 70}" fill="#fff"/>')
print("\n".join(parts))
print("</svg>")
