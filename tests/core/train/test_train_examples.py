"""Records to training sequences: positions, credit, sampling modes, and each kind of bad record with its field."""

import json

import pytest

from strop.core.errors import DataError, Where
from strop.core.records import Record
from strop.core.train.examples import Reading, TrainRollout, response_tokens, rollout_example, sft_example

PPO = Reading("ppo", needs_old=True, vocabulary=lambda: 100)


def rollout(**more):
    chunk = {"token_ids": [10, 11, 12, 13, 2], "sampled": [[2, 5]], "logprobs": [-0.5, -1.0, -0.25]}
    values = {"kind": "rollout", "id": "g/0", "task": "t", "chunks": [chunk], "advantage": 1.5, **more}
    return Record.parse(json.dumps(values), Where("in.jsonl", 3))


def read(record, reading=PPO):
    return rollout_example(record, record.view(TrainRollout), reading)


def test_the_first_sampled_token_and_the_end_token_are_trained():
    (sequence,) = read(rollout()).sequences
    assert sequence.positions == [2, 3, 4]
    assert sequence.token_ids == [10, 11, 12, 13, 2]
    assert sequence.advantages == [1.5] * 3
    assert sequence.old_logprobs == [-0.5, -1.0, -0.25]


def test_what_follows_the_last_sampled_token_is_not_computed():
    chunk = {"token_ids": list(range(10, 20)), "sampled": [[2, 3], [5, 7]], "logprobs": [-1, -2, -3]}
    (sequence,) = read(rollout(chunks=[chunk])).sequences
    assert sequence.token_ids == list(range(10, 17))
    assert sequence.positions == [2, 5, 6]


def test_several_chunks_are_several_sequences_and_one_without_sampled_tokens_is_none():
    fed = {"token_ids": [1, 2], "sampled": []}
    first = {"token_ids": [1, 2, 3], "sampled": [[2, 3]], "logprobs": [-1]}
    second = {"token_ids": [1, 4, 5, 6], "sampled": [[1, 3]], "logprobs": [-2, -3]}
    example = read(rollout(chunks=[first, fed, second]))
    assert [one.positions for one in example.sequences] == [[2], [1, 2]]
    assert example.num_trained == 3


def test_token_level_before_step_level_before_the_rollouts_own():
    chunk = {"token_ids": [1, 2, 3, 4, 5], "sampled": [[1, 3], [4, 5]], "logprobs": [-1] * 3}
    steps = [{"span": [1, 3], "advantage": 0.5}, {"span": [4, 5], "advantage": -2}]
    whole = rollout(chunks=[chunk])
    stepped = rollout(chunks=[chunk], steps=steps)
    token = rollout(chunks=[{**chunk, "advantages": [7, 8, 9]}], steps=steps)
    assert read(whole).sequences[0].advantages == [1.5] * 3
    assert read(stepped).sequences[0].advantages == [0.5, 0.5, -2]
    assert read(token).sequences[0].advantages == [7, 8, 9]


def test_steps_of_several_chunks_name_their_chunk():
    chunks = [{"token_ids": [1, 2, 3], "sampled": [[1, 3]], "logprobs": [-1, -1]} for _ in range(2)]
    steps = [{"span": [1, 3], "advantage": 1, "chunk": 1}, {"span": [0, 3], "advantage": 2, "chunk": 0}]
    assert [one.advantages for one in read(rollout(chunks=chunks, steps=steps)).sequences] == [[2, 2], [1, 1]]
    with pytest.raises(DataError, match=r"steps\[0\].chunk: missing"):
        read(rollout(chunks=chunks, steps=[{"span": [1, 3], "advantage": 1}]))


def test_without_advantage_there_is_no_example():
    assert read(rollout(advantage=None)) is None


def test_sft_trains_successes_with_weight_one():
    sft = Reading("sft", needs_old=False)
    assert read(rollout(success=False), sft) is None
    assert read(rollout(success=None), sft) is None
    example = read(rollout(success=True, advantage=-3), sft)
    assert example.sequences[0].advantages == [1.0] * 3


def test_zero_advantage_has_no_signal():
    assert not read(rollout(advantage=0)).has_signal
    assert read(rollout(advantage=1e-9)).has_signal


def test_training_divides_logits_by_the_temperature_of_sampling():
    def temperature(**sampling):
        return read(rollout(sampling=sampling)).sequences[0].temperature

    assert temperature(temperature=0.7, logprobs="scaled") == 0.7
    assert temperature(temperature=0.7, logprobs="processed") == 0.7
    assert temperature(temperature=1.0, logprobs="raw") == 1.0


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.8, "logprobs": "processed"}, "biased by the mass that was cut off"),
        ({"top_k": 20, "logprobs": "processed"}, "biased by the mass that was cut off"),
        ({"temperature": 0.0}, "greedily"),
        ({"temperature": 0.6, "logprobs": "raw"}, "those of temperature 1"),
    ],
)
def test_log_probabilities_of_another_distribution_are_refused(sampling, message):
    record = rollout(sampling=sampling)
    with pytest.raises(DataError, match=message) as raised:
        read(record)
    assert raised.value.field == "sampling"
    assert "--allow-truncated-sampling" in str(raised.value)
    assert read(record, Reading("ppo", needs_old=True, allow_truncated=True)) is not None
    successes = rollout(sampling=sampling, success=True)
    assert read(successes, Reading("sft", needs_old=False)) is not None


def test_processed_log_probabilities_over_everything_are_fine():
    assert read(rollout(sampling={"logprobs": "processed", "top_p": 1.0, "top_k": 0})) is not None
    assert read(rollout(sampling={"logprobs": "scaled", "top_p": 0.9})) is not None


