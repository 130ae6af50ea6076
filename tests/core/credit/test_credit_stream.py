"""Credit over streams of records: grouping by id, completeness, order, failed members, bad input, spliced steps."""

import json
import math
import random
import tracemalloc

import pytest

from strop.core.credit.gaca import GacaOptions
from strop.core.credit.gigpo import GigpoOptions
from strop.core.credit.steps import StepEstimator
from strop.core.credit.stream import CreditStream, GrpoEstimator
from strop.core.errors import DataError, Where
from strop.core.records import Record


def grpo(**how):
    return GrpoEstimator(**{"std": False, "baseline": "mean", "all_rows": False, "drops_equal": False, **how})


def run(estimator, rollouts, ordered=True, on_bad=None):
    """The records that leave, as dictionaries, and the stream. `rollouts` are dictionaries or raw lines."""

    def stop(error, record):
        raise error

    lines = [line if isinstance(line, str) else json.dumps(line) for line in rollouts]
    records = (Record.parse(line, Where("in.jsonl", i)) for i, line in enumerate(lines, 1))
    stream = CreditStream(estimator, stamp={"estimator": estimator.name}, ordered=ordered, on_bad=on_bad or stop)
    return [json.loads(record.encode()) for record in stream.run(records)], stream


def rollout(group, sample, reward, **more):
    made = {"kind": "rollout", "id": f"{group}/{sample}", "task": group, "group": group, "sample": sample}
    return made | ({} if reward is None else {"reward": reward}) | more


def advantages(out):
    return {record["id"]: record.get("advantage") for record in out if record["kind"] == "rollout"}


