"""Text and chat messages to token ids and back, with the traps of tokenizers handled in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.core.errors import DataError, Unavailable, missing_extra
from strop.core.models.memory import quiet_transformers
from strop.core.models.token_bytes import mistral_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt")

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Kinds of models for which transformers trusts the class that the tokenizer's own files name.
PLAIN_MODELS = ("llama", "gpt2", "qwen3", "qwen3_moe", "gemma3_text", "olmo2", "smollm3")


class Tokenizer:
    """A tokenizer as the tools need it; `inner` is the transformers one, `source` where it comes from.

    It needs no pad token (nothing here pads), and takes end tokens from wherever the model declares them.
    """

    def __init__(self, inner: Any, *, eos_ids: frozenset[int], vocab_size: int, source: str = "") -> None:
        self.inner = inner
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.source = source or str(getattr(inner, "name_or_path", "the model"))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer in a model folder. Raises Unavailable where there is none, or no code for it."""
        config = _read_json(folder / "config.json")
        try:
            if _is_plain(folder, config):
                from transformers import PreTrainedTokenizerFast as Kind
            else:
                from transformers import AutoTokenizer as Kind
        except ImportError:
            raise missing_extra("transformers", "model") from None
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise Unavailable(
                f"{folder}: a model folder without a tokenizer (no {TOKENIZER_FILES[0]}); "
                "copy the tokenizer files of its base model into it"
            )
        quiet_transformers()
        try:
            inner = Kind.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # noqa: BLE001 (transformers raises whatever its parsers raise)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise Unavailable(f"{folder}: its tokenizer cannot be loaded: {reason}") from None
        declared = [config, config.get("text_config") or {}, _read_json(folder / "generation_config.json")]
        eos_ids = {inner.eos_token_id} | {id_ for part in declared for id_ in _as_ids(part.get("eos_token_id"))}
        size = max(len(inner), config.get("vocab_size") or 0)
        return cls(inner, eos_ids=frozenset(eos_ids - {None}), vocab_size=size, source=str(folder))

    def encode_prompt(
        self, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids that stand before the model's answer; `tools` are for the chat template.

        Text is encoded as it is, with the start token that the tokenizer itself puts first (if any); chat messages go
        through the chat template, with the opening of the assistant's turn (or, where the last message is the
        assistant's own, left open to be continued). The start token never stands twice. Raises DataError for messages
        that no template can take.
        """
        if isinstance(prompt, str):
            return self._single_bos(self._open_ended(prompt))
        rendered = self._render(prompt, tools)
        if isinstance(rendered, str):
            rendered = self.inner(rendered, add_special_tokens=False)["input_ids"]
        return self._single_bos(rendered)

    def decode(self, ids: list[int]) -> str:
        """The text of the ids, special tokens left out, spaces as they are."""
        text: str = self.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @property
    def chat_template(self) -> str | None:
        """The chat template, where there is one."""
        found = getattr(self.inner, "chat_template", None)
        return found if isinstance(found, str) else None

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | list[int]:
        # mistral-common has its chat form in code, and reads no special token out of a text: it gives ids.
        gives_ids = mistral_tokenizer(self.inner) is not None
        if not gives_ids and not getattr(self.inner, "chat_template", None):
            raise DataError(
                f"chat messages, but {self.source} has no chat template (a base model?); "
                "give the prompt as text, or take the model's instruct form",
                field="prompt",
            )
        if not messages:
            raise DataError("no messages", field="prompt")
        continues = messages[-1].get("role") == "assistant"
        try:
            found: str | list[int] = self.inner.apply_chat_template(
                messages, tokenize=gives_ids, add_generation_prompt=not continues, continue_final_message=continues,
                return_dict=False, **({"tools": tools} if tools else {}),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 (templates are programs and raise what they like)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"the chat template of {self.source} refuses the messages: {reason}"
            raise DataError(message, field="prompt") from None
        return found

    def _open_ended(self, text: str) -> list[int]:
        """The ids of a text with what the tokenizer puts before it, but no end token behind: the answer follows."""
        plain: list[int] = self.inner(text, add_special_tokens=False)["input_ids"]
        full: list[int] = self.inner(text)["input_ids"]
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                before = full[:start] if plain else [id_ for id_ in full if id_ == self.inner.bos_token_id]
                return before + plain
        return full

    def _single_bos(self, ids: list[int]) -> list[int]:
        bos = self.inner.bos_token_id
        while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return ids


def _is_plain(folder: Path, config: dict[str, Any]) -> bool:
    """Whether AutoTokenizer would take the class that is nothing but tokenizer.json.

    That class needs no torch, whose import takes seconds; AutoTokenizer does, for every model.
    """
    named = _read_json(folder / "tokenizer_config.json")
    return (
        (folder / "tokenizer.json").exists() and "auto_map" not in named
        and named.get("tokenizer_class") in PLAIN_CLASSES and config.get("model_type") in PLAIN_MODELS
    )  # fmt: skip


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
