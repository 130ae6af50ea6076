"""The choice of experts, recorded and made again: what the model computes, what a router learns, what is refused."""

import pytest

from strop.core.errors import Unavailable
from strop.core.models.routing import (
    Router,
    RoutingShape,
    find_routers,
    gates_of,
    open_routers,
    recording,
    replaying,
    routing_shape,
    shape_of,
)

SHAPE = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "qwen3": ("Qwen3MoeConfig", {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3, a dense layer": ("Qwen3MoeConfig", {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3, gates of all": ("Qwen3MoeConfig", {"num_experts": 8, "norm_topk_prob": False}),
    "qwen2": ("Qwen2MoeConfig", {"num_experts": 8, "shared_expert_intermediate_size": 12}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
}
IDS = [[5, 9, 17, 3, 88, 41, 41, 6, 72, 30, 11]]


def make(kind="qwen3", dtype="float32", seed=0, **more):
    import torch
    import transformers

    name, values = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SHAPE, **values, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    # The grouped product that transformers takes by itself knows no float64.
    model.set_experts_implementation("eager")
    for router in find_routers(model):
        # Some of these routers begin at zero, where every expert is as good as any other.
        torch.nn.init.normal_(router.module.weight, std=0.5)
    return model.to(getattr(torch, dtype)).eval().requires_grad_(False)


def logits_of(model, ids=IDS):
    import torch

    return model(input_ids=torch.tensor(ids), use_cache=False).logits[0]


def record(model, ids=IDS):
    import torch

    with recording(model) as recorder:
        logits = logits_of(model, ids)
        return logits, torch.from_numpy(recorder.take())


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_choice_replayed_is_its_own_forward(kind):
    import torch

    model = make(kind)
    plain, routing = record(model)
    layers = (0, 2) if "dense" in kind else (0, 1, 2)
    assert shape_of(find_routers(model)) == RoutingShape(layers, 8, 2)
    assert routing.shape == (11, len(layers), 2)
    assert routing.dtype == torch.uint8
    assert len(routing.unique()) > 4
    with replaying(model, routing):
        torch.testing.assert_close(logits_of(model), plain, rtol=0, atol=2e-6)
    # The order in which a token's experts are named does not matter.
    with replaying(model, routing.flip(-1)):
        torch.testing.assert_close(logits_of(model), plain, rtol=0, atol=2e-6)
    assert torch.equal(logits_of(model), plain), "the model chooses for itself again"


@pytest.mark.parametrize("kind", KINDS)
def test_another_choice_is_obeyed_in_every_layer(kind):
    import torch

    model = make(kind)
    plain, routing = record(model)
    other = (routing + 3) % 8
    with replaying(model, other), recording(model) as recorder:
        changed = logits_of(model)
        assert torch.equal(torch.from_numpy(recorder.take()), other)
    assert float((changed - plain).abs().max()) > 1e-2


def test_the_gates_are_those_of_the_formula():
    """T1's g_e, computed apart, through a block of experts: y = sum of g_e f_e(h)."""
    import math

    import torch

    block = make(dtype="float64").model.layers[0].mlp
    hidden = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 5], [7, 2], [3, 4], [6, 1]])
    scores = hidden @ block.gate.weight.T
    gates = gates_of(scores, chosen, is_normed=True)
    expected = torch.zeros_like(hidden)
    for t in range(4):
        total = sum(math.exp(float(scores[t, e])) for e in chosen[t])
        for k, e in enumerate(chosen[t].tolist()):
            gate = math.exp(float(scores[t, e])) / total
            assert float(gates[t, k]) == pytest.approx(gate, abs=1e-12)
            gate_up = block.experts.gate_up_proj[e] @ hidden[t]
            expected[t] += gate * (block.experts.down_proj[e] @ (torch.nn.functional.silu(gate_up[:12]) * gate_up[12:]))
    ours = block.experts(hidden, chosen, gates)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_gates_of_experts_that_the_live_router_rules_out_are_finite():
    """All recorded experts lie 200 nats below the live favourite: a quotient of two float32 zeros is no number."""
    import torch

    logits = torch.tensor([[200.0, 0.0, 1.0, 0.0]])
    gates = gates_of(logits, torch.tensor([[1, 2]]), is_normed=True)
    torch.testing.assert_close(gates, torch.softmax(torch.tensor([[0.0, 1.0]]), -1))


