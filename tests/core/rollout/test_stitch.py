"""Exact tokens over many turns: the four cases by hand, and whole episodes with real tokenizers and templates."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.models.load import load_tokenizer, resolve_model
from strop.core.models.token_bytes import TokenBytes
from strop.core.models.tokens import Tokenizer
from strop.core.records import Chunk, Record, Span, check_chunks
from strop.core.rollout.stitch import (
    CASES,
    MAX_S,
    MAX_U,
    Boundary,
    Stitcher,
    Turn,
    audit,
    find_boundary,
    shared_prefix,
    stitch,
)

# Toy tokens for what is worked out by hand: one letter each, and some that hold several.
PIECES = dict(enumerate("abcdefghijklmnopqrstuvwxyz<>.\n", start=1)) | {
    50: "ab",
    51: "bc",
    52: "abc",
    53: "d.",
    54: ">a",
}
IDS = {piece: id_ for id_, piece in PIECES.items()}


def toy(id_):
    return PIECES[id_].encode() if id_ in PIECES else b"#%d;" % id_


def ids(*pieces):
    return [IDS[piece] for piece in pieces]


def letters(text):
    return [IDS[letter] for letter in text]


# --- the four cases by hand


def test_strict_by_hand():
    prompt, sampled = letters("hi>"), letters("yo<")
    assert find_boundary(prompt, sampled, letters("hi>yo<ok>"), toy) == Boundary("strict", resume=6)
    stitcher = Stitcher(toy)
    assert stitcher.next_prompt(prompt) == prompt
    stitcher.take(sampled, [-1.0, -2.0, -3.0])
    assert stitcher.next_prompt(letters("hi>yo<ok>")) == letters("hi>yo<ok>")
    stitcher.take(letters("z<"), [-4.0, -5.0])
    assert stitcher.chunks() == [
        Chunk(letters("hi>yo<ok>z<"), [Span(3, 6), Span(9, 11)], [-1.0, -2.0, -3.0, -4.0, -5.0])
    ]
    assert stitcher.counts == {"strict": 1, "normalized": 0, "retokenized": 0, "split": 0}
    assert stitcher.num_dropped == 0


def test_normalized_by_hand():
    """The template shows neither the opened reasoning ("q.") nor the second end token ("<") in history."""
    stitcher = Stitcher(toy)
    stitcher.next_prompt(letters("hi>q."))
    stitcher.take(letters("yo<<"), [-1.0, -2.0, -3.0, -4.0])
    # The suffix stays, since the policy saw it; the dropped token leaves stream and loss.
    assert stitcher.next_prompt(letters("hi>yo<\nok>q.")) == letters("hi>q.yo<\nok>q.")
    stitcher.take(letters("z<"), [-5.0, -6.0])
    assert stitcher.chunks() == [
        Chunk(letters("hi>q.yo<\nok>q.z<"), [Span(5, 8), Span(14, 16)], [-1.0, -2.0, -3.0, -5.0, -6.0])
    ]
    assert stitcher.places()[1].boundary == Boundary("normalized", s=2, u=1, resume=6)
    assert stitcher.places()[0].span == Span(5, 8)
    assert (stitcher.counts["normalized"], stitcher.num_dropped) == (1, 1)


def test_retokenized_by_hand():
    """Sampled "a" "bc", re-encoded as "ab" "c": the sampled ids stay, and so does their place in the loss."""
    stitcher = Stitcher(toy)
    stitcher.next_prompt(letters("hi>"))
    stitcher.take(ids("a", "bc", "<"), [-1.0, -2.0, -3.0])
    rendered = [*letters("hi>"), *ids("ab", "c", "<"), *letters("ok>")]
    # Dropping "bc" and "<" would be too much: with "a" gone nothing of the answer is left.
    assert stitcher.next_prompt(rendered) == [*letters("hi>"), *ids("a", "bc", "<"), *letters("ok>")]
    stitcher.take(letters("z"), [-4.0])
    assert stitcher.places()[1].boundary == Boundary("retokenized", resume=6)
    # The next rendered prompt holds the copy again: compared with what was rendered before, this is strict.
    assert stitcher.next_prompt([*rendered, *letters("z.k")]) == [
        *letters("hi>"), *ids("a", "bc", "<"), *letters("ok>z.k"),
    ]  # fmt: skip
    stitcher.take([], [])
    assert stitcher.counts == {"strict": 1, "normalized": 0, "retokenized": 1, "split": 0}
    assert stitcher.chunks()[0].sampled == [Span(3, 6), Span(9, 10)]
    assert stitcher.chunks()[0].logprobs == [-1.0, -2.0, -3.0, -4.0]


def test_split_by_hand():
    """The template prunes "xx." from history: what was drawn stays in its chunk, a new one begins."""
    stitcher = Stitcher(toy)
    stitcher.next_prompt(letters("hi>"))
    stitcher.take(letters("xx.yo<"), [-1.0] * 6)
    assert stitcher.next_prompt(letters("hi>yo<ok>")) == letters("hi>yo<ok>")
    stitcher.take(letters("z"), [-2.0])
    assert stitcher.chunks() == [
        Chunk(letters("hi>xx.yo<"), [Span(3, 9)], [-1.0] * 6),
        Chunk(letters("hi>yo<ok>z"), [Span(9, 10)], [-2.0]),
    ]
    assert [place.chunk for place in stitcher.places()] == [0, 1]
    assert stitcher.counts["split"] == 1


# --- off by one


@pytest.mark.parametrize(("s", "case"), [(1, "normalized"), (MAX_S, "normalized"), (MAX_S + 1, "split")])
def test_most_of_a_prompts_end_that_a_template_may_leave_out(s, case):
    prompt = [*letters("hi"), *[IDS["q"]] * s]
    assert find_boundary(prompt, letters("yo"), letters("hiyok"), toy).case == case


@pytest.mark.parametrize(("u", "case"), [(1, "normalized"), (MAX_U, "normalized"), (MAX_U + 1, "split")])
def test_most_of_an_answers_end_that_may_be_dropped(u, case):
    found = find_boundary(letters("hi"), [*letters("yo"), *[IDS["q"]] * u], letters("hiyok"), toy)
    assert found.case == case
    assert found.u == (u if case == "normalized" else 0)


def test_the_sum_is_least_and_ties_go_to_the_smaller_u():
    prompt, sampled, following = letters("..pq"), letters("rs"), letters("..rs")
    assert find_boundary(prompt, sampled, following, toy) == Boundary("normalized", 2, 0, 4)
    # "ab" + "abcd" in "abcd...": s = 2, u = 0 against s = 0, u = 2 ("ab" + "ab" is no prefix): only the first fits.
    assert find_boundary(letters("ab"), letters("abcd"), letters("abcd."), toy) == Boundary("normalized", 2, 0, 4)
    # "p" + "pqr" in "ppq.": s = 0, u = 1 is less than anything else.
    assert find_boundary(letters("p"), letters("pqr"), letters("ppq."), toy) == Boundary("normalized", 0, 1, 3)
    # "p" + "pp" in "pp.": (1, 0) and (0, 1) tie.
    assert find_boundary(letters("p"), letters("pp"), letters("pp."), toy) == Boundary("normalized", 1, 0, 2)


def brute_force(prompt, sampled, following):
    """Case 2 as written, with our two conditions, over the whole grid."""

    def text(part):
        return b"".join(map(toy, part))

    found = []
    for s in range(min(MAX_S, len(prompt)) + 1):
        for u in range(min(MAX_U, max(0, len(sampled) - 1)) + 1):
            kept = sampled[: len(sampled) - u]
            matched = prompt[: len(prompt) - s] + kept
            if following[: len(matched)] != matched:
                continue
            shared = shared_prefix(text(prompt + kept), text(following))
            if not s or shared <= len(text(matched)):
                found.append((s + u, u, s, len(matched)))
    return min(found, default=None)


@given(*[st.lists(st.sampled_from([1, 2, 3, 50, 51]), max_size=6)] * 3, st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=400)
def test_the_search_finds_what_trying_all_finds(prompt, sampled, rest, s, u):
    following = [*prompt[: max(0, len(prompt) - s)], *sampled[: max(0, len(sampled) - u)], *rest]
    found = find_boundary(prompt, sampled, following, toy)
    expected = brute_force(prompt, sampled, following)
    strict = following[: len(prompt) + len(sampled)] == prompt + sampled
    assert (found.case == "strict") == strict
    if not strict:
        assert (found.case == "normalized") == (expected is not None)
    if found.case == "normalized":
        assert (found.s + found.u, found.u, found.s, found.resume) == expected
    kept = find_boundary(prompt, sampled, following, toy, keep_sampled=True)
    assert kept == found or (kept.case, found.case) == ("retokenized", "normalized")


def test_an_answer_that_ends_inside_a_token_of_the_copy_is_split():
    assert find_boundary(letters("hi>"), letters("abcd"), [*letters("hi>"), *ids("ab", "c", "d.")], toy).case == "split"


def test_a_copy_that_begins_inside_a_token_with_the_end_of_the_prompt():
    """SmolLM2 does this: "...assistant", newline; then an answer that begins with newlines."""
    prompt, sampled = letters("hi>"), ids("ab", "c", "<")
    following = [*letters("hi"), *ids(">a", "bc", "<"), *letters("ok")]
    assert find_boundary(prompt, sampled, following, toy) == Boundary("retokenized", resume=5)
    # Neither is it case 2 where a later token of the answer is the same: "hi" ">" + ">a" would say ">" twice.
    assert find_boundary(letters("hi>"), letters(">x<"), letters("hi>>x<"), toy).case == "strict"


def test_tokens_that_merge_at_the_junction_are_not_taken_for_a_suffix_left_out():
    # Dropping one newline of the prompt and "foo<" of the answer would fit the ids, and write a newline too many.
    pieces = {1: b"x", 2: b"\n", 3: b"\n\n", 4: b"foo", 5: b"<"}
    prompt, sampled, following = [1, 2], [3, 4, 5], [1, 3, 2, 4, 5, 2]
    assert find_boundary(prompt, sampled, following, pieces.__getitem__) == Boundary("retokenized", resume=5)


def test_a_short_answer_is_not_found_by_chance_inside_the_prompt():
    # The template strips the one newline that was sampled; there is another one four tokens before.
    assert find_boundary(letters("hi\nxyz"), letters("\n"), letters("hi\nxyz<"), toy).case == "split"
    # Stripped right where it was sampled, after its twin: the policy saw both, so both stay.
    assert find_boundary(letters("hi\n"), letters("\nyo"), letters("hi\nyo<"), toy) == Boundary("normalized", 1, 0, 5)


def test_an_answer_is_not_looked_for_in_what_follows():
    assert find_boundary(letters("hi>"), ids("ab"), letters("hi>.ab"), toy).case == "split"


def test_a_turn_is_not_dropped_whole():
    """Sampled "xyz", of which history shows nothing: dropping all three would be admissible by the grid alone."""
    assert find_boundary(letters("hi>"), letters("xyz"), letters("hi>ok"), toy).case == "split"


def test_short_answers_split_otherwise_lose_tokens_in_the_papers_order_alone():
    prompt, sampled, following = letters("hi>"), ids("x", "a", "bc", "<"), letters("hi>xabc<ok")
    assert find_boundary(prompt, sampled, following, toy) == Boundary("normalized", 0, 2, 5)
    assert find_boundary(prompt, sampled, following, toy, keep_sampled=True) == Boundary("retokenized", 0, 0, 8)


def test_empty_turns_and_prompts_that_add_nothing():
    stitcher = Stitcher(toy)
    for rendered in ("hi>", "hi>", "hi>ok"):
        assert stitcher.next_prompt(letters(rendered)) == letters(rendered)
        stitcher.take([], [])
    assert stitcher.next_prompt(letters("hi>okz")) == letters("hi>okz")
    stitcher.take(letters("a"), [-1.0])
    assert stitcher.next_prompt(letters("hi>okza")) == letters("hi>okza")
    stitcher.take(letters("b"), [-2.0])
    assert stitcher.chunks() == [Chunk(letters("hi>okzab"), [Span(6, 7), Span(7, 8)], [-1.0, -2.0])]
    assert [place.span for place in stitcher.places()] == [None, None, None, Span(6, 7), Span(7, 8)]
    assert stitcher.counts["strict"] == 4
    # A prompt that is shorter than what is there (a compaction) begins a chunk.
    assert stitcher.next_prompt(letters("h")) == letters("h")
    stitcher.take(letters("c"), [-3.0])
    assert stitcher.counts["split"] == 1


def test_a_prompt_that_was_never_fed_leaves_no_trace():
    stitcher = Stitcher(toy)
    stitcher.next_prompt(letters("hi>"))
    stitcher.take(letters("yo<<"), [-1.0, -2.0, -3.0, -4.0])
    before = stitcher.chunks()
    stitcher.next_prompt(letters("hi>yo<ok>"))
    assert stitcher.chunks() == before
    assert sum(stitcher.counts.values()) == stitcher.num_dropped == 0
    fed = stitcher.next_prompt(letters("hi>yo<<shorter>"))
    assert fed == letters("hi>yo<<shorter>")
    fed.clear()
    stitcher.take(letters("z"), [-5.0])
    assert stitcher.chunks()[0].token_ids == letters("hi>yo<<shorter>z")


def test_what_does_not_fit_is_refused():
    stitcher = Stitcher(toy)
    with pytest.raises(ValueError, match="without a prompt"):
        stitcher.take([1], [-1.0])
    with pytest.raises(ValueError, match="no tokens"):
        stitcher.next_prompt([])
    stitcher.next_prompt([1])
    with pytest.raises(ValueError, match="1 log-probabilities for 2 sampled"):
        stitcher.take([1, 2], [-1.0])
    stitcher.take([1, 2], [-1.0, -2.0])
    with pytest.raises(ValueError, match="without a prompt"):
        stitcher.take([1], [-1.0])


# --- the audit


def test_the_audit_tells_copies_and_strangers_from_what_was_drawn():
    prompt, drawn = letters("hi>"), ids("a", "bc", "<")
    turn = Turn(prompt, drawn)

    def kinds(context, tokens):
        start = len(context)
        found = audit([Chunk([*context, *tokens], [Span(start, start + len(tokens))])], [turn], toy)
        return found.aligned, found.retokenized, found.placeholder, found.drift_rate

    assert kinds(prompt, drawn) == (6, 0, 0, 0.0)
    assert kinds(prompt, ids("ab", "c", "<")) == (4, 2, 0, 2 / 3)
    assert kinds(prompt, ids("abc", "<")) == (4, 1, 0, 1 / 2)
    assert kinds(prompt, ids("x", "bc", "<")) == (5, 0, 1, 1 / 3)
    # One byte too many moves all that follows to other places.
    assert kinds(prompt, ids("a", "x", "bc")) == (4, 0, 2, 2 / 3)
    # Dropped at the end: what is left is aligned.
    assert kinds(prompt, ids("a", "bc")) == (5, 0, 0, 0.0)
    # Context is no part of the rate, but of the counts and of what was seen.
    assert kinds(letters("ho>"), drawn) == (5, 0, 1, 0.0)
    assert audit([Chunk([*letters("ho>"), *drawn], [Span(3, 6)])], [turn], toy).other_history == 3
    assert audit([Chunk([*prompt, *drawn], [Span(3, 6)])], [turn], toy).other_history == 0
    assert audit([Chunk([*letters("ho>"), *drawn], [Span(3, 6)])], [Turn(None, drawn)], toy).aligned == 3


def test_the_audit_of_nothing_and_of_what_does_not_belong_together():
    assert audit([], [Turn([1], [])], toy).drift_rate is None
    with pytest.raises(ValueError, match="0 sampled spans for 1 turns"):
        audit([], [Turn([1], [1])], toy)


def test_a_log_of_a_harness_that_fed_the_rendered_copy():
    """T1's own setting: nothing drifts, but what follows a case 3 was sampled after the copy (2.6 % there)."""
    log = [
        Turn(letters("hi>"), ids("a", "bc", "<"), [-1.0, -2.0, -3.0]),
        Turn([*letters("hi>"), *ids("ab", "c", "<"), *letters("k")], letters("z"), [-4.0]),
    ]
    stitcher = stitch(log, toy)
    assert stitcher.counts["retokenized"] == 1
    found = audit(stitcher.chunks(), log, toy)
    assert (found.drift_rate, found.sampled, found.other_history, found.aligned) == (0.0, 4, 1, 8)


