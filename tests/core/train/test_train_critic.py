"""The critic: its loss by hand, updates whatever the packing, values of a plain forward pass, and how it is kept."""

import json
import random

import pytest
import torch

from strop.core.errors import DataError, Unavailable, UsageError, Where
from strop.core.models.load import resolve_model
from strop.core.records import Record
from strop.core.train.critic import Critic, CriticOptions, CriticTrainer, explained_variance, value_losses
from strop.core.train.critic_setup import CRITIC, find_critic, open_critic
from strop.core.train.examples import Example, TrainSequence
from strop.core.train.policy import LoraOptions
from strop.core.train.values import ValueWriter, ZeroCritic, critic_opener


def valued_examples(vocabulary=97, count=9, seed=3):
    """Rollouts whose return is whether their tokens are mostly large ids: something a critic can learn."""
    chance = random.Random(seed)
    examples = []
    for number in range(count):
        length = chance.randint(4, 24)
        ids = [chance.randrange(vocabulary) for _ in range(length)]
        positions = sorted(chance.sample(range(1, length), chance.randint(1, length - 1)))
        target = float(sum(token > vocabulary / 2 for token in ids) > length / 2)
        values = [chance.gauss(0.4, 0.2) for _ in positions]
        sequence = TrainSequence(ids, positions, [], [], values=values, returns=[target] * len(positions))
        examples.append(Example(str(number), [sequence]))
    return examples


@pytest.fixture
def critic(tiny_llama):
    """Makes a critic of all parameters whose head is not zero."""

    def make(dtype="float64"):
        made = Critic(tiny_llama(dtype, tie_word_embeddings=False).requires_grad_(True))
        torch.manual_seed(2)
        torch.nn.init.normal_(made.head.weight, std=0.3)
        return made

    return make


def test_the_loss_by_hand():
    """Eps 0.2. Inside the clip the plain square; outside the larger of both, without gradient where the held one is."""
    value = torch.tensor([0.5, 1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.4, 0.4, 0.4, 0.4], dtype=torch.float64)
    target = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    loss, stopped = value_losses(value, old, target, 0.2)
    # Held values: .5, .6, .6, .2.
    assert loss.tolist() == pytest.approx([0.25, 0.16, 1.0, 1.0])
    loss.sum().backward()
    assert value.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0, -2.0])
    assert stopped.tolist() == [False, True, False, False]
    plain, none = value_losses(value, old, target, 0)
    assert plain.tolist() == pytest.approx([0.25, 0, 1, 1])
    assert not none.any()


def test_values_are_those_of_a_plain_forward_pass(critic):
    made = critic()
    sequences = [one.sequences[0] for one in valued_examples()]
    for budget in (4096, 20):
        found = made.value_lists(sequences, budget)
        for sequence, values in zip(sequences, found, strict=True):
            with torch.no_grad():
                hidden = made.model.model(torch.tensor([sequence.token_ids])).last_hidden_state[0]
            plain = made.head(hidden).squeeze(-1)
            assert values == pytest.approx([plain[position - 1].item() for position in sequence.positions], abs=1e-6)


def test_a_new_critic_expects_nothing(tiny_llama):
    sequences = [one.sequences[0] for one in valued_examples()]
    assert Critic(tiny_llama()).value_lists(sequences) == ZeroCritic().value_lists(sequences)


def test_an_update_does_not_depend_on_the_packs(critic):
    examples, weights, reports = valued_examples(), [], []
    for budget in (4096, 30, 1):
        made = critic()
        options = CriticOptions(1e-2, pack_tokens=budget)
        shuffled = random.Random(budget).sample(examples, len(examples))
        reports.append(CriticTrainer(made, options).update(shuffled))
        weights.append(torch.cat([parameter.detach().flatten() for _, parameter in made.trainable()]))
    for other, report in zip(weights[1:], reports[1:], strict=True):
        assert (other - weights[0]).abs().max() < 1e-5
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-7)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)


def test_it_learns_what_states_promise(critic):
    made, examples = critic("float32"), valued_examples(count=24)
    trainer = CriticTrainer(made, CriticOptions(1e-2, value_clip=0))
    sequences = [one.sequences[0] for one in examples]
    losses = [trainer.update(examples).loss for _ in range(30)]
    assert losses[-1] < losses[0] / 4
    for sequence, values in zip(sequences, made.value_lists(sequences), strict=True):
        sequence.values = values
    assert explained_variance(sequences) > 0.7


