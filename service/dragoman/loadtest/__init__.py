"""Load tests: requests leave when the schedule says, whether or not the server keeps up.

    scenario.py    what to send and when: stages, a mix of requests, a service level; from a TOML file
    arrivals.py    the times of an open loop (Poisson or evenly spaced, ramps), the callers of a closed one
    requests.py    the requests of a mix, drawn from a seed
    target.py      one gRPC call, plain or streaming, cancelled or not
    load.py        sending at those times, with a bound on what is in flight; or each caller behind its last answer
    processes.py   the same in several processes, one clock for all
    report.py      what happened: rates, counts by status, percentiles, goodput; what of the service level was missed
    plot.py        lines in a picture (SVG)
    page.py        a report as one HTML file
    progress.py    a line on stderr while it runs
    capacity.py    the highest rate that holds a service level

In an open loop latency counts from the intended time of sending, so that a server that stalls is charged for every
request that it kept from being sent (no coordinated omission). No call is retried.
"""