class TestGrouping:
    def test_interleaved_groups_are_found_by_id(self):
        """prime-rl #600: prompts in another order made groups of different problems, and nobody noticed."""
        rollouts = [rollout(g, s, float(r), group_size=3) for g, rs in {"a": "012", "b": "900"}.items()
                    for s, r in enumerate(rs)]  # fmt: skip
        expected = advantages(run(grpo(), rollouts)[0])
        assert expected == pytest.approx({"a/0": -1, "a/1": 0, "a/2": 1, "b/0": 6, "b/1": -3, "b/2": -3})
        for seed in range(5):
            random.Random(seed).shuffle(rollouts)
            out, _ = run(grpo(), rollouts)
            assert advantages(out) == expected
            assert [r["id"] for r in out] == [r["id"] for r in rollouts]

    def test_a_failed_member_leaves_its_group_smaller_and_the_next_group_alone(self):
        """AReaL #1419: with a fixed stride the partial group would take a member of the next."""
        rollouts = [
            rollout("a", 0, 1.0, group_size=3), rollout("a", 1, None, group_size=3, error="sandbox lost"),
            rollout("a", 2, 0.0, group_size=3), rollout("b", 0, 5.0, group_size=2), rollout("b", 1, 7.0, group_size=2),
        ]  # fmt: skip
        out, stream = run(grpo(), rollouts)
        assert advantages(out) == {"a/0": 0.5, "a/1": None, "a/2": -0.5, "b/0": -1.0, "b/1": 1.0}
        assert out[1] == rollouts[1]
        assert stream.tally.errors == 1
        assert stream.tally.incomplete == 0

    def test_a_failed_member_s_reward_is_no_reward(self):
        out, _ = run(grpo(), [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("a", 2, 100.0, error="timeout")])
        assert advantages(out) == {"a/0": 0.5, "a/1": -0.5, "a/2": None}

    def test_uneven_groups_are_centred_each_on_its_own(self):
        """Slime: rewards centred over the batch where sample counts differ."""
        rollouts = [rollout("a", i, r) for i, r in enumerate([1.0, 0.0])]
        rollouts += [rollout("b", i, r) for i, r in enumerate([10.0, 10.0, 40.0])]
        assert list(advantages(run(grpo(), rollouts)[0]).values()) == pytest.approx([0.5, -0.5, -10, -10, 20])

    def test_groups_leave_when_complete(self):
        seen = []

        def records():
            for i, made in enumerate([rollout(g, s, 1.0, group_size=2) for g, s in (("a", 0), ("a", 1), ("b", 0))]):
                seen.append(f"in {made['id']}")
                yield Record.parse(json.dumps(made), Where("-", i))

        stream = CreditStream(grpo(), stamp={}, on_bad=pytest.fail)
        seen += [f"out {r.get('id')}" if r else "" for r in _noting(stream.run(records()), seen)]
        assert seen.index("out a/0") < seen.index("in b/0")

    def test_unordered_and_ordered_hold_the_same_records(self):
        rollouts = [rollout("a", 0, 1.0, group_size=2), {"kind": "task", "id": "t"}]
        rollouts += [rollout("b", i, float(i), group_size=2) for i in range(2)] + [rollout("a", 1, 0.0, group_size=2)]
        ordered, _ = run(grpo(), rollouts)
        unordered, _ = run(grpo(), rollouts, ordered=False)
        assert [r["id"] for r in ordered] == ["a/0", "t", "b/0", "b/1", "a/1"]
        assert [r["id"] for r in unordered] == ["t", "b/0", "b/1", "a/0", "a/1"]
        assert sorted(map(str, ordered)) == sorted(map(str, unordered))

    def test_without_a_group_the_task_in_its_version_is_one(self):
        made = [rollout("t", i, float(i)) for i in range(4)]
        for i, one in enumerate(made):
            del one["group"]
            one["statement_version"] = 1 + i // 2
        del made[0]["statement_version"]
        out, stream = run(grpo(), made)
        assert list(advantages(out).values()) == [-0.5, 0.5, -0.5, 0.5]
        assert stream.tally.ungrouped == 4

    def test_incomplete_groups_are_credited_and_counted(self):
        out, stream = run(grpo(), [rollout("a", 0, 1.0, group_size=8), rollout("a", 1, 0.0, group_size=8)])
        assert advantages(out) == {"a/0": 0.5, "a/1": -0.5}
        assert stream.tally.incomplete == 1
        assert stream.tally.first_incomplete == "a: 2 of 8"

    def test_a_group_of_failures_passes(self):
        rollouts = [rollout("a", i, None, error="lost", group_size=2) for i in range(2)]
        out, stream = run(grpo(drops_equal=True), rollouts)
        assert out == rollouts
        assert stream.tally.groups == 0

    def test_memory_is_bounded_by_the_open_groups(self):
        """prime-rl #2373: an unbounded history of samples. 400 groups of 50 KB records in a few hundred KB."""
        text = "x" * 50_000

        def records():
            for group in range(400):
                for sample in range(2):
                    made = rollout(f"g{group}", sample, float(sample), group_size=2, response=text)
                    yield Record.parse(json.dumps(made), Where("-", 1))

        tracemalloc.start()
        count = sum(1 for _ in CreditStream(grpo(), stamp={}, on_bad=pytest.fail).run(records()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 800
        assert peak < 2_000_000


def _noting(records, seen):
    for record in records:
        seen.append(f"out {record.get('id')}")
        yield record


class TestEqualRewards:
    def test_dropped_with_a_count(self):
        rollouts = [rollout("a", i, 0.3) for i in range(8)] + [rollout("b", i, float(i)) for i in range(2)]
        rollouts.append(rollout("a", 8, None, error="lost"))
        out, stream = run(grpo(drops_equal=True), rollouts)
        # The failed member passes: it is no part of the statistics.
        assert list(advantages(out)) == ["b/0", "b/1", "a/8"]
        assert (stream.tally.dropped_groups, stream.tally.dropped_rollouts, stream.tally.groups) == (1, 8, 2)

    def test_kept_they_are_exactly_zero(self):
        for std in (True, False):
            out, _ = run(grpo(std=std), [rollout("a", i, 0.3) for i in range(8)])
            assert set(advantages(out).values()) == {0.0}

    def test_small_groups_are_warned_about_with_the_number(self):
        """OpenRLHF #1250: p = 0.18 and size two, 70 % without a signal."""
        rewards = [1.0] * 18 + [0.0] * 82
        rollouts = [rollout(f"g{i // 2}", i % 2, r, success=r > 0) for i, r in enumerate(rewards)]
        _, stream = run(grpo(), rollouts)
        (line,) = stream.tally.small_group_warnings()
        assert "50 of 50 groups have 2 scored members" in line
        assert "0.18, 70 % of such groups carry no signal" in line
        _, stream = run(grpo(), [rollout("a", 0, 1.0)])
        (line,) = stream.tally.small_group_warnings()
        assert "1 of 1 groups have 1 scored member: 100 %" in line

    def test_without_success_two_values_of_reward_tell_the_pass_rate(self):
        rollouts = [rollout(f"g{i // 2}", i % 2, -1.0 if i < 9 else 1.0) for i in range(12)]
        assert run(grpo(), rollouts)[1].tally.pass_rate == 0.25
        rollouts[0]["reward"] = 0.4
        _, stream = run(grpo(), rollouts)
        assert stream.tally.pass_rate is None
        assert "few of such groups" in stream.tally.small_group_warnings()[0]

    def test_groups_of_eight_raise_no_warning(self):
        _, stream = run(grpo(), [rollout("a", i, float(i)) for i in range(8)])
        assert stream.tally.small_group_warnings() == []


class TestBadInput:
    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (rollout("a", 1, None), "reward"),
            (rollout("a", 1, None) | {"reward": None}, "reward"),
            (rollout("a", 1, "1"), "reward"),
            (rollout("a", 1, True), "reward"),
            ('{"kind":"rollout","id":"a/1","task":"a","group":"a","reward":1e999}', "reward"),
            (rollout("a", 1, 1e101), "reward"),
            (rollout("a", 0, 1.0), "id"),
            (rollout("a", 0, 1.0, id="other"), "sample"),
            (rollout("a", 1, 1.0, group_size=0), "group_size"),
            (rollout("a", 1, 1.0, group_size=5), "group_size"),
            (rollout("a", 1, 1.0, id=7), "id"),
            # prime-rl #600: groups of different problems.
            (rollout("a", 1, 1.0, task="another"), "task"),
            (rollout("a", 1, 1.0, statement_version=2), "statement_version"),
        ],
    )
    def test_places_and_fields(self, bad, field):
        good = rollout("a", 0, 1.0, group_size=3)
        with pytest.raises(DataError) as caught:
            run(grpo(), [good, bad])
        assert caught.value.where == Where("in.jsonl", 2)
        assert caught.value.field == field

    def test_set_aside_a_bad_member_still_counts_for_completeness(self):
        """One NaN reward poisons its group: it is named and left out, and the others are compared without it."""
        bad = []
        rollouts = [rollout("a", 0, 1.0, group_size=3), rollout("a", 1, None, group_size=3)]
        rollouts += [rollout("a", 2, 0.0, group_size=3), rollout("b", 0, 1.0, group_size=1)]
        out, stream = run(grpo(), rollouts, on_bad=lambda error, record: bad.append((error.field, record.get("id"))))
        assert bad == [("reward", "a/1")]
        assert advantages(out) == {"a/0": 0.5, "a/2": -0.5, "b/0": 0.0}
        assert stream.tally.incomplete == 0

    def test_a_line_nobody_can_read_counts_if_it_tells_its_group(self):
        stream = CreditStream(grpo(), stamp={}, on_bad=pytest.fail)
        out = []

        def records():
            yield Record.parse(json.dumps(rollout("a", 0, 1.0, group_size=3)), Where("-", 1))
            stream.lost_line(b'{"kind":"rollout","id":"a/1","task":"a","group":"a","group_size":3,"reward":NaN}\n')
            stream.lost_line(b'{"kind":"rollout","id":"a/1","task":"a","gro')
            yield Record.parse(json.dumps(rollout("a", 2, 0.0, group_size=3)), Where("-", 4))
            assert [r.get("id") for r in out] == ["a/0", "a/2"]
            yield Record.parse('{"kind":"task","id":"t"}', Where("-", 5))

        for record in stream.run(records()):
            out.append(record)
        assert [r.get("advantage") for r in out] == [0.5, -0.5, None]

    def test_a_second_copy_is_set_aside_and_the_true_member_still_awaited(self):
        bad = []
        rollouts = [rollout("a", 0, 1.0, group_size=2), rollout("a", 0, 9.0, group_size=2)]
        rollouts.append(rollout("a", 1, 0.0, group_size=2))
        out, _ = run(grpo(), rollouts, on_bad=lambda error, record: bad.append(error.field))
        assert bad == ["id"]
        assert advantages(out) == {"a/0": 0.5, "a/1": -0.5}


