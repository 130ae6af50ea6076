"""The options of every tool that uses a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strop.core.engines.open import EngineOptions

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL",
        help="A Hugging Face folder, a hub id (owner/name, or owner/name@revision), or a .gguf file, which is "
        "converted once into the cache. With --endpoint: the model the servers serve, for its tokenizer.",
        show_default=False,
    ),
]  # fmt: skip
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", metavar="FOLDER",
        help="A peft LoRA folder, or the --out folder of `train`, whose latest checkpoint is taken.",
        show_default=False,
    ),
]  # fmt: skip
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", metavar="ENGINE",
        help="transformers, vllm or server; auto: server with --endpoint, vllm where it is installed and a GPU is "
        "there, else transformers. script:FILE says what is written in FILE (see the manual).",
    ),
]  # fmt: skip
Endpoint = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint", metavar="URL",
        help="An OpenAI-compatible server that takes and returns token ids, e.g. http://localhost:8000 (repeatable).",
        show_default=False,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or auto.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="DTYPE",
        help="float32, bfloat16, float16; auto: bfloat16 on a GPU and on a CPU that multiplies it, else float32.",
    ),
]  # fmt: skip
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory", metavar="FRACTION", min=0.01, max=1.0,
        help="The share of the GPU's memory that vllm may take. Unset: 0.45, so that a second model fits beside it.",
        show_default=False,
    ),
]  # fmt: skip
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context", metavar="TOKENS", min=1,
        help="Most tokens of prompt and response together. Unset: the model's own limit.",
        show_default=False,
    ),
]  # fmt: skip
Offline = Annotated[bool, typer.Option("--offline", help="Never ask the hub: only what is on this machine.")]


def engine_options(
    *, model: str | None, adapter: str | None = None, engine: str = "auto", endpoint: list[str] | None = None,
    device: str = "auto", dtype: str = "auto", gpu_memory: float | None = None, max_context: int | None = None,
    offline: bool = False, seed: int = 0, batch_rows: int = 0,
) -> EngineOptions:  # fmt: skip
    """The options as core takes them."""
    from strop.core.engines.open import EngineOptions

    return EngineOptions(
        engine=engine, model=model, adapter=adapter, device=device, dtype=dtype, endpoints=tuple(endpoint or ()),
        gpu_memory=gpu_memory, max_context=max_context, batch_rows=batch_rows, seed=seed, offline=offline,
    )  # fmt: skip
