"""The smoke scenario for Locust, for those who already run it: single words, 20 requests a second.

    pip install locust
    locust -f deploy/loadtest/locustfile.py --headless --users 20 --spawn-rate 20 --run-time 5s --host localhost:50051

Each user sends once a second. Locust is a closed loop: a server that stalls keeps its users from sending, and the
latencies do not show it. ``dragoman loadtest`` counts from when a request was due.
"""

from __future__ import annotations

import random
import time

import grpc.experimental.gevent as grpc_gevent
from locust import User, constant_throughput, task

from dragoman.client import Client
from dragoman.errors import DragomanError
from dragoman.loadtest.scenario import WORDS
from dragoman.retries import NO_RETRIES

grpc_gevent.init_gevent()


class Caller(User):
    """Asks for one word a second."""

    wait_time = constant_throughput(1)

    def on_start(self) -> None:
        """Each user has a connection of its own."""
        self.client = Client(self.host, retries=NO_RETRIES)  # a retry would hide an error

    def on_stop(self) -> None:
        """Hang up."""
        self.client.close()

    @task
    def generate(self) -> None:
        """One call, counted under its method's name."""
        begin = time.perf_counter()
        error = None
        try:
            text = self.client.generate(random.choice(WORDS), timeout=10).text
        except DragomanError as failed:
            error, text = failed, ""
        self.environment.events.request.fire(
            request_type="grpc",
            name="Generate",
            response_time=(time.perf_counter() - begin) * 1000,
            response_length=len(text),
            exception=error,
        )
