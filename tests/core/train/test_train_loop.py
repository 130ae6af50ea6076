"""One update: the same loss and gradient however the batch is packed, split or ordered, and as plain padding gives.

Llama's norms compute in float32 even in a float64 model, which bounds how closely two shapes can agree.
"""

import dataclasses
import random

import pytest
import torch

from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions

ALL = [
    LossOptions("ppo", kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, mismatch_cap=3.0),
    LossOptions("dppo", kl_coef=0.3, kl_estimator="k2"),
    LossOptions("reinforce", entropy_coef=-0.2),
    LossOptions("sft"),
]


def gradients(trainer):
    return torch.cat([parameter.grad.flatten() for _, parameter in trainer.policy.trainable()])


def assert_same_gradient(mine, theirs, relative=1e-6):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=relative * theirs.abs().max().item())


def measure(policy, examples, loss, **optim):
    trainer = Trainer(policy, loss, OptimOptions(**optim))
    trainer.optimizer.zero_grad(set_to_none=True)
    sums = trainer.accumulate(examples)
    return sums.loss, gradients(trainer), sums


@pytest.mark.parametrize("loss", ALL, ids=lambda one: one.loss)
@pytest.mark.parametrize("denominator", ["token", "sequence", "constant"])
def test_loss_and_gradient_do_not_depend_on_packs_or_order(lora_policy, random_examples, loss, denominator):
    policy, examples = lora_policy(), random_examples(9)
    optim = {"denominator": denominator, "constant_tokens": 20}
    value, gradient, sums = measure(policy, examples, loss, pack_tokens=4096, **optim)
    assert gradient.abs().max() > 1e-4
    for budget in (1, 17, 64):
        shuffled = random.Random(budget).sample(examples, len(examples))
        again, other, others = measure(policy, shuffled, loss, pack_tokens=budget, **optim)
        assert again == pytest.approx(value, abs=1e-7)
        assert_same_gradient(other, gradient)
        assert others.values == pytest.approx(sums.values, abs=1e-5)
        assert (others.trained, others.tokens) == (sums.trained, sums.tokens)


def test_float32_agrees_to_rounding(lora_policy, random_examples):
    policy, examples = lora_policy("float32"), random_examples(9)
    value, gradient, _ = measure(policy, examples, ALL[0], pack_tokens=4096)
    again, other, _ = measure(policy, examples[::-1], ALL[0], pack_tokens=10)
    assert again == pytest.approx(value, abs=1e-6)
    assert_same_gradient(other, gradient, 1e-5)


def test_full_parameters_agree_too(tiny_llama, random_examples):
    from strop.core.train.policy import Policy

    policy = Policy(tiny_llama().requires_grad_(True))
    examples = random_examples(5)
    value, gradient, _ = measure(policy, examples, LossOptions("ppo", entropy_coef=0.1), pack_tokens=4096)
    again, other, _ = measure(policy, examples, LossOptions("ppo", entropy_coef=0.1), pack_tokens=8)
    assert again == pytest.approx(value, abs=1e-7)
    assert_same_gradient(other, gradient)


def test_all_parameters_in_bfloat16_are_kept_in_float32(tiny_llama, random_examples):
    """Autocast: the gradient is that of float32 to bfloat16's accuracy, and small updates are not lost."""
    from strop.core.train.policy import Policy

    examples, loss = random_examples(5), LossOptions("ppo")
    wide = tiny_llama("float32").requires_grad_(True)
    narrow = tiny_llama("float32").requires_grad_(True)
    value, gradient, _ = measure(Policy(wide), examples, loss)
    policy = Policy(narrow, compute_dtype="bfloat16")
    again, other, _ = measure(policy, examples, loss)
    assert value != again == pytest.approx(value, abs=0.02)
    assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.99
    before = narrow.model.norm.weight.detach().clone()
    Trainer(policy, loss, OptimOptions(lr=1e-5)).update(examples)
    assert narrow.model.norm.weight.dtype == torch.float32
    assert (narrow.model.norm.weight != before).all()


