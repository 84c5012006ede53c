"""What TensorBoard reads of a run's event files, as JSON: scalars and histograms by tag, as [step, value] each.

  python oracle/events.py RUN        needs the package tensorboard
"""

import json
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(str(Path(sys.argv[1], "tensorboard")), size_guidance={"scalars": 0, "histograms": 0})
events.Reload()
tags = events.Tags()
read = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]}
for tag in tags["histograms"]:
    of = lambda value: {"min": value.min, "max": value.max, "num": value.num, "sum": value.sum,
                        "limits": list(value.bucket_limit), "counts": list(value.bucket)}
    read[tag] = [[event.step, of(event.histogram_value)] for event in events.Histograms(tag)]
json.dump(read, sys.stdout, indent=1)