BASE = {"token_ids": [10, 11, 12, 13, 2], "sampled": [[2, 5]], "logprobs": [-0.5, -1.0, -0.25]}
BAD = [
    ({"chunks": [{**BASE, "logprobs": [-0.5, -1.0]}]}, "chunks[0].logprobs", "2 values for 3 sampled tokens"),
    ({"chunks": [{**BASE, "sampled": [[2, 6]]}]}, "chunks[0].sampled[0]", "outside the 5 tokens"),
    ({"chunks": [{**BASE, "sampled": [[3, 5], [2, 3]]}]}, "chunks[0].sampled[1]", "out of order"),
    ({"chunks": [{**BASE, "sampled": [[0, 3]]}]}, "chunks[0].sampled", "cannot have been sampled"),
    ({"chunks": [{**BASE, "sampled": [], "logprobs": []}]}, "chunks", "nothing to train on"),
    ({"chunks": [{**BASE, "token_ids": [10, 11, 12, 100, 2]}]}, "chunks[0].token_ids", "vocabulary of 100"),
    ({"chunks": [{**BASE, "token_ids": [10, 11, 12, -1, 2]}]}, "chunks[0].token_ids", "vocabulary"),
    ({"chunks": [{**BASE, "logprobs": [-0.5, 0.4, -1]}]}, "chunks[0].logprobs[1]", "above 0"),
    ({"chunks": [{"token_ids": [1, 2], "sampled": [[1, 2]]}]}, "chunks[0].logprobs", "--loss reinforce"),
    ({"chunks": [{**BASE, "advantages": [1.0]}]}, "chunks[0].advantages", "1 values for 3"),
    ({"chunks": [{**BASE, "advantages": [1.0, 1e16, 1.0]}]}, "chunks[0].advantages[1]", "too large"),
    ({"chunks": []}, "chunks", "missing"),
    ({"chunks": [{**BASE, "logprobs": [-0.5, None, -1]}]}, "chunks[0].logprobs[1]", "null"),
    ({"advantage": 1e300}, "advantage", "1e15|1000000000000000"),
    ({"advantage": "high"}, "advantage", "str"),
    ({"sampling": {"logprobs": "log2"}}, "sampling.logprobs", "raw, scaled or processed"),
    ({"steps": [{"span": [2, 4], "advantage": 1}]}, "steps", "token 4 of chunk 0 lies in no step"),
    ({"steps": [{"advantage": 1}]}, "steps[0].span", "missing"),
    ({"steps": [{"span": [2, 9], "advantage": 1}]}, "steps[0].span", "outside"),
    ({"steps": [{"span": [2, 5], "advantage": 1, "chunk": 3}]}, "steps[0].chunk", "there are 1"),
    ({"steps": [{"span": [2, 4], "advantage": 1}, {"span": [4, 5]}]}, "steps[1].advantage", "missing"),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD, ids=[f"{i}-{one[1]}" for i, one in enumerate(BAD)])
def test_bad_records_name_file_line_and_field(change, field, message):
    with pytest.raises(DataError, match=message) as raised:
        read(rollout(**change))
    assert raised.value.field == field
    assert str(raised.value).startswith("in.jsonl:3: ")


def test_missing_log_probabilities_are_fine_where_nothing_compares_with_them():
    record = rollout(chunks=[{"token_ids": [1, 2], "sampled": [[1, 2]]}])
    assert read(record, Reading("reinforce", needs_old=False)).sequences[0].old_logprobs == []


def sft(**values):
    return Record.parse(json.dumps({"kind": "sft", **values}), Where("in.jsonl", 1))


class Words:
    """A tokenizer over a few words, with two end tokens; `inner` has transformers' call form."""

    eos_ids = frozenset({2, 3})
    ids = {"<bos>": 1, "<eos>": 2, "<end>": 3, "a": 10, "b": 11, "c": 12}

    class Inner:
        eos_token_id = 2

        def __call__(self, text, add_special_tokens=True):
            ids = [Words.ids[word] for word in text.split()]
            return {"input_ids": ([1] if add_special_tokens else []) + ids}

    inner = Inner()

    def encode_prompt(self, prompt):
        return self.inner(prompt)["input_ids"]


def test_sft_by_spans_trains_just_those():
    example = sft_example(sft(id="x", token_ids=[1, 2, 3, 4], trained=[[1, 2], [3, 4]]), None, 10)
    assert example.id == "x"
    assert example.sequences[0].positions == [1, 3]


RESPONSES = [("b c", [11, 12, 2]), ("b <eos>", [11, 2]), ("b <end>", [11, 3]), ("", [2])]


@pytest.mark.parametrize(("response", "ids"), RESPONSES)
def test_sft_by_text_has_one_start_and_exactly_one_end(response, ids):
    example = sft_example(sft(prompt="a b", response=response), Words(), None)
    (sequence,) = example.sequences
    assert sequence.token_ids == [1, 10, 11, *ids]
    assert sequence.positions == list(range(3, 3 + len(ids)))
    assert response_tokens(Words(), response) == ids


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prompt": "a"}, "response"),
        ({"response": "a"}, "prompt"),
        ({"token_ids": [1, 2]}, "trained"),
        ({"token_ids": [1, 2], "trained": []}, "trained"),
        ({"token_ids": [1, 2], "trained": [[1, 3]]}, "trained[0]"),
        ({"token_ids": [1, 2], "trained": [[0, 1]]}, "trained"),
        ({"token_ids": [1, 2], "trained": [[1, 1]]}, "trained"),
        ({"token_ids": [1, 99], "trained": [[1, 2]]}, "token_ids"),
    ],
)
def test_bad_sft_records(values, field):
    with pytest.raises(DataError) as raised:
        sft_example(sft(**values), Words(), 50)
    assert raised.value.field == field
