"""`--loss nsd` in the trainer: the loss by plain autograd, whatever the packs, and what is read of a rollout."""

import math
import random

import pytest
import torch

from strop.core.errors import DataError
from strop.core.records import Record
from strop.core.train.examples import Reading, TrainRollout, rollout_example
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions, NsdChoice

CHOICES = [
    NsdChoice(),
    NsdChoice(anchor="importance", alpha=0.3),
    NsdChoice(anchor="k1", penalty="unbounded"),
    NsdChoice(anchor="full", alpha=0.5),
    NsdChoice(anchor="none", penalty="npo"),
    NsdChoice(gradient="policy", alpha=0.2),
    NsdChoice(gradient="policy", anchor="full", alpha=0.2),
]


@pytest.fixture
def signalled(random_examples):
    """Random examples with a frozen model's log-probabilities and gates."""
    chance = random.Random(3)
    examples = random_examples(8)
    for example in examples:
        for sequence in example.sequences:
            sequence.logp_ref = [-chance.uniform(0.1, 6) for _ in sequence.positions]
            sequence.gate = [max(0.0, chance.uniform(-0.5, 1)) for _ in sequence.positions]
    return examples


def printed(logits, reference_logits, sequence, choice):
    """The sum over tokens as the paper and the sheet print it."""
    rows = [position - 1 for position in sequence.positions]
    every = torch.log_softmax(logits[rows], -1)
    logp = every.gather(1, torch.tensor([sequence.token_ids[p] for p in sequence.positions])[:, None]).squeeze(1)
    p, gate = logp.exp(), torch.tensor(sequence.gate, dtype=logits.dtype)
    log_ref = torch.tensor(sequence.logp_ref, dtype=logits.dtype)
    ref = log_ref.exp()
    push = {
        "bounded": gate * torch.sigmoid(-torch.log(1 - p)),
        "unbounded": -gate * torch.log(1 - p),
        "npo": -gate * 2 / 0.1 * torch.log(torch.sigmoid(-0.1 * (logp - log_ref))),
    }[choice.penalty]
    all_ref = torch.log_softmax(reference_logits[rows], -1)
    anchor = {
        "paper": ref * (log_ref - logp),
        "importance": (ref / p) * (log_ref - logp),
        "k1": logp - log_ref,
        "full": (all_ref.exp() * (all_ref - every)).sum(-1),
        "none": 0 * logp,
    }[choice.anchor]
    loss = push + choice.alpha * anchor
    return (loss.detach() * logp if choice.gradient == "policy" else loss).sum()


@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: f"{one.penalty}-{one.anchor}-{one.gradient}")
def test_loss_and_gradient_are_those_of_the_printed_formulas(lora_policy, signalled, choice):
    policy = lora_policy()
    loss = LossOptions("nsd", nsd=choice)
    trainer = Trainer(policy, loss, OptimOptions(denominator="sum", pack_tokens=64))
    trainer.optimizer.zero_grad(set_to_none=True)
    sums = trainer.accumulate(signalled)
    mine = torch.cat([parameter.grad.flatten() for _, parameter in policy.trainable()])
    trainer.optimizer.zero_grad(set_to_none=True)
    total = 0
    for sequence in (one for example in signalled for one in example.sequences):
        ids = torch.tensor([sequence.token_ids])
        with torch.no_grad(), policy.model.disable_adapter():
            reference = policy.model(ids).logits[0]
        total = total + printed(policy.model(ids).logits[0], reference, sequence, choice) / len(signalled)
    total.backward()
    theirs = torch.cat([parameter.grad.flatten() for _, parameter in policy.trainable()])
    assert sums.loss == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())
    assert theirs.abs().max() > 1e-4


