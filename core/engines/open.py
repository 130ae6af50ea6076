"""Which engine, and with what: from the options of a command line to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.core.errors import UsageError

if TYPE_CHECKING:
    from strop.core.engines.protocol import Engine, ModelInfo
    from strop.core.engines.server import ServerEngine
    from strop.core.engines.vllm import VllmEngine
    from strop.core.models.load import ModelPath
    from strop.core.models.tokens import Tokenizer

MODEL_MISSING = "--model is missing: a folder, a hub id or a .gguf file; with --endpoint, the model that is served"
ENGINES = ("auto", "transformers", "vllm", "server")
SCRIPT = "script:"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user said of model and engine; see cli/model_options.py for the meaning of each."""

    engine: str = "auto"
    model: str | None = None
    adapter: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    endpoints: tuple[str, ...] = ()
    gpu_memory: float | None = None
    max_context: int | None = None
    batch_rows: int = 0
    seed: int = 0
    offline: bool = False
    record_routing: bool = False


def choose_engine(options: EngineOptions) -> str:
    """ "auto" resolved: server if there are endpoints; vllm where it is installed and a GPU is there; transformers.

    Raises UsageError for an engine that is unknown or does not fit the other options.
    """
    name = options.engine
    if name.startswith(SCRIPT):
        if not options.model:
            raise UsageError(f"--engine {name} needs a --model, for its tokenizer and chat template")
        return "script"
    if name not in ENGINES:
        raise UsageError(f"--engine {name}: expected one of {', '.join(ENGINES)}, or script:FILE")
    if options.endpoints and name not in ("auto", "server"):
        raise UsageError(f"--endpoint goes with --engine server, not with {name}")
    if name == "server" and not options.endpoints:
        raise UsageError("--engine server needs an --endpoint, e.g. --endpoint http://localhost:8000")
    if not options.model:
        raise UsageError(MODEL_MISSING)
    if name != "auto":
        return name
    if options.endpoints:
        return "server"
    return "vllm" if options.device in ("auto", "cuda") and _can_use_vllm() else "transformers"


def _can_use_vllm() -> bool:
    from importlib.util import find_spec

    if find_spec("vllm") is None or find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def open_engine(options: EngineOptions) -> Engine:
    """The engine the options ask for; weights may be loaded only when the first request comes."""
    name = choose_engine(options)
    if options.record_routing:
        _check_routing(name, options)
    if name == "server":
        return open_server(options)
    if name == "vllm":
        return open_vllm(options)
    if name == "script":
        return _open_script(options)
    from strop.core.engines.transformers import TransformersEngine

    return TransformersEngine.open(options)


def _check_routing(name: str, options: EngineOptions) -> None:
    """Raises UsageError where there is no routing to be had, before anything large is loaded."""
    from strop.core.models.routing import routing_shape

    if name == "server":
        raise UsageError("--routing: an OpenAI-compatible server does not return routing; the engine vllm does")
    if name == "script":
        raise UsageError("--routing: a script has no experts")
    model, _ = resolve_policy(options)
    if routing_shape(model.path) is None:
        raise UsageError(f"--routing: {model.name} is not a mixture of experts and has no routing to record")


def open_vllm(options: EngineOptions, *, for_scoring: bool = False) -> VllmEngine:
    """The engine vllm, with its weights loaded; see VllmEngine for `for_scoring`."""
    from strop.core.engines.vllm import VllmEngine
    from strop.core.models.adapters import model_info
    from strop.core.models.load import load_tokenizer

    model, adapter = resolve_policy(options)
    return VllmEngine(
        model.path, load_tokenizer(model).eos_ids, model_info(model, adapter, options.adapter), adapter=adapter,
        device=options.device, dtype=options.dtype, gpu_memory=options.gpu_memory, max_context=options.max_context,
        seed=options.seed, record_routing=options.record_routing, for_scoring=for_scoring,
    )  # fmt: skip


def _open_script(options: EngineOptions) -> Engine:
    from strop.core.engines.script import ScriptEngine
    from strop.core.models.load import context_length, load_tokenizer

    model, _ = resolve_policy(options)
    file = Path(options.engine.removeprefix(SCRIPT))
    return ScriptEngine(file, load_tokenizer(model), context_length(model, options.max_context))


def open_server(options: EngineOptions) -> ServerEngine:
    """The servers at the endpoints, each of which was seen to serve the model."""
    from strop.core.engines.server import ServerEngine
    from strop.core.models.load import load_tokenizer

    served = _served_adapter(options)
    model, adapter = resolve_policy(_without(options, served))
    tokenizer = load_tokenizer(model)
    return ServerEngine(
        options.endpoints, (model.name, str(model.path)), tokenizer.eos_ids, policy_info(options),
        adapter=adapter or served, max_context=options.max_context, vocab_size=tokenizer.vocab_size,
        scored_at_once=options.batch_rows,
    )  # fmt: skip


def policy_info(options: EngineOptions) -> ModelInfo:
    """What records say of model and adapter, with the hashes of their content; no weights are loaded."""
    from dataclasses import replace

    from strop.core.models.adapters import model_info

    served = _served_adapter(options)
    model, adapter = resolve_policy(_without(options, served))
    info = model_info(model, adapter, options.adapter)
    return info if served is None else replace(info, adapter=served)


def _served_adapter(options: EngineOptions) -> str | None:
    """With endpoints, what is no folder here may be an adapter that the servers know by this name."""
    known = options.adapter and (not options.endpoints or Path(options.adapter).expanduser().exists())
    return None if known else options.adapter


def _without(options: EngineOptions, served: str | None) -> EngineOptions:
    from dataclasses import replace

    return options if served is None else replace(options, adapter=None)


def resolve_policy(options: EngineOptions) -> tuple[ModelPath, Path | None]:
    """Where model and adapter lie. Raises UsageError where they are known not to belong together."""
    from strop.core.models.adapters import check_base, resolve_adapter
    from strop.core.models.load import resolve_model

    if not options.model:
        raise UsageError(MODEL_MISSING)
    model = resolve_model(options.model, offline=options.offline)
    adapter = None if options.adapter is None else resolve_adapter(options.adapter)
    if adapter is not None:
        check_base(adapter, model)
    return model, adapter


def open_tokenizer(options: EngineOptions) -> Tokenizer:
    """The tokenizer that goes with the options' model, without its weights."""
    from strop.core.models.load import load_tokenizer, resolve_model

    if not options.model:
        raise UsageError(MODEL_MISSING)
    return load_tokenizer(resolve_model(options.model, offline=options.offline))
