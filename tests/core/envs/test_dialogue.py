"""The dialogue of a policy with a world: how it ends, what its record says, summaries of one's own, tools in words."""

from itertools import count

import pytest

from strop.core.engines.protocol import Completion
from strop.core.envs.compaction import INTRODUCTION, Compaction, newest_turns
from strop.core.envs.dialogue import DialogueEpisode, EpisodeLimits
from strop.core.envs.tool_calls import detect_format, has_tool_role
from strop.core.envs.world import Opening, Outcome, ToolResult
from strop.core.errors import DataError, Unavailable
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.verifiers.verdict import Verdict

ADD = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}  # fmt: skip


class Counter:
    """Counts to a number: each message (or call of add) moves it; at the number the world ends."""

    def __init__(self, goal=3, tools=(), says="Count."):
        self.goal, self.tools, self.says = goal, list(tools), says
        self.value = 0
        self.closed = 0

    def reset(self):
        return Opening([{"role": "user", "content": self.says}], self.tools)

    def act(self, text, calls, *, seconds_left):
        if self.tools and not calls:
            return Outcome(done=True, stop="agent")
        results = []
        for call in calls or [None]:
            if call is not None and not call.valid:
                results.append(ToolResult(call.message, valid=False))
                continue
            self.value += 1 if call is None else call.arguments["n"]
            results.append(ToolResult(f"It is {self.value} now. " + "x" * len(text)))
        done = self.value >= self.goal
        return Outcome(results, done=done, reward=1.0 if done else 0.0)

    def judge(self):
        return Verdict.of(self.value >= self.goal)

    def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def tokenizer(smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(str(smol)))


def play(tokenizer, world, messages, limits=None, stop="eos", clock=None):
    """Drives an episode as the loop does; the policy says the messages in turn. Returns episode, prompts, verdict."""
    more = {} if clock is None else {"clock": clock}
    episode = DialogueEpisode(tokenizer, world, limits or EpisodeLimits(), **more)
    prompts = []
    said = iter(messages)
    ids = episode.resume(episode.act(episode.begin()))
    while ids is not None:
        prompts.append(ids)
        sampled = tokenizer.inner(next(said), add_special_tokens=False)["input_ids"] + [tokenizer.inner.eos_token_id]
        bound = episode.max_tokens
        cut = sampled if bound is None else sampled[:bound]
        reason = stop if len(cut) == len(sampled) else "length"
        work = episode.advance(Completion("k", cut, [-0.5] * len(cut), reason))
        ids = None if work is None else episode.resume(episode.act(work))
    return episode, prompts, episode.judge()


def test_text_is_an_action_and_the_world_ends_it(tokenizer):
    world = Counter(goal=2)
    episode, prompts, verdict = play(tokenizer, world, ["one", "two"])
    record = episode.trajectory("two")
    assert (episode.stop, record["turns"], verdict.success, world.closed) == ("env", 2, True, 1)
    assert [step["reward"] for step in record["steps"]] == [0.0, 1.0]
    assert [step["action"] for step in record["steps"]] == ["one", "two"]
    assert record["steps"][1]["observation"].startswith("It is 1 now.")
    # The prompt of each turn is the stream so far and what is new: id for id what the policy saw.
    (chunk,) = record["chunks"]
    for prompt, span in zip(prompts, chunk.sampled, strict=True):
        assert chunk.token_ids[: span.start] == prompt


def test_a_model_that_knows_no_tools_is_told_of_them_in_words(tokenizer):
    world = Counter(goal=9, tools=[ADD])
    call = '<tool_call>\n{"name": "add", "arguments": {"n": 4}}\n</tool_call>'
    wrong = '<tool_call>\n{"name": "add", "arguments": {"n": "x"}}\n</tool_call>'
    unknown = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    no_object = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'
    episode, prompts, _ = play(tokenizer, world, [call + call, wrong, unknown, no_object, "I am done."])
    steps = episode.trajectory("")["steps"]
    assert '"description": "Adds."' in tokenizer.inner.decode(prompts[0])
    assert (episode.stop, world.value) == ("agent", 8)
    assert [step["valid"] for step in steps] == [True, False, False, False, True]
    assert "should be integer" in steps[2]["observation"]
    assert "There is no tool 'fly'" in steps[3]["observation"]
    assert "object" in steps[4]["observation"]


def test_each_limit_has_a_name(tokenizer):
    assert play(tokenizer, Counter(), ["a"] * 9, EpisodeLimits(max_turns=2))[0].stop == "max_turns"
    assert play(tokenizer, Counter(goal=99), ["a b c"] * 99, EpisodeLimits(max_context=120))[0].stop == "max_context"
    assert play(tokenizer, Counter(), ["a"], stop="length")[0].stop == "max_tokens_per_turn"
    times = count(step=10)
    late = EpisodeLimits(max_time_s=25)
    assert play(tokenizer, Counter(goal=99), ["a"] * 99, late, clock=lambda: next(times))[0].stop == "max_time"
    cancelled = play(tokenizer, Counter(), ["a"], stop="cancelled")[0]
    assert (cancelled.stop, cancelled.num_turns) == ("cancelled", 1)