def test_the_report_says_push_anchor_and_gates(lora_policy, signalled):
    report = Trainer(lora_policy(), LossOptions("nsd"), OptimOptions(denominator="sum")).update(signalled)
    gates = [gate for example in signalled for one in example.sequences for gate in one.gate]
    assert report.metrics["gate"] == pytest.approx(sum(gates) / len(gates))
    assert report.metrics["gate_open_share"] == pytest.approx(sum(gate > 0 for gate in gates) / len(gates))
    # L_GU lies in [G/2, G] (sheet, 1.5).
    assert report.metrics["gate"] / 2 <= report.metrics["push"] <= report.metrics["gate"]
    total = (report.metrics["push"] + 0.01 * report.metrics["anchor"]) * len(gates) / len(signalled)
    assert report.metrics["loss"] == pytest.approx(total)


def test_closed_gates_without_an_anchor_move_nothing(lora_policy, signalled):
    for example in signalled:
        for sequence in example.sequences:
            sequence.gate = [0.0] * len(sequence.gate)
    trainer = Trainer(lora_policy(), LossOptions("nsd", nsd=NsdChoice(anchor="none")), OptimOptions(denominator="sum"))
    report = trainer.update(signalled)
    assert report.metrics["loss"] == 0
    assert report.metrics["grad_norm"] == 0


def chunk(**more):
    return {"token_ids": [3, 4, 5, 6], "sampled": [[2, 4]], "logprobs": [-1.0, -2.0], **more}


def read(chunk, needs_old=False, **more):
    record = Record.make("rollout", {"id": "r", "task": "t", "chunks": [chunk], **more})
    return rollout_example(record, record.view(TrainRollout), Reading("nsd", needs_old, lambda: 9))


def test_an_example_holds_the_signals():
    example = read(chunk(logp_ref=[-1.5, -2.5], logp_neg=[-1.0, -3.0], gate=[0.1, 0.0]), reward=1.0)
    (sequence,) = example.sequences
    assert sequence.positions == [2, 3]
    assert sequence.logp_ref == [-1.5, -2.5]
    assert sequence.gate == [0.1, 0.0]
    assert example.has_signal


def test_nsd_trains_at_temperature_one_whatever_the_rollout_was_sampled_at():
    example = read(chunk(logp_ref=[-1, -2], gate=[0.1, 0]), sampling={"temperature": 0.7, "top_p": 0.9})
    assert example.sequences[0].temperature == 1


def test_a_rollout_without_signals_is_left_out():
    assert read(chunk()) is None


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"gate": [0.1, 0.2]}, r"chunks\[0\].logp_ref"),
        ({"gate": [0.1, 0.2], "logp_ref": [-1.0]}, r"chunks\[0\].logp_ref"),
        ({"gate": [0.1, -0.2], "logp_ref": [-1.0, -1.0]}, r"chunks\[0\].gate\[1\]"),
        ({"gate": [0.1, 0.2], "logp_ref": [-1.0, 0.5]}, r"chunks\[0\].logp_ref\[1\]"),
    ],
)
def test_bad_signals_name_their_place(fields, where):
    with pytest.raises(DataError, match=where):
        read(chunk(**fields))


def test_the_trust_mask_needs_log_probabilities_of_temperature_one():
    fields = chunk(logp_ref=[-1, -2], gate=[0.1, 0])
    assert read(fields, needs_old=True).sequences[0].old_logprobs == [-1.0, -2.0]
    with pytest.raises(DataError, match="temperature"):
        read(fields, needs_old=True, sampling={"temperature": 0.7})


def test_the_trust_mask_takes_fallen_tokens_out(lora_policy, signalled):
    policy = lora_policy()
    choice = NsdChoice(trust_ratio=0.2, anchor="none")
    for example in signalled:
        for sequence in example.sequences:
            sequence.old_logprobs = [math.log(0.999)] * len(sequence.positions)
    report = Trainer(policy, LossOptions("nsd", nsd=choice), OptimOptions(denominator="sum")).update(signalled)
    assert report.metrics["mask_share"] == 1
    assert report.metrics["loss"] == 0
