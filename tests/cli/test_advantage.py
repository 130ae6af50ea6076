"""`strop advantage` as a process: options, messages, exit statuses, start-up, the contract's golden values."""

import json
import math
import resource
import statistics
import subprocess
import sys

import pytest

A = [("s0", 0, 0.2), ("s1", 0, 0.8), ("s2", 10, 0.2)]
B = [("s0", 0, 0.5), ("s1", 0, 0.5)]
C = [("s0", 0, 0.1), ("s3", 0, 0.3), ("s0", 0, 0.2)]


def golden():
    """The worked example of gaca.md 2.9."""
    return [
        {"kind": "rollout", "id": f"t/{i}", "task": "t", "group": "t", "sample": i, "success": i == 0,
         "reward": float(sum(r for _, r, _ in steps)),
         "steps": [{"anchor": a, "reward": r, "nll": n, "valid": True} for a, r, n in steps]}
        for i, steps in enumerate((A, B, C))
    ]  # fmt: skip


def rollout(group, sample, reward, **more):
    made = {"kind": "rollout", "id": f"{group}/{sample}", "task": group, "group": group, "sample": sample}
    return made | {"reward": reward} | more


def steps(result):
    return [step["advantage"] for record in result.records for step in record.get("steps", ())]


NO_STD = ["--no-std", "--discount", "0.95"]


class TestGolden:
    def test_gigpo(self, run_strop):
        result = run_strop(["advantage", "--gigpo", *NO_STD], golden())
        expected = [13.0188, 11, 6.25, -6.0062, -8.5, -6.0062, -3.75, -6.0062]
        assert steps(result) == pytest.approx(expected, abs=1e-4)
        credit = result.records[0]["credit"]
        assert credit["estimator"] == "gigpo"
        assert credit["options"] == {
            "std": False, "episode_stats": "rows", "discount": 0.95, "invalid_penalty": 0.1, "step_weight": 1.0
        }  # fmt: skip

    def test_gaca(self, run_strop):
        options = ["--gaca", *NO_STD, "--base-weight", "0.5", "--modulation", "0.25", "--singleton", "shrink"]
        expected = [6.4177, 4.9697, 4.2299, -3.0031, -4.25, -3.4605, -0.7268, -3.0031]
        assert steps(run_strop(["advantage", *options], golden())) == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize(
        ("stats", "std", "expected"),
        [
            ("trajectories", "--no-std", [6.6667, -3.3333, -3.3333]),
            ("rows", "--no-std", [6.25, -3.75, -3.75]),
            ("trajectories", "--std", [1.1547, -0.5774, -0.5774]),
            ("rows", "--std", [1.2076, -0.7246, -0.7246]),
        ],
    )
    def test_episode_statistics(self, run_strop, stats, std, expected):
        for estimator in ("--grpo", "--gigpo"):
            result = run_strop(["advantage", estimator, "--episode-stats", stats, std], golden())
            assert [r["advantage"] for r in result.records] == pytest.approx(expected, abs=1e-4)

    def test_doubled_even_mixing_is_gigpo(self, run_strop):
        gaca = ["--gaca", "--modulation", "0", "--scale", "2", "--singleton", "shrink"]
        assert steps(run_strop(["advantage", *gaca], golden())) == steps(run_strop(["advantage", "--gigpo"], golden()))

    def test_rloo_and_dr_grpo(self, run_strop):
        rollouts = [rollout("a", i, r) for i, r in enumerate([1.0, 0.0, 0.0, 0.0])]
        result = run_strop(["advantage", "--grpo", "--baseline", "rloo", "--no-std"], rollouts)
        assert [r["advantage"] for r in result.records] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
        result = run_strop(["advantage", "--grpo", "--dr-grpo"], rollouts)
        assert [r["advantage"] for r in result.records] == [0.75, -0.25, -0.25, -0.25]
        assert result.records[0]["credit"]["options"]["dr_grpo"] is True

    def test_defaults(self, run_strop):
        """Textbook GRPO divides; the default of the step-level ones is that of their code (0.95, rows, std)."""
        result = run_strop(["advantage", "--grpo"], golden())
        assert [r["advantage"] for r in result.records] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)
        assert result.records[0]["credit"] == {
            "tool": "advantage", "version": result.records[0]["credit"]["version"], "estimator": "grpo",
            "options": {"std": True, "episode_stats": "trajectories", "baseline": "mean", "dr_grpo": False},
        }  # fmt: skip
        options = run_strop(["advantage", "--gaca"], golden()).records[0]["credit"]["options"]
        assert (options["base_weight"], options["modulation"], options["singleton"]) == (0.5, 0.25, "episode")
        assert (options["discount"], options["episode_stats"], options["std"]) == (0.95, "rows", True)
        additive = run_strop(["advantage", "--gaca", "--map", "additive"], golden()).records[0]["credit"]["options"]
        assert additive["base_weight"] == 1.0


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ([], "exactly one of"),
            (["--grpo", "--gaca"], "exactly one of"),
            (["--grpo", "--discount", "0.9"], "--discount does not go with --grpo"),
            (["--gigpo", "--modulation", "0.1"], "--modulation does not go with --gigpo"),
            (["--gaca", "--baseline", "rloo"], "--baseline does not go with --gaca"),
            (["--gaca", "--step-weight", "1"], "--step-weight does not go with --gaca"),
            (["--gigpo", "--dr-grpo"], "--dr-grpo does not go with --gigpo"),
            (["--grpo", "--dr-grpo", "--std"], "without a deviation"),
            (["--gaca", "--base-weight", "1.5"], "[0, 1]"),
            (["--gaca", "--scale", "nan"], "not a finite number"),
            (["--gaca", "--scale", "inf"], "not a finite number"),
            (["--gigpo", "--discount", "1.5"], "--discount"),
            (["--gaca", "--control", "sideways"], "--control"),
        ],
    )
    def test_usage_errors(self, run_strop, options, says):
        result = run_strop(["advantage", *options], golden(), check=False)
        assert result.status == 2
        assert result.stdout == b""
        assert says in result.stderr
        assert "Traceback" not in result.stderr

    def test_help_says_why_to_divide_and_what_small_groups_cost(self, run_strop):
        """tinker-cookbook #579; OpenRLHF #1250; TRL #5588."""
        text = " ".join(run_strop(["advantage", "--help"]).stdout.decode().split())
        assert "Dividing makes every group count alike" in text
        assert "70 % for groups of 2 at a pass rate of 0.18" in text
        assert "still get the gradient of a KL term" in text

    def test_a_seed_reaches_the_shuffle(self, run_strop):
        runs = {
            tuple(steps(run_strop(["advantage", "--gaca", "--control", "shuffle_traj", "--seed", seed], golden())))
            for seed in "0123"
        }
        assert len(runs) > 1
        again = [run_strop(["advantage", "--gaca", "--control", "shuffle_batch"], golden()).stdout for _ in range(2)]
        assert again[0] == again[1]


