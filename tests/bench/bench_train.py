"""The train step beside a plain padded transformers + peft loop, and the output matrix beside full logits.

Run as a script: prints a table line each. Needs the small model (STROP_BENCH_MODEL names another folder).

The step: LoRA rank 16 on all linear layers, sequences of lengths spread evenly over 16-256 in shuffled order, the last
half of each trained, one optimiser step over all of them. The plain loop pads batches of 4, 8 and 16 as they come,
computes all logits and accumulates the gradient; its loss is the same to 1e-5. Rounds are interleaved, and each number
is the best of its rounds, since whatever else runs on the machine only adds time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

BATCH_SIZES = (4, 8, 16)
NUM_SEQUENCES, SHORTEST, LONGEST = 16, 16, 256
ROUNDS = int(os.environ.get("STROP_BENCH_ROUNDS", "3"))
RANK, ALPHA = 16, 32.0
BARS = {"best": 1.3, 8: 1.6}
MIB = 2**20


def small_model() -> Path:
    """The converted SmolLM2-135M-Instruct."""
    if named := os.environ.get("STROP_BENCH_MODEL"):
        return Path(named)
    from strop.core.models.load import resolve_model

    script = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "get_model.sh"
    file = os.environ.get("STROP_TEST_GGUF") or subprocess.run(
        ["bash", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHON": sys.executable}
    ).stdout.strip()
    return Path(resolve_model(file).path)


def sequences(vocabulary: int):
    """Token ids and trained positions; advantages of both signs."""
    from strop.core.train.examples import Example, TrainSequence

    chance = random.Random(0)
    step = (LONGEST - SHORTEST) / (NUM_SEQUENCES - 1)
    lengths = [round(SHORTEST + i * step) for i in range(NUM_SEQUENCES)]
    chance.shuffle(lengths)
    examples = []
    for number, length in enumerate(lengths):
        ids = [chance.randrange(vocabulary) for _ in range(length)]
        positions = list(range(length // 2, length))
        advantage = chance.choice([-1.0, 1.0]) * chance.uniform(0.5, 1.5)
        examples.append(
            Example(str(number), [TrainSequence(ids, positions, [advantage] * len(positions), [-2.0] * len(positions))])
        )
    return examples


def plain_step(model, optimizer, examples, batch_size: int) -> float:
    """Padding, full logits, log-softmax, gradient accumulation: what one writes without thinking of packing."""
    rows = [sequence for one in examples for sequence in one.sequences]
    total = sum(len(row.positions) for row in rows)
    loss_sum = 0.0
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        width = max(len(row.token_ids) for row in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        weight = torch.zeros(len(part), width)
        for i, row in enumerate(part):
            ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
            mask[i, : len(row.token_ids)] = 1
            weight[i, row.positions] = torch.tensor(row.advantages)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(logprobs * weight[:, 1:]).sum() / total
        loss.backward()
        loss_sum += loss.item()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum


def bench_step(dtype: str) -> None:
    """Lines for one dtype."""
    from transformers import AutoModelForCausalLM

    from strop.core.train.loop import OptimOptions, Trainer
    from strop.core.train.losses import LossOptions
    from strop.core.train.policy import LoraOptions, Policy, add_lora

    model = AutoModelForCausalLM.from_pretrained(small_model(), dtype=getattr(torch, dtype)).requires_grad_(False)
    model = add_lora(model, LoraOptions(RANK, ALPHA), seed=0)
    policy = Policy(model)
    examples = sequences(policy.vocabulary)
    # A rate of zero leaves the weights where they are, so that every round computes the same.
    trainer = Trainer(policy, LossOptions("reinforce"), OptimOptions(lr=0.0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    tokens = sum(one.num_tokens for one in examples)
    seconds: dict[object, list[float]] = {}
    losses: dict[object, float] = {}

    def timed(name, run):
        started = time.perf_counter()
        losses[name] = run()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    for _ in range(ROUNDS):
        timed("ours", lambda: trainer.update(examples).metrics["loss"])
        for size in BATCH_SIZES:
            timed(size, lambda size=size: plain_step(model, optimizer, examples, size))
        print(f"{dtype} {({name: round(values[-1], 2) for name, values in seconds.items()})}", file=sys.stderr)
    rate = {name: tokens / min(values) for name, values in seconds.items()}
    report(dtype, rate, max(abs(losses["ours"] - losses[size]) for size in BATCH_SIZES))


def report(dtype: str, rate: dict, gap: float) -> None:
    """Prints the table's lines."""
    best = max(BATCH_SIZES, key=lambda size: rate[size])
    what = f"train step, LoRA 16, lengths 16-256, {dtype}"
    for name, size, bar in (("its best batch", best, BARS["best"]), ("its batch", 8, BARS[8])):
        ratio = rate["ours"] / rate[size]
        beside = f"plain padded loop at {name} ({size}): {rate[size]:.0f} tokens/s ({ratio:.2f}x)"
        line(what, f"{rate['ours']:.0f} tokens/s", beside, f"at least {bar}x", ok=ratio >= bar)
    if dtype == "float32":
        line("train step, loss beside the padded one", f"{gap:.1e} apart", "", "at most 1e-5", ok=gap <= 1e-5)


