"""`--loss opsd` in the trainer: the divergence by plain autograd, whatever the packs, and what is read of a rollout."""

import random

import pytest
import torch

from strop.core.errors import DataError
from strop.core.records import Record
from strop.core.train.examples import Example, Reading, TrainRollout, TrainSequence, rollout_example
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions, OpsdChoice

CHOICES = [OpsdChoice(), OpsdChoice(beta=0.2), OpsdChoice("forward"), OpsdChoice("reverse")]


@pytest.fixture
def taught(random_examples):
    """Random examples whose teacher reads another prompt: a shorter one, a longer one, or the same."""
    chance = random.Random(3)
    examples = random_examples(8)
    for example in examples:
        for sequence in example.sequences:
            own = sequence.token_ids[: sequence.positions[0]]
            other = [chance.randrange(97) for _ in range(chance.choice([1, 40]))]
            sequence.teacher_prompt_ids = chance.choice([own, other, other + own])
    return examples


def printed(logits, teacher_logits, sequence, choice):
    """The sum over the trained tokens, from whole rows of logits."""
    shift = len(sequence.teacher_prompt_ids) - sequence.positions[0]
    q = torch.log_softmax(logits[[position - 1 for position in sequence.positions]], -1)
    p = torch.log_softmax(teacher_logits[[position - 1 + shift for position in sequence.positions]], -1)
    if choice.divergence == "forward":
        return (p.exp() * (p - q)).sum()
    if choice.divergence == "reverse":
        return (q.exp() * (q - p)).sum()
    m = (choice.beta * p.exp() + (1 - choice.beta) * q.exp()).log()
    return (choice.beta * p.exp() * (p - m) + (1 - choice.beta) * q.exp() * (q - m)).sum()


@pytest.mark.parametrize("pack_tokens", [1, 64])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: f"{one.divergence}-{one.beta}")
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(lora_policy, taught, choice, pack_tokens):
    policy = lora_policy()
    trainer = Trainer(policy, LossOptions("opsd", opsd=choice), OptimOptions(pack_tokens=pack_tokens))
    trainer.optimizer.zero_grad(set_to_none=True)
    sums = trainer.accumulate(taught)
    mine = torch.cat([parameter.grad.flatten() for _, parameter in policy.trainable()])
    trainer.optimizer.zero_grad(set_to_none=True)
    total, num = 0, sum(example.num_trained for example in taught)
    for sequence in (one for example in taught for one in example.sequences):
        read = sequence.teacher_prompt_ids + sequence.token_ids[sequence.positions[0] :]
        with torch.no_grad(), policy.model.disable_adapter():
            teacher = policy.model(torch.tensor([read])).logits[0]
        logits = policy.model(torch.tensor([sequence.token_ids])).logits[0]
        total = total + printed(logits, teacher, sequence, choice) / num
    total.backward()
    theirs = torch.cat([parameter.grad.flatten() for _, parameter in policy.trainable()])
    assert sums.loss == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())
    assert theirs.abs().max() > 1e-4


def test_a_fresh_adapter_under_its_own_prompt_is_at_the_optimum(lora_policy, taught):
    policy = lora_policy()
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    for example in taught:
        for sequence in example.sequences:
            sequence.teacher_prompt_ids = sequence.token_ids[: sequence.positions[0]]
    report = Trainer(policy, LossOptions("opsd"), OptimOptions()).update(taught)
    assert report.metrics["loss"] == pytest.approx(0, abs=1e-12)
    assert report.metrics["grad_norm"] == pytest.approx(0, abs=1e-9)


def test_updates_bring_the_policy_nearer(lora_policy, taught):
    trainer = Trainer(lora_policy(), LossOptions("opsd"), OptimOptions(lr=5e-3))
    losses = [trainer.update(taught).metrics["loss"] for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]


def chunk(**more):
    return {"token_ids": [3, 4, 5, 6, 7], "sampled": [[2, 4]], **more}


def read(chunk, **more):
    record = Record.make("rollout", {"id": "r", "task": "t", "chunks": [chunk], **more})
    return rollout_example(record, record.view(TrainRollout), Reading("opsd", False, lambda: 9))


def test_an_example_holds_what_the_teacher_reads():
    # Neither log-probabilities nor a sampling of temperature 1 are needed: nothing is compared with the rollout.
    example = read(chunk(teacher_prompt_ids=[8, 8, 8, 1]), sampling={"temperature": 1.1, "top_p": 0.9})
    (sequence,) = example.sequences
    assert sequence.token_ids == [3, 4, 5, 6]
    assert sequence.positions == [2, 3]
    assert sequence.teacher_ids == [8, 8, 8, 1, 5]
    assert sequence.num_fed == 5
    assert sequence.temperature == 1


def test_several_turns_of_one_chunk_stay_as_they_were():
    sequence = TrainSequence([1, 2, 3, 4, 5, 6], [2, 5], [1.0, 1.0], [], teacher_prompt_ids=[7])
    assert sequence.teacher_ids == [7, 3, 4, 5]
    assert sequence.teacher_shift == -1
    assert Example("e", [sequence]).num_trained == 2


def test_a_rollout_without_a_teachers_prompt_is_left_out():
    assert read(chunk()) is None


@pytest.mark.parametrize(("ids", "message"), [([], "missing or empty"), ([3, 9], "vocabulary of 9")])
def test_bad_prompts_name_their_place(ids, message):
    with pytest.raises(DataError, match=message) as failure:
        read(chunk(teacher_prompt_ids=ids))
    assert failure.value.field == "chunks[0].teacher_prompt_ids"
