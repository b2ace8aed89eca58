"""What a served model tells of itself."""

import dataclasses

import pytest

from dragoman.bundle import Shortlist
from dragoman.config import ServerConfig
from dragoman.metrics import ServerMetrics
from dragoman.model_table import ModelTable
from dragoman.observer import RequestObserver
from dragoman.servicers.generation import GenerationServicer
from dragoman.servicers.rpc import Call
from dragoman.testing import scripted_manifest, scripted_model
from dragoman.v1 import generation_pb2 as pb

TRAINED = {"bleu": 30.5, "num_sentences": 2000.0}
UNMEASURED = {"status": "unmeasured"}


async def described(trained, graphs, shortlist=None):
    manifest = scripted_manifest()
    graph_set = dataclasses.replace(manifest.graphs[0], quality=graphs)
    model = scripted_model(manifest=dataclasses.replace(manifest, quality=trained, graphs=(graph_set,)))
    if shortlist is not None:
        model.shortlist = Shortlist("cpu", "int8", "", graph_set.decoder, "", 1, 1, 1.0, shortlist)
    servicer = GenerationServicer(ModelTable([model]), ServerConfig(), RequestObserver(ServerMetrics()))
    (get_model,) = (method for method in servicer.methods() if method.name == "GetModel")
    (response,) = [reply async for reply in get_model.behaviour(pb.GetModelRequest(), Call("GetModel"))]
    return dict(response.quality)


async def test_quality_is_that_of_the_graphs_that_answer():
    """Their figures alone: none of the trained model's beside them, of which some have the same name."""
    assert await described(TRAINED, {"bleu": 30.25, "num_lines": 500.0}) == {"bleu": "30.25", "num_lines": "500.0"}


async def test_quality_of_a_model_with_a_shortlist_is_that_of_its_answers():
    """They are not the graph set's own."""
    assert await described(TRAINED, {"bleu": 30.25}, {"bleu": 30.0}) == {"bleu": "30.0"}


@pytest.mark.parametrize("graphs", [UNMEASURED, {}])
async def test_quality_of_graphs_that_were_not_measured_is_the_trained_models(graphs):
    """Without a word of the graphs' own."""
    assert await described(TRAINED, graphs) == {"bleu": "30.5", "num_sentences": "2000.0"}


async def test_a_model_that_nobody_measured_says_so():
    assert await described(UNMEASURED, UNMEASURED) == UNMEASURED