def test_explained_variance_is_over_all_tokens_together():
    parts = [TrainSequence([], [1] * 2, [], [], values=[0.0, 1.0], returns=[1.0, 1.0]),
             TrainSequence([], [1], [], [], values=[0.25], returns=[0.0])]  # fmt: skip
    residual, spread = torch.tensor([1.0, 0.0, -0.25]), torch.tensor([1.0, 1.0, 0.0])
    expected = 1 - (residual.var(unbiased=False) / spread.var(unbiased=False)).item()
    assert explained_variance(parts) == pytest.approx(expected)
    assert explained_variance(parts[:1]) is None


def test_an_empty_batch_is_an_error(critic):
    with pytest.raises(ValueError, match="at least one token"):
        CriticTrainer(critic(), CriticOptions(1e-3)).update([])


@pytest.mark.parametrize("lora", [LoraOptions(4, 8.0), None], ids=["adapter", "all parameters"])
def test_a_kept_critic_says_the_same_and_goes_on_the_same(tiny_llama, tmp_path, lora):
    tiny_llama("float32").save_pretrained(tmp_path / "base")
    base = resolve_model(str(tmp_path / "base"))
    how = {"lora": lora, "device": "cpu", "dtype": "float32", "seed": 0}
    examples = valued_examples()
    sequences = [one.sequences[0] for one in examples]
    opened = open_critic(base, None, **how)
    trainer = CriticTrainer(opened.critic, CriticOptions(1e-2))
    trainer.update(examples)
    (tmp_path / "v1").mkdir()
    opened.save(tmp_path / "v1", trainer.state())
    again = open_critic(base, find_critic(tmp_path / "v1"), **how)
    assert again.critic.value_lists(sequences) == opened.critic.value_lists(sequences)
    other = CriticTrainer(again.critic, CriticOptions(1e-2))
    other.load_state(again.optimizer_state())
    assert other.update(examples).loss == trainer.update(examples).loss
    assert again.critic.value_lists(sequences) == opened.critic.value_lists(sequences)
    (tmp_path / "v1" / CRITIC / "value_head.safetensors").write_bytes(b"no")
    with pytest.raises(Unavailable, match=r"value_head\.safetensors"):
        open_critic(base, tmp_path / "v1" / CRITIC, **how)


def test_a_critic_of_another_base_is_refused(tiny_llama, tmp_path):
    for number, name in enumerate(("one", "other")):
        tiny_llama("float32", seed=number).save_pretrained(tmp_path / name)
    one, other = (resolve_model(str(tmp_path / name)) for name in ("one", "other"))
    how = {"lora": LoraOptions(4), "device": "cpu", "dtype": "float32", "seed": 0}
    (tmp_path / "v1").mkdir()
    open_critic(one, None, **how).save(tmp_path / "v1", None)
    with pytest.raises(UsageError, match="another model"):
        open_critic(other, find_critic(tmp_path / "v1"), **how)
    assert open_critic(one, find_critic(tmp_path / "v1"), **how).optimizer_state() is None


def record(number, **more):
    fields = {"kind": "rollout", "id": str(number), "task": "t", "reward": 1.0,
              "chunks": [{"token_ids": [5, 6, 7], "sampled": [[1, 3]]}, {"token_ids": [8], "sampled": []}]}  # fmt: skip
    return Record.parse(json.dumps(fields | more), Where("-", number + 1))


def test_values_are_written_beside_the_tokens_in_the_order_of_the_stream():
    task = Record.parse('{"kind": "task", "id": "t"}', Where("-", 1))
    records = [task, record(0), record(1, error="sandbox lost"), task, record(2, chunks=[])]
    before = [one.encode() for one in records]
    written = list(ValueWriter(ZeroCritic, on_bad=pytest.fail).run(records))
    assert written == records
    assert [one.encode() for i, one in enumerate(written) if i != 1] == before[:1] + before[2:]
    chunks = json.loads(written[1].encode())["chunks"]
    assert chunks[0] == {"token_ids": [5, 6, 7], "sampled": [[1, 3]], "values": [0.0, 0.0]}
    assert chunks[1] == {"token_ids": [8], "sampled": []}


def test_a_bad_rollout_is_handed_over():
    bad = []
    records = [record(0), record(1, chunks=[{"token_ids": [5], "sampled": [[0, 1]]}])]
    assert len(list(ValueWriter(ZeroCritic, lambda error, _: bad.append(error.field)).run(records))) == 1
    with pytest.raises(DataError, match="out of order or outside"):
        list(ValueWriter(ZeroCritic, _raise).run([record(0, chunks=[{"token_ids": [5], "sampled": [[1, 3]]}])]))
    assert bad == ["chunks[0].sampled"]


def _raise(error, _):
    raise error


def test_no_critic_there(tmp_path):
    with pytest.raises(UsageError, match="no critic there"):
        critic_opener(tmp_path, model=None, device="cpu", dtype="auto", offline=True)
