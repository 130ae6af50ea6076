"""The server engine against real HTTP servers that misbehave: no sample lost, none doubled, each fault named."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from strop.core.engines.endpoints import ServerLimits, base_url, shown
from strop.core.engines.protocol import ModelInfo, Request
from strop.core.engines.server import ServerEngine
from strop.core.errors import Unavailable, UsageError
from strop.core.records import Sampling

EOS = 2
VOCABULARY = 1000
# Short pauses; the limits on answers are long enough for a busy machine, and shortened where a test is about them.
FAST = ServerLimits(
    connect_s=10.0, check_s=10.0, read_s=20.0, total_s=30.0, attempts=6, first_pause_s=0.02, longest_pause_s=0.2,
    patience_s=1.5,
)  # fmt: skip


class Server(ThreadingHTTPServer):
    """A completions server whose answers are a function of the request, and whose faults a test sets.

    `fault(server, number, body)` is asked for each completion but the engine's probes: it may return a status, a
    function that changes the answer, or do with the connection what it likes (return "done").
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, port=0, fault=None, *, name="toy", mode="raw", models_fault=None, shift=0.0):
        super().__init__(("127.0.0.1", port), Handler)
        self.fault, self.name, self.mode, self.models_fault, self.shift = fault, name, mode, models_fault, shift
        self.adapters, self.seen, self.keys = {}, [], set()
        self.takes_adapters = True
        self.connections = set()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=lambda: self.serve_forever(poll_interval=0.02), daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self):
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def stop(self):
        """As if the process were killed: nothing listens, and every connection is gone."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Clients that went away are part of these tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing on stderr."""

    def reply(self, status, content, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        server = self.server
        server.keys.add(self.headers.get("Authorization"))
        if server.models_fault is not None and server.models_fault(self) == "done":
            return
        cards = [{"id": server.name, "root": f"/models/{server.name}", "parent": None, "max_model_len": 64}]
        cards += [{"id": name, "root": path, "parent": server.name} for name, path in server.adapters.items()]
        self.reply(200, {"object": "list", "data": cards})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            if not server.takes_adapters:
                return self.reply(404, {"detail": "Not Found"})
            server.adapters[body["lora_name"]] = body["lora_path"]
            return self.reply(200, b"Success")
        if body["model"] not in (server.name, *server.adapters):
            return self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        answer = self.answer(body)
        if body["prompt"] == list(range(10, 26)):
            return self.reply(200, answer)
        with server.lock:
            server.seen.append(body)
            number = len(server.seen)
        found = server.fault(self, number, body) if server.fault is not None else None
        if found == "done":
            return None
        if isinstance(found, int):
            return self.reply(found, {"error": {"message": f"made to fail with {found}"}})
        changed = found(answer) if callable(found) else answer
        return self.reply(200, changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    def answer(self, body):
        """Tokens and log-probabilities that follow from prompt and seed."""
        if "prompt_logprobs" in body:
            table = [None, *({str(token): {"logprob": -token / 8, "rank": 1}} for token in body["prompt"][1:])]
            choice = {"finish_reason": "length", "prompt_token_ids": body["prompt"], "prompt_logprobs": table}
            return {"id": "x", "object": "text_completion", "model": body["model"], "choices": [choice]}
        count = min(body["max_tokens"], 4)
        ids = [(body["seed"] + 7 * i + sum(body["prompt"])) % (VOCABULARY - 10) + 5 for i in range(count)]
        shift = self.server.shift + (0.125 if body["model"] != self.server.name else 0.0)
        values = [-1.0 - shift - i for i in range(count)]
        if body["top_k"] == 1 and self.server.mode == "processed":
            values = [0.0] * count
        choice = {
            "index": 0, "text": "", "finish_reason": "length", "stop_reason": None, "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": values, "tokens": [f"token_id:{i}" for i in ids]},
        }  # fmt: skip
        return {"id": "x", "object": "text_completion", "model": body["model"], "choices": [choice]}


@pytest.fixture
def start():
    servers = []

    def make(*args, **options):
        servers.append(Server(*args, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def engine_for(*servers, limits=FAST, **options):
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    return ServerEngine(
        urls, ("toy",), frozenset({EOS}), ModelInfo("toy", "r"), vocab_size=VOCABULARY, limits=limits, **options
    )


def request(key, **sampling):
    return Request(key, [3, 4, 5], Sampling(**{"max_tokens": 4, **sampling}), seed=key if isinstance(key, int) else 1)


def run(engine, requests):
    """All completions by key; fails if one comes twice or not at all."""
    for one in requests:
        engine.submit(one)
    assert engine.pending == len(requests)
    found = {}
    while engine.pending:
        for done in engine.collect():
            assert done.key not in found
            found[done.key] = done
    assert set(found) == {one.key for one in requests}
    assert engine.collect() == []
    return found


def change(**fields):
    def apply(answer):
        answer["choices"][0].update(fields)
        return answer

    return apply


def change_values(values):
    return lambda answer: change(logprobs={**answer["choices"][0]["logprobs"], "token_logprobs": values})(answer)


def test_answers_come_back_each_once_with_ids_and_logprobs(start):
    server = start()
    with engine_for(server) as engine:
        assert engine.context_length == 64
        found = run(engine, [request(i) for i in range(300)])
    first = found[0]
    assert (first.stop, first.error, len(first.token_ids)) == ("length", None, 4)
    assert first.logprobs == [-1.0, -2.0, -3.0, -4.0]
    assert found[1].token_ids == [i + 1 for i in first.token_ids]
    assert len(server.seen) == 300


def test_everything_is_said_to_the_server(start):
    """A default that the server takes from the model's own generation config would change the distribution."""
    server = start()
    with engine_for(server) as engine:
        run(engine, [request(1, temperature=0.7, top_p=0.9, stop=["\n"])])
    body = server.seen[0]
    assert body["prompt"] == [3, 4, 5]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 0.9, -1, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert (body["seed"], body["stop"], body["stop_token_ids"], body["ignore_eos"]) == (1, ["\n"], [EOS], True)
    assert (body["n"], body["add_special_tokens"], body["return_token_ids"]) == (1, False, True)


def test_500_then_recovery_loses_nothing(start):
    server = start(fault=lambda handler, number, body: 500 if number <= 10 else None)
    with engine_for(server) as engine:
        found = run(engine, [request(i) for i in range(8)])
    assert all(done.error is None for done in found.values())
    assert len(server.seen) == 18


def test_500_for_ever_is_an_error_after_the_limit(start):
    server = start(fault=lambda handler, number, body: 500)
    with engine_for(server) as engine:
        done = run(engine, [request(0)])[0]
    assert "HTTP 500: made to fail with 500" in done.error
    assert "tried 6 times" in done.error
    assert done.token_ids == []
    assert len(server.seen) == FAST.attempts


def test_429_waits_as_long_as_it_is_asked_to(start):
    def fault(handler, number, body):
        if number == 1:
            handler.reply(429, {"error": "slow down"}, [("Retry-After", "1")])
            return "done"
        return None

    server = start(fault=fault)
    with engine_for(server) as engine:
        begun = time.monotonic()
        assert run(engine, [request(0)])[0].error is None
    assert time.monotonic() - begun >= 1.0


def test_400_is_not_asked_again(start):
    server = start(fault=lambda handler, number, body: 400)
    with engine_for(server) as engine:
        done = run(engine, [request(0)])[0]
    assert "HTTP 400: made to fail with 400" in done.error
    assert len(server.seen) == 1


def test_a_server_that_never_answers_is_an_error_in_bounded_time(start):
    release = threading.Event()

    def hang(handler, number, body):
        release.wait(20)
        return "done"

    server = start(fault=hang)
    with engine_for(server, limits=replace(FAST, attempts=2, read_s=1.0)) as engine:
        begun = time.monotonic()
        found = run(engine, [request(i) for i in range(4)])
        assert time.monotonic() - begun < 15
    release.set()
    assert all("no answer in time" in done.error for done in found.values())


def test_a_server_that_never_answers_at_the_start(start):
    release = threading.Event()

    def hang(handler):
        release.wait(20)
        return "done"

    server = start(models_fault=hang)
    with pytest.raises(Unavailable, match=r"no server can be used: http://127.0.0.1:\d+: no answer in time"):
        engine_for(server, limits=replace(FAST, check_s=0.5))
    release.set()


def test_a_server_that_drips_is_ended_by_the_total_limit(start):
    def drip(handler, number, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
        return "done"

    server = start(fault=drip)
    with engine_for(server, limits=replace(FAST, attempts=1, total_s=1.0)) as engine:
        begun = time.monotonic()
        assert "no answer in time" in run(engine, [request(0)])[0].error
        assert time.monotonic() - begun < 3.8


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (change_values([-1.0, None, -3.0, -4.0]), "the log-probability of token 1 is null"),
        (change_values([-1.0, -2.0, -3.0]), "3 log-probabilities for 4 tokens"),
        (change_values([-1.0, -2.0, -9999.0, -4.0]), "the log-probability of token 2 is not finite"),
        (change_values([-1.0, 0.5, -3.0, -4.0]), "the log-probability of token 1 is above zero"),
        (change_values(None), "the log-probabilities are missing"),
        (change(logprobs=None), "the log-probabilities are missing"),
        (change(token_ids=None), "the answer has no token_ids"),
        (change(token_ids=[]), "no token was sampled"),
        (change(token_ids=[1, 2, 3, VOCABULARY]), "outside the vocabulary"),
        (change(token_ids=[9, 8, 7, 6]), "of other tokens than the sampled ones"),
        (change(prompt_token_ids=[1, 3, 4, 5]), "the server's prompt is not the one that was sent"),
        (change(finish_reason="abort"), "ended the request with abort"),
        (change(finish_reason="stop"), "the last token it returned is no end token"),
        (lambda answer: json.dumps(answer).replace("-2.0", "NaN").encode(), "the answer holds NaN"),
        (lambda answer: json.dumps(answer).replace("-2.0", "-Infinity").encode(), "the answer holds Infinity"),
        (lambda answer: {"choices": []}, "0 choices for one prompt"),
        (lambda answer: {"result": "ok"}, "not what was asked for"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_it(start, fault, says):
    server = start(fault=lambda handler, number, body: fault)
    with engine_for(server) as engine:
        done = run(engine, [request(0)])[0]
    assert says in done.error
    assert server.url in done.error
    assert (done.token_ids, done.logprobs, done.stop) == ([], [], "")
    assert len(server.seen) == 1


def test_stop_reasons(start):
    endings = {1: (EOS, "stop", EOS), 2: (EOS, "stop", None), 3: (77, "stop", "\n"), 4: (77, "length", None)}

    def fault(handler, number, body):
        last, finish, reason = endings[body["seed"]]
        ids = [9, 9, 9, last]
        tokens = {"token_logprobs": [-1.0] * 4, "tokens": [f"token_id:{i}" for i in ids]}
        return change(token_ids=ids, finish_reason=finish, stop_reason=reason, logprobs=tokens)

    server = start(fault=fault)
    with engine_for(server) as engine:
        found = run(engine, [request(i, stop=["\n"]) for i in endings])
    assert {key: done.stop for key, done in found.items()} == {1: "eos", 2: "eos", 3: "stop", 4: "length"}


def test_a_connection_that_dies_in_the_middle_is_tried_again(start):
    def fault(handler, number, body):
        if number % 3 != 1:
            return None
        handler.send_response(200)
        handler.send_header("Content-Length", "4000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [{"token_ids": [1, 2')
        handler.close_connection = True
        return "done"

    server = start(fault=fault)
    with engine_for(server) as engine:
        found = run(engine, [request(i) for i in range(6)])
    assert all(done.error is None for done in found.values())


def test_one_of_two_endpoints_is_killed_and_nothing_is_lost_or_doubled(start, caplog):
    dying, other = start(), start()

    def fault(handler, number, body):
        if number == 20:
            threading.Thread(target=dying.stop).start()
        if number >= 20:
            handler.connection.shutdown(socket.SHUT_RDWR)
            return "done"
        time.sleep(0.005)
        return None

    dying.fault = fault
    with engine_for(dying, other) as engine, caplog.at_level(logging.WARNING, "strop.engines"):
        found = run(engine, [request(i) for i in range(200)])
    assert all(done.error is None for done in found.values())
    with engine_for(other) as engine:
        plain = run(engine, [request(i) for i in range(200)])
    assert {key: done.token_ids for key, done in found.items()} == {key: d.token_ids for key, d in plain.items()}
    assert f"{dying.url} is set aside" in caplog.text


def test_an_endpoint_that_is_back_is_used_again(start):
    first, second = start(), start()
    port = first.server_address[1]
    with engine_for(first, second) as engine:
        run(engine, [request(i) for i in range(20)])
        first.stop()
        run(engine, [request(i) for i in range(20)])
        back = start(port)
        deadline = time.monotonic() + 10
        while not back.seen and time.monotonic() < deadline:
            run(engine, [request(i) for i in range(8)])
    assert back.seen


def test_an_endpoint_that_hangs_when_it_is_back_holds_nothing_up(start):
    """Whether it is back is seen beside the work, which goes on with the others."""
    release = threading.Event()
    hanging, good = start(), start()
    with engine_for(hanging, good) as engine:
        hanging.fault = lambda handler, number, body: 503
        hanging.models_fault = lambda handler: release.wait(20) and "done"
        begun = time.monotonic()
        while time.monotonic() - begun < 1.0:
            found = run(engine, [request(i) for i in range(8)])
            assert all(done.error is None for done in found.values())
        assert time.monotonic() - begun < 5
        release.set()


def test_an_endpoint_that_fails_fast_does_not_draw_the_requests(start):
    """It looks the least busy of all."""
    failing, good = start(fault=lambda handler, number, body: 500), start(fault=lambda *_: time.sleep(0.02))
    with engine_for(failing, good) as engine:
        found = run(engine, [request(i) for i in range(100)])
    assert all(done.error is None for done in found.values())
    assert len(failing.seen) < 100


def test_the_least_loaded_endpoint_comes_first(start):
    slow, quick = start(fault=lambda *_: time.sleep(0.3)), start()
    with engine_for(slow, quick) as engine:
        waiting = 0
        for i in range(60):
            engine.submit(request(i))
            waiting += 1
            while waiting >= 4:
                waiting -= len(engine.collect())
        while engine.pending:
            engine.collect()
    assert len(quick.seen) > 2 * len(slow.seen)


def test_all_servers_gone_is_an_error_when_patience_ends(start):
    server = start()
    with engine_for(server) as engine:
        run(engine, [request(0)])
        server.stop()
        begun = time.monotonic()
        found = run(engine, [request(i) for i in range(50)])
        assert time.monotonic() - begun < 15
    assert all("no server could be used for 1.5 s" in done.error or "tried" in done.error for done in found.values())


PROMPTS = [[3, 4, 5 + i] for i in range(60)]


def test_scores_of_prompts_come_in_order_from_all_endpoints(start):
    servers = [start(), start()]
    with engine_for(*servers) as engine:
        scores = engine.prompt_logprobs(PROMPTS)
    assert scores == [[-0.5, -(5 + i) / 8] for i in range(60)]
    assert sum(len(server.seen) for server in servers) == 60
    assert min(len(server.seen) for server in servers) >= 20
    body = servers[0].seen[0]
    assert (body["max_tokens"], body["prompt_logprobs"], body["stream"]) == (1, 0, False)


def test_scoring_gets_over_failures_that_pass(start):
    server = start(fault=lambda server, number, body: 500 if number % 3 == 1 else None)
    with engine_for(server) as engine:
        assert engine.prompt_logprobs(PROMPTS[:9]) == [[-0.5, -(5 + i) / 8] for i in range(9)]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (change(prompt_logprobs=None), "cannot score given tokens"),
        (change(prompt_logprobs=[None, {"4": {"logprob": -1.0}}]), "another prompt"),
        (change(prompt_token_ids=[1, 3, 4, 5]), "another prompt"),
        (change(prompt_logprobs=[None, {"4": {"logprob": -1.0}}, None]), "without its log-probability"),
        (change(prompt_logprobs=[None, {"4": {"logprob": -1.0}}, {"6": {"logprob": -1.0}}]), "without its log-prob"),
        (change(prompt_logprobs=[None, {"4": {"logprob": None}}, {"5": {"logprob": -1.0}}]), "not what was asked"),
        (lambda answer: {"choices": []}, "0 choices"),
        (400, "made to fail with 400"),
    ],
)
def test_scores_that_do_not_fit_the_prompt_are_refused(start, fault, told):
    server = start(fault=lambda *_: fault)
    with engine_for(server) as engine, pytest.raises(Unavailable, match=told) as caught:
        engine.prompt_logprobs(PROMPTS[:1])
    assert server.url in str(caught.value)


def test_other_weights_have_another_fingerprint(start):
    """Less than what two machines may differ by, and yet not taken for the same."""
    prints = []
    for shift in (0.0, 0.0, 0.05):
        with engine_for(start(shift=shift)) as engine:
            prints.append(engine.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_nobody_there_at_the_start(start):
    server = start()
    url = server.url
    server.stop()
    with pytest.raises(Unavailable, match=rf"no server can be used: {url}: ConnectError"):
        engine_for(url)


def test_one_dead_endpoint_at_the_start_is_left_for_later(start):
    gone = start()
    gone.stop()
    with engine_for(gone.url, start()) as engine:
        assert run(engine, [request(0)])[0].error is None


def test_another_model_is_refused(start):
    with pytest.raises(Unavailable, match="serves other, not toy"):
        engine_for(start(name="other"))
    with pytest.raises(Unavailable, match="serves other, not toy"):
        engine_for(start(), start(name="other"))


def test_other_weights_under_the_same_name_are_refused(start):
    with pytest.raises(Unavailable, match="computes something else than was seen before"):
        engine_for(start(), start(shift=2.0))


def test_the_mode_of_logprobs_is_seen_not_assumed(start):
    plain, cut, cold = Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.5)
    with engine_for(start(mode="raw")) as engine:
        assert [engine.logprobs_mode(s) for s in (plain, cut, cold)] == ["scaled", "scaled", "raw"]
        assert engine.logprobs_mode(Sampling(temperature=0.0)) == "raw"
    with engine_for(start(mode="processed")) as engine:
        assert [engine.logprobs_mode(s) for s in (plain, cut, cold)] == ["scaled", "processed", "scaled"]
        assert engine.logprobs_mode(Sampling(temperature=0.0)) == "raw"
    with pytest.raises(Unavailable, match=r"returns \w+ log-probabilities, and another endpoint \w+ ones"):
        engine_for(start(mode="raw"), start(mode="processed"))


@pytest.fixture
def adapter(tmp_path):
    """The least that is an adapter: a config with a rank and one lora_B tensor that is not zero."""
    data = b"\x00\x00\x80\x3f"
    header = json.dumps({"base.lora_B.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return tmp_path


def test_an_adapter_is_loaded_seen_in_the_list_and_loaded_again_after_a_restart(start, adapter):
    server = start()
    port = server.server_address[1]
    with engine_for(server, adapter=adapter) as engine:
        run(engine, [request(0)])
        (name,) = server.adapters
        assert server.seen[0]["model"] == name
        assert server.adapters[name] == str(adapter.resolve())
        server.stop()
        again = start(port)
        assert run(engine, [request(0)])[0].error is None
        assert list(again.adapters) == [name]


def test_an_adapter_that_was_dropped_is_loaded_again(start, adapter):
    server = start()
    with engine_for(server, adapter=adapter) as engine:
        server.adapters.clear()
        assert run(engine, [request(0)])[0].error is None
        assert len(server.adapters) == 1


def test_an_adapter_the_server_knows_by_name(start):
    server = start()
    server.adapters["tuned"] = "/adapters/tuned"
    with engine_for(server, adapter="tuned") as engine:
        run(engine, [request(0)])
    assert server.seen[0]["model"] == "tuned"
    with pytest.raises(Unavailable, match="does not serve the adapter absent"):
        engine_for(server, adapter="absent")


def test_a_server_that_cannot_load_adapters_is_refused(start, adapter):
    server = start()
    server.takes_adapters = False
    with pytest.raises(Unavailable, match=r"cannot load the adapter .*Not Found.*--enable-lora"):
        engine_for(server, adapter=adapter)


def test_a_server_that_runs_the_base_in_place_of_the_adapter_is_refused(start, adapter, monkeypatch):
    server = start()
    answer = Handler.answer
    monkeypatch.setattr(Handler, "answer", lambda self, body: answer(self, {**body, "model": self.server.name}))
    with pytest.raises(Unavailable, match="computes what its base toy computes"):
        engine_for(server, adapter=adapter)


def test_sampling_that_cannot_be_honoured_is_a_usage_error(start):
    with engine_for(start()) as engine:
        for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"temperature": 0.001}, {"stop": [""]}):
            with pytest.raises(UsageError):
                engine.submit(request(0, **bad))
        assert engine.pending == 0


def test_a_prompt_that_fills_the_context_ends_by_length(start):
    server = start()
    with engine_for(server) as engine:
        engine.submit(Request("long", [3] * 64, Sampling(), seed=1))
        (done,) = engine.collect()
        assert (done.stop, done.token_ids, done.error) == ("length", [], None)
        run(engine, [Request(1, [3] * 62, Sampling(max_tokens=50), seed=1)])
    assert [body["max_tokens"] for body in server.seen] == [2]


def test_the_key_is_sent_and_never_said(start, monkeypatch, caplog):
    monkeypatch.setenv("STROP_API_KEY", "s3cret-key")
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-host")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.DEBUG)
    server = start(fault=lambda handler, number, body: 401)
    with engine_for(server) as engine:
        done = run(engine, [request(0)])[0]
    assert server.keys == {"Bearer s3cret-key"}
    assert "STROP_API_KEY" in done.error
    assert "s3cret" not in done.error + caplog.text
    assert "httpx" not in {record.name for record in caplog.records}


def test_endpoints_as_users_write_them():
    assert base_url("localhost:8000") == "http://localhost:8000"
    assert base_url("https://host/v1/") == "https://host"
    assert base_url("http://host:1/prefix/v1") == "http://host:1/prefix"
    for bad in ("ftp://host", "http://", "http://host:port", ""):
        with pytest.raises(UsageError, match="--endpoint"):
            base_url(bad)
    assert shown("http://me:word@host:1/v1") == "http://host:1/v1"


def test_closing_is_quick_with_requests_under_way(start):
    release = threading.Event()
    server = start(fault=lambda *_: release.wait(20))
    engine = engine_for(server)
    for i in range(50):
        engine.submit(request(i))
    time.sleep(0.1)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 2
    assert engine.pending == 0
    engine.close()
    release.set()


def test_pauses_follow_from_the_seed():
    server = ServerEngine.__new__(ServerEngine)
    server._limits = ServerLimits()
    pauses = [server._pause(seed, 3) for seed in range(50)]
    assert pauses == [server._pause(seed, 3) for seed in range(50)]
    assert all(1.0 <= pause <= 2.0 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.5


def test_the_path_to_a_server_needs_httpx_and_nothing_heavy(start):
    server = start()
    code = f"""
import sys
from strop.core.engines.server import ServerEngine
from strop.core.engines.protocol import ModelInfo, Request
from strop.core.records import Sampling
with ServerEngine(("{server.url}",), ("toy",), frozenset([2]), ModelInfo("toy", "r")) as engine:
    engine.submit(Request(0, [3], Sampling(max_tokens=2), 1))
    print(engine.collect()[0].error)
print([name for name in ("torch", "transformers", "vllm", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:2] == ["None", "[]"]


TASKS = [
    {"kind": "task", "id": f"t{i}", "prompt": f"{i}+1=", "reference": i + 1, "verifier": {"name": "number"}}
    for i in range(3)
]


def rollout(run_strop, server, model, *more, input=TASKS):
    url = server if isinstance(server, str) else server.url
    args = ["rollout", "--model", model, "--endpoint", url, "-n", 4, "--seed", 1, "--max-tokens", 4, *more]
    return run_strop(args, input, check=False)


def test_the_command_gets_over_500_and_loses_no_sample(start, run_strop, tiny_model):
    server = start(name=str(tiny_model), fault=lambda handler, number, body: 500 if number % 3 == 1 else None)
    done = rollout(run_strop, server, tiny_model)
    assert (done.status, "error" in done.stderr) == (0, False)
    rollouts = [record for record in done.records if record["kind"] == "rollout"]
    assert [record["sample"] for record in rollouts] == [0, 1, 2, 3] * 3
    assert len({record["id"] for record in rollouts}) == 12
    assert all(len(record["chunks"][0]["logprobs"]) == 4 and "error" not in record for record in rollouts)
    assert {record["sampling"].get("logprobs", "scaled") for record in rollouts} == {"scaled"}
    seeds = {body["seed"] for body in server.seen}
    assert {record["seed"] for record in rollouts} == seeds


def test_the_command_says_in_a_line_that_no_server_answers(start, run_strop, tiny_model):
    gone = start()
    gone.stop()
    done = rollout(run_strop, gone.url, tiny_model)
    assert done.status == 69
    assert not [record for record in done.records if record["kind"] == "rollout"]
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"strop rollout: no server can be used: {gone.url}: ConnectError")


def test_the_command_names_wrong_values_and_makes_no_reward_of_them(start, run_strop, tiny_model):
    bad = change_values([-1.0, None, -3.0, -4.0])
    server = start(name=str(tiny_model), fault=lambda handler, number, body: bad if body["seed"] % 2 else None)
    done = rollout(run_strop, server, tiny_model)
    rollouts = [record for record in done.records if record["kind"] == "rollout"]
    wrong = [record for record in rollouts if record["seed"] % 2]
    assert 0 < len(wrong) < len(rollouts) == 12
    assert all("token 1 is null" in record["error"] and "reward" not in record for record in wrong)
    assert all("reward" in record for record in rollouts if record["seed"] % 2 == 0)
    assert f"{len(wrong)} failed by the machinery" in done.stderr