def padded_loss(model, examples, temperature):
    """Plain transformers: one padded batch, full logits, log-softmax, token mean of -A log p. Also its gradient."""
    sequences = [sequence for one in examples for sequence in one.sequences]
    width = max(len(one.token_ids) for one in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    weight = torch.zeros(len(sequences), width)
    for row, one in enumerate(sequences):
        ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        mask[row, : len(one.token_ids)] = 1
        weight[row, one.positions] = torch.tensor(one.advantages)
    logits = model(input_ids=ids, attention_mask=mask).logits.float() / temperature
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    total = sum(one.num_trained for one in examples)
    return -(logprobs * weight[:, 1:]).sum() / total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_plain_padded_transformers_on_the_tiny_model(lora_policy, random_examples, temperature):
    policy, examples = lora_policy("float32"), random_examples(6)
    for one in examples:
        for sequence in one.sequences:
            sequence.temperature = temperature
    value, gradient, _ = measure(policy, examples, LossOptions("reinforce"))
    policy.model.zero_grad(set_to_none=True)
    plain = padded_loss(policy.model, examples, temperature)
    plain.backward()
    theirs = torch.cat([parameter.grad.flatten() for _, parameter in policy.trainable()])
    assert value == pytest.approx(plain.item(), abs=1e-5)
    assert_same_gradient(gradient, theirs, 1e-5)


@pytest.mark.slow
def test_packed_equals_plain_padded_transformers_on_the_real_model(smol, random_examples):
    from transformers import AutoModelForCausalLM

    from strop.core.train.policy import LoraOptions, Policy, add_lora

    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).requires_grad_(False)
    policy = Policy(add_lora(model, LoraOptions(4, 8.0), seed=0))
    examples = random_examples(4)
    with torch.no_grad():
        sums_loss = padded_loss(policy.model, examples, 1.0).item()
    trainer = Trainer(policy, LossOptions("reinforce"), OptimOptions())
    assert trainer.accumulate(examples).loss == pytest.approx(sums_loss, abs=1e-5)


def test_zero_advantage_counts_in_the_denominator(lora_policy, random_examples):
    policy, examples = lora_policy(), random_examples(4)
    silent = [dataclasses.replace(one, sequences=[
        dataclasses.replace(sequence, advantages=[0.0] * len(sequence.positions)) for sequence in one.sequences
    ]) for one in random_examples(3, seed=9)]  # fmt: skip
    alone, gradient, sums = measure(policy, examples, LossOptions("reinforce"))
    together, other, more = measure(policy, examples + silent, LossOptions("reinforce"))
    share = sums.trained / more.trained
    assert together == pytest.approx(alone * share, abs=1e-7)
    assert_same_gradient(other, gradient * share)


def test_masked_tokens_stay_in_the_denominator(lora_policy, random_examples):
    policy, examples = lora_policy(), random_examples(4)
    for one in examples:
        for sequence in one.sequences:
            sequence.advantages = [1.0] * len(sequence.positions)
            batch = policy.pack_batch([sequence])
            sequence.old_logprobs = policy.logprobs(batch, entropy_grad=False)[0].tolist()
    first = examples[0].sequences[0]
    value, _, sums = measure(policy, examples, LossOptions("ppo", mismatch_cap=2.0))
    assert value == pytest.approx(-1, abs=1e-6)  # ratio one everywhere
    assert sums.values["mask_share"] == 0
    first.old_logprobs[0] -= 2.0
    masked, _, sums = measure(policy, examples, LossOptions("ppo", mismatch_cap=2.0))
    assert sums.values["mask_share"] == 1
    assert masked == pytest.approx(-(sums.trained - 1) / sums.trained, abs=1e-6)