# --- real tokenizers and templates

HEADER = "<|im_start|>{{ m['role'] }}\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ANSWER = "{% if m['role'] == 'assistant' %}"
BARE = "{{ m['content'].split('</think>')[-1] }}"
CALLS = "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}"
TEMPLATES = {
    # The model stops at the end token, the template goes on with a newline: the boundary patch of Qwen's family.
    "newline": "{% for m in messages %}" + HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + OPEN,
    # Reasoning is shown in no turn of the history.
    "prunes": "{% for m in messages %}" + HEADER + BARE + "<|im_end|>\n{% endfor %}" + OPEN,
    # The generation prompt opens the reasoning, history shows none of it.
    "opens": "{% for m in messages %}" + HEADER + BARE + "<|im_end|>\n{% endfor %}"
    + OPEN.replace("assistant\n", "assistant\n<think>\n"),
    # The generation prompt opens and closes the reasoning, as templates do that are told not to think.
    "closes": "{% for m in messages %}" + HEADER + BARE + "<|im_end|>\n{% endfor %}"
    + OPEN.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
    # Empty think tags that the model never emitted.
    "inserts": "{% for m in messages %}" + HEADER + ANSWER + "<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}" + OPEN,
    # Tool calls are written anew, in JSON with other whitespace than the model's.
    "calls": "{% for m in messages %}" + HEADER + "{{ m['content'] }}" + CALLS + "<|im_end|>\n{% endfor %}" + OPEN,
    # Answers are stripped, and their end is no special token.
    "strips": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}  # fmt: skip