def test_a_router_learns_under_replay_and_the_derivative_is_right():
    import torch

    model = make(dtype="float64")
    _, routing = record(model)
    other = (routing + 3) % 8
    weights = [router.module.weight.requires_grad_(True) for router in open_routers(model)]

    def loss():
        with replaying(model, other):
            return logits_of(model).log_softmax(-1)[:, 7].mean()

    loss().backward()
    for layer, weight in enumerate(weights):
        assert torch.isfinite(weight.grad).all()
        # Exactly the experts that the record names have a gate, and so a gradient.
        used = weight.grad.abs().sum(1) > 0
        assert used.nonzero().flatten().tolist() == other[:, layer].unique().tolist()
        expert = int(other[0, layer, 0])
        at = (expert, int(weight.grad[expert].abs().argmax()))
        # Qwen's norms compute in float32, so that a finer step would measure their rounding.
        step = 3e-3
        with torch.no_grad():
            weight[at] += step
            up = float(loss())
            weight[at] -= 2 * step
            down = float(loss())
            weight[at] += step
        assert float(weight.grad[at]) == pytest.approx((up - down) / (2 * step), rel=2e-3)


def test_the_derivative_of_a_block_by_its_router_in_float64():
    """Every router weight of one block, and the hidden states, by torch's own check of finite differences."""
    import torch
    from torch.func import functional_call

    model = make(dtype="float64")
    block = model.model.layers[1].mlp
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 5, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = block.gate.weight.detach().clone().requires_grad_(True)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(15)]).reshape(5, 3, 2)
    with replaying(model, chosen):
        assert torch.autograd.gradcheck(lambda w, h: functional_call(block, {"gate.weight": w}, (h,)), (weight, hidden))


def test_a_layer_that_runs_twice_gets_the_same_rows():
    """With activations recomputed in the backward pass the gradient is that of the pass without."""
    import torch

    gradients = {}
    for recomputed in (False, True):
        model = make(dtype="float64").requires_grad_(True)
        _, routing = record(model)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        calls = []
        for router in open_routers(model):
            router.module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with replaying(model, (routing + 3) % 8):
            logits_of(model).log_softmax(-1)[:, 7].mean().backward()
        assert len(calls) == (6 if recomputed else 3)
        gradients[recomputed] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients[True].keys() == gradients[False].keys()
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-9, atol=1e-12)


def test_recorded_token_by_token_it_is_what_one_forward_records():
    import torch
    from transformers import DynamicCache

    model = make()
    _, whole = record(model)
    cache = DynamicCache(config=model.config)
    with recording(model) as recorder, torch.no_grad():
        model(input_ids=torch.tensor([IDS[0][:4]]), past_key_values=cache, use_cache=True)
        first = recorder.take()
        for token in IDS[0][4:]:
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        rest = recorder.take()
        assert recorder.take().shape == (0, 3, 2)
    assert [*first.tolist(), *rest.tolist()] == whole.tolist()


def test_a_routing_of_another_shape_is_refused():
    import torch

    model = make()
    _, routing = record(model)
    with pytest.raises(ValueError, match="3 layers with 2 experts"), replaying(model, routing[:, :2]):
        pass
    with replaying(model, routing[:-1]), pytest.raises(ValueError, match="11 tokens under the routing of 10"):
        logits_of(model)
    assert torch.isfinite(logits_of(model)).all()


def test_what_cannot_be_replayed_is_refused(tiny_model):
    """A dense model has no routers, and one whose gates carry a scale of their own is not computed wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    assert routing_shape(tiny_model) is None
    with pytest.raises(Unavailable, match="no router"):
        find_routers(AutoModelForCausalLM.from_pretrained(tiny_model))
    model = make()
    gate = model.model.layers[1].mlp.gate
    plain = gate.forward
    gate.forward = lambda hidden: tuple(part * 2 if part.dtype == torch.float32 and part.shape[-1] == 2 else part
                                        for part in plain(hidden))  # fmt: skip
    with pytest.raises(Unavailable, match="no plain softmax"):
        open_routers(model)


def test_layers_that_differ_are_refused():
    model = make()
    model.model.layers[2].mlp.gate.num_experts = 4
    with pytest.raises(Unavailable, match="differ"):
        find_routers(model)


@pytest.mark.parametrize("kind", ["qwen3, a dense layer", "mixtral"])
def test_the_shape_of_a_folder_is_that_of_its_model(kind, tmp_path):
    model = make(kind)
    model.config.save_pretrained(tmp_path)
    assert routing_shape(tmp_path) == shape_of(find_routers(model))


def test_the_narrowest_type():
    assert RoutingShape((0,), 256, 8).dtype == "uint8"
    assert RoutingShape((0,), 257, 8).dtype == "uint16"


def test_both_rules_are_found_out():
    assert [one.is_normed for one in open_routers(make("qwen3"))] == [True] * 3
    assert [one.is_normed for one in open_routers(make("qwen3, gates of all"))] == [False] * 3
    assert isinstance(open_routers(make("mixtral"))[0], Router)