def stepped(group, sample, steps, reward=None, **more):
    total = math.fsum(step.get("reward") or 0 for step in steps) if reward is None else reward
    return rollout(group, sample, total, steps=steps, **more)


def two_attempts():
    return [
        stepped("a", 0, [{"anchor": "x", "reward": 0.0, "nll": 0.5}, {"anchor": "y", "reward": 1.0, "nll": 1.5}]),
        stepped("a", 1, [{"anchor": "x", "reward": 0.0, "nll": 0.7}, {"anchor": "y", "reward": 0.0, "nll": 0.7}]),
    ]


GIGPO = GigpoOptions(std=False, discount=1.0)


class TestSteps:
    def test_what_is_written(self):
        out, _ = run(StepEstimator(GIGPO), two_attempts())
        assert [r["advantage"] for r in out] == [0.5, -0.5]
        assert out[0]["steps"][1] == {
            "anchor": "y", "reward": 1.0, "nll": 1.5, "return": 1.0, "episode_advantage": 0.5, "step_advantage": 0.5,
            "anchor_size": 2, "advantage": 1.0,
        }  # fmt: skip
        assert list(out[0])[-2:] == ["advantage", "credit"]
        out, _ = run(StepEstimator(GIGPO, GacaOptions()), two_attempts())
        step = out[0]["steps"][1]
        assert step["nll_score"] == pytest.approx(1)
        assert step["weight"] == pytest.approx(0.75)
        assert list(step)[-3:] == ["nll_score", "weight", "advantage"]

    def test_a_step_s_own_bytes_stay(self):
        """Unknown fields, spellings of numbers, spaces and odd characters of a step pass byte for byte."""
        step = '{ "anchor" : "x", "reward":1.50e0, "note":"}\\u2028 \\"{", "deep":{"a":[1e-7,{}]} }'
        line = f'{{"kind":"rollout","id":"r","task":"t","group":"g","reward":1.5,"steps":[{step}, {{"anchor":"q"}}]}}'
        made = Record.parse(line, Where("-", 1))
        stream = CreditStream(StepEstimator(GIGPO), stamp={}, on_bad=pytest.fail)
        (record,) = stream.run([made])
        text = record.encode().decode()
        assert step.rstrip("} ") in text
        assert text.startswith(line[: line.index(step)])
        assert json.loads(text)["steps"][0]["deep"] == {"a": [1e-7, {}]}

    def test_a_second_run_replaces_the_first(self):
        """No doubled keys, no leftovers of another estimator, and the same numbers as from a fresh start."""
        fresh, _ = run(StepEstimator(GIGPO), two_attempts())
        first, _ = run(StepEstimator(GigpoOptions(), GacaOptions()), two_attempts())
        again, _ = run(StepEstimator(GIGPO), first)
        assert [r["steps"] for r in again] == [r["steps"] for r in fresh]
        assert [r["advantage"] for r in again] == [r["advantage"] for r in fresh]
        assert again[0]["credit"] == {"estimator": "gigpo"}
        plain, _ = run(grpo(), first)
        assert [r["steps"] for r in plain] == [r["steps"] for r in two_attempts()]
        lost = [dict(record, error="lost") for record in first]
        cleared, _ = run(grpo(), lost)
        assert all("advantage" not in r and "credit" not in r for r in cleared)
        assert cleared[0]["steps"] == two_attempts()[0]["steps"]

    def test_a_foreign_field_of_an_output_s_name_is_replaced_not_doubled(self):
        rollouts = two_attempts()
        rollouts[0]["steps"][0] |= {"return": "mine", "nll": None}
        out, _ = run(StepEstimator(GIGPO), [json.dumps(r) for r in rollouts])
        assert out[0]["steps"][0]["return"] == 1.0

    def test_anchors_are_made_of_observations(self):
        """Text as it is; other JSON by value, whatever the order of its keys; null is nothing."""
        rollouts = [
            stepped("a", 0, [{"observation": "you see a door", "reward": 0}, {"observation": {"x": 1, "y": [2]}}]),
            stepped("a", 1, [{"observation": {"y": [2], "x": 1}, "reward": 0}, {"observation": "you see a door"}]),
        ]
        out, _ = run(StepEstimator(GIGPO), rollouts)
        anchors = [[s["anchor"] for s in r["steps"]] for r in out]
        assert anchors[0] == anchors[1][::-1]
        assert {s["anchor_size"] for r in out for s in r["steps"]} == {2}
        for missing in ({}, {"anchor": None}, {"observation": None}):
            with pytest.raises(DataError) as caught:
                run(StepEstimator(GIGPO), [stepped("a", 0, [{"reward": 0.0} | missing])])
            assert caught.value.field == "steps[0].anchor"

    def test_similar_observations(self):
        texts = ["the red door is closed and the lamp is on", "the red door is closed and the lamp is up", "a cellar"]
        rollouts = [stepped("a", i, [{"observation": text, "reward": float(i)}]) for i, text in enumerate(texts)]
        out, _ = run(StepEstimator(GIGPO, similarity=0.95), rollouts)
        assert [r["steps"][0]["anchor_size"] for r in out] == [2, 2, 1]
        with pytest.raises(DataError, match="compares texts"):
            run(StepEstimator(GIGPO, similarity=0.95), two_attempts())

    def test_rewards_without_steps_rewards_come_last(self):
        steps = [{"anchor": "x"}, {"anchor": "y", "reward": None}]
        rollouts = [rollout("a", i, float(i), steps=steps) for i in range(2)]
        out, stream = run(StepEstimator(GIGPO), rollouts)
        assert [[s["return"] for s in r["steps"]] for r in out] == [[0, 0], [1, 1]]
        assert stream.tally.reward_mismatches == 0

    def test_rewards_that_do_not_add_up_are_counted(self):
        _, stream = run(StepEstimator(GIGPO), [stepped("a", 0, [{"anchor": "x", "reward": 0.2}], reward=1.0)])
        assert stream.tally.reward_mismatches == 1
        sums = [stepped("a", 0, [{"anchor": "x", "reward": 0.1}, {"anchor": "y", "reward": 0.2}], reward=0.3)]
        assert run(StepEstimator(GIGPO), sums)[1].tally.reward_mismatches == 0

    def test_steps_are_needed_but_may_be_none(self):
        with pytest.raises(DataError) as caught:
            run(StepEstimator(GIGPO), [rollout("a", 0, 1.0)])
        assert caught.value.field == "steps"
        options = GigpoOptions(std=False, all_rows=False)
        out, _ = run(StepEstimator(options), [rollout("a", 0, 1.0, steps=[]), rollout("a", 1, 0.0, steps=[])])
        assert advantages(out) == {"a/0": 0.5, "a/1": -0.5}

    def test_a_failed_rollout_needs_no_steps_and_bends_no_statistics(self):
        out, _ = run(StepEstimator(GIGPO), [*two_attempts(), rollout("a", 2, None, error="lost", steps="garbage")])
        assert out[:2] == run(StepEstimator(GIGPO), two_attempts())[0]
        assert out[2]["steps"] == "garbage"
        out, _ = run(StepEstimator(GIGPO), [r | {"error": None} for r in two_attempts()])
        assert [r["advantage"] for r in out] == [0.5, -0.5]

    def test_equal_groups_are_kept_unless_asked(self):
        equal = [stepped("a", i, [{"anchor": "x", "reward": r}, {"anchor": "y", "reward": 1 - r}]) for i, r in
                 enumerate([0.0, 1.0])]  # fmt: skip
        out, _ = run(StepEstimator(GIGPO), equal)
        assert [r["advantage"] for r in out] == [0, 0]
        # The second door was worth it for one of them only: steps differ where attempts do not.
        assert [r["steps"][1]["advantage"] for r in out] == [0.5, -0.5]
        out, stream = run(StepEstimator(GIGPO, drops_equal=True), equal)
        assert out == []
        assert stream.tally.dropped_groups == 1

    def test_results_do_not_depend_on_which_groups_came_together(self):
        """With a group size each group is computed alone, without one all together at the end: the same bytes."""
        draw = random.Random(4)
        rollouts = [
            stepped(f"g{g}", s, [{"anchor": draw.choice("xyz"), "reward": draw.random(), "nll": draw.random()}
                                 for _ in range(draw.randrange(1, 6))])
            for g in range(6) for s in range(4)
        ]  # fmt: skip
        options = GacaOptions(control="shuffle_traj")
        together, _ = run(StepEstimator(GigpoOptions(), options), rollouts)
        alone, _ = run(StepEstimator(GigpoOptions(), options), [r | {"group_size": 4} for r in rollouts])
        assert [r["steps"] for r in together] == [r["steps"] for r in alone]

    def test_batch_controls_wait_for_the_whole_input(self):
        rollouts = [r | {"group_size": 2} for r in two_attempts()]
        rollouts += [r | {"group": "b", "id": "b" + r["id"], "group_size": 2} for r in two_attempts()]
        out, _ = run(StepEstimator(GIGPO, GacaOptions(control="mean_matched", singleton="shrink")), rollouts)
        assert {s["weight"] for r in out for s in r["steps"]} == {0.5}
        assert [r["id"] for r in out] == [r["id"] for r in rollouts]


