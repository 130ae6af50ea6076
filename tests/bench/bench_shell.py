"""Episodes in a sandbox side by side: eight whose commands sleep, beside the longest of them alone.

Run as a script: prints a table line. `strop rollout` says how long its episodes took, without start-up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STROP = str(Path(sys.executable).with_name("strop"))
EPISODES, SLEEP_S, BAR = 8, 10, 1.3


def tiny_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and a config: a script needs no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "<end>"])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=template)
    made.save_pretrained(folder)
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(alphabet) + 1, max_position_embeddings=1 << 16, **sizes)
    config.eos_token_id = len(alphabet)
    config.save_pretrained(folder)


def seconds(folder: Path, number: int) -> float:
    """What `rollout` says its episodes took."""
    tests = {"name": "tests", "files": {"x": ""}, "folder": "hidden", "command": "true", "report": "r", "reward": "w"}
    tasks = [{"kind": "task", "id": f"t{i}", "prompt": "?", "env": "shell", "verifier": tests} for i in range(number)]
    done = subprocess.run(
        [STROP, "rollout", "--model", folder, "--engine", f"script:{folder / 'policy.jsonl'}", "--sandbox", "process"],
        input="".join(json.dumps(task) + "\n" for task in tasks), capture_output=True, text=True, check=True,
    )  # fmt: skip
    match = re.search(rf"{number}/{number} passed.* in ([0-9.]+) s", done.stderr)
    if match is None:
        raise SystemExit(done.stderr)
    return float(match[1])


def main() -> None:
    """Prints the line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_tokenizer(folder)
        script = {"messages": [f"```bash\nsleep {SLEEP_S}\n```", "Done."]}
        (folder / "policy.jsonl").write_text(json.dumps(script) + "\n")
        alone, together = seconds(folder, 1), seconds(folder, EPISODES)
    verdict = "ok" if together <= BAR * alone else "MISSED"
    print(
        f"| {EPISODES} episodes side by side that sleep {SLEEP_S} s, sandboxes of processes | {together:.1f} s | "
        f"one alone {alone:.1f} s ({together / alone:.2f}x) | at most {BAR}x | {verdict} |"
    )


if __name__ == "__main__":
    main()
