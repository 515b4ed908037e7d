"""What a step took on its device: by the host where it waits, by events in the stream where it does not."""

import time

import torch

from schedlab.framework.model.stopwatch import stopwatch


def test_the_host_s_time_between_start_and_stop():
    watch = stopwatch(torch.device("cpu"))
    watch.start()
    time.sleep(0.003)
    watch.stop()
    took = watch.elapsed_ns()
    time.sleep(0.003)
    assert 3_000_000 <= took == watch.elapsed_ns()


def test_events_are_recorded_in_the_stream_and_waited_for_only_when_read(monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.number = len(said)
            said.append("made")

        def record(self):
            said.append(("record", self.number))

        def synchronize(self):
            said.append(("wait", self.number))

        def elapsed_time(self, other):
            assert (self.number, other.number) == (0, 1)
            return 1.25  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = stopwatch(torch.device("cuda"))
    watch.start()
    watch.stop()
    assert said[2:] == [("record", 0), ("record", 1)]
    assert watch.elapsed_ns() == 1_250_000 and said[-1] == ("wait", 1)
