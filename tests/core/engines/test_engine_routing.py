"""Completions that say which experts were used: what one forward over the same tokens chooses, only where asked for."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from strop.core.engines.blocks import BlockScheduler
from strop.core.engines.open import EngineOptions, open_engine
from strop.core.engines.protocol import Request
from strop.core.engines.vllm import VllmEngine
from strop.core.errors import Unavailable, UsageError
from strop.core.models.routing import RoutingShape, recording, routing_shape
from strop.core.records import Record, Sampling
from strop.core.rollout.routing import RoutingLog
from strop.core.rollout.routing_file import RoutingWriter
from strop.core.rollout.stitch import Stitcher
from strop.core.train.examples import Reading, TrainRollout, rollout_example
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions
from strop.core.train.policy import Policy
from strop.core.train.routing import RoutingReading

SAMPLING = Sampling(max_tokens=7)


def options(model, engine="transformers", **more):
    return EngineOptions(
        engine=engine, model=str(model), device="cpu", dtype="float32", max_context=64, record_routing=True, **more
    )


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.pending:
        done |= {one.key: one for one in engine.collect()}
    return done


def requests():
    """Two prompts, three samples of each, and one that fills the context."""
    prompts = {p: list(range(30 + p, 40 + 2 * p)) for p in (0, 5)}
    some = [Request((p, row), prompts[p], SAMPLING, 10 * p + row, row) for p in prompts for row in range(3)]
    return [*some, Request("full", list(range(64)), SAMPLING, 0)]


def test_the_rows_are_those_of_one_forward_over_the_same_tokens(tiny_moe):
    import torch
    from transformers import AutoModelForCausalLM

    with open_engine(options(tiny_moe)) as engine:
        done = run(engine, requests())
        alone = run(engine, [requests()[4]])
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    assert routing_shape(tiny_moe) == RoutingShape((1, 2), 8, 2)
    for request in requests()[:-1]:
        completion = done[request.key]
        fed = [*request.prompt_ids, *completion.token_ids[:-1]]
        with torch.no_grad(), recording(model) as recorder:
            model(input_ids=torch.tensor([fed]))
            expected = recorder.take()
        assert completion.routing.shape == (len(request.prompt_ids) + len(completion.token_ids) - 1, 2, 2)
        assert completion.routing.dtype == np.uint8
        assert np.sort(completion.routing, -1).tolist() == np.sort(expected, -1).tolist()
    assert done["full"].routing is None
    assert alone[5, 1].routing.tolist() == done[5, 1].routing.tolist()
    assert len(np.unique(np.concatenate([one.routing for one in done.values() if one.routing is not None]))) == 8


def test_an_episode_of_several_turns_is_replayed_in_the_trainer(tiny_moe, tmp_path):
    """Engine, stitcher, file, record, pack: the trainer's log-probabilities are the engine's.

    With the rows off by one they are not, so that a shift anywhere on the way would show.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with open_engine(options(tiny_moe)) as engine, RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(engine, writer)
        record = play(log)
        log.attach(record)
    reading = Reading("ppo", needs_old=True, routing=RoutingReading("on", lambda: routing_shape(tiny_moe)))
    example = rollout_example(record, record.view(TrainRollout), reading)
    assert [len(one.routing) for one in example.sequences] == [len(one.token_ids) - 1 for one in example.sequences]
    assert len(example.sequences) == 2
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    trainer = Trainer(Policy(model), LossOptions("ppo"), OptimOptions())
    sums = trainer.accumulate([example])
    assert sums.gap_max < 1e-4
    for sequence in example.sequences:
        sequence.routing = np.roll(sequence.routing, 1, axis=0)
    assert trainer.accumulate([example]).gap_max > 0.1


def play(log):
    """Two turns behind one another, and after a history that was pruned a third."""
    stitcher = Stitcher(lambda id_: b"%d " % id_)
    rendered = list(range(30, 42))
    for turn in range(3):
        log.submit(Request("g/0", stitcher.next_prompt(rendered), SAMPLING, turn))
        (completion,) = log.collect()
        stitcher.take(completion.token_ids, completion.logprobs)
        rendered = [*rendered, *completion.token_ids, 70, 71, 72] if turn == 0 else list(range(90, 101))
    fields = {"id": "g/0", "task": "t", "advantage": 1.0, "chunks": stitcher.chunks()}
    return Record.make("rollout", fields)


def test_nothing_is_recorded_that_was_not_asked_for(tiny_moe):
    from dataclasses import replace

    with open_engine(replace(options(tiny_moe), record_routing=False)) as engine:
        plain = run(engine, requests())
    with open_engine(options(tiny_moe)) as engine:
        recorded = run(engine, requests())
    for key, completion in plain.items():
        assert completion.routing is None
        assert (completion.token_ids, completion.logprobs) == (recorded[key].token_ids, recorded[key].logprobs)


def test_rows_of_several_samples_would_be_mixed_up(tiny_moe):
    with pytest.raises(ValueError, match="one row at a time"):
        BlockScheduler(None, None, context=8, rows=2, recorder=object())


def test_a_model_without_experts_has_no_routing(tiny_model):
    for engine in ("transformers", "vllm"):
        with pytest.raises(UsageError, match="not a mixture of experts"):
            open_engine(options(tiny_model, engine))


def test_a_server_and_a_script_have_none(tiny_moe, tmp_path):
    with pytest.raises(UsageError, match="does not return routing"):
        open_engine(options(tiny_moe, "server", endpoints=("http://127.0.0.1:1",)))
    with pytest.raises(UsageError, match="a script has no experts"):
        open_engine(options(tiny_moe, f"script:{tmp_path}"))


@pytest.mark.vllm
def test_vllm_without_its_second_runner_says_what_records_instead(tiny_moe):
    """Version 0.32 returns routing from a runner that needs Triton, and so a GPU."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("Triton is here, and with it vLLM's second runner")
    with pytest.raises(Unavailable, match=r"cannot return the routing .*Model Runner V2.*--engine transformers"):
        open_engine(options(tiny_moe, "vllm"))


def flat(ids):
    return SimpleNamespace(token_ids=list(ids), logprobs=[-1.0] * len(ids), start_indices=list(range(len(ids))))


def vllm_output(ids, routed):
    sampled = SimpleNamespace(
        token_ids=ids, logprobs=flat(ids), finish_reason="length", stop_reason=None, routed_experts=routed
    )
    return SimpleNamespace(request_id="0", prompt_token_ids=[1, 2, 3], outputs=[sampled])


def vllm_engine(layers):
    engine = object.__new__(VllmEngine)
    engine._keys, engine._vocab_size, engine._routed_layers = {"0": "k"}, 100, layers
    return engine


@pytest.mark.parametrize("surplus", [0, 2])
def test_of_what_vllm_returns_the_layers_with_a_router_and_the_rows_of_the_ids_are_kept(surplus):
    """It gives [positions from 0 on, all decoder layers, K]; zeros where a layer has no router."""
    routed = np.arange(2 * 3 * (4 + surplus), dtype=np.uint8).reshape(-1, 3, 2)
    done = vllm_engine([1, 2])._completion(vllm_output([7, 8], routed))
    assert done.routing.tolist() == routed[:4, 1:].tolist()
    assert vllm_engine([1, 2])._completion(vllm_output([7, 8], None)).routing is None
    assert vllm_engine(None)._completion(vllm_output([7, 8], routed)).routing is None
