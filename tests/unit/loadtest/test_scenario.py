"""Scenarios as files, and those that come with the project."""

import ast
from itertools import islice
from pathlib import Path

import pytest

from dragoman.errors import ConfigError
from dragoman.loadtest.arrivals import Stage
from dragoman.loadtest.requests import draw_requests
from dragoman.loadtest.scenario import Part, Scenario, read_scenario

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "loadtest"
STAGE = "[[stages]]\nseconds = 1\nrate = 1\n"


def write(folder: Path, text: str) -> Path:
    """A scenario's file."""
    (folder / "scenario.toml").write_text(text, encoding="utf-8")
    return folder / "scenario.toml"


def test_a_ramp_begins_where_it_says(tmp_path):
    """A stage without from_rate has its rate from its start."""
    file = write(tmp_path, "[[stages]]\nseconds = 4\nfrom_rate = 2\nrate = 6\n[[stages]]\nseconds = 1\nrate = 6\n")
    scenario = read_scenario(file)

    assert scenario.stages == (Stage(4.0, 2.0, 6.0), Stage(1.0, 6.0, 6.0))
    assert (scenario.closed, scenario.peak, scenario.seconds, scenario.asked_rate) == (False, 6.0, 5.0, 22 / 5)
    assert scenario.scaled(peak=3.0, seconds=10.0).stages == (Stage(8.0, 1.0, 3.0), Stage(2.0, 3.0, 3.0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no stages"),
        ("[[stages]\n", "no TOML"),
        ("[[stages]]\nseconds = 1\n", "stage 1 lacks rate"),
        ("[[stages]]\nrate = 1\nseconds = 0\n", "seconds is 0"),
        ("[[stages]]\nrate = 1e300\nseconds = 1\n", "rate is 1e[+]300"),
        ("[[stages]]\nrate = nan\nseconds = 1\n", "rate is nan"),
        ("[[stages]]\nrate = '1'\nseconds = 1\n", "rate is '1'; it must be a number"),
        ("[[stages]]\nrate = 0\nseconds = 1\n", "nothing would be sent"),
        (STAGE + "[[stages]]\nseconds = 1\ncallers = 1\n", "stage 1 has rate; a stage of a closed loop"),
        ("stages = 1\n", r"write \[\[stages\]\]"),
        ("mix = 1\n" + STAGE, r"write \[\[mix\]\]"),
        ("arrivals = 'burst'\n" + STAGE, "arrivals is 'burst'"),
        ("closed = true\n" + STAGE, "closed cannot be set"),
        ("warmup_seconds = 1\n" + STAGE, "'warmup_seconds', which is none of"),
        (STAGE + "[slo]\np99 = 1\n", "'p99', which is none of"),
        (STAGE + "[slo]\nmax_p99_ms = 0\n", "max_p99_ms is 0"),
        (STAGE + "[[mix]]\nstreaming = 2\n", "streaming is 2"),
        (STAGE + "[[mix]]\nmodel = 2\n", "model is 2"),
        (STAGE + "[[mix]]\nwords = [3, 2]\n", "words is"),
        (STAGE + "[[mix]]\nwords = [1.5, 2]\n", "words is"),
        (STAGE + "[[mix]]\nwords = 3\n", "words is 3"),
        (STAGE + "[[mix]]\ntexts = 'none.txt'\n", "none.txt"),
        (STAGE + "[[mix]]\noptions = { beam = 2 }\n", "options: beam is no decoding option"),
        (STAGE + "[[mix]]\noptions = { beam_size = 0 }\n", "options: beam_size is 0"),
        (STAGE + "[[mix]]\nname = 'a'\n[[mix]]\nname = 'a'\n", "share a name"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path, text, said):
    """The file's name, and the value at fault."""
    with pytest.raises(ConfigError, match=rf"(?s)scenario\.toml.*{said}"):
        read_scenario(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    """As every file that a person gave."""
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_scenario(tmp_path / "absent.toml")


def test_requests_are_drawn_by_weight_length_and_share():
    """Three of four are of the heavy part; lengths fill their range; shares are about those asked for."""
    mix = (
        Part("heavy", weight=3.0, texts=("a b c", "d e"), words=(1, 7), cancel=0.5, cancel_after_ms=(20.0, 30.0)),
        Part("light", texts=("whole line",), streaming=0.25),
    )
    requests = list(islice(draw_requests(mix, seed=4), 8000))
    heavy = [request for request in requests if request.part.name == "heavy"]
    light = [request for request in requests if request.part.name == "light"]
    cancels = [request.cancel_seconds for request in heavy if request.cancel_seconds is not None]

    assert len(heavy) == pytest.approx(6000, abs=200)
    assert {len(request.text.split()) for request in heavy} == set(range(1, 8))
    assert all(request.text in "a b c d e a b c d e a b c d e" for request in heavy)
    assert len(cancels) == pytest.approx(3000, abs=200)
    assert all(0.02 <= seconds <= 0.03 for seconds in cancels)
    assert {request.text for request in light} == {"whole line"}
    assert sum(request.streaming for request in light) == pytest.approx(500, abs=100)
    assert requests == list(islice(draw_requests(mix, seed=4), 8000))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_the_projects_scenarios_are_valid_and_hold_a_service_level(file):
    """Each has limits, without which its exit status would say nothing."""
    scenario = read_scenario(file)

    assert isinstance(scenario, Scenario)
    assert scenario.slo.max_error_rate is not None
    assert scenario.warm_up_seconds > 0


def test_the_scenarios_are_those_that_the_readme_names():
    """Steady, spike, soak, overload, long texts and the smoke test."""
    assert {file.stem for file in FOLDER.glob("*.toml")} == {"smoke", "steady", "spike", "soak", "overload", "long"}


def test_the_locust_file_is_valid_python_and_sends_the_smoke_scenario():
    """Locust itself is not installed where tests run: the file's grammar, and its rate and texts."""
    tree = ast.parse((FOLDER / "locustfile.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {"locust", "dragoman.client", "dragoman.loadtest.scenario"} <= imported
