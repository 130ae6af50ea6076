"""Which experts a mixture of experts chose, recorded and chosen again: routing replay, R3 (T1, section 2.5).

A trainer's arithmetic differs from a sampler's in the last bits, and where two experts are nearly as good that is
enough to choose another one: then it trains another network than the one that spoke. So the choice is taken from the
record, and the gates of the chosen experts from the live logits s:

    g_e = exp(s_e) / sum of exp(s_e') over the recorded e',   y = sum of g_e f_e(h) over the recorded e

The choice is a constant and the gradient flows through the gates alone, so the router stays trainable. A model that
does not normalise its gates (norm_topk_prob off) keeps its own softmax over all experts, read at the recorded ones:
with the choice that it would make itself the output is its plain forward's, to rounding.

The choice is held by layer and not by a cursor: a layer whose forward runs twice, as it does where activations are
recomputed in the backward pass, gets the same rows both times. The context must then stay open over that pass.

Axes: T tokens of a forward, L layers with a router, E experts, K experts chosen for a token.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.errors import Unavailable
from strop.core.models.memory import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Where a model keeps what `open_routers` found.
FOUND = "_strop_routers"
LAYER = re.compile(r"\blayers\.(\d+)\.")
# How far our gates may lie from the model's own; both are in [0, 1].
TOLERANCE = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}
PROBE_ROWS = 7


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The layers (numbers of decoder layers) that have a router, how many experts each has, how many a token gets."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> str:
        """The narrowest type that holds a number of an expert: "uint8" or "uint16"."""
        return "uint8" if self.num_experts <= 1 << 8 else "uint16"


@dataclass(frozen=True, slots=True)
class Router:
    """A router's module, the decoder layer it belongs to, and whether the gates of a token add up to 1."""

    module: Any
    layer: int
    is_normed: bool = True


def is_mixture(model: Any) -> bool:
    """Whether the model is a mixture of experts: how many rows an expert gets depends on the neighbours' tokens."""
    return _is_mixture(model.config)


def _is_mixture(config: Any) -> bool:
    config = config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERT_NAMES)


