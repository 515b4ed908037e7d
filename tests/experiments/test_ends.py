"""How commands end where what they write to takes nothing, and how names of any signs are drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from schedlab.experiments.analysis.report_plots import fairness, svg

RUN = ("run", "engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "timeline=0",
       "workload.max_requests=4", "hydra.run.dir=run")  # fmt: skip


def ended(*words: str, **keys: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schedlab", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **keys)  # type: ignore[call-overload]


def test_nobody_has_to_read_what_is_printed(workspace):
    """Closed, full, and a pipe that nobody reads: the run is made, and no traceback shown."""
    closed = ended(*RUN, preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = ended(*RUN, stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = ended("policy", "list", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(Path("run/result.json").read_text())["status"] == "finished"


NAMES = ["$\\foo{$", "a\x1b[31mred", "<script>", "$", "x$y", "\\$_^{", "b\x00", "\u202egnp", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_signs_are_drawn(name):
    figure = fairness({name: {name: 1.0, "b": 2.0}, "other": {"b": 1.0}})
    text = "".join(ElementTree.fromstring(svg(figure, "fairness").encode()).itertext())
    shown = name if name.isprintable() else name.encode("unicode_escape").decode()
    assert text.count(shown) >= 2  # in the legend and at the axis
