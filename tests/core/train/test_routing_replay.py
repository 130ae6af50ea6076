"""Routing replay in the trainer: what it does to the gap, what it trains, how records bring it, what ends a run."""

import json

import pytest

from strop.core.errors import DataError, Where
from strop.core.models.routing import RoutingShape, find_routers, recording
from strop.core.records import Record
from strop.core.rollout.routing_file import RoutingFault, RoutingWriter
from strop.core.train.batches import BatchReader
from strop.core.train.examples import Example, Reading, TrainRollout, TrainSequence, rollout_example
from strop.core.train.loop import OptimOptions, Trainer, _means
from strop.core.train.losses import LossOptions
from strop.core.train.policy import LoraOptions, Policy, add_lora
from strop.core.train.routing import RoutingReading

VOCABULARY = 97
SHAPE = RoutingShape((0, 1, 2), 8, 2)


def moe(seed=0, dtype="float32", trained=True):
    """A random Qwen3-MoE; its routers are as wide as transformers makes them (0.02), the rest is wider."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for router in find_routers(model):
        torch.nn.init.normal_(router.module.weight, std=Qwen3MoeConfig().initializer_range)
    model.set_experts_implementation("eager")
    return model.to(getattr(torch, dtype)).eval().requires_grad_(trained)


def examples_of(model, seed=0, count=6):
    """Random sequences with the log-probabilities and the routing of `model`, recorded one sequence at a time."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    examples = []
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, (20 + 5 * number,), generator=generator)
        with torch.no_grad(), recording(model) as recorder:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            routing = recorder.take()[:-1]
        old = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        positions = list(range(5, len(ids)))
        sequence = TrainSequence(ids.tolist(), positions, [1.0] * len(positions), old[4:].tolist(), routing=routing)
        examples.append(Example(f"e{number}", [sequence]))
    return examples


def freed(examples):
    """The same without their routing."""
    from dataclasses import replace

    return [Example(one.id, [replace(sequence, routing=None) for sequence in one.sequences]) for one in examples]