def routing_shape(folder: Path) -> RoutingShape | None:
    """The routers of the model in `folder`, from its configuration alone; None if it is no mixture of experts.

    Raises Unavailable for a mixture whose routers are of an unknown kind.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if not _is_mixture(config):
            return None
        # The modules without their weights: which layers have a router is the model code's own rule.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError) as error:
        raise Unavailable(f"{folder}: transformers cannot read this model: {error}") from None
    return shape_of(find_routers(model))


def shape_of(routers: list[Router]) -> RoutingShape:
    """The shape they have in common."""
    first = routers[0].module
    return RoutingShape(tuple(router.layer for router in routers), int(first.num_experts), int(first.top_k))


def find_routers(model: Any) -> list[Router]:
    """The routers of a model (peft-wrapped or not) in the order of its layers, by their form; gates are not looked at.

    That is the form transformers 5 gives to Qwen, Mixtral, OLMoE and their relatives: a module that returns logits
    [T, E], gates [T, K] and chosen experts [T, K]. Raises Unavailable where there is none, where layers differ, or
    where a layer number comes twice (models of several towers).
    """
    base = _base(model)
    kind = base.config.model_type
    found = []
    for name, module in base.named_modules():
        layer = LAYER.search(name)
        if layer and type(module).__name__.endswith("TopKRouter") and hasattr(module, "top_k"):
            found.append(Router(module, int(layer[1])))
    if not found:
        raise Unavailable(f"{kind}: no router is found in it whose choice could be recorded")
    if len({(router.module.num_experts, router.module.top_k) for router in found}) > 1:
        raise Unavailable(f"{kind}: its layers differ in their numbers of experts, which is not supported")
    layers = [router.layer for router in found]
    if layers != sorted(set(layers)):
        raise Unavailable(f"{kind}: its routers do not stand in one row of layers, which is not supported")
    return found


def open_routers(model: Any) -> list[Router]:
    """As `find_routers`, with the rule of the gates, which a probe finds out; kept with the model.

    Raises Unavailable for a router whose gates are no softmax of its logits (one with a bias, a scale or groups).
    """
    base = _base(model)
    routers: list[Router] | None = getattr(base, FOUND, None)
    if routers is None:
        found = find_routers(model)
        routers = [Router(one.module, one.layer, _is_normed(one.module, base.config.model_type)) for one in found]
        setattr(base, FOUND, routers)
    return routers


def _is_normed(module: Any, kind: str) -> bool:
    """Which of the two rules gives the gates that the router computes for arbitrary hidden states."""
    import torch

    weight = module.weight
    hidden = torch.randn(PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = module(hidden.to(weight))
        if isinstance(output, tuple) and len(output) == 3 and output[0].shape == (PROBE_ROWS, module.num_experts):
            logits_TE, gates_TK, chosen_TK = output
            for is_normed in (True, False):
                ours_TK = gates_of(logits_TE, chosen_TK, is_normed=is_normed).to(gates_TK.dtype)
                if float((ours_TK - gates_TK).abs().max()) <= TOLERANCE[str(gates_TK.dtype).removeprefix("torch.")]:
                    return is_normed
    raise Unavailable(f"{kind}: the gates of its {type(module).__name__} are no plain softmax; it cannot be replayed")


def gates_of(logits_TE: Tensor, chosen_TK: Tensor, *, is_normed: bool) -> Tensor:
    """The gates [T, K] of the chosen experts, in float32 (float64 for float64 logits).

    Normed: a softmax over the chosen ones; else the softmax over all, read at the chosen ones.
    """
    import torch

    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    if is_normed:
        return torch.softmax(logits_TE.gather(1, chosen_TK).to(wide), -1)
    return torch.softmax(logits_TE.to(wide), -1).gather(1, chosen_TK)


class RoutingRecorder:
    """Records what a model's routers choose, forward by forward, until `close`."""

    def __init__(self, model: Any) -> None:
        routers = open_routers(model)
        self.shape = shape_of(routers)
        self._chosen: list[list[Tensor]] = [[] for _ in routers]
        self._handles = [
            router.module.register_forward_hook(self._hook(rows))
            for router, rows in zip(routers, self._chosen, strict=True)
        ]

    @staticmethod
    def _hook(rows: list[Tensor]) -> Any:
        def keep(module: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            rows.append(output[2])

        return keep

    def take(self) -> NDArray[Any]:
        """The choices [T, L, K] of all forwards since the last call, in order; the dtype is the shape's.

        Raises ValueError where layers saw different numbers of tokens.
        """
        import numpy as np
        import torch

        if not self._chosen[0]:
            return np.zeros((0, len(self._chosen), self.shape.top_k), self.shape.dtype)
        layers = [torch.cat(rows) for rows in self._chosen]
        for rows in self._chosen:
            rows.clear()
        if len({layer.shape for layer in layers}) > 1:
            raise ValueError(f"the layers chose for {[len(layer) for layer in layers]} tokens")
        return torch.stack(layers, 1).cpu().numpy().astype(self.shape.dtype)

    def close(self) -> None:
        """Lets the model go on unobserved."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def recording(model: Any) -> Iterator[RoutingRecorder]:
    """Within it what the model chooses is recorded; `take` gives it."""
    recorder = RoutingRecorder(model)
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def replaying(model: Any, routing_TLK: Tensor) -> Iterator[None]:
    """Within it every forward of the model is over the T tokens of `routing_TLK` and uses the experts it names.

    The rows are those of the row that is fed (of packed sequences one behind the other). Raises ValueError where the
    shape is not the model's, and in a forward over another number of tokens. To be left only after the backward pass
    if activations are recomputed in it.
    """
    import torch

    routers = open_routers(model)
    shape = shape_of(routers)
    if routing_TLK.shape[1:] != (len(routers), shape.top_k):
        message = f"{len(routers)} layers with {shape.top_k} experts a token"
        raise ValueError(f"a routing of shape {list(routing_TLK.shape)} for a model of {message}")
    layers = routing_TLK.to(device=routers[0].module.weight.device, dtype=torch.int64).unbind(1)
    handles = [
        router.module.register_forward_hook(_replay_hook(chosen_TK.contiguous(), is_normed=router.is_normed))
        for router, chosen_TK in zip(routers, layers, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def experts_per_token(model: Any, top_k: int | None) -> Iterator[None]:
    """Within it every router of the model chooses `top_k` experts for a token; None leaves it to the model.

    What is chosen is what the same checkpoint chooses with `num_experts_per_tok` set so: the gates of the chosen are
    made to add up to 1 where the model does that. Raises Unavailable where there are no routers, ValueError where there
    are fewer experts.
    """
    if top_k is None:
        yield
        return
    modules = [router.module for router in find_routers(model)]
    if not 1 <= top_k <= int(modules[0].num_experts):
        raise ValueError(f"{top_k} experts a token of a model that has {modules[0].num_experts}")
    before = modules[0].top_k
    try:
        for module in modules:
            module.top_k = top_k
        yield
    finally:
        for module in modules:
            module.top_k = before


def _replay_hook(chosen_TK: Tensor, *, is_normed: bool) -> Any:
    def choose(module: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, gates_TK, _ = output
        if len(logits_TE) != len(chosen_TK):
            raise ValueError(f"a forward over {len(logits_TE)} tokens under the routing of {len(chosen_TK)}")
        here_TK = chosen_TK.to(logits_TE.device)
        return logits_TE, gates_of(logits_TE, here_TK, is_normed=is_normed).to(gates_TK.dtype), here_TK

    return choose


def _base(model: Any) -> Any:
    """The transformers model below a peft wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
