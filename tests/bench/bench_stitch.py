"""Stitching beside generation: one episode of many turns, sampled by SmolLM2-135M-Instruct through the engine.

Run as a script: prints a table line. On a GPU generation is faster and the share larger; so the share is also worked
out for an engine that samples 2,000 tokens a second for the one episode.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

TURNS, TOKENS, BAR = 12, 64, 0.02
FAST = 2_000
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Prints the line."""
    from strop.core.engines.open import EngineOptions, open_engine, open_tokenizer
    from strop.core.engines.protocol import Request
    from strop.core.models.token_bytes import TokenBytes
    from strop.core.records import Sampling
    from strop.core.rollout.stitch import Stitcher

    model = os.environ.get("MODEL") or subprocess.run(
        ["bash", ROOT / "examples/quickstart/get_model.sh"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = EngineOptions(engine="transformers", model=model, dtype="float32")
    tokenizer = open_tokenizer(options)
    stitcher = Stitcher(TokenBytes(tokenizer))
    messages = [{"role": "user", "content": "Tell me a story, a little at a time."}]
    spent = {"generate": 0.0, "stitch": 0.0, "render": 0.0}

    def timed(name: str, work):
        started = time.perf_counter()
        found = work()
        spent[name] += time.perf_counter() - started
        return found

    num_sampled = 0
    with open_engine(options) as engine:
        for turn in range(TURNS + 1):
            rendered = timed("render", lambda: tokenizer.encode_prompt(messages))
            fed = timed("stitch", lambda ids=rendered: stitcher.next_prompt(ids))

            def generate(ids=fed, seed=turn):
                engine.submit(Request("story", ids, Sampling(max_tokens=TOKENS), seed))
                return engine.collect()[0]

            done = generate() if turn == 0 else timed("generate", generate)
            timed("stitch", lambda done=done: stitcher.take(done.token_ids, done.logprobs))
            if turn == 0:
                # The first turn also loads the model.
                spent = dict.fromkeys(spent, 0.0)
            else:
                num_sampled += len(done.token_ids)
            messages.append({"role": "assistant", "content": tokenizer.decode(done.token_ids)})
            messages.append({"role": "user", "content": "It is 12:45.\n" * 20 + "Go on."})
    share = spent["stitch"] / spent["generate"]
    fast = spent["stitch"] / (num_sampled / FAST)
    verdict = "ok" if share < BAR else "MISSED"
    print(
        f"| stitching {TURNS} turns of {TOKENS} tokens, share of generation | {share:.4%} | "
        f"rendering the history {spent['render'] / spent['generate']:.3%} | {BAR:.0%} | {verdict} |"
    )
    print(f"stitching {1000 * spent['stitch']:.1f} ms, generation {spent['generate']:.1f} s ({num_sampled} tokens)")
    print(f"boundaries {stitcher.counts}; at {FAST} tokens a second the share were {fast:.3%}")


if __name__ == "__main__":
    main()
