"""What was once published on the wire stays as it is. The rules: proto/README.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "proto" / "landed.py"


@pytest.fixture(scope="module")
def landed() -> ModuleType:
    """proto/landed.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("landed", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_that_landed_is_gone_or_different(landed):
    """No field is removed, renumbered or retyped, no RPC changed: callers of old go on working."""
    assert landed.broken(landed.read(), landed.listing()) == []


def test_all_that_is_there_has_landed(landed):
    """What is new is on the list from the day it comes: 'bash proto/generate.sh' puts it there."""
    assert landed.broken(landed.listing(), landed.read()) == []


def test_the_list_tells_every_change_that_breaks_a_caller(landed):
    """Numbers, types, labels, presence, oneofs, enum values and streams are all in its lines."""
    lines = landed.listing()
    for line in (
        "dragoman.v1.GenerateRequest.text: string = 3",
        "dragoman.v1.GenerateRequest.priority: sint32 = 7",
        "dragoman.v1.GenerateRequest.options: dragoman.v1.DecodingOptions = 5",
        "dragoman.v1.DecodingOptions.beam_size: optional uint32 = 2",
        "dragoman.v1.BatchGenerateRequest.requests: repeated dragoman.v1.GenerateRequest = 1",
        "dragoman.v1.BatchItem.error: google.rpc.Status of outcome = 2",
        "dragoman.v1.FinishReason.FINISH_REASON_UNSPECIFIED: value = 0",
        "dragoman.v1.GenerationService.StreamGenerate: "
        "rpc (dragoman.v1.GenerateRequest) returns (stream dragoman.v1.StreamGenerateResponse)",
        "inference.GRPCInferenceService.ModelStreamInfer: "
        "rpc (stream inference.ModelInferRequest) returns (stream inference.ModelStreamInferResponse)",
        "inference.ModelInferRequest.raw_input_contents: repeated bytes = 7",
        "inference.InferParameter.int64_param: int64 of parameter_choice = 2",
    ):
        assert line in lines, line


def test_a_change_of_what_landed_is_found_and_the_list_is_left_alone(landed, monkeypatch, tmp_path, capsys):
    """A renumbered field is one line gone; the message names it."""
    path = tmp_path / "landed.txt"
    old = [
        line.replace("GenerateRequest.text: string = 3", "GenerateRequest.text: string = 9")
        for line in landed.listing()
    ]
    path.write_text("".join(f"{line}\n" for line in old))
    monkeypatch.setattr(landed, "LANDED", path)
    assert landed.main() == 1
    assert "dragoman.v1.GenerateRequest.text: string = 9" in capsys.readouterr().err
    assert path.read_text().splitlines() == old
    path.write_text("".join(f"{line}\n" for line in landed.listing()[:50]))
    assert landed.main() == 0
    assert path.read_text().splitlines() == landed.listing()
