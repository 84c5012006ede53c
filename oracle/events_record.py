"""Writes oracle/golden/events.tfrecord with TensorBoard's own classes: what `src/metrics/tensorboard.rs` must write for a step.

  python oracle/events_record.py     needs the package tensorboard
"""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

LOAD = [5, 0, 3]
middles = [expert + 0.5 for expert in range(len(LOAD))]
load = HistogramProto(min=0, max=3, num=sum(LOAD), sum=sum(n * x for n, x in zip(LOAD, middles)),
                      sum_squares=sum(n * x * x for n, x in zip(LOAD, middles)),
                      bucket_limit=[1, 2, 3], bucket=LOAD)
values = [Summary.Value(tag="train/loss", simple_value=2.5), Summary.Value(tag="moe/layer 1/load", histo=load)]
events = [
    Event(wall_time=1.5, step=0, file_version="brain.Event:2"),
    Event(wall_time=2.25, step=301, session_log=SessionLog(status=SessionLog.START)),
    Event(wall_time=1e9, step=300, summary=Summary(value=values)),
]
with open(Path(__file__).parent / "golden" / "events.tfrecord", "wb") as file:
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
