"""Configuration files that no program should have written."""

from pathlib import Path

import pytest

from dragoman_training.configfile import load_config
from dragoman_training.errors import ConfigError


def test_a_byte_order_mark_is_skipped(toy: Path) -> None:
    """Some editors begin a UTF-8 file with it."""
    plain = load_config("toy.toml")
    (toy / "toy.toml").write_bytes(b"\xef\xbb\xbf" + (toy / "toy.toml").read_bytes())
    assert load_config("toy.toml") == plain


NINES = "9" * 5_000  # Python's reader takes 4,300 digits


@pytest.mark.parametrize(
    "line",
    [f"seed = {NINES}", f"seed = 0x{NINES}", "seed = " + "[" * 100_000, f"learning_rate = {'9' * 400}"],
    ids=["digits", "hexadecimal", "nested", "float"],
)
def test_absurd_values_in_a_file_are_refused_by_its_name(toy: Path, line: str) -> None:
    """Numbers and lists that Python's reader gives up, or that fit no other number."""
    old = "learning_rate = 1e-2" if line.startswith("learning_rate") else "seed = 3"
    (toy / "toy.toml").write_text((toy / "toy.toml").read_text().replace(old, line))
    with pytest.raises(ConfigError, match=r"^toy\.toml is no valid TOML: "):
        load_config("toy.toml")


@pytest.mark.parametrize("value", [NINES, "[" * 100_000], ids=["digits", "nested"])
def test_absurd_values_on_the_command_line_are_refused_by_their_key(toy: Path, value: str) -> None:
    """With a message shorter than the value."""
    with pytest.raises(ConfigError, match=r"--set schedule\.steps: the value cannot be read \(") as refusal:
        load_config("toy.toml", [f"schedule.steps={value}"])
    assert len(str(refusal.value)) < 400
