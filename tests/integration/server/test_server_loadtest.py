"""A load test tells the truth about a server that stops, for a while, in the middle of it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from dragoman.loadtest.arrivals import Stage
from dragoman.loadtest.processes import Plan, run_plan
from dragoman.loadtest.report import Outcome, summarize
from dragoman.loadtest.scenario import Scenario

STOP_SECONDS = 1.5
SERVE = """
import asyncio, sys
from dragoman.cli.serve import serve
from dragoman.config import ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.server import Server
from dragoman.testing import scripted_model

metrics = ServerMetrics()
config = ServerConfig(host="127.0.0.1", port=0, metrics_port=0)
sys.exit(asyncio.run(serve(Server(ModelTable([scripted_model()]), config, metrics))))
"""


class Stopper:
    """Stops a process once the load says that requests have ended, and lets it go on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._timer: threading.Timer | None = None
        self._begin = self.seconds = 0.0

    def __call__(self, ended: Sequence[Outcome]) -> None:
        if ended and self._timer is None:
            os.kill(self._pid, signal.SIGSTOP)
            self._begin = time.monotonic()
            self._timer = threading.Timer(STOP_SECONDS, self._go_on)
            self._timer.start()

    def _go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        self.seconds = time.monotonic() - self._begin


def test_a_server_that_was_stopped_has_a_p99_of_about_the_stop():
    """50 a second for 6 s, stopped for 1.5 s: a quarter of the requests were due then, some right at its start."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        target = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        stopper = Stopper(process.pid)
        scenario = Scenario((Stage(6.0, 50.0, 50.0),))
        report = summarize(run_plan(Plan(target, scenario), stopper), scenario.asked_rate)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait() == 0
        process.stdout.close()
    latency = report.all.latency_ms

    assert report.all.errors == {}
    assert latency is not None
    assert 0.8 * stopper.seconds < latency.p99 / 1000 < stopper.seconds + 1.0
    assert latency.p50 < latency.p99 / 2  # what was due before and behind it is not charged
