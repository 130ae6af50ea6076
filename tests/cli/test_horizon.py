"""strop horizon as a process: the track of rollouts, replays, bad input."""

import pytest


def rollout(number, turns, success=True, **more):
    return {
        "kind": "rollout", "id": f"t/{number}", "task": "t", "turns": turns, "success": success,
        "reward": float(success), **more,
    }  # fmt: skip


def track(run_strop, records, *args, **more):
    return run_strop(["horizon", "--only", "horizon", *args], records, **more)


def test_a_step_every_so_many_rollouts_and_the_rest_is_one_too(run_strop):
    records = [rollout(i, 12) for i in range(50)]
    done = track(run_strop, records, "--every", "20")
    assert [(h["step"], h["rollouts"], h["buffered"]) for h in done.records] == [(1, 20, 20), (2, 20, 40), (3, 10, 50)]
    assert [h["before"] for h in done.records] == pytest.approx([15, 15.7, 16.33])
    assert done.records[0]["applied"] == 15
    assert "3 steps; the cap is now 16.9, 17 turns" in done.stderr
    whole = track(run_strop, records).records
    assert [(h["rollouts"], h["after"]) for h in whole] == [(50, pytest.approx(15.7))]


def test_other_records_and_the_rollouts_pass_in_order(run_strop):
    task = {"kind": "task", "id": "t"}
    done = run_strop(["horizon", "--every", "1", "--min-successes", "1"], [task, rollout(0, 3), rollout(1, 3)])
    assert [record["kind"] for record in done.records] == ["task", "rollout", "horizon", "rollout", "horizon"]
    assert done.records[2]["provenance"]["tool"] == "horizon"


def test_what_counts(run_strop):
    records = [
        rollout(0, 4),
        rollout(1, 15, success=False, stop="max_turns"),
        {"kind": "rollout", "id": "t/2", "task": "t", "error": "sandbox lost", "turns": 3},
        # Graded: three of four assertions of a large task bring more than 1, and are no success.
        rollout(3, 9, success=False) | {"reward": 1.5},
        {"kind": "rollout", "id": "t/4", "task": "t", "reward": 1.0, "steps": [{}, {}]},
        rollout(5, None) | {"steps": []},
    ]
    (step,) = track(run_strop, records, "--min-successes", "2").records
    assert (step["rollouts"], step["successes"], step["errors"], step["buffered"]) == (6, 3, 1, 2)
    assert step["percentile"] == pytest.approx(3.8)
    assert step["success_rate"] == pytest.approx(3 / 5)
    assert step["clipped_share"] == pytest.approx(1 / 5)


def test_a_replay_cuts_off_and_says_what_it_cannot_know(run_strop):
    def chunk(turns):
        return {
            "chunks": [{"token_ids": [7] * 10 * turns, "sampled": [[10 * t + 5, 10 * t + 10] for t in range(turns)]}],
            "steps": [{"span": [10 * t + 5, 10 * t + 10]} for t in range(turns)],
        }

    records = [
        rollout(0, 8, **chunk(8)),
        rollout(1, 20, **chunk(20)),
        rollout(2, 6, success=False, stop="max_turns", horizon=6, **chunk(6)),
    ]
    (plain,) = track(run_strop, records, "--start", "10").records
    assert (plain["successes"], plain["tokens"]) == (2, 5 * 34)
    done = track(run_strop, records, "--start", "10", "--replay")
    (replayed,) = done.records
    assert (replayed["successes"], replayed["tokens"], replayed["unknown"]) == (1, 5 * 24, 1)
    assert replayed["tokens_saved_share"] == pytest.approx(10 / 34)
    assert "1 episodes had run out of turns below the cap" in done.stderr


def test_presets_and_single_constants(run_strop):
    records = [rollout(i, 50) for i in range(20)]
    after = [
        track(run_strop, records, "--start", "40", *args).records[0]["after"]
        for args in ([], ["--order", "average-first", "--rate", "0.1"], ["--preset", "code-bfcl"], ["--rate", "1"])
    ]
    assert after == pytest.approx([41, 42, 44, 50])


def test_schedules_by_the_clock(run_strop):
    records = [rollout(i, 5) for i in range(4)]
    for method, caps in ("fixed", [15] * 4), ("tti", [15, 20, 30, 50]), ("scaling-inter", [5, 16, 28, 39]):
        got = track(run_strop, records, "--method", method, "--steps", "4", "--every", "1").records
        assert [h["applied"] for h in got] == caps


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--rate", "0"], "(0, 1]"),
        (["--low", "60"], "low <= high"),
        (["--method", "tti"], "number of steps"),
        (["--method", "tti", "--steps", "4", "--stages", "5,x"], "--stages '5,x'"),
        (["--min-successes", "200"], "needed <= remembered"),
    ],
)
def test_usage_errors(run_strop, args, says):
    done = track(run_strop, [], *args, check=False)
    assert done.status == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"turns": "many"}, "turns"), ({"turns": -1}, "turns"), ({"success": 1}, "success"), ({"steps": 3}, "steps")],
)
def test_bad_records_name_their_place_and_can_be_set_aside(run_strop, tmp_path, fields, says):
    records = [rollout(0, 3), rollout(1, 3) | fields]
    done = track(run_strop, records, check=False)
    assert done.status == 65
    assert f"<stdin>:2: {says}: " in done.stderr
    rejects = tmp_path / "rejects.jsonl"
    done = track(run_strop, records, "--keep-going", "--rejects", rejects, check=False)
    assert done.status == 1
    assert done.records[0]["rollouts"] == 1
    assert '"line":2' in rejects.read_text()


def test_empty_input(run_strop):
    done = run_strop(["horizon"])
    assert done.stdout == b""
    assert "0 steps" in done.stderr
