"""Makes a small model of another family: its own tokenizer and weights from scratch, half trained on sums.

    python family.py DIR SEED STEPS < tasks.jsonl

The tokenizer has a token for each byte, and one for a digit with the line feed behind it, which SmolLM2 has as two.
The model sees whole lines of the few-shot prompt; the loss is that of their answers.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BATCH = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a digit with the line feed behind it as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    feed = "\u010a"
    pieces = ["</s>", *alphabet, *(digit + feed for digit in "0123456789")]
    merges = [(digit, feed) for digit in "0123456789"]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], steps: int, seed: int
) -> float:
    """Plain next-token training; the last loss (nats a token)."""
    chance = random.Random(seed)
    equals = tokenizer.convert_tokens_to_ids("=")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        batch = tokenizer(chance.sample(texts, BATCH), return_tensors="pt", padding=True)
        # The answer alone counts: what stands before the last "=" is drawn at random.
        ids = batch["input_ids"]
        is_answer = (ids == equals).flip(1).cumsum(1).flip(1) == 0
        labels = ids.masked_fill(~is_answer | (batch["attention_mask"] == 0), -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def main() -> None:
    """Writes the folder."""
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    tasks = [record for record in map(json.loads, sys.stdin) if record["kind"] == "task"]
    texts = sorted({f"{task['prompt']}{task['reference']}\n" for task in tasks})
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    loss = train(model, tokenizer, texts, steps, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    pieces = " | ".join(tokenizer.tokenize("12+5=17\n"))
    print(f"{folder}: {size:,} weights, {len(tokenizer)} tokens ({pieces}), loss {loss:.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
