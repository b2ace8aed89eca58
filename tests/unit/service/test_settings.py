"""A setting has one name, in a file, in the environment and as a flag; what comes later wins."""

from __future__ import annotations

import argparse
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import serve
from dragoman.cli.serve import settings_of_command
from dragoman.config import (
    SECTIONS,
    DeviceConfig,
    EngineConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RepositoryConfig,
    ServerConfig,
    TracingConfig,
)
from dragoman.errors import ConfigError
from dragoman.setting import settings_of
from dragoman.settings import read_settings


@pytest.fixture
def write(tmp_path):
    """Makes a file of settings."""

    def write(text):
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


def test_flags_win_over_the_environment_and_that_over_the_file(write):
    """Each of them over the one before, setting by setting; what nobody gave has its default."""
    file = write("max_waiting = 1\nport = 1\nhost = '::1'\n")
    environment = {"DRAGOMAN_MAX_WAITING": "2", "DRAGOMAN_PORT": "2", "HOME": "/root"}
    settings = read_settings(file, environment, {"max_waiting": 3})
    assert settings.section(EngineConfig) == EngineConfig(max_waiting=3)
    assert settings.section(ServerConfig) == ServerConfig(host="::1", port=2)
    assert read_settings().section(ServerConfig) == ServerConfig()


def test_the_environment_can_name_the_file_and_a_flag_another(write):
    """The flag wins here, too."""
    named = str(write("port = 7\n"))
    assert read_settings(environment={"DRAGOMAN_CONFIG": named}).section(ServerConfig).port == 7
    with pytest.raises(ConfigError, match=r"cannot read the settings in nowhere\.toml: No such file"):
        read_settings(Path("nowhere.toml"), {"DRAGOMAN_CONFIG": named})


def test_every_kind_of_value_can_be_written_everywhere(write):
    """Numbers, texts, switches and lists."""
    file = write(
        "drain_seconds = 5\nsharing = false\nbundles = ['a', 'b']\nlatency_buckets = [0.5, 2]\nlog_format = 'json'\n"
    )
    from_file = read_settings(file)
    from_environment = read_settings(
        environment={
            "DRAGOMAN_DRAIN_SECONDS": "5",
            "DRAGOMAN_SHARING": "False",
            "DRAGOMAN_BUNDLES": "a, b",
            "DRAGOMAN_LATENCY_BUCKETS": "0.5,2",
            "DRAGOMAN_LOG_FORMAT": "json",
        }
    )
    flags = ("a", "b", "--drain-seconds=5", "--no-sharing", "--latency-buckets=0.5,2", "--log-format=json")
    from_flags = settings_of_command(parse(*flags))
    for settings in (from_file, from_environment, from_flags):
        assert settings.section(ServerConfig).drain_seconds == 5.0
        assert settings.section(EngineConfig) == EngineConfig(share_equal=False)
        assert settings.section(RepositoryConfig).bundles == ("a", "b")
        assert settings.section(MetricsConfig).latency_buckets == (0.5, 2.0)
        assert settings.section(LogConfig).format == "json"


def test_a_switch_of_the_file_can_be_turned_back_by_a_flag(write):
    """Both ways."""
    file = write("sharing = false\nallow_model_control = true\n")
    settings = settings_of_command(parse("--config", str(file), "--sharing", "--no-allow-model-control"))
    assert settings.section(EngineConfig).share_equal
    assert not settings.section(RepositoryConfig).allow_control


