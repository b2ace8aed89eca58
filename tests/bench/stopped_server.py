"""What does a load test say of a server that stops for 5 s in the middle of 30 s at 50 requests a second?

It starts ``dragoman serve`` on free ports, runs ``dragoman loadtest`` against it, and sends SIGSTOP and SIGCONT.

python tests/bench/stopped_server.py
python tests/bench/stopped_server.py --seconds 60 --stop 10 --rate 20
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stop", type=float, default=5.0, help="seconds")
    parser.add_argument("--rate", type=float, default=50.0)
    args = parser.parse_args()
    dragoman = [sys.executable, "-m", "dragoman.cli.main"]
    ports = ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
    server = subprocess.Popen(
        [*dragoman, "serve", *ports], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    target = f"127.0.0.1:{json.loads(server.stdout.readline())['port']}"
    shape = ["--rate", str(args.rate), "--duration", str(args.seconds), "--warm-up", "2"]
    load = subprocess.Popen([*dragoman, "loadtest", target, *shape, "--deadline", str(args.stop + 10)])
    time.sleep(args.seconds / 2)
    server.send_signal(signal.SIGSTOP)
    time.sleep(args.stop)
    server.send_signal(signal.SIGCONT)
    status = load.wait()
    server.terminate()
    server.wait()
    return status


if __name__ == "__main__":
    sys.exit(main())