class TestStream:
    def test_unknown_kinds_and_bytes_pass(self, run_strop):
        lines = [
            b'{"kind":"task", "id":"t", "big":12345678901234567890, "x":[1,2.50,"\xe2\x80\xa8"]}',
            b'{"kind":"novel","x":1e-7}',
            b'{"kind":"rollout","id":"r","task":"t","group":"g","group_size":1,"error":"lost","note":"\\u2029"}',
        ]
        result = run_strop(["advantage", "--grpo"], b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\n\n")
        assert result.stdout == b"".join(line + b"\n" for line in lines)

    def test_empty_input(self, run_strop):
        for estimator in ("--grpo", "--gaca"):
            assert run_strop(["advantage", estimator, "--diagnose", "--only", "rollout"], b"").stdout == b""

    def test_tokens_pass_byte_for_byte(self, run_strop):
        text = '[{"token_ids":[1, 2,3],"sampled":[[1,3]],"logprobs":[-0.10,-1.5e-3],"later":{"a":1}}]'
        line = f'{{"kind":"rollout","id":"r","task":"t","group":"g","chunks":{text},"reward":1,"zzz":0.50}}\n'
        out = run_strop(["advantage", "--grpo", "--keep-zero-variance"], line.encode()).stdout.decode()
        assert text in out
        assert '"reward":1,"zzz":0.50,"advantage":0.0,"credit":' in out

    def test_order_and_unordered(self, run_strop):
        rollouts = [rollout("a", 0, 1.0, group_size=2), {"kind": "task", "id": "t"}]
        rollouts += [rollout("b", i, float(i), group_size=2) for i in range(2)] + [rollout("a", 1, 0.0, group_size=2)]
        out = run_strop(["advantage", "--grpo"], rollouts).records
        assert [r["id"] for r in out] == ["a/0", "t", "b/0", "b/1", "a/1"]
        out = run_strop(["advantage", "--grpo", "--unordered"], rollouts).records
        assert [r["id"] for r in out] == ["t", "b/0", "b/1", "a/0", "a/1"]

    def test_a_group_leaves_while_the_input_is_still_open(self):
        strop = [str(p) for p in [sys.executable, "-m", "strop", "advantage", "--grpo", "--line-buffered"]]
        with subprocess.Popen(strop, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            for i in range(2):
                child.stdin.write(json.dumps(rollout("a", i, float(i), group_size=2)).encode() + b"\n")
            child.stdin.flush()
            first = json.loads(child.stdout.readline())
            assert (first["id"], round(first["advantage"], 4)) == ("a/0", -0.7071)
            child.stdin.close()
            assert json.loads(child.stdout.read())["id"] == "a/1"
            assert child.wait(30) == 0

    def test_files(self, run_strop, tmp_path):
        """Members of a group may lie in several files."""
        for i in range(2):
            (tmp_path / f"{i}.jsonl").write_text(json.dumps(rollout("a", i, float(i), group_size=2)) + "\n")
        out = run_strop(["advantage", "--grpo", "--no-std", tmp_path / "0.jsonl", tmp_path / "1.jsonl"]).records
        assert [r["advantage"] for r in out] == [-0.5, 0.5]
        result = run_strop(["advantage", "--grpo", tmp_path / "0.jsonl", tmp_path / "0.jsonl"], check=False)
        assert result.status == 65
        assert f"{tmp_path / '0.jsonl'}:1: id:" in result.stderr


class TestMessages:
    def test_dropped_groups_are_counted(self, run_strop):
        """TRL #3452: the share of groups without a signal, not a loss of 0."""
        rollouts = [rollout("a", i, 0.3) for i in range(8)] + [rollout("b", i, float(i)) for i in range(8)]
        result = run_strop(["advantage", "--grpo"], rollouts)
        assert len(result.records) == 8
        assert "dropped 1 of 2 groups (8 rollouts)" in result.stderr
        assert run_strop(["advantage", "--grpo", "-q"], rollouts).stderr == ""
        result = run_strop(["advantage", "--grpo", "--keep-zero-variance"], rollouts)
        assert [r["advantage"] for r in result.records[:8]] == [0.0] * 8
        assert "KL term would still move them" in result.stderr

    def test_small_groups(self, run_strop):
        rollouts = [rollout(f"g{i // 2}", i % 2, float(i < 18), success=i < 18) for i in range(100)]
        result = run_strop(["advantage", "--grpo"], rollouts)
        assert "at the observed pass rate 0.18, 70 % of such groups carry no signal" in result.stderr
        result = run_strop(["advantage", "--grpo"], [rollout("a", 0, 1.0)])
        assert "100 % of such groups carry no signal" in result.stderr

    def test_failed_incomplete_ungrouped(self, run_strop):
        rollouts = [rollout("a", i, float(i), group_size=5) for i in range(3)] + [rollout("a", 3, None, error="lost")]
        del rollouts[3]["reward"]
        bare = [{k: v for k, v in rollout("b", i, float(i)).items() if k != "group"} for i in range(3)]
        errors = run_strop(["advantage", "--grpo"], rollouts + bare).stderr
        assert "1 of 7 rollouts failed by the machine" in errors
        assert "1 groups were not complete at the end of the input (first a: 4 of 5)" in errors
        assert "3 rollouts name no group" in errors

    def test_missing_nll_and_odd_rewards(self, run_strop):
        rollouts = golden()
        del rollouts[0]["steps"][0]["nll"]
        rollouts[1]["reward"] = 3.0
        errors = run_strop(["advantage", "--gaca"], rollouts).stderr
        assert "1 of 8 steps have no nll" in errors
        assert "1 rollouts have a reward that their steps' rewards do not add up to" in errors


class TestBadInput:
    @pytest.mark.parametrize(
        ("estimator", "lines", "says"),
        [
            ("--grpo", ['{"kind":"rollout","id":"x"'], ":1: the line ends"),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","group":"t","reward":NaN}'], ":1: NaN"),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","group":"t","reward":Infinity}'], ":1: Infinity"),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","reward":1e999}'], ":1: reward:"),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","group":"t"}'], ":1: reward: missing"),
            ("--grpo", ['{"kind":"rollout","id":"a","group":"t","reward":1}'], ":1: "),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","reward":"high"}'], ":1: reward:"),
            ("--grpo", ['{"kind":"rollout","id":"a","task":"t","reward":1}'] * 2, ":2: id: 'a' came before"),
            ("--gigpo", ['{"kind":"rollout","id":"a","task":"t","reward":1}'], ":1: steps: missing"),
            ("--gigpo", ['{"kind":"rollout","id":"a","task":"t","reward":1,"steps":[{}]}'], ":1: steps[0].anchor"),
            ("--gigpo", ['{"kind":"rollout","id":"a","task":"t","reward":1,"steps":[{"anchor":1}]}'], "steps[0].anc"),
            (
                "--gaca",
                ['{"kind":"rollout","id":"a","task":"t","reward":1,"steps":[{"anchor":"x","span":[0,9]}],'
                 '"chunks":[{"token_ids":[1,2],"sampled":[[1,2]],"logprobs":[-1]}]}'],
                ":1: steps[0].span: [0, 9) lies outside the 2 tokens",
            ),
            (
                "--gaca",
                ['{"kind":"rollout","id":"a","task":"t","reward":1,"steps":[{"anchor":"x","span":[0,2]}],'
                 '"chunks":[{"token_ids":[1,2],"sampled":[[1,2]],"logprobs":[-1,-2]}]}'],
                ":1: chunks[0].logprobs: 2 values for 1 sampled tokens",
            ),
        ],
    )  # fmt: skip
    def test_file_line_field_and_65(self, run_strop, tmp_path, estimator, lines, says):
        path = tmp_path / "in.jsonl"
        path.write_text("\n".join(lines) + "\n")
        result = run_strop(["advantage", estimator, path], check=False)
        assert result.status == 65
        assert f"{path}" in result.stderr
        assert says in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stderr.count("\n") == 1

    def test_keep_going_names_the_record_and_compares_the_rest(self, run_strop, tmp_path):
        """One NaN reward: named, left out, counted as seen; the group is not held to the end, nor poisoned."""
        lines = [json.dumps(rollout("a", i, float(i), group_size=4)) for i in range(3)]
        lines[1] = lines[1].replace("1.0", "NaN")
        lines.append(json.dumps(rollout("a", 3, None, group_size=4)))
        lines.append(json.dumps(rollout("b", 0, 1.0, group_size=1)))
        text = "\n".join(lines).encode()
        rejects = tmp_path / "rejects.jsonl"
        command = ["advantage", "--grpo", "--no-std", "--keep-zero-variance", "--keep-going", "--rejects", rejects]
        result = run_strop(command, text, check=False)
        assert result.status == 1
        assert {r["id"]: r["advantage"] for r in result.records} == {"a/0": -1.0, "a/2": 1.0, "b/0": 0.0}
        assert "<stdin>:2: NaN" in result.stderr
        assert "<stdin>:4: reward: missing" in result.stderr
        assert "not complete" not in result.stderr
        set_aside = [json.loads(line) for line in rejects.read_text().splitlines()]
        assert [(r["line"], r["field"]) for r in set_aside] == [(2, None), (4, "reward")]

    def test_groups_before_the_bad_line_are_kept(self, run_strop):
        lines = [json.dumps(rollout("a", i, float(i), group_size=2)) for i in range(2)] + ['{"kind":']
        result = run_strop(["advantage", "--grpo"], "\n".join(lines).encode(), check=False)
        assert result.status == 65
        assert [r["id"] for r in result.records] == ["a/0", "a/1"]