def test_a_message_cut_off_by_a_full_context_is_told_from_one_that_is_too_long(tokenizer):
    episode = DialogueEpisode(tokenizer, Counter(), EpisodeLimits(max_context=60))
    ids = episode.resume(episode.act(episode.begin()))
    sampled = [5] * (60 - len(ids))
    assert episode.advance(Completion("k", sampled, [0.0] * len(sampled), "length")) is None
    assert episode.stop == "max_context"


def test_a_first_prompt_beyond_the_context_is_the_end_of_a_budget(tokenizer):
    """No error (verifiers #1625)."""
    episode, prompts, verdict = play(tokenizer, Counter(says="word " * 500), [], EpisodeLimits(max_context=100))
    record = episode.trajectory("")
    assert (prompts, episode.stop, verdict.success) == ([], "max_context", False)
    assert (record["turns"], record["steps"], record["chunks"]) == (0, [], [])


NATIVE = (
    "{%- for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{%- if m['role'] == 'tool' %}<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{%- else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    '{# <tool_call> {"name": ..., "arguments": ...} #}'
)


@pytest.mark.parametrize("template", [None, NATIVE], ids=["in words", "native"])
def test_a_result_is_whole_or_not_there(tokenizer, smol, template):
    """A result that overflows the context is not cut in the middle of its template; it stays away (TRL #5521)."""
    from strop.core.models.load import load_tokenizer, resolve_model

    if template is not None:
        tokenizer = load_tokenizer(resolve_model(str(smol)))
        tokenizer.inner.chat_template = template
        assert (detect_format(template), has_tool_role(template)) == ("hermes", True)
    say = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
    _, prompts, _ = play(tokenizer, Counter(goal=99, tools=[ADD]), [say] * 2 + ["Done."])
    whole = len(prompts[2])
    for most in range(len(prompts[1]) + 1, whole + 2, 3):
        episode, fed, _ = play(tokenizer, Counter(goal=99, tools=[ADD]), [say] * 3, EpisodeLimits(max_context=most))
        record = episode.trajectory("")
        (chunk,) = record["chunks"]
        assert (episode.stop, record["turns"]) == ("max_context", 2 if most <= whole else 3)
        # Nothing of the result that did not fit, and each one that did with both of its tags.
        assert chunk.sampled[-1].end == len(chunk.token_ids)
        assert chunk.token_ids[: chunk.sampled[-1].start] == fed[-1]
        text = tokenizer.decode(chunk.token_ids)
        assert text.count("<tool_response>") == text.count("</tool_response>") == record["turns"] - 1


def test_what_the_world_loses_is_an_error(tokenizer):
    class Lost(Counter):
        def judge(self):
            raise SandboxLost("gone")

    _, _, verdict = play(tokenizer, Lost(goal=1), ["a"])
    assert verdict.error == "sandbox lost: gone"


def test_what_is_missing_for_one_world_is_its_error(tokenizer):
    class Wanting(Counter):
        def judge(self):
            raise Unavailable("no image; bring it")

    _, _, verdict = play(tokenizer, Wanting(goal=1), ["a"])
    assert verdict.error == "no image; bring it"


def test_getting_ready_is_none_of_the_policys_time(tokenizer):
    """Nor of a command's (endpoints #456)."""

    class Slow(Counter):
        def act(self, text, calls, *, seconds_left):
            outcome = super().act(text, calls, seconds_left=seconds_left)
            outcome.making_s = 20.0 if self.value == 1 else 0.0
            return outcome

    for world, stop in ((Slow(), "env"), (Counter(), "max_time")):
        times = count(step=10)
        assert (
            play(tokenizer, world, ["a"] * 3, EpisodeLimits(max_time_s=35), clock=lambda t=times: next(t))[0].stop
            == stop
        )


