"""Stop strings: found at the token that completes them, wherever the borders of the tokens lie."""

import random

import pytest

from strop.core.engines.stops import StopFinder
from strop.core.models.load import load_tokenizer, resolve_model

TEXTS = [
    "The answer is 42.\nNext question: what is 7 times 6?\n\nAnswer: 42<|end|> and so on",
    "Привет, мир! 你好，世界。 🙂🙃 naïve café — “quoted” text… 👩‍👩‍👧‍👦 family",
    "   leading spaces\t\ttabs\r\nand   runs   of   spaces\n\n\n",
    "def f(x):\n    return x**2  # squares\n\nprint(f(3))",
]


@pytest.fixture(scope="module")
def tokenizer(smol):
    return load_tokenizer(resolve_model(str(smol)))


def first_token_with(tokenizer, ids, stops):
    """The plain way: decode everything after every token."""
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1])
        if any(stop in text for stop in stops):
            return i
    return None


def found_at(tokenizer, ids, stops):
    finder = StopFinder(tokenizer, stops)
    return next((i for i, token in enumerate(ids) if finder.found(token)), None)


@pytest.mark.parametrize("text", TEXTS)
def test_any_part_of_a_text_is_found_at_the_token_that_completes_it(tokenizer, text):
    ids = tokenizer.encode_prompt(text)
    rng = random.Random(1)
    for _ in range(150):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.choice((1, 1, 2, 3, 5, 9, 20))]
        assert found_at(tokenizer, ids, [stop]) == first_token_with(tokenizer, ids, [stop]), repr(stop)


def test_random_tokens_too(tokenizer):
    """Bytes that never become characters, special tokens, anything a hot model may draw."""
    rng = random.Random(2)
    for _ in range(60):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(25)]
        text = tokenizer.decode(ids)
        start = rng.randrange(len(text))
        stop = text[start : start + rng.choice((1, 2, 4))]
        if "\ufffd" not in stop:
            plain = first_token_with(tokenizer, ids, [stop])
            found = found_at(tokenizer, ids, [stop])
            # A character that is complete at once may be seen with the tokens behind it, where bytes around it are not.
            assert found is not None, (ids, stop)
            assert plain <= found <= plain + 4, (ids, stop)


def test_several_stops_and_none(tokenizer):
    ids = tokenizer.encode_prompt("one two three four")
    assert found_at(tokenizer, ids, ["four", "two"]) == first_token_with(tokenizer, ids, ["two"])
    assert found_at(tokenizer, ids, ["five"]) is None
    assert found_at(tokenizer, ids, []) is None


def test_the_work_per_token_does_not_grow(tokenizer):
    lengths = []

    class Counting:
        def decode(self, ids):
            lengths.append(len(ids))
            return tokenizer.decode(ids)

    finder = StopFinder(Counting(), ["never"])
    for token in tokenizer.encode_prompt("words and more words " * 200):
        finder.found(token)
    assert max(lengths) <= 9
