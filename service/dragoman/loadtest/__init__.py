"""An open-loop load test: requests leave when the schedule says, whether or not the server keeps up.

    arrivals.py   when to send: a Poisson process, from a seed
    load.py       sending at those times, with a bound on what is in flight
    report.py     what happened: rates, counts by status, latency percentiles
    target.py     one gRPC call as the load's ``Call``

Latency counts from the intended time of sending, so that a server that stalls is charged for every request that it kept
from being sent (no coordinated omission).
"""
