"""Tool calls out of a model's own text: three formats, everything that may be wrong with them, and garbage."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.envs.tool_calls import (
    CLOSE,
    MAX_CALLS,
    OPEN,
    BadCall,
    Call,
    ParsedMessage,
    detect_format,
    has_tool_role,
    parse_message,
    render_call,
    result_messages,
    split_reasoning,
)
from strop.core.envs.tool_schemas import argument_problem, tool_schemas


def tool(name, required=(), **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TOOLS = tool_schemas([
    tool("Read", ["path"], path={"type": "string"}, offset={"type": "integer"}),
    tool("Write", ["path", "content"], path={"type": "string"}, content={"type": "string"}),
    tool("Bash", ["command"], command={"type": "string"}, timeout={"type": "number"}, wait={"type": "boolean"}),
    tool("Plan", steps={"type": "array", "items": {"type": "string"}}, note={"type": ["string", "null"]}, extra={}),
    tool("List"),
])  # fmt: skip
FORMATS = ["hermes", "xml", "bash"]


def hermes(**call):
    return f"{OPEN}\n{json.dumps(call)}\n{CLOSE}"


def xml(name, **values):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{OPEN}\n<function={name}>\n{body}</function>\n{CLOSE}"


def calls(text, form, tools=TOOLS, **options):
    found = parse_message(text, form, tools, **options)
    return [(call.name, call.arguments) if isinstance(call, Call) else call.message for call in found.calls]


# --- what a template uses

QWEN = r"""{%- if tools %}For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>{%- endif %}
{%- for message in messages %}{%- if message.role == "tool" %}<tool_response>{% endif %}{%- endfor %}"""
CODER = """<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>
</function>\n</tool_call>{% if message.role == 'tool' %}<tool_response>{% endif %}"""
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>"
PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form", "role"),
    [(QWEN, "hermes", True), (CODER, "xml", True), (GLM, None, False), (PLAIN, None, False), (None, None, False),
     ("", None, False), ("Act in a ```bash block.", "bash", False)],
)  # fmt: skip
def test_the_template_says_which_format_it_uses(template, form, role):
    assert detect_format(template) == form
    assert has_tool_role(template) is role


def test_the_small_models_template_knows_no_tools(smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    template = load_tokenizer(resolve_model(str(smol))).inner.chat_template
    assert detect_format(template) is None
    assert not has_tool_role(template)


# --- calls that can be run


def test_several_calls_in_order_and_the_text_around_them():
    text = f"First I look.\n{hermes(name='Read', arguments={'path': 'a'})}\nthen\n" + hermes(
        name="Bash", arguments={"command": "ls", "timeout": 2}
    )
    found = parse_message(text, "hermes", TOOLS)
    assert found.text == "First I look.\n\nthen"
    assert found.reasoning == ""
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("Read", {"path": "a"}),
        ("Bash", {"command": "ls", "timeout": 2}),
    ]
    assert all(call.valid for call in found.calls)
    assert "".join(call.raw for call in found.calls) == text.removeprefix("First I look.\n").replace("\nthen\n", "")


def test_xml_parameters_take_the_type_of_the_schema():
    text = xml("Bash", command="echo a\n\necho b", timeout="2.5", wait="True") + xml("Read", path=" 3", offset="7")
    assert calls(text, "xml") == [
        ("Bash", {"command": "echo a\n\necho b", "timeout": 2.5, "wait": True}),
        ("Read", {"path": " 3", "offset": 7}),
    ]
    inline = f"{OPEN}<function=Read><parameter=path>a</parameter></function>{CLOSE}"
    assert calls(inline, "xml") == [("Read", {"path": "a"})]
    assert calls(xml("Plan", steps='["a", "b"]', note="null", extra="1"), "xml") == [
        ("Plan", {"steps": ["a", "b"], "note": None, "extra": "1"})
    ]
    assert calls(xml("Read", path="a", offset="7"), "xml", None) == [("Read", {"path": "a", "offset": "7"})]


def test_fenced_blocks():
    text = "Look:\n```bash\nls -l\ncat a\n```\nand\n```python\nprint('```bash')\n```\n```bash\npwd\n```"
    found = parse_message(text, "bash")
    assert [call.arguments["command"] for call in found.calls] == ["ls -l\ncat a", "pwd"]
    assert {call.name for call in found.calls} == {"bash"}
    assert found.text == "Look:\nand\n```python\nprint('```bash')\n```"


@pytest.mark.parametrize(
    "text",
    ["Say ```bash ls``` here", "```sh\nls\n```", "``bash\nls\n``", "```bash-session\nls\n```", "    ```bash\n    ls",
     "````md\n```bash\nrm -r /\n```\n````", "```python\n```bash\nls", "no fence at all", "x```bash\nls\n```"],
)  # fmt: skip
def test_what_only_looks_like_a_block_is_text(text):
    found = parse_message(text, "bash")
    assert (found.calls, found.text) == ([], text.strip())


def test_a_longer_fence_holds_a_shorter_one():
    assert calls("````bash\ncat > a.md <<E\n```\nx\n```\nE\n````", "bash", None) == [
        ("bash", {"command": "cat > a.md <<E\n```\nx\n```\nE"})
    ]
    assert calls("   ```bash  \r\nls\n  ```  ", "bash", None) == [("bash", {"command": "ls"})]


def test_end_tags_inside_a_string_do_not_end_the_call():
    content = f"a {CLOSE} b </parameter> c </think> {OPEN}"
    assert calls(hermes(name="Write", arguments={"path": "a", "content": content}), "hermes") == [
        ("Write", {"path": "a", "content": content})
    ]
    content = f"a {CLOSE} b </parameter> c"
    assert calls(xml("Write", path="a", content=content), "xml") == [("Write", {"path": "a", "content": content})]


def test_an_end_tag_taken_as_the_stop_string_may_be_missing():
    """And a call cut off anywhere before its end is not run."""
    for form, text in (("hermes", hermes(name="List", arguments={})), ("xml", xml("List"))):
        whole = text.removesuffix(CLOSE)
        assert calls(whole, form) == [("List", {})]
        for end in range(len(OPEN), len(whole.rstrip())):
            found = parse_message(whole[:end], form, TOOLS)
            assert [call.valid for call in found.calls] == [False]
            assert found.calls[0].raw == whole[:end]


def test_a_list_of_calls_and_calls_without_arguments():
    body = json.dumps([{"name": "List"}, {"name": "Read", "arguments": {"path": "a"}}])
    assert calls(f"{OPEN}{body}{CLOSE}", "hermes") == [("List", {}), ("Read", {"path": "a"})]


# --- calls that cannot


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "Read", "arguments": {"path": "a"}', "not JSON"),
        ("Read a", "not JSON"),
        ("", "not JSON"),
        ('{"name": "Read", "arguments": {"path": "a\nb"}}', "not JSON"),
        ('{"name": "Bash", "arguments": {"command": "ls", "timeout": NaN}}', "not JSON"),
        ('{"name": "Bash", "arguments": {"command": "ls", "timeout": 1e999}}', "not JSON"),
        ('{"name": "Read", "arguments": {"path": "\\ud800"}}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "List"} {"name": "List"}', "something else than </tool_call>"),
        ('["List"]', "has to be an object"),
        ("[]", "a list of 0 calls"),
        ('{"arguments": {}}', "has to be an object"),
        ('{"name": 3, "arguments": {}}', "has to be an object"),
        ('{"name": "Read", "arguments": ["a"]}', '"arguments" has to be an object, not array'),
        ('{"name": "Read", "arguments": "{}"}', '"arguments" has to be an object, not string'),
        ('{"name": "Raed", "arguments": {}}', "no tool 'Raed'; the tools are: Bash, List, Plan, Read, Write."),
        ('{"name": "Read", "arguments": {}}', "Read was not run: argument 'path' is missing."),
        ('{"name": "Read", "arguments": {"path": 3}}', "argument 'path' should be string, not integer"),
        ('{"name": "Read", "arguments": {"path": "a", "offset": 1.5}}', "should be integer, not number"),
        ('{"name": "Read", "arguments": {"path": "a", "offset": true}}', "should be integer, not boolean"),
        ('{"name": "Plan", "arguments": {"steps": ["a", 2]}}', "'steps[1]' should be string, not integer"),
        ('{"name": "Plan", "arguments": {"note": {}}}', "should be string or null, not object"),
    ],
)
def test_a_bad_call_answers_with_words_and_the_rest_goes_on(body, words):
    text = f"{OPEN}{body}{CLOSE} and {hermes(name='List', arguments={})}"
    found = parse_message(text, "hermes", TOOLS)
    bad, good = found.calls
    assert isinstance(bad, BadCall)
    assert words in bad.message
    assert not bad.valid
    assert bad.raw == f"{OPEN}{body}{CLOSE}"
    assert (good.name, good.valid, found.text) == ("List", True, "and")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<function=Read>\n<parameter=path>\na\n</function>", "'path' is not closed"),
        ("<function=Read>\npath: a\n</function>", "something else"),
        ("<function=Read>\n<parameter=path>a</parameter>", "'path' is not closed"),
        ("Read", "<function=NAME>"),
        ("", "<function=NAME>"),
        ("<function=>\n</function>", "<function=NAME>"),
        ("<function=" + "x" * 500 + ">\n</function>", "<function=NAME>"),
        ("<function=Read>\n<parameter=>a</parameter>\n</function>", "<parameter=NAME>"),
        ("<function=Read><parameter=path>a</parameter><parameter=path>b</parameter></function>", "given twice"),
        ("<function=List></function> so", "something else than </tool_call>"),
        ("<function=Raed></function>", "no tool 'Raed'"),
        ("<function=Read></function>", "'path' is missing"),
        ("<function=Read><parameter=path>a</parameter><parameter=offset>x</parameter></function>",
         "'offset' should be integer, not string"),
    ],
)  # fmt: skip
def test_a_bad_call_in_xml(body, words):
    found = parse_message(f"{OPEN}{body}{CLOSE} and {xml('List')}", "xml", TOOLS)
    bad, good = found.calls
    assert isinstance(bad, BadCall)
    assert words in bad.message
    assert (good.name, found.text) == ("List", "and")


def test_nothing_inside_a_malformed_call_is_run():
    inner = xml("Bash", command="rm -r /")
    text = f"{OPEN}<function=Write><parameter=path>a</parameter><parameter=content>{inner}"
    assert [call.valid for call in parse_message(text, "xml", TOOLS).calls] == [False]
    assert [call.valid for call in parse_message(OPEN + hermes(name="List"), "hermes", TOOLS).calls] == [False]


def test_blocks_without_end_or_content_are_not_run():
    assert "no closing fence" in calls("```bash\nrm -r build", "bash", None)[0]
    assert "is empty" in calls("```bash\n```", "bash", None)[0]
    assert "is empty" in calls("```bash\n \n\n```", "bash", None)[0]
    assert "no closing fence" in calls("```bash", "bash", None)[0]


def test_names_that_a_model_made_up_are_repeated_in_part():
    found = parse_message(hermes(name="x" * 10_000, arguments={}), "hermes", TOOLS)
    assert len(found.calls[0].message) < 300


@pytest.mark.parametrize(
    ("form", "one"), [("hermes", hermes(name="List")), ("xml", xml("List")), ("bash", "```bash\nls\n```\n")]
)
def test_a_loop_of_calls_is_cut_and_said(form, one):
    assert len(calls(one * MAX_CALLS, form, None)) == MAX_CALLS
    found = parse_message(one * (MAX_CALLS + 50), form)
    assert [call.valid for call in found.calls] == [True] * MAX_CALLS + [False]
    assert f"more than {MAX_CALLS}" in found.calls[-1].message
    # Empty tags are bad calls, each answered: the same holds.
    assert len(calls((OPEN + CLOSE) * 1000, form)) == (0 if form == "bash" else MAX_CALLS + 1)


# --- reasoning


def test_reasoning_is_kept_apart_and_not_acted_on():
    thought = f"Maybe {hermes(name='List', arguments={})}?"
    call = hermes(name="Read", arguments={"path": "a"})
    found = parse_message(f"\n<think>\n{thought}\n</think>\n\nSo: {call}", "hermes", TOOLS)
    assert (found.reasoning, found.text) == (thought, "So:")
    assert [call.name for call in found.calls] == ["Read"]
    # Opened by the prompt, and once more by the model itself.
    for start in ("", "<think>"):
        found = parse_message(f"{start}{thought}</think>{call}", "hermes", TOOLS, reasoning_is_open=True)
        assert found.reasoning == thought
        assert len(found.calls) == 1
    # Without an end all of it is reasoning: cut off in thought, nothing is run.
    found = parse_message(f"<think>{thought}", "hermes", TOOLS)
    assert found == ParsedMessage(reasoning=thought)
    # A tag that does not open the message is text.
    found = parse_message(f"the <think> tag {call}", "hermes", TOOLS)
    assert (found.reasoning, found.text, len(found.calls)) == ("", "the <think> tag", 1)
    assert split_reasoning("a</think>b") == ("", "a</think>b")


# --- schemas


def test_schemas_that_say_little_or_nonsense():
    assert argument_problem({"a": 1}, {}) is None
    assert argument_problem({"a": 1}, {"type": "object", "properties": None, "required": None}) is None
    closed = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "additionalProperties": False}
    assert argument_problem({"a": "x"}, closed) is None
    assert argument_problem({"a": "z"}, closed) == 'argument \'a\' should be one of ["x", "y"]'
    assert argument_problem({"b": 1}, closed) == "there is no argument 'b'"
    nested = {"properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"type": "null"}}}}}
    assert argument_problem({"a": {}}, nested) == "argument 'a.b' is missing"
    assert argument_problem({"a": {"b": 0}}, nested) == "argument 'a.b' should be null, not integer"
    assert argument_problem({"a": 2.0}, {"properties": {"a": {"type": "integer"}}}) is None


# --- results


def test_results_go_back_in_the_words_of_the_template():
    good, bad = Call("Read", {"path": "a"}), BadCall("There is no tool 'x'.", name="x")
    results = [(good, "line\n"), (bad, bad.message)]
    assert result_messages(results, "hermes", tool_role=True) == [
        {"role": "tool", "name": "Read", "content": "line\n"},
        {"role": "tool", "name": "x", "content": "There is no tool 'x'."},
    ]
    assert result_messages(results, "xml", tool_role=False) == [
        {"role": "user", "content": "<tool_response>\nline\n\n</tool_response>\n<tool_response>\nThere is no tool 'x'."
         "\n</tool_response>"},
    ]  # fmt: skip
    for tool_role in (True, False):
        assert result_messages(results, "bash", tool_role=tool_role) == [
            {"role": "user", "content": "line\n\n\nThere is no tool 'x'."}
        ]
    assert result_messages([], "hermes", tool_role=True) == []


# --- any call, any text

TEXT = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            [OPEN, CLOSE, "<function=", "<parameter=", "</parameter>", "</function>", "<think>", "</think>", "```",
             "bash",
             "\n", " ", '"', "\\", "{", "}", "[", ":", ",", "a", ">", '{"name": "List", "arguments": {}}', "````"]
        )
    ).map("".join),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(TEXT, st.dictionaries(TEXT, JSON, max_size=4), TEXT.filter(lambda text: OPEN not in text))
def test_what_is_rendered_is_parsed_hermes(name, arguments, before):
    call = Call(name, arguments)
    text = "." + before + render_call(call, "hermes") + before
    found = parse_message(text, "hermes")
    assert [(call.name, call.arguments) for call in found.calls] == [(name, arguments)]
    assert found.text == ("." + before + before).strip()


NAME = st.text(st.characters(exclude_characters=">", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name == name.strip()
)


@given(NAME, st.dictionaries(NAME, TEXT, max_size=3))
@settings(max_examples=200)
def test_what_is_rendered_is_parsed_xml(name, arguments):
    try:
        text = render_call(Call(name, arguments), "xml")
    except ValueError:
        # Only tags of the format's own make a value that it cannot hold.
        assert any("</parameter>" in value or OPEN in value for value in arguments.values())
        return
    found = parse_message("." + text + ".", "xml")
    assert [(call.name, call.arguments) for call in found.calls] == [(name, arguments)]
    assert found.text == ".."


@given(
    st.integers(),
    st.lists(TEXT, max_size=3),
    st.booleans(),
    st.none() | st.text().filter(lambda t: t.strip() not in ("null", "None")),
)
def test_typed_values_come_back_from_xml(offset, steps, wait, note):
    for name, arguments in (("Read", {"path": "a", "offset": offset % 2**63}), ("Bash", {"command": "", "wait": wait}),
                            ("Plan", {"steps": steps, "note": note})):  # fmt: skip
        try:
            text = render_call(Call(name, arguments), "xml")
        except ValueError:
            continue
        assert calls(text, "xml") == [(name, arguments)]


@given(TEXT.filter(str.strip), TEXT.filter(lambda text: "```" not in text and not text.lstrip().startswith("<think>")))
def test_what_is_rendered_is_parsed_bash(command, before):
    text = f"{before}\n{render_call(Call('bash', {'command': command}), 'bash')}\nend"
    found = parse_message(text, "bash")
    assert [call.arguments for call in found.calls] == [{"command": command}]
    assert found.text == f"{before}\nend".strip()


def test_what_a_format_cannot_hold_is_refused():
    for call in (Call("Bash", {"command": "ls"}), Call("bash", {}), Call("bash", {"command": 3})):
        with pytest.raises(ValueError, match="fenced block"):
            render_call(call, "bash")
    for call in (Call("a>b", {}), Call("a", {"b": "\n</parameter>\n</function>"}), Call("a", {"b": xml("c")})):
        with pytest.raises(ValueError, match="tags of the format"):
            render_call(call, "xml")
    with pytest.raises(ValueError):
        render_call(Call("a", {"b": float("nan")}), "hermes")


@given(st.one_of(TEXT, st.text(st.characters(), max_size=30)), st.sampled_from(FORMATS), st.booleans())
@settings(max_examples=500)
def test_any_text_is_parsed(text, form, is_open):
    for tools in (None, TOOLS):
        found = parse_message(text, form, tools, reasoning_is_open=is_open)
        assert all(isinstance(call, Call | BadCall) for call in found.calls)
        assert sum(len(raw) for raw in {call.raw for call in found.calls}) <= len(text)


GARBAGE = {
    "open": OPEN, "close": CLOSE, "both": OPEN + CLOSE, "strings": OPEN + '{"', "escapes": OPEN + '["\\"',
    "lists": OPEN + "[", "values": OPEN + "<function=a><parameter=b></parameter>", "ends": "</parameter> ",
    "gaps": OPEN + " " * 50, "functions": OPEN + "<function=a>\n<parameter=b>\n" + CLOSE, "fences": "```bash\n",
    "ticks": "`", "inline": "``` ", "lines": "\n", "spaces": " ", "opened": "```bash\n````\n", "think": "<think>",
    "plain": "lorem ipsum ", "names": "<function=", "nested": '{"a":',
}  # fmt: skip
STARTS = ("", OPEN + '{"name": "a', OPEN + "<function=a><parameter=b>", "```bash\n")


def seconds_to_parse(form, start, unit, num_bytes):
    text = start + unit * (num_bytes // len(unit))
    begun = time.process_time()
    parse_message(text, form, TOOLS)
    return time.process_time() - begun


@pytest.mark.parametrize("form", FORMATS)
def test_garbage_takes_time_in_proportion(form, record_property):
    """Twenty times the text takes some twenty times the time, never four hundred times."""
    for name, unit in GARBAGE.items():
        for start in STARTS:
            short, long = (seconds_to_parse(form, start, unit, size) for size in (20_000, 400_000))
            assert long < max(0.5, 100 * short), (name, start, short, long)
    slowest = max((seconds_to_parse(form, "", GARBAGE[name], 10_000_000), name) for name in ("both", "ends", "opened"))
    assert slowest[0] < 10
    record_property(f"10 MB of garbage read as {form}, the slowest ({slowest[1]}), s", round(slowest[0], 3))
