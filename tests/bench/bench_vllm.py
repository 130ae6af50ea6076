"""What our driving of vLLM costs: tokens a second beside vllm.LLM.generate, on the same prompts with the same seeds.

Run as a script: prints table lines; a few minutes on two cores. Two processes, each with one engine: vLLM's own
entry point as a user would call it (which runs the model in a process of its own), and our engine, driven bare (submit,
collect) and by the whole rollout loop with its verifier. They take turns, so that what else the machine does falls on
all alike; the ratios are medians over the turns. Neither compiles: on a CPU that takes minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BAR = 0.9
TURNS = 3
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 8, 8, 16
MAX_CONTEXT = 512
SETTINGS = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip


def tasks() -> list[dict]:
    """Few-shot sums, as text prompts with a number to be verified."""
    pairs = [(3 + 5 * i, 4 + 7 * i) for i in range(NUM_PROMPTS)]
    return [
        {
            "kind": "task", "id": f"sum-{i}", "prompt": f"3+4=7\n12+5=17\n{a}+{b}=", "reference": a + b,
            "verifier": {"name": "number"},
        }
        for i, (a, b) in enumerate(pairs)
    ]  # fmt: skip


def seed_of(prompt: int, sample: int) -> int:
    """The seed of a sample."""
    return 1000 * prompt + sample


def serve(sides: dict) -> None:
    """For each line on stdin, the name of a side: runs it and answers with sampled tokens and seconds."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = sides[line.strip()]()
        print(json.dumps([tokens, time.perf_counter() - started]), flush=True)


def theirs(folder: str) -> None:
    """vllm.LLM.generate, asked for the same: one seed and one log-probability a token."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, dtype="float32", max_model_len=MAX_CONTEXT, enforce_eager=True, disable_log_stats=True,
        use_tqdm_on_load=False,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    prompts, parameters = [], []
    for p, task in enumerate(tasks()):
        for sample in range(NUM_SAMPLES):
            prompts.append({"prompt_token_ids": tokenizer.encode(task["prompt"])})
            parameters.append(
                SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed_of(p, sample), logprobs=0)
            )

    def generate() -> int:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve({"generate": generate})


def ours(folder: str) -> None:
    """Our engine, bare and under the rollout loop."""
    from strop.core.engines.open import EngineOptions, open_engine, open_tokenizer
    from strop.core.engines.protocol import Request
    from strop.core.errors import Where
    from strop.core.records import Record, Sampling, Task
    from strop.core.rollout.attempts import AttemptMaker, SamplingChoice
    from strop.core.rollout.loop import RolloutLoop, Work
    from strop.core.tasks.verifiers import open_verifiers

    options = EngineOptions(
        engine="vllm", model=folder, device="cpu", dtype="float32", max_context=MAX_CONTEXT, offline=True
    )
    tokenizer = open_tokenizer(options)
    engine = open_engine(options)
    ids = [tokenizer.encode_prompt(task["prompt"]) for task in tasks()]
    records = [Record.parse(json.dumps(task), Where("bench", i)) for i, task in enumerate(tasks())]

    def bare() -> int:
        for p in range(NUM_PROMPTS):
            for sample in range(NUM_SAMPLES):
                key = seed_of(p, sample)
                engine.submit(Request(key, ids[p], Sampling(max_tokens=MAX_TOKENS), key, sample))
        tokens = 0
        while engine.pending:
            tokens += sum(len(done.token_ids) for done in engine.collect())
        return tokens

    def rollout() -> int:
        choice = SamplingChoice(max_tokens=MAX_TOKENS)
        with open_verifiers() as verifiers:
            maker = AttemptMaker(engine, tokenizer, seed=1, choice=choice)
            work = [Work(record, record.view(Task), tuple(range(NUM_SAMPLES)), NUM_SAMPLES) for record in records]
            loop = RolloutLoop(
                engine, maker, verifiers.verify, concurrency=engine.concurrency, on_bad=lambda *_: sys.exit("bad task")
            )
            written = sum(len(given.record.encode()) for given in loop.run(work) if given.made)
        assert written
        assert maker.tally.errors == 0
        return maker.tally.sampled_tokens

    serve({"submit/collect": bare, "rollout loop": rollout})


class Side:
    """A process that runs one of the above when asked."""

    def __init__(self, name: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, name, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **SETTINGS}, start_new_session=True,
        )  # fmt: skip
        self.ask(None)

    def ask(self, what: str | None) -> tuple[int, float]:
        """Tokens and seconds of one run; of None the word that it is ready."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if what is not None:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(("[", '"ready"')):
                return json.loads(line)
        raise SystemExit("a side of the benchmark died")

    def close(self) -> None:
        """Ends the process; vLLM's own ends its children when its input ends."""
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)


def model_folder() -> str:
    """The small model, converted."""
    from strop.core.models.load import resolve_model

    named = os.environ.get("STROP_TEST_GGUF")
    if not named:
        script = ROOT / "examples" / "quickstart" / "get_model.sh"
        done = subprocess.run(
            ["bash", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHON": sys.executable}
        )
        named = done.stdout.strip()
    return str(resolve_model(named).path)


def main() -> None:
    """Prints the lines."""
    folder = model_folder()
    sides = {"generate": Side("theirs", folder)}
    sides["submit/collect"] = sides["rollout loop"] = Side("ours", folder)
    try:
        for name, side in sides.items():
            side.ask(name)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(TURNS):
            for name, side in sides.items():
                tokens, seconds = side.ask(name)
                rates[name].append(tokens / seconds)
    finally:
        for side in {id(side): side for side in sides.values()}.values():
            side.close()
    base = statistics.median(rates["generate"])
    for name in ("submit/collect", "rollout loop"):
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates["generate"], strict=True))
        verdict = "ok" if ratio >= BAR else "MISSED"
        print(
            f"| vLLM, {name}, {NUM_PROMPTS} x {NUM_SAMPLES} samples | {statistics.median(rates[name]):.0f} tokens/s "
            f"({ratio:.2f} of beside) | LLM.generate {base:.0f} tokens/s | {BAR} of beside | {verdict} |"
        )


if __name__ == "__main__":
    {"theirs": theirs, "ours": ours}[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 1 else main()
