"""The command line itself: help, wrong usage, option order, environment, configuration file, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from strop import __version__
from strop.cli.main import COMMANDS

STROP = str(Path(sys.executable).with_name("strop"))
ROLLOUTS = [
    {"kind": "rollout", "id": f"g/{i}", "task": "g", "group": "g", "group_size": 2, "sample": i, "reward": float(i)}
    for i in range(2)
]


def shown(run_strop, args, env=None):
    """Option -> (value, origin), as --show-config prints them."""
    lines = run_strop([*args, "--show-config"], env=env).stdout.decode().splitlines()
    columns = [line.split("\t") for line in lines]
    return {name: (json.loads(value), place) for name, value, place in columns}


@pytest.mark.parametrize("args", [["--help"], ["-h"]])
def test_the_overview(run_strop, args):
    done = run_strop(args)
    text = done.stdout.decode()
    assert done.stderr == ""
    for name, (_, line) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


def test_no_command_is_a_usage_error_with_the_overview(run_strop):
    done = run_strop([], check=False)
    assert done.status == 2
    assert done.stdout == b""
    assert "Usage: strop COMMAND" in done.stderr


def test_the_version(run_strop):
    assert run_strop(["--version"]).stdout == f"strop {__version__}\n".encode()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(run_strop, name):
    long, short = run_strop([name, "--help"]), run_strop([name, "-h"])
    assert long.stdout == short.stdout
    assert long.stderr == ""
    text = long.stdout.decode()
    assert text.isascii()
    too_long = [line for line in text.splitlines() if len(line) > 80]
    assert not too_long
    assert text.startswith(f"Usage: strop {name} [OPTIONS]")
    for section in ("Examples:", "Input fields:", "Output fields:", "Memory:", "Options:", "Shared options:"):
        assert f"{section}\n" in text


def test_unknown_commands_and_options_are_met_with_the_nearest(run_strop):
    command = run_strop(["advantge"], check=False)
    assert command.status == 2
    assert "Did you mean 'advantage'?" in command.stderr
    option = run_strop(["advantage", "--grop"], check=False)
    assert option.status == 2
    assert "--grpo" in option.stderr
    assert command.stdout == option.stdout == b""


def test_options_are_never_abbreviated(run_strop):
    assert run_strop(["advantage", "--gr"], ROLLOUTS, check=False).status == 2
    assert run_strop(["adv"], check=False).status == 2


def test_options_may_stand_anywhere_and_two_hyphens_end_them(run_strop, tmp_path):
    source = tmp_path / "--grpo"
    source.write_text("".join(json.dumps(r) + "\n" for r in ROLLOUTS))
    plain = run_strop(["advantage", "--grpo", "--no-std", str(source)]).stdout
    assert run_strop(["advantage", str(source), "--no-std", "--grpo"]).stdout == plain
    assert run_strop(["advantage", "--grpo", "--no-std", "--", "--grpo"], cwd=tmp_path).stdout == plain
    assert plain


def test_a_usage_error_says_nothing_on_stdout(run_strop):
    done = run_strop(["advantage", "--discount", "much"], check=False)
    assert done.status == 2
    assert done.stdout == b""
    assert "'much' is not a valid float" in done.stderr


def test_help_opens_the_manual_page(run_strop, tmp_path):
    man = tmp_path / "man"
    man.write_text('#!/bin/sh\necho "$@"\n')
    man.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for names, page in (["advantage"], "strop-advantage.1"), ([], "strop.1"), (["records"], "strop-records.5"):
        shown = run_strop(["help", *names], env=env).stdout.decode().strip()
        assert Path(shown).name == page
        assert Path(shown).exists()
    assert run_strop(["help", "nonsense"], env=env, check=False).status == 2
    without = run_strop(["help", "advantage"], env={"PATH": str(tmp_path / "nothing")}, check=False)
    assert without.status == 69
    assert "--help" in without.stderr


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "strop.toml"

    def write(text: str) -> dict[str, str]:
        path.write_text(text)
        return {"STROP_CONFIG": str(path)}

    return write


def test_precedence_option_environment_file_default(run_strop, config):
    env = config('keep-going = true\n[advantage]\ndiscount = 0.5\nseed = 1\nscale = 3\nonly = "metric"\n')
    env |= {"STROP_ADVANTAGE_SEED": "2", "STROP_ADVANTAGE_SCALE": "4"}
    got = shown(run_strop, ["advantage", "--scale", "5"], env)
    file = f"file {env['STROP_CONFIG']}"
    assert got["scale"] == (5.0, "command line")
    assert got["seed"] == (2, "environment STROP_ADVANTAGE_SEED")
    assert got["discount"] == (0.5, file)
    assert got["keep-going"] == (True, file)
    assert got["only"] == ("metric", file)
    assert got["quiet"] == (False, "default")


def test_a_table_of_a_command_wins_over_the_top(run_strop, config):
    env = config('only = "a"\n[advantage]\nonly = "b"\n')
    assert shown(run_strop, ["advantage"], env)["only"][0] == "b"
    assert shown(run_strop, ["report"], env)["only"][0] == "a"


def test_a_model_for_all_does_not_make_calibrate_attempt(run_strop, config):
    env = config('model = "M"\n')
    assert shown(run_strop, ["rollout"], env)["model"][0] == "M"
    assert shown(run_strop, ["calibrate"], env)["model"] == (None, "default")
    env = config('[calibrate]\nmodel = "M"\n')
    assert shown(run_strop, ["calibrate"], env)["model"][0] == "M"


def test_names_are_those_of_the_options(run_strop, config):
    env = config("[train]\nfrom = 'a'\nlora = 8\n")
    assert shown(run_strop, ["train"], env)["from"] == ("a", f"file {env['STROP_CONFIG']}")
    env |= {"STROP_TRAIN_FROM": "b", "STROP_ROLLOUT_SAMPLES": "3"}
    assert shown(run_strop, ["train"], env)["from"] == ("b", "environment STROP_TRAIN_FROM")
    assert shown(run_strop, ["rollout"], env)["samples"] == (3, "environment STROP_ROLLOUT_SAMPLES")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_can_be_configured_under_its_own_name(name):
    from strop.cli.app import load_command
    from strop.cli.config import NOT_IN_FILES, long_name

    for parameter in load_command(name).params:
        if parameter.param_type_name == "option" and parameter.name not in NOT_IN_FILES:
            assert f"--{long_name(parameter)}" in parameter.opts
            assert parameter.envvar.startswith(f"STROP_{name.upper().replace('-', '_')}_")


def test_a_configured_value_really_rules(run_strop, config):
    env = config("[advantage]\ngrpo = true\nstd = false\n")
    got = run_strop(["advantage"], ROLLOUTS, env=env)
    assert [r["advantage"] for r in got.records] == [-0.5, 0.5]


def test_nothing_stays_nothing(run_strop, config):
    env = config("[advantage]\nonly = 'None'\n")
    done = run_strop(["advantage", "--show-config"], env=env, check=False)
    assert done.status == 2
    assert "leave the key out" in done.stderr
    got = shown(run_strop, ["advantage"], config(""))
    assert got["only"] == (None, "default")
    assert got["rejects"] == (None, "default")
    # An empty variable counts as unset, as in `STROP_ADVANTAGE_ONLY= strop advantage`.
    assert shown(run_strop, ["advantage"], {"STROP_ADVANTAGE_ONLY": ""})["only"] == (None, "default")


def test_a_text_for_a_list_is_one_value_and_not_its_letters(run_strop, config):
    assert shown(run_strop, ["report"], config("[report]\ncolumn = 'abc=x'\n"))["column"][0] == ["abc=x"]
    assert shown(run_strop, ["report"], config("[report]\ncolumn = ['a=x', 'b=y']\n"))["column"][0] == ["a=x", "b=y"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[advantage]\ndiscuont = 1\n", "did you mean discount?"),
        ("[advantge]\ndiscount = 1\n", "did you mean advantage?"),
        ("no-such-option = 1\n", "no command has this option"),
        ("[advantage]\ndiscount = [1, 2]\n", "one value"),
        ("[advantage]\ndiscount = true\n", "a text or a number"),
        ("[advantage]\ngrpo = 'yes'\n", "true or false"),
        ("[advantage]\nseed = 1.5\n", "1.5"),
        ("[advantage.deep]\nx = 1\n", "deep"),
        ("advantage = 1\n", "table"),
        ("[advantage]\nhelp = true\n", "no such option"),
        ("[advantage]\nfiles = ['x']\n", "no such option"),
        ("not toml", "not TOML"),
    ],
)
def test_what_the_file_may_not_say_is_a_usage_error(run_strop, config, text, words):
    env = config(text)
    done = run_strop(["advantage", "--grpo"], ROLLOUTS, env=env, check=False)
    assert done.status == 2, done.stderr
    assert words in done.stderr
    assert env["STROP_CONFIG"] in done.stderr
    assert done.stdout == b""


def test_a_missing_configuration_file_is_66(run_strop, tmp_path):
    done = run_strop(["advantage", "--grpo"], ROLLOUTS, env={"STROP_CONFIG": str(tmp_path / "no.toml")}, check=False)
    assert done.status == 66
    assert "STROP_CONFIG" in done.stderr


def test_no_file_is_found_by_itself(run_strop, tmp_path):
    for name in ("strop.toml", ".strop.toml", ".config/strop.toml", ".config/strop/config.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("nonsense")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    assert run_strop(["advantage", "--grpo"], ROLLOUTS, cwd=tmp_path, env=env).records
    assert sorted(p.name for p in tmp_path.iterdir()) == [".config", ".strop.toml", "strop.toml"], "nothing is left"


def test_a_bad_value_in_the_environment_says_where_it_stood(run_strop):
    done = run_strop(["advantage"], env={"STROP_ADVANTAGE_DISCOUNT": "much"}, check=False)
    assert done.status == 2
    assert "from the environment STROP_ADVANTAGE_DISCOUNT" in done.stderr


def test_secrets_are_not_shown():
    from strop.cli.config import shown as rendered

    assert "hunter2" not in rendered("api_key", "hunter2")
    assert "hunter2" not in rendered("endpoint", ["http://user:hunter2@host:8000"])
    assert rendered("endpoint", ["http://host:8000"]) == '["http://host:8000"]'
    assert rendered("max_tokens", 5) == "5"


def complete(words: str, shell: str = "bash") -> list[str]:
    env = {**os.environ, "_STROP_COMPLETE": f"complete_{shell}", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run([STROP], capture_output=True, text=True, timeout=60, env=env)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion():
    assert complete("strop adv") == ["advantage"]
    assert set(COMMANDS) <= set(complete("strop "))
    assert "--grpo" in complete("strop advantage --g")
    assert complete("strop advantage --score z") == ["zscore"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script(shell):
    env = {**os.environ, "_STROP_COMPLETE": f"source_{shell}"}
    done = subprocess.run([STROP], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0
    assert f"complete_{shell}" in done.stdout
    if shell == "bash":
        script = f"{done.stdout}\nCOMP_WORDS=(strop adv) COMP_CWORD=1\n_strop_completion strop\n"
        script += 'echo "${COMPREPLY[@]}"'
        env = {**os.environ, "PATH": f"{Path(STROP).parent}:{os.environ['PATH']}"}
        ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=env)
        assert ran.stdout.strip() == "advantage", ran.stderr


def test_doctor_says_no_only_when_asked(run_strop):
    table = run_strop(["doctor"])
    assert table.stderr == ""
    text = table.stdout.decode()
    assert "What is here" in text
    for name in COMMANDS:
        assert re.search(rf"^  {name} +(ok|no) ", text, re.MULTILINE)
    assert run_strop(["doctor", "--need", "advantage,python"]).status == 0
    unknown = run_strop(["doctor", "--need", "nonsense"], check=False)
    assert unknown.status == 2
    checks = run_strop(["doctor", "--records"]).records
    assert {check["kind"] for check in checks} == {"check"}
    absent = next((check["name"] for check in checks if check["ok"] is None), None)
    if absent is not None:
        done = run_strop(["doctor", "--need", absent], check=False)
        assert done.status == 1
        assert f"missing: {absent}" in done.stderr
        assert b"What is here" in done.stdout


def test_doctor_imports_nothing_to_look(run_strop):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", STROP, "doctor"], capture_output=True, text=True, timeout=60
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not modules & {"torch", "transformers", "vllm", "docker", "sklearn", "numpy"}