@cache
def byte_level():
    """A byte-level BPE with a few hundred merges, trained here."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Backend(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    corpus = [
        "the answer is in the file, then run it: ",
        "überall äöü 日本語 日本 🙂🙂",
        '{"name": "bash", "arguments": {}}',
    ]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(corpus * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    return Tokenizer(fast, eos_ids=frozenset({2}), vocab_size=len(fast))


@pytest.fixture(scope="session")
def tokenizers_by_name(smol):
    return {"smol": load_tokenizer(resolve_model(str(smol))), "byte": byte_level()}


@dataclass
class Answer:
    """What the policy says: pieces that are encoded each by itself (or byte by byte), and whether it stops properly."""

    pieces: list[tuple[str, bool]]
    reasoning: str = ""
    call: dict | None = None
    ends: bool = True
    reply: str = "ok"

    @property
    def text(self):
        return self.reasoning + "".join(piece for piece, _ in self.pieces) + self.call_text

    @property
    def call_text(self):
        return "" if self.call is None else f"<tool_call>\n{json.dumps(self.call, indent=1)}\n</tool_call>"


@dataclass
class Episode:
    """Plays answers against a stitcher as the loop does: what was fed and drawn is logged as an engine would."""

    tokenizer: Tokenizer
    template: str
    stitcher: Stitcher
    decode: TokenBytes
    log: list[Turn] = field(default_factory=list)
    rendered: list[list[int]] = field(default_factory=list)
    messages: list[dict] = field(default_factory=lambda: [{"role": "user", "content": "go on"}])

    def play(self, answer):
        inner = self.tokenizer.inner
        inner.chat_template = TEMPLATES[self.template]
        self.rendered.append(self.tokenizer.encode_prompt(self.messages))
        fed = self.stitcher.next_prompt(self.rendered[-1])
        drawn = self.draw(answer)
        # Each token has a log-probability of its own, so that a shifted list is seen.
        start = sum(len(turn.sampled_ids) for turn in self.log)
        logprobs = [-float(start + i) for i in range(len(drawn))]
        self.stitcher.take(drawn, logprobs)
        self.log.append(Turn(fed, drawn, logprobs))
        said = self.tokenizer.decode(drawn)
        message = {"role": "assistant", "content": said}
        if answer.call is not None and self.template == "calls":
            message |= {"content": said.partition("<tool_call>")[0], "tool_calls": [answer.call]}
        self.messages += [message, {"role": "user", "content": answer.reply}]

    def draw(self, answer):
        inner = self.tokenizer.inner
        drawn = []
        for piece, as_bytes in [(answer.reasoning, False), *answer.pieces, (answer.call_text, False)]:
            if as_bytes:
                drawn += [inner.convert_tokens_to_ids(letter) for letter in byte_letters(piece)]
            else:
                drawn += inner(piece, add_special_tokens=False)["input_ids"]
        return [*drawn, *([inner.convert_tokens_to_ids("<|im_end|>")] if answer.ends else [])]

    def text(self, tokens):
        return b"".join(map(self.decode, tokens))


def byte_letters(text):
    from tokenizers import pre_tokenizers

    return [
        letter
        for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
        for letter in piece
    ]


def play(tokenizer, template, answers, keep_sampled=False):
    decode = TokenBytes(tokenizer)
    episode = Episode(tokenizer, template, Stitcher(decode, keep_sampled=keep_sampled), decode)
    for answer in answers:
        episode.play(answer)
    return episode


def check(episode):
    """What holds for every episode, whatever the template does."""
    stitcher, log = episode.stitcher, episode.log
    chunks, places = stitcher.chunks(), stitcher.places()
    check_chunks(Record.make("rollout", {}), chunks)
    # Each sampled id is in the loss once, unless counted as dropped.
    assert sum(chunk.num_sampled for chunk in chunks) + stitcher.num_dropped == sum(len(t.sampled_ids) for t in log)
    assert [span for chunk in chunks for span in chunk.sampled] == [p.span for p in places if p.span is not None]
    assert len(places) == len(log)
    for i, (place, turn) in enumerate(zip(places, log, strict=True)):
        if place.span is None:
            assert not turn.sampled_ids
            continue
        chunk, span = chunks[place.chunk], place.span
        # What stands before the span is what was fed; the span is what was drawn, but for the ids dropped at its end.
        after = places[i + 1].boundary if i + 1 < len(places) else None
        num_kept = len(turn.sampled_ids) - (after.u if after else 0)
        assert chunk.token_ids[: span.start] == turn.fed_ids
        assert chunk.token_ids[span.start : span.end] == turn.sampled_ids[:num_kept]
        before = sum(s.end - s.start for s in chunk.sampled[: chunk.sampled.index(span)])
        assert chunk.logprobs[before : before + num_kept] == turn.logprobs[:num_kept]
    counts = stitcher.counts
    assert list(counts) == list(CASES)
    assert sum(counts.values()) == len(log) - 1
    assert len(chunks) == 1 + counts["split"]
    found = audit(chunks, log, episode.decode)
    assert (found.drift_rate or 0.0, found.other_history, found.retokenized, found.placeholder) == (0.0, 0, 0, 0)
    # Where nothing was dropped or left out by the template, our text is the rendered text, whatever the tokens.
    clean = True
    for place, turn, rendered in zip(places, log, episode.rendered, strict=True):
        boundary = place.boundary
        if boundary is None or boundary.case == "split":
            clean = True
        elif boundary.s:
            clean = False
        if clean:
            assert episode.text(turn.fed_ids) == episode.text(rendered)


WORDS = st.sampled_from(
    ["the ", "answer", " is", "\n", "\n\n", " ", "ü", "日本", "語", "🙂", "file", ": ", "x" * 20, '{"a"', "é"]
)
ODD_WORDS = st.one_of(WORDS, st.sampled_from(["<think>", "</think>", "<|im_end|>", "<|im_start|>", "user\n", "\ufffd"]))


def answers(words, **fields):
    piece = st.tuples(st.lists(words, min_size=1, max_size=6).map("".join), st.booleans())
    return st.lists(st.builds(Answer, st.lists(piece, max_size=4), **fields), min_size=1, max_size=5)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["smol", "byte"])
def test_invariants_of_any_episode(tokenizers_by_name, name, template):
    """Ids and log-probabilities are those drawn, and no mask is longer than they are (TRL #5224, TRL #5144)."""

    @settings(max_examples=25, deadline=None)
    @given(
        answers(
            ODD_WORDS,
            reasoning=st.sampled_from(["", "", "<think>hm</think>", "<think>\nthe answer\n</think>\n\n"]),
            call=st.sampled_from([None, None, {"name": "bash", "arguments": {"command": "ls -l ü"}}]),
            ends=st.booleans(),
            reply=ODD_WORDS,
        ),
        st.booleans(),
    )
    def run(said, keep_sampled):
        check(play(tokenizers_by_name[name], template, said, keep_sampled))

    run()


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_splits_that_no_encoder_makes_cost_nothing(tokenizers_by_name, name):
    """Any split of any text, half characters too: one chunk, nothing dropped, no copy in it."""

    @settings(max_examples=40, deadline=None)
    @given(answers(WORDS, ends=st.booleans(), reply=WORDS))
    def run(said):
        episode = play(tokenizers_by_name[name], "newline", said, keep_sampled=True)
        check(episode)
        counts = episode.stitcher.counts
        assert counts["split"] == counts["normalized"] == episode.stitcher.num_dropped == 0

    run()


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_what_the_encoder_itself_gives_is_strict(tokenizers_by_name, name):
    """Also with the newline that the template puts after the end token, and for an answer cut off before its end."""
    said = [Answer([("the answer is 日本語 🙂", False)], ends=ends, reply="go on") for ends in (True, False, True)]
    episode = play(tokenizers_by_name[name], "newline", said)
    check(episode)
    assert episode.stitcher.counts["strict"] == 2
    assert len(episode.stitcher.chunks()) == 1
    # The newline is context: it was rendered, not drawn.
    chunk = episode.stitcher.chunks()[0]
    assert episode.text(chunk.token_ids[chunk.sampled[0].end :]).startswith(b"\n<|im_start|>user\n")
    assert episode.text(chunk.token_ids[chunk.sampled[0].end - 1 :]).startswith(b"<|im_end|>\n")


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_reasoning_pruned_from_history_opens_a_chunk(tokenizers_by_name, name):
    """Only where something was pruned: what follows goes on in its chunk (TRL #6250)."""
    think = "<think>\nthe file is there, I should look into it first and then answer\n</think>\n\n"
    said = [Answer([("look", False)], reasoning=think), Answer([("again", False)]), Answer([("done", False)])]
    episode = play(tokenizers_by_name[name], "prunes", said)
    check(episode)
    assert episode.stitcher.counts == {"strict": 1, "normalized": 0, "retokenized": 0, "split": 1}
    first, second = episode.stitcher.chunks()
    assert episode.text(first.token_ids).endswith(think.encode() + b"look<|im_end|>")
    assert b"<think>" not in episode.text(second.token_ids)
    assert [len(chunk.sampled) for chunk in (first, second)] == [1, 2]


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_a_generation_prompt_that_history_does_not_show_stays_where_it_was_seen(tokenizers_by_name, name):
    episode = play(tokenizers_by_name[name], "opens", [Answer([("look", False)]), Answer([("done", False)])])
    check(episode)
    boundary = episode.stitcher.places()[1].boundary
    assert boundary.case == "normalized"
    assert boundary.s > 0
    assert boundary.u == 0
    text = episode.text(episode.stitcher.chunks()[0].token_ids)
    assert text.count(b"<think>\n") == 2
    assert b"<think>\nlook<|im_end|>\n<|im_start|>user" in text


@pytest.mark.parametrize("template", ["inserts", "closes", "opens"])
@pytest.mark.parametrize("name", ["smol", "byte"])
def test_think_tags_that_the_template_inserts_are_never_trained_on(tokenizers_by_name, name, template):
    """In history and in the generation prompt; the trainer's own positions are what counts (Automodel #3739)."""
    from strop.core.train.examples import Reading, TrainRollout, rollout_example

    said = ["look", "again", "done"]
    episode = play(tokenizers_by_name[name], template, [Answer([(word, False)]) for word in said])
    check(episode)
    chunks = episode.stitcher.chunks()
    assert b"think>" in episode.text([id_ for chunk in chunks for id_ in chunk.token_ids])
    record = Record.make("rollout", {"id": "g/0", "task": "t", "chunks": chunks, "advantage": 1.0})
    reading = Reading("ppo", needs_old=True, vocabulary=lambda: 1 << 20)
    example = rollout_example(record, record.view(TrainRollout), reading)
    trained = [episode.text([one.token_ids[i] for i in one.positions]) for one in example.sequences]
    assert b"".join(trained) == b"<|im_end|>".join([*(word.encode() for word in said), b""])


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_tool_calls_written_anew_open_a_chunk_and_lose_nothing(tokenizers_by_name, name):
    call = {"name": "bash", "arguments": {"command": "ls -l", "timeout": 3}}
    episode = play(
        tokenizers_by_name[name], "calls", [Answer([("look ", False)], call=call), Answer([("done", False)])]
    )
    check(episode)
    assert episode.stitcher.counts["split"] == 1
    assert episode.stitcher.num_dropped == 0
    assert b'<tool_call>\n{\n "name"' in episode.text(episode.stitcher.chunks()[0].token_ids)


@pytest.mark.parametrize("name", ["smol", "byte"])
def test_half_characters_keep_their_places(tokenizers_by_name, name):
    episode = play(
        tokenizers_by_name[name],
        "newline",
        [Answer([("日本語🙂 and so on and on, " * 3, True)]), Answer([("done", False)])],
    )
    check(episode)
    assert episode.stitcher.counts["retokenized"] == 1
    chunk = episode.stitcher.chunks()[0]
    span = chunk.sampled[0]
    # A token a byte, and the end token.
    assert span.end - span.start == len(("日本語🙂 and so on and on, " * 3).encode()) + 1


# --- cost


def test_the_history_is_not_decoded_again_and_again(record_property):
    """64 turns: nothing is decoded where the case is strict, and for case 3 the last turn alone (TRL #6250)."""
    calls = 0

    def counting(id_):
        nonlocal calls
        calls += 1
        return b"%d " % id_ if id_ < 1000 else b"".join(b"%d " % part for part in divmod(id_, 1000))

    for copied in (False, True):
        calls = 0
        rendered = [7] * 1000
        stitcher = Stitcher(counting)
        took = 0.0
        for turn in range(64):
            # Drawn as pairs of tokens, re-encoded as one token for each pair.
            drawn = [1 + turn, 500] * 100
            begun = time.perf_counter()
            stitcher.next_prompt(rendered)
            stitcher.take(drawn, [-1.0] * len(drawn))
            took += time.perf_counter() - begun
            shown = [(1 + turn) * 1000 + 500] * 100 if copied else drawn
            rendered = [*rendered, *shown, *[9] * 300]
        assert stitcher.counts["retokenized" if copied else "strict"] == 63
        assert calls <= 63 * (2 * MAX_S + 2 * len(drawn) + 2) * copied
        kind = "retokenized" if copied else "strict"
        record_property(f"stitching 64 turns, 64 x 200 tokens drawn, {kind}, ms", round(took * 1000, 1))