def test_a_model_has_settings_of_its_own(write):
    """Over those of all models, wherever they come from; other models do not have them."""
    file = write("slots = 8\n[per_model.en-de]\nslots = 16\nprovider = 'cuda'\ndevice = 1\n")
    settings = read_settings(file, {"DRAGOMAN_MAX_WAITING": "5"}, {"slots": 32})
    settings.check()
    assert settings.models == ("en-de",)
    assert settings.section(EngineConfig, "en-de") == EngineConfig(num_slots=16, max_waiting=5)
    assert settings.section(EngineConfig, "g2p-en") == EngineConfig(num_slots=32, max_waiting=5)
    assert settings.section(ModelConfig, "en-de").provider == "cuda"
    assert settings.section(DeviceConfig, "en-de").device_id == 1
    assert settings.section(DeviceConfig).device_id == 0


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("prot = 1", {}, r"server\.toml: there is no setting 'prot'; the nearest is 'port'"),
        ("[server]\nport = 1", {}, r"server\.toml: there is no setting 'server'"),
        ("qqqqqqqq = 1", {}, r"'qqqqqqqq'; dragoman serve --check prints all there are"),
        ("[per_modl.x]\nslots = 1", {}, r"'per_modl'; the nearest is 'per_model'"),
        ("[per_model.x]\nslot = 1", {}, r"\[per_model\.x\]: there is no setting 'slot' that a model.*'slots'"),
        ("[per_model.x]\nport = 1", {}, r"no setting 'port' that a model can have of its own"),
        ("per_model = 3", {}, r"write \[per_model\.NAME\]"),
        ("[per_model]\nslots = 3", {}, r"write \[per_model\.NAME\]"),
        ("port = 'x'", {}, r"server\.toml: port is 'x'; it must be from 0 to 65535"),
        ("port = 70000", {}, r"port is 70000; it must be from 0 to 65535"),
        ("port = true", {}, r"port is True; it must be from 0 to 65535"),
        ("port = 1.0", {}, r"port is 1\.0; it must be"),
        ("drain_seconds = nan", {}, r"drain_seconds is nan; it must be from 0 to 1000000000"),
        ("drain_seconds = inf", {}, r"drain_seconds is inf; it must be"),
        ("sharing = 1", {}, r"sharing is 1; it must be true or false"),
        ("bundles = 'a'", {}, r"bundles is 'a'; it must be a list, each item a text"),
        ("bundles = [1]", {}, r"bundles is \(1,\); it must be a text"),
        ("host = 3", {}, r"host is 3; it must be a text"),
        ("host = ['a']", {}, r"host is \('a',\); it must be a text"),
        ("host = 1979-05-27", {}, r"host is datetime"),
        ("log_level = 'loud'", {}, r"log_level is 'loud'; it must be one of debug, info, warning, error"),
        ("port = ", {}, r"server\.toml is no TOML: Invalid value"),
        ("", {"DRAGOMAN_PROT": "1"}, r"the environment has DRAGOMAN_PROT.*the nearest is 'DRAGOMAN_PORT'"),
        ("", {"DRAGOMAN_PORT": "x"}, r"DRAGOMAN_PORT is 'x'; it must be from 0 to 65535"),
        ("", {"DRAGOMAN_PORT": ""}, r"DRAGOMAN_PORT is ''; it must be from 0 to 65535"),
        ("", {"DRAGOMAN_SHARING": "maybe"}, r"DRAGOMAN_SHARING is 'maybe'; it must be true or false"),
        ("", {"DRAGOMAN_SLOTS": "0"}, r"DRAGOMAN_SLOTS is 0; it must be from 1 to 65536"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place_and_the_remedy(write, text, environment, message):
    """Before anything starts: a setting without effect is worse than none."""
    with pytest.raises(ConfigError, match=message):
        read_settings(write(text), environment)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = 1\n" * 200_000, b"a=" + b"[" * 100_000])
def test_a_file_that_is_none_of_settings_is_refused(tmp_path, content):
    """Bytes that are no text, too many of them, and nesting without end."""
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.toml"):
        read_settings(path)


def test_the_variables_of_clients_are_no_matter_of_the_servers():
    """One shell may have both."""
    assert read_settings(environment={"DRAGOMAN_TOKEN": "x"}).section(ServerConfig) == ServerConfig()


def test_variables_that_kubernetes_makes_up_are_passed_over():
    """A service named dragoman gives each pod beside it these, two of them by names of ours."""
    environment = {
        "DRAGOMAN_PORT": "tcp://10.96.0.7:50051",
        "DRAGOMAN_METRICS_PORT": "tcp://10.96.0.8:9464",
        "DRAGOMAN_SERVICE_HOST": "10.96.0.7",
        "DRAGOMAN_SERVICE_PORT": "50051",
        "DRAGOMAN_SERVICE_PORT_GRPC": "50051",
        "DRAGOMAN_PORT_50051_TCP": "tcp://10.96.0.7:50051",
        "DRAGOMAN_PORT_50051_TCP_PROTO": "tcp",
        "DRAGOMAN_PORT_50051_TCP_PORT": "50051",
        "DRAGOMAN_PORT_50051_TCP_ADDR": "10.96.0.7",
        "DRAGOMAN_EN_DE_SERVICE_HOST": "10.96.0.9",
    }
    settings = read_settings(environment=environment)
    assert settings.section(ServerConfig) == ServerConfig()
    assert read_settings(environment={"DRAGOMAN_PORT": "7"}).section(ServerConfig).port == 7


def test_what_is_printed_is_a_file_that_says_the_same_and_where_it_is_from(write):
    """Every setting once; reading it again gives the same values."""
    file = write('max_waiting = 7\nhost = "a\\"\\\\b\\u007f"\n[per_model."x y"]\nslots = 3\n')
    settings = read_settings(file, {"DRAGOMAN_LATENCY_BUCKETS": "1e-6,3"}, {"sharing": False})
    text = settings.to_toml()
    table = tomllib.loads(text)
    names = {known.name for section in SECTIONS.values() for known in settings_of(section)}
    assert set(table) == names | {"per_model"}
    assert f"max_waiting = 7  # {file}: max_waiting\n" in text
    assert "latency_buckets = [1e-06, 3.0]  # DRAGOMAN_LATENCY_BUCKETS\n" in text
    assert "sharing = false  # --no-sharing\n" in text
    assert "slots = 64  # default\n" in text
    again = read_settings(write(text))
    for section in SECTIONS.values():
        assert again.section(section) == settings.section(section)
    assert again.section(EngineConfig, "x y") == settings.section(EngineConfig, "x y")


def test_secrets_are_printed_nowhere(write):
    """Not by --check, not in errors, and they are no flag: anybody on the machine reads those."""
    settings = read_settings(environment={"DRAGOMAN_OTLP_HEADERS": "key=hunter2"})
    assert settings.section(TracingConfig).headers == "key=hunter2"
    assert "\n# otlp_headers is hidden  # DRAGOMAN_OTLP_HEADERS\n" in settings.to_toml()
    assert "otlp_headers" not in tomllib.loads(settings.to_toml())
    assert 'otlp_headers = ""  # default\n' in read_settings().to_toml()
    with pytest.raises(ConfigError, match=r"otlp_headers is hidden; it must be a text"):
        read_settings(write("otlp_headers = ['hunter2']"))
    with pytest.raises(SystemExit):
        parse("--otlp-headers", "key=hunter2")


def test_values_that_do_not_go_together_are_refused_by_the_check(write):
    """Also those that a model has of its own."""
    with pytest.raises(ConfigError, match="tls has a certificate and no key"):
        read_settings(environment={"DRAGOMAN_TLS_CERTIFICATE": "x"}).check()
    with pytest.raises(ConfigError, match="latency_buckets is"):
        read_settings(write("latency_buckets = [2, 1]")).check()


@pytest.mark.parametrize("model", ["", "[per_model.x]\nprovider = 'cpu'"])
def test_settings_of_an_unused_gpu_are_refused_wherever_they_stand(write, model):
    """They would have no effect."""
    file = write(f"gpu_mem_limit = 5\n{model}")
    with pytest.raises(ConfigError, match=r"server\.toml: gpu_mem_limit was given without --provider cuda"):
        settings_of_command(parse("--config", str(file)))


def test_settings_of_a_gpu_are_for_one_model_too(write):
    """Where that one runs on it."""
    file = write("gpu_mem_limit = 5\n[per_model.x]\nprovider = 'cuda'")
    assert settings_of_command(parse("--config", str(file))).section(DeviceConfig, "x").mem_limit_bytes == 5


def test_an_engine_made_in_code_is_checked_too():
    """By the names of its fields."""
    for values in ({"num_slots": 0}, {"num_slots": True}, {"stuck_seconds": math.nan}, {"stuck_seconds": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(values))} is"):
            EngineConfig(**values)
    assert EngineConfig(stuck_seconds=1).stuck_seconds == 1


def test_every_setting_is_explained_and_numbers_have_a_range():
    """One name each; no flag is another's beginning by accident of spelling."""
    names = [known.name for section in SECTIONS.values() for known in settings_of(section)]
    assert len(set(names)) == len(names)
    for known in (known for section in SECTIONS.values() for known in settings_of(section)):
        assert known.help and not known.problem(known.default), known.name
        if known.kind in (int, float):
            assert known.low is not None and known.high is not None, known.name


def check(*arguments: str) -> int:
    return serve.run(parse("--check", *arguments))


def test_check_prints_all_settings_and_serves_nothing(capsys, write):
    """What the embedded models need is there."""
    assert check("--config", str(write("max_waiting = 7\n[per_model.g2p-en]\nslots = 3\n"))) == 0
    table: dict[str, Any] = tomllib.loads(capsys.readouterr().out)
    assert table["max_waiting"] == 7 and table["port"] == 50051
    assert table["per_model"] == {"g2p-en": {"slots": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bundles = ['nowhere']", "nowhere is no bundle"),
        ("models = 'nowhere'", "cannot read the folder of models nowhere"),
        ("model = 'nothing'", "'nothing'"),
        (
            "model = 'g2p-en'\ndefault_model = 'en-xx'",
            "default_model names 'en-xx', which is not to be served; .*g2p-en",
        ),
        ("model = 'g2p-en'\n[per_model.g2p-de]\nslots = 1", "per_model names 'g2p-de'"),
        ("model = 'g2p-en'\ntls_certificate = 'a'\ntls_key = 'b'", "cannot be read"),
        ("model = 'g2p-en'\ntokens = 'nowhere'", "nowhere cannot be read"),
    ],
)
def test_check_refuses_what_could_not_be_served(write, text, message):
    """With the name of what is missing."""
    with (
        pytest.raises(ConfigError, match=message) if "bundles" not in text else pytest.raises(Exception, match=message)
    ):
        check("--config", str(write(text)))