def line(*cells: str, ok: bool) -> None:
    """One line of the table."""
    print(f"| {' | '.join(cells)} | {'ok' if ok else 'MISSED'} |")


HIDDEN, VOCABULARY, POSITIONS, TRAINED = 896, 151_936, 1024, 256


def head_child(which: str, backward: bool) -> None:
    """In a process of its own: time and peak extra memory of one form, as JSON."""
    from strop.kernels.linear_logprob import linear_logprob

    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, requires_grad=backward)
    # In place: a temporary of this size would raise the mark that the extra memory is measured from.
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.02)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,))
    trained = torch.arange(0, POSITIONS, POSITIONS // TRAINED)

    def run():
        if which == "ours":
            (logprobs,) = linear_logprob(hidden[trained], weight, targets[trained])
        else:
            logits = hidden @ weight.T
            logprobs = (logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1))[trained]
        if backward:
            hidden.grad = None
            logprobs.sum().backward()
        return logprobs.detach().sum().item()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, value = [], 0.0
    for _ in range(3):
        started = time.perf_counter()
        value = run()
        times.append(time.perf_counter() - started)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / MIB
    print(json.dumps({"ms": min(times) * 1000, "mib": extra, "value": value}))


def bench_head() -> None:
    """Lines for the output matrix, forward and with the gradient."""
    for backward in (False, True):
        found = {}
        for which in ("ours", "full"):
            args = [sys.executable, "-P", __file__, "head", which, str(int(backward))]
            found[which] = json.loads(subprocess.run(args, capture_output=True, text=True, check=True).stdout)
        ours, full = found["ours"], found["full"]
        assert abs(ours["value"] - full["value"]) < 1e-2
        ok = ours["ms"] <= full["ms"] / 2 and ours["mib"] <= full["mib"] / 8
        what = "forward and backward" if backward else "forward"
        line(
            f"output matrix, 1/4 of 1,024 positions, vocabulary 151,936, {what}",
            f"{ours['ms']:.0f} ms, {ours['mib']:.0f} MiB",
            f"full logits {full['ms']:.0f} ms, {full['mib']:.0f} MiB",
            "at most 1/2 of the time, 1/8 of the memory",
            ok=ok,
        )


def main() -> None:
    """Prints the table's lines."""
    from strop.core.models.load import cpu_has_bfloat16

    bench_head()
    bench_step("float32")
    if cpu_has_bfloat16():
        bench_step("bfloat16")
    else:
        print("bfloat16 was not measured: this CPU has no bfloat16 instructions, and `strop train` takes float32 on it")


if __name__ == "__main__":
    if sys.argv[1:2] == ["head"]:
        head_child(sys.argv[2], sys.argv[3] == "1")
    else:
        main()
