"""Back-ends that are asked directly: what the command line cannot show in a short time."""

import sys

from strop.core.debate.replies import Question
from strop.core.debate.roles import Cast, ProgramRole

# Answers, but not to the example "mute".
PROGRAM = """
import json, sys, time
for line in sys.stdin:
    if json.loads(line)["example"]["id"] == "mute":
        time.sleep(60)
    print(json.dumps({"text": "Vote: 1"}), flush=True)
"""


def question(name):
    return Question(name, "support", 1, 0, "prompt", 0, {"example": {"id": name}})


def test_a_program_that_answers_nothing_fails_by_the_machinery_and_the_next_question_is_answered(tmp_path):
    file = tmp_path / "role.py"
    file.write_text(PROGRAM)
    # Long enough for an interpreter to start on a busy machine.
    role = ProgramRole(f"{sys.executable} {file}", seconds=5)
    try:
        replies = dict(role.ask([question("a"), question("mute"), question("b")]))
    finally:
        role.close()
    assert [replies[number].text for number in range(3)] == ["Vote: 1", "", "Vote: 1"]
    assert [replies[number].error is None for number in range(3)] == [True, False, True]
    assert "5 s" in replies[1].error


def test_a_reply_is_kept_before_the_next_question_is_asked(tmp_path):
    file = tmp_path / "role.py"
    file.write_text(PROGRAM)
    kept = []
    role = ProgramRole(f"{sys.executable} {file}")

    class Watched:
        name = role.name

        def ask(self, questions):
            for number, reply in role.ask(questions):
                assert len(kept) == number
                yield number, reply

        def close(self):
            role.close()

    cast = Cast({"support": Watched()}, on_reply=kept.append)
    try:
        assert [reply.text for reply in cast.ask([question("a"), question("b")])] == ["Vote: 1", "Vote: 1"]
    finally:
        cast.close()
    assert [record.get("example") for record in kept] == ["a", "b"]