def test_gap_and_kl_to_the_rollout_are_zero_on_policy(lora_policy, random_examples):
    policy, examples = lora_policy(), random_examples(3)
    for one in examples:
        for sequence in one.sequences:
            batch = policy.pack_batch([sequence])
            sequence.old_logprobs = policy.logprobs(batch, entropy_grad=False)[0].tolist()
    report = Trainer(policy, LossOptions("ppo"), OptimOptions(lr=0.1)).update(examples)
    assert report.metrics["logprob_gap_max"] < 1e-5
    assert report.metrics["kl_rollout"] < 1e-9
    assert report.metrics["clip_share"] == 0
    moved = Trainer(policy, LossOptions("ppo"), OptimOptions(lr=0.1)).update(examples)
    assert moved.metrics["logprob_gap_max"] > 1e-3
    assert moved.metrics["kl_rollout"] > 0


def test_first_sampled_token_and_end_token_are_trained(lora_policy):
    """Their log-probabilities move, and those of the prompt have no part in the loss."""
    from strop.core.train.examples import Example, TrainSequence

    policy = lora_policy()
    sequence = TrainSequence([5, 6, 7, 8, 2], [2, 3, 4], [1.0] * 3, [])
    batch = policy.pack_batch([sequence])
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [7, 8, 2]
    before = policy.logprobs(batch, entropy_grad=False)[0]
    trainer = Trainer(policy, LossOptions("sft"), OptimOptions(lr=1e-2))
    for _ in range(5):
        trainer.update([Example("a", [sequence])])
    after = policy.logprobs(batch, entropy_grad=False)[0]
    assert ((after - before) > 0.1).all()


def test_no_token_of_another_sequence_matters(lora_policy, random_examples):
    policy = lora_policy()
    one, other = random_examples(2, seed=3)
    alone = policy.logprobs(policy.pack_batch(one.sequences), entropy_grad=False)[0]
    packed = policy.logprobs(policy.pack_batch(one.sequences + other.sequences), entropy_grad=False)[0]
    torch.testing.assert_close(packed[: len(alone)], alone, rtol=0, atol=1e-6)


def test_what_a_tool_said_is_attended_to_and_not_trained(lora_policy):
    """Out of the loss, and not out of the attention (TimeSearch-R #7)."""
    from strop.core.records import Record
    from strop.core.train.examples import Example, Reading, TrainRollout, TrainSequence, rollout_example

    def example(tool):
        chunk = {"token_ids": [5, 6, 7, 2, *tool, 8, 9, 2], "sampled": [[2, 4], [7, 10]], "logprobs": [-1.0] * 5}
        record = Record.make("rollout", {"id": "g/0", "task": "t", "chunks": [chunk], "advantage": 1.0})
        return rollout_example(record, record.view(TrainRollout), Reading("ppo", needs_old=True, vocabulary=lambda: 97))

    policy = lora_policy()
    one, other = example([11, 12, 13]), example([11, 14, 13])
    assert one.sequences[0].positions == [2, 3, 7, 8, 9]
    unrelated = TrainSequence([20, 21, 22], [1, 2], [1.0] * 2, [])
    batch = policy.pack_batch([unrelated, *one.sequences])
    found = policy.logprobs(batch, entropy_grad=False)[0][2:]
    # As a plain forward pass over all of the tokens gives, each at its own place.
    ids = torch.tensor([one.sequences[0].token_ids])
    logits = policy.model(input_ids=ids).logits[0].log_softmax(-1)
    plain = torch.stack([logits[i - 1, ids[0, i]] for i in one.sequences[0].positions])
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    changed = policy.logprobs(policy.pack_batch(other.sequences), entropy_grad=False)[0]
    torch.testing.assert_close(changed[:2], found[:2], rtol=0, atol=1e-6)
    assert ((changed[2:] - found[2:]).abs() > 1e-6).all()
    # A tool's token has no part in the loss of its own: with the answers' advantages at zero there is no gradient.
    silent = TrainSequence(one.sequences[0].token_ids, one.sequences[0].positions, [0.0] * 5, [-1.0] * 5)
    _, gradient, sums = measure(policy, [Example("a", [silent])], LossOptions("reinforce"))
    assert (gradient.abs().max(), sums.trained) == (0, 5)


