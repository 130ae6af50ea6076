"""`strop debate-label` as a user runs it: roles of all kinds, and what can go wrong."""

import json
import shutil
import sys

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
# Support always accepts; the others accept where a tool's name is in the request.
RULES = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    assert "y_raw" not in line and "y_human" not in line, "a gold label reached a role"
    example = asked["example"]
    able = any(tool in example["query"] for tool in example["agent"]["tools"])
    cite = f"[skill:{asked['skills'][0]['id']}]"
    text = {
        "support": f"It can. {cite}\\nVote: 2", "objection": f"Look at the tools. {cite}\\nVote: {2 if able else 1}",
        "guidance": "Name the tool.",
        "verdict": f"{cite}\\nGap: {'none' if able else 'tools'}\\nVerdict: {2 if able else 1}",
        "router": f"## Judgement\\n{cite}\\n## Verdict\\nVerdict: {2 if able else 1}",
    }[asked["role"]]
    print(json.dumps({"text": text}), flush=True)
"""


def example(name, query, *tools, **more):
    return {"id": name, "query": query, "agent": {"name": "A", "profile": "travel", "tools": list(tools)}, **more}


EXAMPLES = [
    example("a", "please rebook flight LH1", "rebook", y_raw=2),
    example("b", "please cancel flight LH2", "search", y_raw=1),
    example("c", "rename the flight of Ann", "search", y_raw=1),
    example("d", "refund travel of Bob", "search", y_raw=1),
    example("e", "please rebook train 7", "rebook", y_raw=2),
]


@pytest.fixture
def rules(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(RULES)
    return f"command:{sys.executable} {file}"


@pytest.fixture
def program(tmp_path):
    """A role out of some lines of Python that are run for each question."""

    def make(body):
        file = tmp_path / "role.py"
        file.write_text(f"import json, sys\nfor line in sys.stdin:\n    asked = json.loads(line)\n    {body}\n")
        return f"command:{sys.executable} {file}"

    return make


@pytest.fixture
def label(run_strop):
    def run(*args, examples=EXAMPLES, check=True, **more):
        return run_strop(["debate-label", *args], examples, check=check, env=ENV, **more)

    return run


def of(result, kind):
    return [record for record in result.records if record.get("kind") == kind]


def written(tmp_path, name, records):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- what it does


def test_each_example_comes_back_as_it_came_and_is_followed_by_its_label(label, rules):
    done = label("--role", rules)
    lines = done.stdout.split(b"\n")
    assert lines[0] == json.dumps(EXAMPLES[0]).encode()
    found = of(done, "label")
    assert [(one["id"], one["verdict"]) for one in found] == [("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 2)]
    trace = found[1]["trace"]
    assert (trace["y_sem"], trace["y_crit"], trace["y_judge"], trace["gap"]) == (1, 0, 0, "tools")
    assert found[1]["priority"] == 1.5
    assert found[1]["reward"] == {"cls": 1, "sec": 1, "skill": 1, "total": 1.2}
    # Two rounds of three, and the verdict.
    assert len(trace["replies"]) == 7


def test_disagreement_makes_a_skill_without_a_text_of_the_debate(label, rules, tmp_path):
    bank, buffer = tmp_path / "bank.jsonl", tmp_path / "buffer.jsonl"
    done = label("--role", rules, "--skills-out", bank, "--buffer", buffer, "--every", 2)
    (made,) = of(done, "skill")
    assert (made["id"], made["update"]["action"], made["update"]["freq"]) == ("tools-over-accept", "add", 3)
    stored = [json.loads(line) for line in bank.read_text().splitlines()]
    assert [one["id"] for one in stored][-1] == "tools-over-accept"
    waiting = buffer.read_text()
    for text in ("Look at the tools", "Name the tool", "LH2", "Ann", "Bob"):
        assert text not in waiting + bank.read_text()
    assert {json.loads(line)["used"] for line in waiting.splitlines()} == {"tools-over-accept"}
    # The next run reads the bank, and what is used up does not count again.
    again = label("--role", rules, "--skills", bank, "--buffer", buffer)
    assert of(again, "skill") == []


def test_the_buffer_gathers_over_runs(label, rules, tmp_path):
    buffer = tmp_path / "buffer.jsonl"
    assert of(label("--role", rules, "--buffer", buffer, examples=EXAMPLES[:3]), "skill") == []
    assert len(of(label("--role", rules, "--buffer", buffer, examples=EXAMPLES[3:]), "skill")) == 1


def test_labels_do_not_depend_on_batches_as_long_as_skills_are_fixed(label, rules):
    one, many = (label("--role", rules, "--fixed-skills", "--every", n) for n in (1, 5))
    assert [label_["trace"] for label_ in of(one, "label")] == [label_["trace"] for label_ in of(many, "label")]


def test_the_same_seed_gives_the_same_bytes_and_another_swaps_other_sides(label, rules):
    first, second, other = (label("--role", rules, "--seed", n) for n in (1, 1, 2))
    assert first.stdout == second.stdout
    sides = [[one["trace"]["first"] for one in of(done, "label")] for done in (first, other)]
    assert sides[0] != sides[1]
    assert {side for both in sides for rounds in both for side in rounds} == {"support", "objection"}
    unswapped = of(label("--role", rules, "--no-swap"), "label")
    assert all(one["trace"]["first"] == ["support", "support"] for one in unswapped)


@pytest.mark.parametrize(("variant", "calls"), [("--no-judge", 4), ("--no-debate", 1)])
def test_the_variants(label, rules, variant, calls):
    found = of(label("--role", rules, variant, "--sections", "verdict"), "label")
    assert all(len(one["trace"]["replies"]) == calls for one in found)
    assert all(one["verdict"] is not None and one["trace"]["valid_sections"] for one in found)


def test_measures_by_human_labels_and_what_they_label_is_not_exported(label, rules, tmp_path):
    human = written(tmp_path, "human.jsonl", [{"id": "a", "y_human": 2}, {"id": "b", "y_human": 2}])
    done = label("--role", rules, "--eval", human, "--export", "sft")
    accuracy, *_ = of(done, "metric")
    # a by its human label, b against it, the others by their own.
    assert (accuracy["name"], accuracy["value"], accuracy["n"]) == ("accuracy", 0.8, 5)
    assert of(done, "label")[1]["priority"] == 2.5
    assert [one["id"] for one in of(done, "sft")] == ["c/full", "d/full", "e/full"]


def test_exports_go_on_through_rollout_with_the_reward(label, rules, run_strop, smol, tmp_path):
    done = label("--role", rules, "--export", "grpo", "--export", "sft", "--trace", "reasoning")
    tasks = of(done, "task")
    response = of(done, "sft")[0]["response"]
    assert response == "## Judgement\n[skill:seed-access-and-authority]\nGap: none\nVerdict: 2\n## Verdict\nVerdict: 2"
    prompt = json.dumps(tasks[0]["prompt"]) + json.dumps(of(done, "sft")[0]["prompt"])
    assert "y_raw" not in prompt
    said = ["## Verdict\nVerdict: 2", response, "Verdict: 5"]
    script = tmp_path / "said.jsonl"
    script.write_text("".join(
        json.dumps({"task": tasks[0]["id"], "sample": i, "messages": [text]}) + "\n" for i, text in enumerate(said)
    ))  # fmt: skip
    command = ["rollout", "--model", smol, "--engine", f"script:{script}", "-n", 3]
    rollouts = [r for r in run_strop(command, tasks[:1], env=ENV).records if r["kind"] == "rollout"]
    assert [one["reward"] for one in rollouts] == [1.0, 1.2, 0.0]
    assert [one["success"] for one in rollouts] == [True, True, False]


def test_labels_that_come_in_are_exported_and_measured_without_any_role(label, rules):
    labels = of(label("--role", rules), "label")
    done = label("--export", "sft", "--metrics", "--only", "sft,metric", examples=labels)
    assert len(of(done, "sft")) == 5
    assert of(done, "metric")[0]["value"] == 1.0


# --- raw replies


def test_labels_are_parsed_anew_from_labels_and_from_the_file_of_replies(label, rules, tmp_path):
    replies = tmp_path / "replies.jsonl"
    first = label("--role", rules, "--replies", replies)
    labels = written(tmp_path, "labels.jsonl", first.records)
    for file in (labels, replies):
        again = label("--role", f"replay:{file}")
        assert [one["trace"] for one in of(again, "label")] == [one["trace"] for one in of(first, "label")]


def test_nobody_is_asked_again_what_the_file_of_replies_answers(label, rules, program, tmp_path):
    replies = tmp_path / "replies.jsonl"
    first = label("--role", rules, "--replies", replies)
    (tmp_path / "rules.py").write_text("raise SystemExit('asked')")
    torn = replies.read_bytes()
    replies.write_bytes(torn + b'{"kind":"reply","exam')
    again = label("--role", rules, "--replies", replies)
    assert again.stdout == first.stdout
    assert replies.read_bytes() == torn
    assert "0 replies asked for, 35 known" in again.stderr


def test_a_model_whose_weights_changed_under_the_same_name_is_asked_again(label, tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    model, replies = tmp_path / "model", tmp_path / "replies.jsonl"
    shutil.copytree(tiny_model, model)
    args = ("--model", model, "--no-debate", "--rechecks", 0, "--max-tokens", 8, "--replies", replies)
    first = label(*args, examples=EXAMPLES[:1])
    again = label(*args, examples=EXAMPLES[:1])
    assert "0 replies asked for, 1 known" in again.stderr
    assert again.stdout == first.stdout
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"] *= -1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    changed = label(*args, examples=EXAMPLES[:1])
    assert "1 replies asked for, 0 known" in changed.stderr
    sources = [json.loads(line)["source"] for line in replies.read_text().splitlines()]
    names = [of(done, "label")[0]["provenance"]["options"]["roles"]["router"] for done in (first, changed)]
    assert sources == names
    assert len(set(names)) == 2
    assert all(name.startswith(f"model:{model}@") for name in names)


def test_resume_does_what_is_missing_and_the_bank_comes_out_the_same(label, rules, tmp_path):
    banks = [tmp_path / "whole.bank", tmp_path / "resumed.bank"]
    whole = label("--role", rules, "--every", 2, "--skills-out", banks[0])
    part = tmp_path / "part.jsonl"
    part.write_bytes(b"\n".join(whole.stdout.split(b"\n")[:5])[:-20])
    done = label("--role", rules, "--every", 2, "--skills-out", banks[1], "--resume", part)
    assert part.read_bytes() == whole.stdout
    assert banks[0].read_bytes() == banks[1].read_bytes()
    assert "21 replies asked for" in done.stderr


def test_a_real_model_speaks_in_all_roles(label, smol):
    args = ("--model", smol, "--rounds", 1, "--max-tokens", 8, "--rechecks", 0)
    first, second = (label(*args, examples=EXAMPLES[:1]) for _ in range(2))
    (found,) = of(first, "label")
    assert [one["role"] for one in found["trace"]["replies"]] == ["support", "objection", "guidance", "verdict"]
    assert all(one["text"] for one in found["trace"]["replies"])
    assert first.stdout == second.stdout


# --- what can go wrong


def test_an_empty_reply_is_no_verdict_and_is_asked_for_again(label, program):
    silent = program('print(json.dumps({"text": ""}), flush=True)')
    (found,) = of(label("--role", silent, "--rechecks", 2, examples=EXAMPLES[:1]), "label")
    assert (found["verdict"], found["trace"]["fault"]) == (None, "an empty reply")
    assert found["trace"]["valid_sections"] is False
    assert [one["attempt"] for one in found["trace"]["replies"] if one["role"] == "verdict"] == [0, 1, 2]
    assert found["error"] is None


def test_a_verdict_out_of_range_is_none_and_says_so(label, program):
    (found,) = of(label("--role", program('print(json.dumps({"text": "Verdict: 3"}), flush=True)'),
                        examples=EXAMPLES[:1]), "label")  # fmt: skip
    assert found["verdict"] is None
    assert found["trace"]["fault"] == "verdict 3 is out of range, expected 0, 1 or 2"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print('hello', flush=True)", "is not JSON"),
        ("sys.exit(3)", "ended with exit status 3"),
        ("print('{\"text\": \"a\"}\\n{\"text\": \"b\"}', flush=True)", "more than one line"),
        ("print('{\"said\": 1}', flush=True)", "answered without a text"),
        ("sys.stdout.buffer.write(b'{\"text\": \"\\xff\"}\\n'); sys.stdout.flush()", "not JSON"),
    ],
)  # fmt: skip
def test_a_role_that_fails_fails_by_the_machinery(label, program, body, says):
    done = label("--role", program(body), examples=EXAMPLES[:1], check=False)
    assert done.status == 69
    (found,) = of(done, "label")
    assert says in found["error"]
    assert found["verdict"] is None
    assert says in done.stderr


def test_a_role_that_fails_once_costs_one_label(label, program):
    body = 'print(json.dumps({"text": "Vote: 2 Verdict: 2"}) if asked["example"]["id"] != "b" else "", flush=True)'
    found = of(label("--role", program(body)), "label")
    assert [one["id"] for one in found if one["error"]] == ["b"]
    assert [one["verdict"] for one in found if not one["error"]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("records", "status", "says"),
    [
        ([{"kind": "skill", "id": "x", "title": "t", "principle": "p"}] * 2, 65, ":2: id: skill 'x' came before, at"),
        ([{"kind": "skill", "id": "a b", "title": "t", "principle": "p"}], 65, ":1: id: 'a b'"),
        ([{"kind": "skill", "id": "x", "title": "t"}], 65, ":1: "),
    ],
)
def test_a_bad_bank(label, rules, tmp_path, records, status, says):
    bank = written(tmp_path, "bank.jsonl", records)
    done = label("--role", rules, "--skills", bank, check=False)
    assert (done.status, done.stdout) == (status, b"")
    assert f"{bank}{says}" in done.stderr


def test_replies_that_answer_twice_are_bad_data(label, tmp_path):
    reply = {"kind": "reply", "example": "a", "role": "support", "round": 1, "text": "x"}
    file = written(tmp_path, "replies.jsonl", [reply, reply])
    done = label("--role", f"replay:{file}", check=False)
    assert done.status == 65
    assert f"{file}:2: role: support of 'a' answered round 1 twice, first at {file}:1" in done.stderr
    file = written(tmp_path, "replies.jsonl", [reply | {"role": "clown"}])
    done = label("--role", f"replay:{file}", check=False)
    assert (done.status, done.stdout) == (65, b"")
    assert "role: 'clown', expected one of" in done.stderr


def test_a_reply_that_is_missing_is_bad_data_at_the_example(label, tmp_path, rules):
    labels = of(label("--role", rules), "label")
    file = written(tmp_path, "labels.jsonl", labels[:1] + labels[2:])
    rejects = tmp_path / "rejects.jsonl"
    done = label("--role", f"replay:{file}", check=False)
    assert done.status == 65
    assert f"<stdin>:2: {file} holds no reply of support in round 1, attempt 0" in done.stderr
    assert [one["id"] for one in of(done, "label")] == ["a"]
    done = label("--role", f"replay:{file}", "--keep-going", "--rejects", rejects, check=False)
    assert (done.status, [one["id"] for one in of(done, "label")]) == (1, ["a", "c", "d", "e"])
    assert json.loads(rejects.read_text())["line"] == 2


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("support.txt", b"Request: {query}\n{gold}\n", "support.txt:2: {gold}: unknown field"),
        ("support.txt", b"{query.__class__}", "support.txt:1: {query.__class__}: unknown field"),
        ("support.txt", b"ok\n{query", "support.txt:2: "),
        ("verdict.txt", b"ok\n\xff\n", "verdict.txt:2: not UTF-8"),
        ("jugde.txt", b"ok", "jugde.txt:1: no template has this name"),
    ],
)
def test_a_bad_template(label, rules, tmp_path, name, data, says):
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / name).write_bytes(data)
    done = label("--role", rules, "--prompts", folder, check=False)
    assert (done.status, done.stdout) == (65, b"")
    assert says in done.stderr


def test_templates_are_copied_edited_and_used(label, program, tmp_path):
    folder = tmp_path / "prompts"
    label("--copy-prompts", folder)
    (folder / "support.txt").write_text("Speak {{plainly}}: {query}")
    body = 'print(json.dumps({"text": asked["prompt"]}), flush=True)'
    odd = [example("a", "a {query} in braces", "x")]
    (found,) = of(label("--role", program(body), "--prompts", folder, examples=odd), "label")
    assert found["trace"]["replies"][0]["text"] == "Speak {plainly}: a {query} in braces"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([EXAMPLES[0], EXAMPLES[0]], "<stdin>:2: id: example 'a' came before, at <stdin>:1"),
        ([EXAMPLES[0], example("b", "x", y_raw=3)], "<stdin>:2: y_raw: 3, expected a raw label"),
        ([EXAMPLES[0], {"id": "b", "query": "x"}], "<stdin>:2: "),
        ([EXAMPLES[0], example("b", "  ")], "<stdin>:2: query: empty"),
        (
            [example("a", "Rebook my flight!", split="train"), example("b", "rebook  my flight", split="test")],
            "<stdin>:2: query: the same request is in split 'train' at <stdin>:1",
        ),
    ],
)
def test_a_bad_example(label, rules, records, says):
    done = label("--role", rules, examples=records, check=False)
    assert done.status == 65
    assert says in done.stderr
    # What came before it is finished.
    assert [one["id"] for one in of(done, "label")] == ["a"]


def test_malformed_utf8_is_bad_data(label, rules):
    lines = json.dumps(EXAMPLES[0]).encode() + b'\n{"id": "b", "query": "\xff", "agent": {}}\n'
    done = label("--role", rules, examples=lines, check=False)
    assert done.status == 65
    assert "<stdin>:2: not UTF-8" in done.stderr
    assert [one["id"] for one in of(done, "label")] == ["a"]


def test_a_query_of_the_evaluation_is_never_trained_on(label, rules, tmp_path):
    human = written(tmp_path, "human.jsonl", [{"id": "z", "query": "Please REBOOK flight lh1", "y_human": 1}])
    done = label("--role", rules, "--eval", human, "--export", "sft", check=False)
    assert done.status == 65
    assert "<stdin>:1: query: the same request is in the file of --eval" in done.stderr


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ([], 2, "no role"),
        (["--role", "clown"], 2, "expected model, command:PROG or replay:FILE"),
        (["--role", "command:no-such-program-here"], 69, "no such program"),
        (["--role", "replay:nowhere.jsonl"], 66, "nowhere.jsonl"),
        (["--skills", "nowhere.jsonl"], 66, "nowhere.jsonl"),
        (["--eval", "nowhere.jsonl"], 66, "nowhere.jsonl"),
        (["--prompts", "nowhere"], 66, "no such folder"),
        (["--no-debate", "--no-judge"], 2, "--no-judge"),
        (["--export", "csv"], 2, "--export csv: expected sft, grpo"),
        (["--trace", "some"], 2, "--trace some"),
        (["--sections", "hats"], 2, "--sections"),
        (["--bag", "paper"], 2, "--bag paper"),
    ],
)
def test_what_is_missing_or_does_not_fit(label, args, status, says):
    done = label(*args, check=False)
    assert (done.status, done.stdout) == (status, b"")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (lambda entry: [entry, entry], ":2: id: example 'a' is in the buffer already"),
        (lambda entry: [entry | {"pattern": "tools"}], ":1: pattern: 'tools', expected GAP/DIRECTION"),
        (lambda entry: [entry | {"kind": "skill"}], ":1: kind: 'skill'; a buffer holds disagreement records"),
    ],
)
def test_a_bad_buffer(label, rules, tmp_path, records, says):
    entry = {"kind": "disagreement", "id": "a", "pattern": "tools/over_accept", "priority": 1.5, "query": "q"}
    buffer = written(tmp_path, "buffer.jsonl", records(entry))
    before = buffer.read_bytes()
    done = label("--role", rules, "--buffer", buffer, check=False)
    assert (done.status, done.stdout) == (65, b"")
    assert f"{buffer}{says}" in done.stderr
    assert buffer.read_bytes() == before


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"id": "a", "y_human": 3}], ":1: y_human: 3, expected a raw label 0, 1 or 2"),
        ([{"id": "a", "y_human": 1}, {"id": "a", "y_human": 2}], ":2: id: example 'a' was labelled before"),
        ([{"id": "a"}], ":1: "),
    ],
)
def test_bad_human_labels(label, rules, tmp_path, records, says):
    human = written(tmp_path, "human.jsonl", records)
    done = label("--role", rules, "--eval", human, check=False)
    assert (done.status, done.stdout) == (65, b"")
    assert f"{human}{says}" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"verdict": 3}, "verdict: 3, expected a raw label 0, 1 or 2"),
        ({"y_raw": -1}, "y_raw: -1, expected a raw label 0, 1 or 2"),
        ({"id": "a"}, "id: label 'a' came before, at <stdin>:1"),
        (
            {"query": "Please rebook FLIGHT LH1", "split": "test"},
            "query: the same request is in split 'train' at <stdin>:1: a query must not cross splits",
        ),
    ],
)
def test_a_bad_label_that_comes_in(label, rules, tmp_path, change, says):
    first, second = of(label("--role", rules, examples=[one | {"split": "train"} for one in EXAMPLES[:2]]), "label")
    labels = [first, second | change]
    done = label("--export", "sft", examples=labels, check=False)
    assert done.status == 65
    assert f"<stdin>:2: {says}" in done.stderr
    assert [(one["kind"], one["id"]) for one in done.records] == [("label", "a"), ("sft", "a/full")]
    rejects = tmp_path / "rejects.jsonl"
    done = label("--export", "sft", "--keep-going", "--rejects", rejects, examples=labels, check=False)
    assert done.status == 1
    assert says in ": ".join(map(str, (json.loads(rejects.read_text())[key] for key in ("field", "reason"))))


def test_the_plan(label, rules):
    (plan,) = of(label("--role", rules, "--dry-run"), "plan")
    assert (plan["examples"], plan["replies"]) == (5, 35)