def test_messages_that_the_template_refuses(tokenizer, smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    strict = load_tokenizer(resolve_model(str(smol)))
    strict.inner.chat_template = "{{ raise_exception('no user may speak') }}"
    episode = DialogueEpisode(strict, Counter())
    with pytest.raises(DataError, match="no user may speak"):
        episode.resume(episode.act(episode.begin()))


# --- own-summary compaction (FrogNano, 1.9)


def test_a_long_history_becomes_its_own_summary(tokenizer):
    world = Counter(goal=6)
    said = ["a long message " * 9] * 3 + ["I counted to three."] + ["b"] * 3
    limits = EpisodeLimits(max_context=400, compact_at=0.6)
    episode, prompts, verdict = play(tokenizer, world, said, limits)
    record = episode.trajectory("b")
    assert record["compaction"] == {"done": 1, "failed": 0}
    # The summary is a step, is trained on, and is no turn.
    summaries = [step for step in record["steps"] if step.get("summary")]
    assert [step["action"] for step in summaries] == ["I counted to three."]
    assert (record["turns"], len(record["steps"]), verdict.success) == (6, 7, True)
    assert "span" in summaries[0]
    # The request fits beside the summary, and the next prompt is the task and the summary.
    at = record["steps"].index(summaries[0])
    assert len(prompts[at]) + int(0.2 * 400) <= 400
    after = tokenizer.inner.decode(prompts[at + 1])
    assert INTRODUCTION in after
    assert "I counted to three." in after
    assert "a long message" not in after
    # The history, the request without its oldest turn, and what follows the summary.
    assert len(record["chunks"]) == record["stitching"]["split"] + 1 == 3
    assert max(map(len, prompts)) < 400


@pytest.mark.parametrize("summary", ["", "word " * 200])
def test_a_failed_summary_is_counted_and_the_newest_turns_go_on(tokenizer, summary):
    """T1 saw 98.3 % of the summaries fail without noticing."""
    world = Counter(goal=5)
    said = ["a long message " * 9] * 3 + [summary] + ["b"] * 2
    episode, prompts, verdict = play(tokenizer, world, said, EpisodeLimits(max_context=400, compact_at=0.6))
    record = episode.trajectory("b")
    assert record["compaction"] == {"done": 0, "failed": 1}
    assert [step["valid"] for step in record["steps"]] == [True] * 3 + [False] + [True] * 2
    assert verdict.success
    after = tokenizer.inner.decode(prompts[4])
    assert INTRODUCTION not in after
    assert len(prompts[4]) <= 200
    assert 1 <= after.count("a long message " * 9) < 3


def test_a_summary_that_calls_a_tool_has_failed(tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
    world = Counter(goal=9, tools=[ADD])
    limits = EpisodeLimits(max_context=700, compact_at=0.5)
    episode, _, _ = play(tokenizer, world, [call + " because " * 60] * 2 + [call, "Done."], limits)
    assert episode.trajectory("")["compaction"] == {"done": 0, "failed": 1}
    assert world.value == 2


def test_without_a_turn_in_between_there_is_no_second_summary():
    compaction = Compaction(at=0.5, window=100)
    assert compaction.is_due(50, 3)
    assert not compaction.is_due(49, 3)
    kept = compaction.take(
        "s", failed=False, messages=[{"role": "user", "content": "t"}], num_first=1, num_turns=3, count=len
    )
    assert len(kept) == 1
    assert not compaction.is_due(99, 3)
    assert compaction.is_due(99, 4)


def test_turns_leave_whole_and_the_oldest_first():
    first = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
    turn = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "tool", "content": "c"}]
    messages = first + turn * 3
    for budget, kept in ((9, 3), (8, 2), (6, 2), (5, 1), (3, 1), (2, 0)):
        assert newest_turns(messages, 2, budget, len) == turn * kept


# --- tools that change on the way

DOUBLE = {
    "type": "function",
    "function": {"name": "double", "description": "Doubles.", "parameters": {"type": "object", "properties": {}}},
}
TEMPLATE = """{%- if tools %}tools: {{ tools | tojson }}
Calls look so: <tool_call>{"name": "x", "arguments": {}}</tool_call>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# 'tool' #}"""


class Growing(Counter):
    """After its first turn there is another tool."""

    def act(self, text, calls, *, seconds_left):
        if any(call.valid and call.name == "double" for call in calls):
            self.value *= 2
            return Outcome([ToolResult(f"It is {self.value} now.")], done=True)
        outcome = super().act(text, calls, seconds_left=seconds_left)
        outcome.tools = [ADD, DOUBLE]
        return outcome


@pytest.mark.parametrize("knows_tools", [True, False])
def test_a_tool_that_comes_later(tokenizer, smol, knows_tools):
    from strop.core.models.load import load_tokenizer, resolve_model

    if knows_tools:
        tokenizer = load_tokenizer(resolve_model(str(smol)))
        tokenizer.inner.chat_template = TEMPLATE
    world = Growing(goal=99, tools=[ADD])
    add = '<tool_call>\n{"name": "add", "arguments": {"n": 4}}\n</tool_call>'
    double = '<tool_call>\n{"name": "double", "arguments": {}}\n</tool_call>'
    episode, prompts, _ = play(tokenizer, world, [double, add, double])
    record = episode.trajectory("")
    assert [step["valid"] for step in record["steps"]] == [False, True, True]
    assert world.value == 8
    seen = [tokenizer.inner.decode(prompt) for prompt in prompts]
    assert ["Doubles." in text for text in seen] == [False, True, True]
    # What stands at the beginning of the template changes it from the start: a new chunk, once.
    assert (len(record["chunks"]), record["stitching"]["split"]) == ((2, 1) if knows_tools else (1, 0))
    for prompt, place in zip(prompts, record["steps"], strict=True):
        assert record["chunks"][place["chunk"]].token_ids[: place["span"].start] == prompt