def test_only_trained_positions_reach_the_output_matrix(lora_policy, monkeypatch):
    from strop.core.train.examples import Example, TrainSequence
    from strop.kernels import linear_logprob as kernel

    seen = []
    inner = kernel.linear_logprob

    def watched(hidden, *args, **more):
        seen.append(len(hidden))
        return inner(hidden, *args, **more)

    policy = lora_policy()
    monkeypatch.setattr(kernel, "linear_logprob", watched)
    head = policy.model.get_base_model().lm_head
    monkeypatch.setattr(head, "forward", lambda *_: pytest.fail("full logits were computed"))
    examples = [Example("a", [TrainSequence(list(range(40)), [30, 39], [1.0, 1.0], [])])]
    Trainer(policy, LossOptions("reinforce"), OptimOptions()).accumulate(examples)
    assert seen == [2]


def test_warmup_rate_and_clipping(lora_policy, random_examples):
    policy, examples = lora_policy(), random_examples(3)
    trainer = Trainer(policy, LossOptions("reinforce"), OptimOptions(lr=0.1, warmup=4, max_grad_norm=1e-3))
    reports = [trainer.update(examples) for _ in range(6)]
    assert [round(report.metrics["lr"], 6) for report in reports] == [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    assert all(report.metrics["grad_norm"] > 1e-3 for report in reports)  # as it was before clipping


def test_reference_is_the_model_without_its_adapter(lora_policy, random_examples):
    policy = lora_policy()
    batch = policy.pack_batch(random_examples(1)[0].sequences)
    reference = policy.reference_logprobs(batch)
    assert not reference.requires_grad
    assert (policy.logprobs(batch, entropy_grad=False)[0] - reference).abs().max() > 1e-3
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    torch.testing.assert_close(policy.logprobs(batch, entropy_grad=False)[0], reference)


def test_a_model_that_mixes_tokens_otherwise_is_not_packed(tiny_llama, random_examples):
    """A layer that looks back across the pack: found by the probe, and then each sequence goes alone."""
    from strop.core.train.policy import Policy

    model = tiny_llama().requires_grad_(True)
    inner = model.model.layers[0].forward

    def leaky(hidden_states, *args, **more):
        hidden = inner(hidden_states, *args, **more)
        return hidden + 0.5 * torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)

    model.model.layers[0].forward = leaky
    policy = Policy(model)
    assert not policy.can_pack
    examples = random_examples(3)
    value, _, _ = measure(policy, examples, LossOptions("reinforce"))
    assert value == pytest.approx(padded_loss(model, examples, 1.0).item(), abs=1e-6)


def test_capped_logits_are_refused(tiny_llama):
    from strop.core.errors import Unavailable
    from strop.core.train.policy import Policy

    model = tiny_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(Unavailable, match="capped"):
        Policy(model)


def test_an_empty_batch_is_an_error(lora_policy):
    with pytest.raises(ValueError, match="at least one"):
        Trainer(lora_policy(), LossOptions(), OptimOptions()).update([])


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "dppo"])
def test_a_response_that_is_masked_whole_gives_loss_zero_and_moves_nothing(lora_policy, random_examples, loss):
    # What `distill --compass` writes where no token has a unit.
    examples = random_examples(3)
    for sequence in (one for example in examples for one in example.sequences):
        sequence.advantages = [0.0] * len(sequence.positions)
    policy = lora_policy()
    before = [parameter.detach().clone() for _, parameter in policy.trainable()]
    report = Trainer(policy, LossOptions(loss), OptimOptions()).update(examples)
    assert (report.metrics["loss"], report.metrics["grad_norm"]) == (0, 0)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.trainable(), strict=True))