def simulated(words_nll):
    """Doors chosen half and half in rooms chosen by luck; see tests/core/credit/test_diagnose.py."""
    made = []
    for i in range(64):
        rich, good = (i // 2) % 2, i % 2
        reward = 6.0 * rich + 10.0 * good
        made.append(rollout(f"g{i // 8}", i % 8, reward, group_size=8, steps=[
            {"anchor": "hall", "reward": 0.0, "nll": words_nll, "optimal_advantage": 0.0},
            {"anchor": f"room {rich}", "reward": reward, "nll": math.log(2), "optimal_advantage": 10.0 * good - 5},
        ]))  # fmt: skip
    return made


class TestDiagnose:
    def metrics(self, result):
        return {(r["name"], r.get("of")): r["value"] for r in result.records if r["kind"] == "metric"}

    @pytest.mark.parametrize(("words_nll", "improves"), [(0.05, 1), (2.77, 0)])
    def test_the_improvement_condition_where_the_optimum_is_known(self, run_strop, words_nll, improves):
        command = ["advantage", "--gaca", "--no-std", "--discount", "1", "--diagnose"]
        result = run_strop(command, simulated(words_nll))
        found = self.metrics(result)
        assert found["modulation_improves", None] == improves
        assert (found["gamma", None] > 0) == bool(improves)
        assert (found["risk_used_weight", None] < found["risk_fixed_weight", None]) == bool(improves)
        assert "cannot be known" not in result.stderr
        assert len([r for r in result.records if r["kind"] == "rollout"]) == 64
        # Made records tell their maker; passed ones do not change theirs.
        (gamma,) = [r for r in result.records if r.get("name") == "gamma"]
        assert gamma["provenance"]["options"]["estimator"] == "gaca"
        assert gamma["n"] == 128

    def test_elsewhere_it_says_that_it_cannot_know(self, run_strop):
        result = run_strop(["advantage", "--gaca", "--diagnose", "--only", "metric"], golden())
        assert "cannot be known from these records" in result.stderr
        found = self.metrics(result)
        assert ("gamma", None) not in found
        assert found["singleton_share", None] == 0.25
        assert found["anchor_size_share", "anchors of 3-4"] == 0.5
        assert found["anchor_size_share", "anchors of 2"] == 0.25
        assert found["zero_variance_group_share", None] == 0.0
        weights = [0.3232, 0.8536, 0, 0.5, 0.5, 0.1938, 0, 0.5]
        assert found["weight_mean", None] == pytest.approx(statistics.mean(weights), abs=1e-4)
        assert found["corr_nll_tokens", None] is None

    def test_of_the_others(self, run_strop):
        rollouts = golden() + [rollout("u", i, 1.0, steps=[]) for i in range(3)]
        found = self.metrics(run_strop(["advantage", "--grpo", "--diagnose"], rollouts))
        assert found == {
            ("zero_variance_group_share", None): 0.5, ("scored_rollouts", None): 6, ("failed_rollouts", None): 0
        }  # fmt: skip
        found = self.metrics(run_strop(["advantage", "--gigpo", "--diagnose"], rollouts))
        assert ("weight_mean", None) not in found
        assert found["corr_nll_step_advantage", None] is not None


class TestStart:
    def test_a_hundred_rollouts_in_under_a_second_without_numpy_or_torch(self, run_strop):
        rollouts = [rollout(f"g{i // 8}", i % 8, float(i % 3), group_size=8) for i in range(96)]
        seconds = []
        for _ in range(3):
            # CPU time of the child: a busy machine does not make it slow.
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert len(run_strop(["advantage", "--grpo"], rollouts).records) == 96
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert min(seconds) < 1.0
        text = "".join(json.dumps(r) + "\n" for r in rollouts)
        command = [sys.executable, "-X", "importtime", "-m", "strop", "advantage", "--grpo"]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
        lines = [line for line in done.stderr.decode().splitlines() if "import time" in line]
        loaded = {line.rpartition("|")[2].strip() for line in lines}
        heavy = {"numpy", "torch", "transformers", "rich", "pydantic", "scipy", "httpx"}
        assert not heavy & {name.partition(".")[0] for name in loaded}
        assert any(name == "strop.core.credit.grpo" for name in loaded)

    def test_schema(self, run_strop):
        schema = json.loads(run_strop(["advantage", "--schema"]).stdout)
        assert set(schema["writes"]) == {"rollout", "metric"}