class TestNll:
    CHUNK = {"token_ids": list(range(10)), "sampled": [[3, 6], [8, 10]], "logprobs": [-0.1, -0.2, -0.3, -1.0, -2.0]}

    def made(self, step, chunks=None):
        other = {"anchor": "x", "reward": 0.0, "nll": 0.2}
        chunks = [self.CHUNK] if chunks is None else chunks
        return stepped("a", 0, [{"anchor": "x", "reward": 0.0} | step, other], chunks=chunks)

    @pytest.mark.parametrize(
        ("span", "nll"), [([3, 6], 0.2), ([0, 10], 0.72), ([4, 9], 0.5), ([8, 10], 1.5), ([5, 6], 0.3)]
    )
    def test_made_of_the_sampled_tokens_in_the_span(self, span, nll):
        """Tokens that were fed count for nothing, whether before, between or after."""
        out, _ = run(StepEstimator(GIGPO, GacaOptions()), [self.made({"span": span})])
        assert out[0]["steps"][0]["nll"] == pytest.approx(nll)

    def test_a_recorded_nll_stands(self):
        out, _ = run(StepEstimator(GIGPO, GacaOptions()), [self.made({"span": [3, 6], "nll": 7.0})])
        assert out[0]["steps"][0]["nll"] == 7.0

    def test_the_action_alone(self):
        step = {"span": [3, 10], "action_span": [8, 10], "nll": 0.72}
        out, _ = run(StepEstimator(GIGPO, GacaOptions(), nll_span="action"), [self.made(step)])
        assert out[0]["steps"][0]["action_nll"] == pytest.approx(1.5)
        assert out[0]["steps"][0]["nll"] == 0.72
        # The other step has no action span: base weight, and it moves nobody.
        assert out[0]["steps"][1]["weight"] == 0.5

    def test_which_chunk(self):
        second = {"token_ids": [1, 2], "sampled": [[1, 2]], "logprobs": [-4.0]}
        made = self.made({"span": [0, 2], "chunk": 1}, [self.CHUNK, second])
        out, _ = run(StepEstimator(GIGPO, GacaOptions()), [made])
        assert out[0]["steps"][0]["nll"] == 4.0
        for step in ({"span": [0, 2]}, {"span": [0, 2], "chunk": 2}):
            with pytest.raises(DataError) as caught:
                run(StepEstimator(GIGPO, GacaOptions()), [self.made(step, [self.CHUNK, second])])
            assert caught.value.field == "steps[0].chunk"

    def test_nothing_to_go_by(self):
        """No tokens in the span, no span, no log-probabilities: the base weight, counted."""
        bare = {k: v for k, v in self.CHUNK.items() if k != "logprobs"}
        for step, chunks in (({"span": [0, 3]}, None), ({}, None), ({"span": [3, 6]}, [bare]), ({"span": [3, 6]}, [])):
            out, stream = run(StepEstimator(GIGPO, GacaOptions(singleton="shrink")), [self.made(step, chunks)])
            assert out[0]["steps"][0]["weight"] == 0.5
            assert "nll" not in out[0]["steps"][0]
            assert stream.tally.steps_without_nll == 1

    @pytest.mark.parametrize(
        ("step", "chunks", "field"),
        [
            ({"span": [3, 11]}, None, "steps[0].span"),
            ({"span": [6, 3]}, None, "steps[0].span"),
            ({"span": [-1, 3]}, None, "steps[0].span"),
            ({"span": [3, 6]}, [{**CHUNK, "logprobs": [-0.1]}], "chunks[0].logprobs"),
            ({"span": [3, 6]}, [{**CHUNK, "sampled": [[3, 12]]}], "chunks[0].sampled[0]"),
            ({"nll": -0.7}, None, "steps[0].nll"),
        ],
    )
    def test_bad_spans_and_log_probabilities(self, step, chunks, field):
        with pytest.raises(DataError) as caught:
            run(StepEstimator(GIGPO, GacaOptions()), [self.made(step, chunks)])
        assert caught.value.where == Where("in.jsonl", 1)
        assert caught.value.field.strip("`") == field
