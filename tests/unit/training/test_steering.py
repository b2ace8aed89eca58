"""What may come, against brute force over all sequences of a tiny vocabulary, in strings and plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.training.conftest import Script, Scripted, noise

from dragoman_training.beam import BeamOptions, beam_search
from dragoman_training.decode import greedy
from dragoman_training.steering import Steering
from dragoman_training.tokenizer import SPECIAL_IDS

IDS = {".": SPECIAL_IDS.eos, "A": 4, "B": 5, "C": 6}
LETTERS = {number: letter for letter, number in IDS.items()}
STEPS = 4

MayCome = Callable[[str, str, int], bool]


def repeats(text: str, letter: str, size: int) -> bool:
    """Whether the text's last letters with this one are in the text already."""
    return len(text) >= size and (text + letter)[-size:] in text


# What is asked for, and independently whether a letter may follow a text of which so many letters are new.
CASES: dict[str, tuple[dict[str, Any], MayCome]] = {
    "nothing": ({}, lambda text, letter, new: True),
    "minimum": ({"min_new_tokens": 3}, lambda text, letter, new: letter != "." or new >= 3),
    "suppressed": ({"suppressed": (IDS["B"],)}, lambda text, letter, new: letter != "B"),
    "no end": ({"suppressed": (IDS["."],)}, lambda text, letter, new: letter != "."),
    "sequences": (
        {"suppressed_sequences": ((IDS["A"], IDS["B"]), (IDS["C"],), (IDS["B"], IDS["B"], IDS["."]))},
        lambda text, letter, new: not any((text + letter).endswith(bad) for bad in ("AB", "C", "BB.")),
    ),
    "no letter twice": ({"no_repeat_ngram_size": 1}, lambda text, letter, new: letter not in text),
    "no pair twice": ({"no_repeat_ngram_size": 2}, lambda text, letter, new: not repeats(text, letter, 2)),
    "no three twice": ({"no_repeat_ngram_size": 3}, lambda text, letter, new: not repeats(text, letter, 3)),
    "penalty": ({"repetition_penalty": 1.8}, lambda text, letter, new: True),
    "reward": ({"repetition_penalty": 0.6}, lambda text, letter, new: True),
    "all": (
        {
            "min_new_tokens": 2,
            "suppressed_sequences": ((IDS["A"], IDS["C"]),),
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.3,
        },
        lambda text, letter, new: (
            (letter != "." or new >= 2) and not (text + letter).endswith("AC") and not repeats(text, letter, 2)
        ),
    ),
}


def every_answer(script: Script, prefix: str, penalty: float, may_come: MayCome) -> dict[str, list[float]]:
    """Each text that ends within the steps or is cut there, with the log-probabilities of its letters."""
    found: dict[str, list[float]] = {}

    def go_on(text: str, log_probs: list[float]) -> None:
        if len(log_probs) == STEPS or text.endswith("."):
            found[text] = log_probs
            return
        logits = script((SPECIAL_IDS.decoder_start, *(IDS[letter] for letter in text)))
        weights = {}
        for letter, number in IDS.items():
            logit = logits[number]
            if letter in text:
                logit = logit / penalty if logit > 0 else logit * penalty
            if may_come(text, letter, len(log_probs)):
                weights[letter] = math.exp(logit)
        for letter, weight in weights.items():
            go_on(text + letter, [*log_probs, math.log(weight / sum(weights.values()))])

    go_on(prefix, [])
    return found


@pytest.mark.parametrize("prefix", ["", "AB", "BBA"])
@pytest.mark.parametrize("name", CASES)
def test_a_wide_beam_finds_the_best_of_all_that_may_come(
    scripted: Callable[[Script], Scripted], name: str, prefix: str
) -> None:
    """All hypotheses in their order, with their scores: the beam drops nothing. Greedy takes the best at each step."""
    asked, may_come = CASES[name]
    steering = Steering(**asked)
    for seed in range(2):

        def script(tokens: tuple[int, ...], seed: int = seed) -> list[float]:
            return noise((seed, *tokens))

        answers = every_answer(script, prefix, steering.repetition_penalty, may_come)
        model, forced = scripted(script), [IDS[letter] for letter in prefix]
        options = BeamOptions(
            beam_size=150, max_new_tokens=STEPS, num_hypotheses=130, length_penalty=0.6, steering=steering
        )
        found = beam_search(model, [4, SPECIAL_IDS.eos], options, prefix=forced)
        texts = ["".join(LETTERS[token] for token in h.tokens) + "." * (h.finish_reason == "stop") for h in found]
        scores = {text: sum(log_probs) / len(log_probs) ** 0.6 for text, log_probs in answers.items()}
        assert texts == sorted(scores, key=lambda text: -scores[text])
        assert [h.score for h in found] == pytest.approx([scores[text] for text in texts], abs=1e-4)
        output = greedy(model, [[4, SPECIAL_IDS.eos]], STEPS, prefixes=[forced], steering=steering)[0]
        text = "".join(LETTERS[token] for token in output.tokens) + "." * (output.finish_reason == "stop")
        assert output.log_probs == pytest.approx(answers[text], abs=1e-4)
        for position, log_prob in enumerate(output.log_probs):
            read = text[: len(prefix) + position]
            assert log_prob == pytest.approx(
                max(a[position] for t, a in answers.items() if t.startswith(read)), abs=1e-4
            )


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_a_small_beam_never_returns_worse_than_what_it_finished(
    scripted: Callable[[Script], Scripted], penalty: float
) -> None:
    """The one that is returned is the best of all that the same search gives; brute force knows none better."""
    for seed in range(5):

        def script(tokens: tuple[int, ...], seed: int = seed) -> list[float]:
            return noise((seed, *tokens))

        model = scripted(script)
        answers = every_answer(script, "", 1.0, CASES["nothing"][1])
        best = max(sum(log_probs) / len(log_probs) ** penalty for log_probs in answers.values())
        for beam in (1, 2, 3):
            options = BeamOptions(beam_size=beam, max_new_tokens=STEPS, length_penalty=penalty)
            one = beam_search(model, [4, SPECIAL_IDS.eos], options)
            more = beam_search(model, [4, SPECIAL_IDS.eos], replace(options, num_hypotheses=beam))
            assert one[0].score == more[0].score == max(h.score for h in more)
            assert one[0].score <= best + 1e-4


@pytest.mark.parametrize(
    "values",
    [
        {"min_new_tokens": -1},
        {"no_repeat_ngram_size": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": math.inf},
        {"suppressed_sequences": ((4,), ())},
        {"suppressed": (4, -1)},
    ],
    ids=str,
)
def test_values_without_a_meaning_are_refused(values: dict[str, Any]) -> None:
    """The message names the option."""
    with pytest.raises(ValueError, match=f"{next(iter(values))}.* must "):
        Steering(**values)


def test_a_minimum_above_the_maximum_is_refused(scripted: Callable[[Script], Scripted]) -> None:
    """By greedy search too."""
    with pytest.raises(ValueError, match="min_new_tokens is 4: it must be at most max_new_tokens"):
        greedy(scripted(noise), [[4, SPECIAL_IDS.eos]], 3, steering=Steering(min_new_tokens=4))
