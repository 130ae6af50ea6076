"""Opening what `strop train` trains: base model, adapter or all parameters, reference, and how to save them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import UsageError
from strop.core.train.policy import LoraOptions, Policy, add_lora, load_lora

if TYPE_CHECKING:
    from strop.core.models.load import ModelPath
    from strop.core.models.routing import RoutingShape
    from strop.core.models.tokens import Tokenizer
    from strop.core.train.checkpoints import Checkpoint
    from strop.core.train.critic_setup import OpenCritic

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CriticWish:
    """A critic beside the policy: `start` is the folder of an earlier one, None begins with nothing."""

    start: Path | None = None


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """What to train. `lora` None trains all parameters; `start` is the checkpoint to go on from, `adapter` a peft one.

    `lora_given`: the user named a rank, which must then be that of the checkpoint or adapter.
    """

    model: str
    lora: LoraOptions | None
    start: Checkpoint | None = None
    adapter: str | None = None
    lora_given: bool = False
    needs_reference: bool = False
    device: str = "auto"
    dtype: str = "auto"
    offline: bool = False
    seed: int = 0
    critic: CriticWish | None = None

    @property
    def trains_all(self) -> bool:
        """Whether all parameters move: as the checkpoint says, else as the options do."""
        if self.start is not None:
            return self.start.about.lora_rank is None
        return self.lora is None and self.adapter is None


class Opener:
    """Opens one thing after another, each when it is first asked for: where the model lies, tokenizer, policy."""

    def __init__(self, options: SetupOptions) -> None:
        self.options = options
        self._base: ModelPath | None = None
        self._tokenizer: Tokenizer | None = None

    def base(self) -> ModelPath:
        """Where the base model lies; a download or conversion happens here."""
        if self._base is None:
            from strop.core.models.load import resolve_model

            self._base = resolve_model(self.options.model, offline=self.options.offline)
        return self._base

    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
        if self._tokenizer is None:
            from strop.core.models.load import load_tokenizer

            self._tokenizer = load_tokenizer(self.base())
        return self._tokenizer

    def vocabulary(self) -> int | None:
        """How many ids the model knows, from its config.json alone; None if that does not say."""
        try:
            config = json.loads((Path(self.base().path) / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        return size if isinstance(size, int) else None

    def routing_shape(self) -> RoutingShape | None:
        """The routers of the base model, from its configuration alone; None if it is no mixture of experts."""
        from strop.core.models.routing import routing_shape

        return routing_shape(self.base().path)

    def setup(self) -> Setup:
        """The policy, loaded, and the critic where one is wanted."""
        made = open_policy(self.options, self.base())
        if self.options.critic is not None:
            from strop.core.train.critic_setup import open_critic

            wish = self.options.critic
            made.critic = open_critic(
                self.base(), wish.start, lora=self.options.lora, device=self.options.device, dtype=self.options.dtype,
                seed=self.options.seed,
            )  # fmt: skip
        return made


@dataclass(slots=True)
class Setup:
    """A policy ready to train, and how to write its weights into a folder."""

    policy: Policy
    base: ModelPath
    lora_rank: int | None
    save_weights: Callable[[Path], None]
    critic: OpenCritic | None = None


def open_policy(options: SetupOptions, base: ModelPath) -> Setup:
    """Loads the model and what is trained of it. Raises UsageError, Unavailable."""
    _check_kind(options)
    if options.trains_all:
        return _open_full(options, base)
    from strop.core.models.load import load_model

    model = _with_adapter(load_model(base, device=options.device, dtype=options.dtype), options, base)
    model.active_peft_config.base_model_name_or_path = name_for_peft(base)
    rank = int(model.active_peft_config.r)
    return Setup(Policy(model), base, rank, lambda folder: save_model(model, base, folder))


def _open_full(options: SetupOptions, base: ModelPath) -> Setup:
    """All parameters move. They are kept in float32, since a bfloat16 weight loses updates below 1/256 of itself."""
    from strop.core.models.load import choose_device, choose_dtype, load_model, resolve_model

    weights = base if options.start is None else resolve_model(str(options.start.path), offline=True)
    model = load_model(weights, device=options.device, dtype="float32").requires_grad_(True)
    reference = load_model(base, device=options.device, dtype="float32") if options.needs_reference else None
    compute = choose_dtype(options.dtype, choose_device(options.device))
    policy = Policy(model, reference=reference, compute_dtype=compute)
    return Setup(policy, base, None, lambda folder: save_model(model, base, folder))


def _check_kind(options: SetupOptions) -> None:
    start = options.start
    if start is None or not options.lora_given:
        return
    rank = options.lora.rank if options.lora else None
    if rank != start.about.lora_rank:
        had = f"LoRA rank {start.about.lora_rank}" if start.about.lora_rank else "full parameters"
        raise UsageError(f"--lora {rank or 0}, but {start.path} holds {had}")


def _with_adapter(model: Any, options: SetupOptions, base: ModelPath) -> Any:
    from strop.core.models.adapters import check_base, resolve_adapter

    if options.start is not None:
        check_base(options.start.path, base)
        return load_lora(model, options.start.path)
    if options.adapter is not None:
        folder = resolve_adapter(options.adapter)
        check_base(folder, base)
        model = load_lora(model, folder)
        rank = int(model.active_peft_config.r)
        if options.lora_given and (options.lora is None or options.lora.rank != rank):
            raise UsageError(f"--lora {options.lora.rank if options.lora else 0}, but the adapter has rank {rank}")
        return model
    assert options.lora is not None
    return add_lora(model, options.lora, seed=options.seed)


def name_for_peft(base: ModelPath) -> str:
    """The name under which other tools find the base: a .gguf file means nothing to peft, its converted folder does."""
    return str(base.path) if base.name.endswith(".gguf") else base.name


def save_model(model: Any, base: ModelPath, folder: Path) -> None:
    """Writes an adapter in peft's form, or a whole model with its tokenizer in Hugging Face's."""
    if hasattr(model, "get_base_model"):
        # Embedding layers are never trained here; an adapter that carries them is refused by vLLM.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        return
    model.save_pretrained(str(folder))
    for pattern in TOKENIZER_FILES:
        for file in Path(base.path).glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