def perturb(model, share, seed):
    """Noise on the routers' weights, `share` of their own spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for router in find_routers(model):
        weight = router.module.weight
        weight.data += torch.randn(weight.shape, generator=generator).to(weight) * weight.data.std() * share


def trainer_of(model, **more):
    options = {"lr": 1e-3, "pack_tokens": 100, **more}
    return Trainer(Policy(model), LossOptions("ppo"), OptimOptions(**options))


def gap_of(model, examples):
    trainer = trainer_of(model)
    return _means(trainer.accumulate(examples), trainer.loss)["logprob_gap_mean"]


def test_under_the_same_weights_the_recorded_log_probabilities_come_back():
    """In packs of several sequences, from routing that was recorded one sequence at a time."""
    model = moe()
    assert gap_of(model, examples_of(model)) < 2e-6


def test_under_a_perturbed_router_the_gap_falls_by_an_order_of_magnitude(record_property):
    """Mean |d log p| over all trained tokens, with a tenth of a router's spread as noise, for each of six seeds.

    What remains is what the noise does to the gates. The factor is therefore one of the router's spread as well:
    tests/bench/bench_routing.py prints it for others, where it falls to 1.5.
    """
    factors = []
    for seed in range(6):
        model = moe(seed)
        examples = examples_of(model, seed)
        perturb(model, 0.1, seed)
        free, replayed = gap_of(model, freed(examples)), gap_of(model, examples)
        assert free > 0.05, "the noise changes choices"
        factors.append(free / replayed)
    record_property("routing_replay_gap_factors", [round(factor, 1) for factor in factors])
    assert min(factors) > 10


def test_the_gradient_reaches_the_router_and_is_that_of_the_replayed_loss():
    """All router weights have a finite gradient, and for one of them it is the difference quotient of the loss."""
    import torch

    model = moe(dtype="float64")
    examples = examples_of(model)
    perturb(model, 1.0, 3)
    router = find_routers(model)[1].module.weight
    trainer = trainer_of(model)
    trainer.accumulate(examples)
    for one in find_routers(model):
        assert torch.isfinite(one.module.weight.grad).all()
        assert float(one.module.weight.grad.abs().min()) > 0
    at = divmod(int(router.grad.abs().argmax()), 32)
    slope = float(router.grad[at])
    # Qwen's norms compute in float32, so that a finer step would measure their rounding.
    step = 1e-3
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            router[at] += sign * step
        losses.append(trainer.accumulate(examples).loss)
        with torch.no_grad():
            router[at] -= sign * step
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-2)


def test_an_adapter_on_the_router_learns_under_replay():
    """The all-linear of peft adapts routers of transformers 5, by wrapping their parameter."""
    model = moe(trained=False)
    examples = examples_of(model)
    policy = Policy(add_lora(model, LoraOptions(4, 8.0), seed=0))
    perturb(model, 0.1, 0)
    trainer = Trainer(policy, LossOptions("ppo"), OptimOptions(pack_tokens=100))
    found = _means(trainer.accumulate(examples), trainer.loss)["logprob_gap_mean"]
    gradients = {name: p.grad for name, p in policy.trainable() if "mlp.gate." in name and "lora_B" in name}
    assert len(gradients) == 3
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients.values())
    assert 0 < 10 * found < _means(trainer.accumulate(freed(examples)), trainer.loss)["logprob_gap_mean"]


def test_the_gradient_is_the_same_however_the_tokens_are_packed():
    import torch

    gradients = []
    for pack_tokens in (1, 60, 1000):
        model = moe(dtype="float64")
        examples = examples_of(model)
        perturb(model, 1.0, 3)
        trainer = trainer_of(model, pack_tokens=pack_tokens)
        trainer.accumulate(examples)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-7)


def test_an_update_moves_the_router_towards_the_advantages():
    model = moe()
    examples = examples_of(model)
    before = [router.module.weight.detach().clone() for router in find_routers(model)]
    trainer = trainer_of(model)
    trainer.update(examples)
    assert all((router.module.weight != old).any() for router, old in zip(find_routers(model), before, strict=True))
    # All advantages are 1: the tokens have become likelier under the routing that they were drawn with.
    sums = trainer.accumulate(examples)
    old = sum(sum(sequence.old_logprobs) for one in examples for sequence in one.sequences)
    new = sum(
        float(trainer.policy.logprobs(batch, entropy_grad=False)[0].detach().sum())
        for batch in [trainer.policy.pack_batch([one.sequences[0]]) for one in examples]
    )
    assert new > old
    assert sums.trained == sum(one.num_trained for one in examples)


def test_the_reference_chooses_freely():
    """With an adapter that changes nothing the KL is 0 without replay, and above 0 under another routing (T1)."""
    kl = {}
    for replayed in (False, True):
        model = moe(trained=False)
        examples = examples_of(model)
        for one in examples:
            one.sequences[0].routing = (one.sequences[0].routing + 3) % 8
        policy = Policy(add_lora(model, LoraOptions(4, 8.0, ("q_proj",)), seed=0))
        trainer = Trainer(policy, LossOptions("ppo", kl_coef=0.1), OptimOptions())
        kl[replayed] = trainer.accumulate(examples if replayed else freed(examples)).values["kl_reference"]
    assert kl[False] == pytest.approx(0, abs=1e-4)
    assert kl[True] > 1


def test_a_pack_of_which_a_part_has_routing_is_refused():
    model = moe()
    mixed = [*examples_of(model)[:1], *freed(examples_of(model))[1:]]
    with pytest.raises(ValueError, match="not every token"):
        trainer_of(model, pack_tokens=1000).accumulate(mixed)


def rollout(number, ref=None, span=(3, 6), length=8):
    """A rollout record; its last tokens are context that comes after what was sampled."""
    ids = list(range(10, 10 + length))
    chunk = {"token_ids": ids, "sampled": [list(span)], "logprobs": [-1.0] * (span[1] - span[0])}
    if ref is not None:
        chunk["routing"] = ref
    record = {
        "kind": "rollout", "id": f"g/{number}", "task": "t", "group": "g", "group_size": 3, "advantage": 1.0,
        "chunks": [chunk],
    }  # fmt: skip
    return Record.parse(json.dumps(record), Where("in.jsonl", number + 1))


@pytest.fixture
def sidecar(tmp_path):
    """Writes routing and gives the field of the record, with changes."""

    def write(rows, **changed):
        import msgspec

        with RoutingWriter(tmp_path / "routing.bin") as writer:
            return {**msgspec.structs.asdict(writer.append(rows)), **changed}

    return write


def rows_of(length=7, seed=0):
    import numpy as np

    chance = np.random.default_rng(seed)
    return np.array([[chance.permutation(8)[:2] for _ in range(3)] for _ in range(length)], np.uint8)


def reading(mode="auto", shape=SHAPE, loss="ppo"):
    return Reading(loss, needs_old=True, routing=RoutingReading(mode, lambda: shape))


def example_of(record, how):
    return rollout_example(record, record.view(TrainRollout), how)


def test_the_routing_is_cut_as_the_tokens_are(sidecar):
    rows = rows_of()
    (sequence,) = example_of(rollout(0, sidecar(rows)), reading()).sequences
    assert len(sequence.token_ids) == 6
    assert sequence.routing.tolist() == rows[:5].tolist()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_routing_training_is_free(mode):
    (sequence,) = example_of(rollout(0), reading(mode)).sequences
    assert sequence.routing is None


def test_off_does_not_look_at_the_file(sidecar):
    ref = sidecar(rows_of(), path="nowhere", dtype="?")
    (sequence,) = example_of(rollout(0, ref), reading("off")).sequences
    assert sequence.routing is None


def test_on_needs_it_of_every_rollout(sidecar):
    with pytest.raises(RoutingFault, match=r"in.jsonl:1: chunks\[0\].routing: missing; --routing-replay on"):
        example_of(rollout(0), reading("on"))


@pytest.mark.parametrize("first", [False, True])
def test_a_mixture_of_both_ends_the_run_even_where_bad_records_are_set_aside(sidecar, first):
    """T1: abort, do not drop. A record that is bad in another way is set aside, as before."""
    ref = sidecar(rows_of())
    bad = rollout(0, ref)
    bad.set(chunks=[{"token_ids": [1], "sampled": [[0, 5]]}])
    records = [bad, rollout(1, ref if first else None), rollout(2, None if first else ref)]
    aside = []
    reader = BatchReader(
        reading(), groups_per_batch=0, on_bad=lambda error, record: aside.append(error), on_other=lambda _: None
    )
    with pytest.raises(RoutingFault, match=r"in.jsonl:3: chunks\[0\].routing: .*would mix two policies"):
        list(reader.run(records))
    assert len(aside) == 1
    assert isinstance(aside[0], DataError)


def test_a_rollout_that_is_not_trained_on_decides_nothing(sidecar):
    how = reading()
    failed = rollout(0)
    failed.set(error="the sandbox was lost")
    records = [failed, rollout(1, sidecar(rows_of())), rollout(2, sidecar(rows_of()))]
    reader = BatchReader(
        how, groups_per_batch=0, on_bad=lambda error, _: pytest.fail(str(error)), on_other=lambda _: None
    )
    (batch,) = reader.run(records)
    assert [one.sequences[0].routing is not None for one in batch.examples] == [True, True]


def test_a_model_without_experts_cannot_replay(sidecar):
    with pytest.raises(RoutingFault, match="not a mixture of experts"):
        example_of(rollout(0, sidecar(rows_of())), reading(shape=None))


BROKEN = {
    "path": ({"path": "nowhere.bin"}, "path: nowhere.bin: No such file"),
    "offset": ({"offset": 1}, "offset: .* 42 bytes, and 42 from 1 on"),
    "below zero": ({"offset": -1}, "offset: -1 is below zero"),
    "rows": ({"shape": [6, 3, 2]}, r"shape: \[6, 3, 2\], expected \[7, 3, 2\]"),
    "layers": ({"shape": [7, 2, 3]}, r"shape: \[7, 2, 3\], expected \[7, 3, 2\]"),
    "dtype": ({"dtype": "float32"}, "dtype: 'float32', expected uint8 or uint16"),
    "wider": ({"dtype": "uint16"}, "offset: .* 42 bytes, and 84 from 0 on"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_record_points_to_is_checked(sidecar, name):
    changed, message = BROKEN[name]
    with pytest.raises(RoutingFault, match=rf"in.jsonl:1: chunks\[0\].routing.{message}"):
        example_of(rollout(0, sidecar(rows_of(), **changed)), reading())


def test_experts_that_the_model_has_not_and_experts_named_twice_are_refused(sidecar):
    rows = rows_of()
    rows[4, 1] = [3, 8]
    with pytest.raises(RoutingFault, match=r"offset: .*expert 8 of a model of 8 experts"):
        example_of(rollout(0, sidecar(rows)), reading())
    # As a buffer that nothing was written to would.
    rows[4, 1] = [0, 0]
    with pytest.raises(RoutingFault, match="names an expert twice"):
        example_of(rollout(0, sidecar(rows)), reading())
