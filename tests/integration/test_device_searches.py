"""The searches' own tests, with a device between them and the scripted logits: the same answers, by its graphs.

What is imported runs here once more. The script's logits are written into a device's buffer, and the searches ask
``DeviceOffers``: greedy, beams, alternatives, samples, penalties, prefixes, scores, and rows that fail.
"""

from collections import Counter

import numpy as np
import pytest
from tests.integration.test_device_tails import config
from tests.unit.engine.test_search import *  # noqa: F403  # its tests are what is run

from dragoman.engine.device import Buffer, Device
from dragoman.engine.device_tails import DeviceOffers, DeviceTails
from dragoman.testing import VOCABULARY, ScriptedRunner
from dragoman.vocabulary import BOS_ID, PAD_ID, UNK_ID
from dragoman_export.device_graphs import write_device_graphs
from dragoman_export.targets import FP16

MOST_ROWS, SIZE = 256, len(VOCABULARY.tokens)


@pytest.fixture(scope="module", autouse=True)
def copied(tmp_path_factory):
    """What was brought to the host, by reason."""
    folder, device, counter = tmp_path_factory.mktemp("device"), Device("cuda-dry"), Counter()
    logits = Buffer(device, (MOST_ROWS, SIZE), np.float32)
    graphs = write_device_graphs(config(SIZE), FP16, folder)
    tails = DeviceTails(device, graphs, folder.joinpath, logits, (PAD_ID, BOS_ID, UNK_ID), counter)
    decode = ScriptedRunner.decode

    def on_device(runner, tokens):
        step = decode(runner, tokens)
        everything = np.zeros((MOST_ROWS, SIZE), np.float32)
        everything[: len(step)] = step
        logits.write(everything)
        return DeviceOffers(tails, len(step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedRunner, "decode", on_device)
        yield counter


def test_the_device_was_asked(copied):
    """The last of this file: rows came back by each of the ways that there are."""
    assert set(copied) == {"best", "ranked", "alternatives", "sampling", "steering", "scores"}
