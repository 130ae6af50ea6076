"""What routing replay leaves of the log-probability gap under perturbed routers, and what recording costs.

Run as a script: prints a table. No model is needed: random Qwen3-MoEs of 3 layers with 8 experts of which 2 are used,
and of 128 of which 8 are, made from six seeds. A router's weights get noise of a share of their own spread, and the
same 100 tokens are scored by the model as it was, by the perturbed one freely, and by the perturbed one under the
recorded routing; in the rows `bf16` the recorded model computes in bfloat16 and the other in float32, with the same
weights. Mean |d log p| is over all tokens and seeds; `worst` is the smallest factor of a seed.

Both the choices that flip and what the noise does to the gates of the chosen grow with the noise. Their quotient is the
larger the flatter the router is: where its logits lie close together, a choice flips by a breath that hardly moves a
gate. transformers makes routers of spread 0.02; a trained one is wider, and replay mends less of noise in its weights.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from strop.core.models.routing import find_routers, recording, replaying

SEEDS, TOKENS, VOCABULARY, HIDDEN = 6, 100, 97, 32
SIZES = ((8, 2), (128, 8))
SPREADS, NOISES = (0.02, 0.05, 0.1, 0.2, 0.5), (0.01, 0.1, 0.5)
ROUNDS, LENGTH = 5, 400
# The case that has a bar: a router as transformers makes it, a tenth of its spread as noise.
CASE, BAR = (0.02, 0.1), 10.0


def make(seed: int, spread: float, experts: int, top_k: int) -> Qwen3MoeForCausalLM:
    """A random model whose router weights have this standard deviation."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, num_experts=experts,
        num_experts_per_tok=top_k, norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    for router in find_routers(model):
        torch.nn.init.normal_(router.module.weight, std=spread)
    return model


def logprobs(model, ids):
    """Log-probabilities (nats) of all tokens but the first."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def measure(seed: int, spread: float, noise: float, experts: int, top_k: int) -> tuple[float, float, float]:
    """Mean |d log p| free and replayed, and the share of choices (token and layer) that flipped."""
    model = make(seed, spread, experts, top_k)
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    with recording(model) as recorder:
        before = logprobs(model, ids)
        routing = torch.from_numpy(recorder.take())
        for router in find_routers(model):
            weight = router.module.weight
            weight += torch.randn(weight.shape, generator=generator) * spread * noise
        free = logprobs(model, ids)
        flipped = torch.from_numpy(recorder.take())
    with replaying(model, routing):
        replayed = logprobs(model, ids)
    share = (routing.sort(-1)[0] != flipped.sort(-1)[0]).any(-1).float().mean()
    return float((free - before).abs().mean()), float((replayed - before).abs().mean()), float(share)


def measure_rounding(seed: int, spread: float, experts: int, top_k: int) -> tuple[float, float, float]:
    """As `measure`, with what a bfloat16 model did beside the same weights computed in float32."""
    narrow = make(seed, spread, experts, top_k).bfloat16()
    model = make(seed, spread, experts, top_k)
    model.load_state_dict(narrow.state_dict())
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(100 + seed))
    with recording(narrow) as recorder:
        before = logprobs(narrow, ids).float()
        routing = torch.from_numpy(recorder.take())
    with recording(model) as recorder:
        free = logprobs(model, ids)
        flipped = torch.from_numpy(recorder.take())
    with replaying(model, routing):
        replayed = logprobs(model, ids)
    share = (routing.sort(-1)[0] != flipped.sort(-1)[0]).any(-1).float().mean()
    return float((free - before).abs().mean()), float((replayed - before).abs().mean()), float(share)


def cost_of_recording() -> float:
    """Time of a forward that is recorded over one that is not: the best of interleaved rounds each."""
    model = make(0, 0.02, 128, 8)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    best = {False: float("inf"), True: float("inf")}
    for _ in range(ROUNDS):
        for recorded in best:
            started = time.perf_counter()
            if recorded:
                with recording(model) as recorder:
                    logprobs(model, ids)
                    recorder.take()
            else:
                logprobs(model, ids)
            best[recorded] = min(best[recorded], time.perf_counter() - started)
    return best[True] / best[False]


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with torch.no_grad():
        print("experts  spread  noise  flipped  |d log p| free  replayed  factor  worst")
        for experts, top_k in SIZES:
            for spread in SPREADS:
                for noise in NOISES:
                    runs = [measure(seed, spread, noise, experts, top_k) for seed in range(SEEDS)]
                    factor = show(f"{top_k} of {experts:<4} {spread:<7} {noise:<6}", runs)
                    if (experts, spread, noise) == (8, *CASE):
                        row = factor
                runs = [measure_rounding(seed, spread, experts, top_k) for seed in range(SEEDS)]
                show(f"{top_k} of {experts:<4} {spread:<7} bf16  ", runs)
        cost = cost_of_recording()
    verdict = "ok" if row >= BAR else "MISSED"
    print(f"| log-probability gap under a perturbed router | {row:.1f} | free / replayed | {BAR} | {verdict} |")
    print(f"a forward of {LENGTH} tokens that is recorded takes {cost:.3f} of the time of one that is not")


def show(what: str, runs: list[tuple[float, float, float]]) -> float:
    """Prints a line; the quotient of the means."""
    free, replayed, flipped = (statistics.mean(column) for column in zip(*runs, strict=True))
    worst = min(one / two for one, two, _ in runs)
    print(f"{what} {flipped:<8.3f} {free:<15.4f} {replayed:<9.5f} {free / replayed:<7.1f} {worst:.1f}", flush=True)
    return free / replayed


if __name__ == "__main__":
    main()
