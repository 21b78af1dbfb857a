"""Data sets of conversations: tokens and weights are those of transformers, and bad records are named."""

from __future__ import annotations

import gzip
import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megascale.core.untrusted_files import LFS_POINTER
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.manifest import check_sampled_tokens, read_manifest
from megascale.data.prepare.chat_builder import build_chat
from megascale.data.prepare.conversations import encode_lines, parse_conversation, read_lines
from megascale.data.tokenizer import chat_sandbox
from megascale.data.tokenizer.chat_template import (
    CHATML,
    ChatTemplate,
    TemplateError,
    check_special_tokens,
    load_chat_template,
    read_special_tokens,
)
from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError
from tests.train.test_generation import tokenizer_of

# ChatML without generation blocks, as most tokenizers have it.
PLAIN = CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
# Drops the system's message after the first turn, so that renderings do not continue each other.
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message['role'] != 'assistant' %}<{{ message['role'] }}>"
    "{{ message['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, who are you?"},
    {"role": "assistant", "content": "A café\n— 日本"},
    {"role": "user", "content": "Thanks <|im_end|>"},
    {"role": "assistant", "content": "You are welcome."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder with ChatML."""
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Hello, who are you? You are welcome. Be brief."] * 3, 300, SPECIAL).save(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": PLAIN}))
    return path


def write(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def encode(records: list[Any], folder: Path, template: ChatTemplate | None, file: Path) -> list[tuple[Any, Any]]:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    encoded = encode_lines(read_lines([write(file, records)]), tokenizer, template)
    return [(item.tokens.tolist(), item.weights.tolist()) for _, _, item in encoded]


def encode_with_transformers(messages: list[Any], folder: Path, template: str) -> tuple[list[int], list[int]]:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    result = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return result["input_ids"], result["assistant_masks"]


def test_tokens_and_weights_are_those_of_transformers(folder, tmp_path) -> None:
    marked = ChatTemplate(CHATML, {}, "marked")
    [(tokens, weights)] = encode([{"messages": TURNS}], folder, marked, tmp_path / "a.jsonl")
    assert (tokens, weights) == encode_with_transformers(TURNS, folder, CHATML)
    assert encode([TURNS], folder, marked, tmp_path / "list.jsonl") == [(tokens, weights)]  # nanochat's form
    # Without generation blocks the same tokens count: answers with the end of their turn.
    plain = load_chat_template(folder)
    assert not plain.has_generation_blocks
    assert encode([{"messages": TURNS}], folder, plain, tmp_path / "b.jsonl") == [(tokens, weights)]
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    counted = tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight])
    assert counted == "A café\n— 日本<|im_end|>You are welcome.<|im_end|>"


@settings(max_examples=25, deadline=None, database=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\U0010fffe\U0010ffff"), min_size=1), max_size=4)
)
def test_both_ways_to_find_the_assistant_agree(contents: list[str]) -> None:
    messages = [{"role": "user", "content": "a"}]
    for content in contents:
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": content}]
    marked = ChatTemplate(CHATML, {}, "marked").render(messages)
    plain = ChatTemplate(PLAIN, {}, "plain").render(messages)
    assert marked == plain
    assert [marked.text[start:stop] for start, stop in marked.spans] == [f"{content}<|im_end|>" for content in contents]


def test_templates_that_hide_the_assistant_or_refuse_are_errors(folder, tmp_path) -> None:
    with pytest.raises(TemplateError, match=r"put \{% generation %\}"):
        ChatTemplate(FORGETFUL, {}, "forgetful").render(TURNS)
    with pytest.raises(DataError, match=r"line 2.*not valid Jinja"):
        ChatTemplate("\n{% if %}", {}, "broken")
    strict = ChatTemplate("{{ raise_exception('no ' + messages[0]['role']) }}", {}, "strict")
    with pytest.raises(DataError, match=r"b.jsonl, line 1, messages: the template strict refuses the .*: no system"):
        encode([{"messages": TURNS}], folder, strict, tmp_path / "b.jsonl")
    # The sandbox keeps a template from Python's internals.
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, "attack").render_text(TURNS)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("'x' * 10000000000", "repeats a value to more than 16,777,216 characters"),
        ("10000000000 * [messages]", "repeats a value"),
        ("messages * (2 * 10000000000)", "repeats a value"),
        ("'x'.encode() * 10000000000", "repeats a value"),
        ("9 ** 99999", "exponent above 4,096"),
        ("(9 ** 4096) ** 4096", "a power of more than 1,048,576 bits"),
        ("'x' | center(10000000000)", "pads a value to more than 65,536"),
        ("'x'.rjust(10000000000)", "pads a value"),
        ("'%10000000000d' % 1", "pads a value"),
        ("'%*d' % (10000000000, 1)", "pads a value"),
        ("'%10000000000d' | format(1)", "pads a value"),
        ("'{:10000000000}'.format(1)", "pads a value"),
        ("'{:{}}'.format(1, 10000000000)", "pads a value"),
        ("messages | tojson(indent=10000000000)", "pads a value"),
        ("[1] | batch(10000000000, 0) | list", "pads a value"),
        ("('x' * 99999) | replace('x', 'y' * 99999)", "writes more than 67,108,864 characters"),
        ("('x' * 99999).replace('x', 'y' * 99999)", "writes more than"),
        ("range(99999) | join('y' * 99999)", "writes more than"),
    ],
)
def test_a_template_cannot_exhaust_memory_with_an_expression(expression: str, reason: str) -> None:
    """Jinja computes constant products while it compiles a template."""
    template = ChatTemplate(f"{{{{ {expression} }}}}", {}, "huge")
    with pytest.raises(TemplateError, match=reason):
        template.render_text(TURNS)
    assert ChatTemplate("{{ '-' * 3 * 2 }}{{ 2 ** 10 }}", {}, "small").render_text(TURNS) == "------1024"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "writes more"),
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "writes more"),
        ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
         "{% set n.x = y %}{% endfor %}", "writes more"),
        ("{% set x = 'x' * 999999 %}{% for i in range(99) %}{{ x }}{% endfor %}", "writes more"),
        ("{% set x = 'x' * 999999 %}{% for i in range(9999) %}{% set y = x + x %}{% endfor %}", "joins texts of more"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 99 iterations"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}", "99 iterations"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end|iterations"),
    ],
)  # fmt: skip
def test_a_template_cannot_exhaust_memory_or_time_with_a_loop(source: str, reason: str, monkeypatch) -> None:
    if "iterations" in reason:
        monkeypatch.setattr(chat_sandbox, "_MAX_ITERATIONS", 99)
    if "joins" in reason:
        monkeypatch.setattr(chat_sandbox, "_MAX_JOINED_CHARACTERS", 1 << 24)
    template = ChatTemplate(source, {}, "huge")
    for _ in range(2):  # the counts of a rendering begin at zero
        with pytest.raises(TemplateError, match=f"the template huge .*({reason})"):
            template.render_text(TURNS)


def test_a_template_within_the_limits_renders_as_in_jinja() -> None:
    source = (
        "{% for m in messages if m.content %}{{ loop.index }}/{{ loop.length }}{{ ', ' if not loop.last }}"
        "{{ '%-9s|%5.1f' % (m.role, 2) ~ '{:>4}'.format(loop.index0) }}{{ m.content | trim | replace('a', 'b') }}"
        "{{ [m.role, 'x'] | join('-') | indent(2) | center(20) }}{{ '%s' | format(m.role) }}{% endfor %}"
        "{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show('a' ~ 1) }}{% for i in [[1, [2]]] recursive %}"
        "{{ loop(i) if i is iterable else i }}{% endfor %}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert ChatTemplate(source, {}, "plain").render_text(TURNS) == plain.render(messages=TURNS)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "messages: it is empty"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]},
            r"messages\[1\].content: it is missing",
        ),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: it is missing"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages: no message has the role assistant"),
        ({"prompt": "a"}, "completion: the key is missing"),
        ({"prompt": "a", "completion": 3}, "completion: it is of type int"),
        ({"prompt": "a", "completion": ""}, "completion: it is empty"),
        ({"text": "a"}, "prompt: the key is missing; a record has messages, or prompt and completion, not 'text'"),
        ([1], r"messages\[0\]: it is of type int"),
        (1, "the record: it is of type int"),
        ({"prompt": "a\ud800", "completion": "b"}, r"the record: it has \\ud800 without the other half"),
    ],
)
def test_bad_records_are_named(record, message, folder, tmp_path) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(DataError, match=rf"bad.jsonl, line 2, {message}"):
        encode([good, record], folder, load_chat_template(folder), tmp_path / "bad.jsonl")


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [TURNS[1], CALL]}, "it renders texts only, no tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, TURNS[2]]},
            "it renders texts only",
        ),
        ({"messages": TURNS, "tools": [{"name": "f"}]}, "it renders no tools; name a template with --chat-template"),
    ],
)
def test_chatml_refuses_what_it_would_leave_out(record, message, folder, tmp_path) -> None:
    with pytest.raises(DataError, match=rf"a.jsonl, line 1, messages: the template ChatML refuses .*: {message}"):
        encode([record], folder, ChatTemplate(CHATML, {}, "ChatML"), tmp_path / "a.jsonl")


def test_a_template_that_fails_to_compute_is_named(folder, tmp_path) -> None:
    template = ChatTemplate("{{ 1 // 0 }}", {}, "t.jinja")
    with pytest.raises(DataError, match=r"line 1, messages: the template t\.jinja refuses the conversation"):
        encode([{"messages": TURNS}], folder, template, tmp_path / "a.jsonl")


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:20] + b"\xff" * 20 + data[40:]])
def test_damaged_archives_are_named(damage, tmp_path, megascale) -> None:
    packed = tmp_path / "chat.jsonl.gz"
    text = "".join(json.dumps({"prompt": f"{number * 7919}", "completion": "b"}) + "\n" for number in range(50))
    packed.write_bytes(damage(gzip.compress(text.encode())))
    run = megascale("data", "build", "--chat", packed, "--out", tmp_path / "out")
    assert run.returncode == 4
    assert f"--chat={packed} cannot be read" in run.stderr


def test_a_template_file_takes_no_tokens_of_the_working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<other>"}))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    file = write(tmp_path / "a.jsonl", [{"messages": TURNS[1:3]}, {"messages": TURNS[3:]}])
    built = build_chat(tmp_path / "data", [file], template=template, vocab_size=300)
    assert "".join(text for text, _ in built.sample).endswith("<|endoftext|>")
    assert load_chat_template(tmp_path / "data").special_tokens == {"eos_token": "<|endoftext|>"}


def test_other_special_tokens_are_another_build(folder, tmp_path) -> None:
    copy = tmp_path / "tokenizer"
    shutil.copytree(folder, copy)
    file = write(tmp_path / "a.jsonl", [{"messages": TURNS[1:3]}, {"messages": TURNS[3:]}])
    build_chat(tmp_path / "data", [file], tokenizer=copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|im_end|>"}))
    with pytest.raises(DataError, match="made from other inputs or settings"):
        build_chat(tmp_path / "data", [file], tokenizer=copy)


def test_several_faults_are_reported_at_once_and_nothing_is_left(tmp_path, megascale) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": 3}\nnot json\n\n{"prompt": "a", "completion": "b"}\n')
    run = megascale("data", "build", "--chat", file, "--out", tmp_path / "out")
    assert run.returncode == 4
    assert "line 1, messages: it is of type int" in run.stderr
    assert "line 2, the record: it is not JSON" in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_byte_that_is_not_utf8_is_named(tmp_path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"line 2, the record: byte 15 of the line .0xe9. is not UTF-8; convert"):
        build_chat(tmp_path / "data", [file], tokenizer=None)


def test_pairs_of_texts_and_of_messages(folder, tmp_path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    pair = {"prompt": "Hello, ", "completion": "you"}
    messages = {"prompt": TURNS[:4], "completion": TURNS[4:]}
    template = load_chat_template(folder)
    [(tokens, weights), (chat, chat_weights)] = encode([pair, messages], folder, template, tmp_path / "a.jsonl")
    prompt, completion = tokenizer.encode("Hello, "), tokenizer.encode("you")
    assert tokens == [*prompt, *completion, tokenizer.end_of_document]
    assert weights == [0] * len(prompt) + [1] * (len(completion) + 1)
    counted = [token for token, weight in zip(chat, chat_weights, strict=True) if weight]
    assert tokenizer.decode(counted) == "You are welcome.<|im_end|>"
    # Without a template only pairs of texts can be encoded.
    assert encode([pair], folder, None, tmp_path / "b.jsonl") == [(tokens, weights)]
    with pytest.raises(DataError, match="there is no chat template; name one with --chat-template"):
        encode([messages], folder, None, tmp_path / "c.jsonl")


def test_a_build_is_complete_deterministic_and_evaluated_over_counted_tokens(folder, tmp_path, megascale) -> None:
    records = [{"prompt": f"{number} and ", "completion": "you are " * (number % 5 + 1)} for number in range(40)]
    plain = write(tmp_path / "chat.jsonl", records)
    packed = tmp_path / "chat.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    command = ["data", "build", "--chat", plain, "--tokenizer", folder, "--held-out", "0.2"]
    run = megascale(*command, "--out", "data", "--max-tokens", "14")
    assert run.returncode == 0, run.stderr
    assert "[[you are " in run.stdout
    assert "were cut to --max-tokens" in run.stdout
    again = megascale(*command, "--out", "data", "--max-tokens", "14")
    assert "nothing to do" in again.stdout
    other = build_chat(tmp_path / "other", [packed], tokenizer=folder, held_out=0.2, max_tokens=14)
    for side, count in (("train", 32), ("valid", 8)):
        ours, theirs = (IndexedDataset(tmp_path / name / side) for name in ("data", "other"))
        assert ours.documents == theirs.documents == count
        assert ours.lengths.max() <= 14
        assert ours.stream.tolist() == theirs.stream.tolist()
        assert ours.loss_weights is not None
        assert ours.loss_weights.tolist() == theirs.loss_weights.tolist()
        assert int(ours.loss_weights.sum()) == other.manifest.parts[side].counted_tokens
    held_out = HeldOut(str(tmp_path / "data" / "valid"), 8)
    batch = held_out.read_batch(range(held_out.windows))
    assert batch.loss_weights is not None
    assert batch.loss_weights.sum() == other.manifest.parts["valid"].counted_tokens
    weights = tmp_path / "data" / "valid.weights"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"valid.weights has \d+ loss weights for \d+ tokens"):
        IndexedDataset(tmp_path / "data" / "valid")
    weights.unlink()
    with pytest.raises(DataError, match=r"data.valid: .*valid.weights is missing, so every token would count"):
        check_sampled_tokens("data.valid", str(tmp_path / "data" / "valid"))


def test_a_tokenizer_is_trained_and_knows_the_ends_of_turns(tmp_path) -> None:
    records = [{"messages": TURNS[1:3]}, {"messages": TURNS[3:]}, {"messages": TURNS}]
    built = build_chat(tmp_path / "data", [write(tmp_path / "a.jsonl", records)], vocab_size=300)
    assert built.sample[-2:] != []
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer.json")
    template = load_chat_template(tmp_path / "data")
    assert template.find_turn_end() == "<|im_end|>"
    [(ids, _)] = tokenizer.encode_markup(["<|im_end|>"])
    assert len(ids) == 1
    counted = [text for text, is_counted in built.sample if is_counted]
    assert counted
    assert all(text.endswith("<|im_end|>") for text in counted)
    assert np.asarray(IndexedDataset(tmp_path / "data" / "train").stream).max() < tokenizer.vocab_size


def test_settings_that_contradict_each_other_are_refused(tmp_path, megascale) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    for options, message in (
        (["--stdlib", "--chat", file], "--chat makes a data set of its own"),
        (["--stdlib", "--max-tokens", "5"], "need --chat"),
        (["--chat", file], "1 different conversations"),
    ):
        run = megascale("data", "build", "--out", "out", *options)
        assert run.returncode in (2, 4), run.stdout
        assert message in run.stderr
    with pytest.raises(ConfigError, match=r"--held-out=1\.5"):
        build_chat(tmp_path / "x", [file], held_out=1.5)


# Templates that lack a part of a conversation, as published templates do, or write it as Python prints it.
SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = SIMPLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
WITH_CALLS = SIMPLE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
WITH_REASONING = SIMPLE.replace("{{ m.content }}", "{{ m.reasoning }}{{ m.content }}")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NULL_CALL = {**CALL, "content": None}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("source", "record", "part"),
    [
        (SIMPLE, {"messages": TURNS[1:3], "tools": TOOLS}, "leaves out the tools"),
        (SIMPLE, {"messages": [TURNS[1], CALL, *TURNS[3:]]}, r"leaves out messages\[1\]\.tool_calls"),
        (
            SIMPLE,
            {"messages": [*TURNS[1:3], TURNS[1], {**TURNS[2], "reasoning_content": "because"}]},
            r"leaves out messages\[3\]\.reasoning_content",
        ),
        (
            WITH_REASONING,
            {"messages": [TURNS[1], {**TURNS[2], "reasoning": "because", "thinking": "another text"}]},
            r"leaves out messages\[1\]\.thinking",
        ),
        (NO_SYSTEM, {"messages": TURNS}, r"leaves out messages\[0\] \(role 'system'\)"),
        (
            SIMPLE.replace("{% for m in messages %}", "{% for m in messages if m.content is string %}"),
            {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, *TURNS[1:3]]},
            r"leaves out messages\[0\] \(role 'system'\)",
        ),
        (WITH_CALLS, {"messages": [TURNS[1], NULL_CALL]}, r"writes the null content of messages\[1\] as the word None"),
        (
            SIMPLE,
            {"messages": [TURNS[1], {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
            r"writes the list of parts in messages\[1\]\.content as Python prints it",
        ),
    ],
)
def test_a_template_that_leaves_out_a_part_is_refused(source, record, part, marked, folder, tmp_path) -> None:
    """The part would be missing in training without any sign of it."""
    if marked:
        source = source.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    template = ChatTemplate(source, {}, "partial")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1, messages: the template partial {part}.*--chat-template"):
        encode([record], folder, template, tmp_path / "a.jsonl")


def test_complete_templates_are_accepted(folder, tmp_path) -> None:
    """Reasoning that a template removes is a changed content, not a missing message."""
    record = {"messages": [{"role": "system", "content": "x"}, TURNS[1], {**CALL, "content": ""}], "tools": TOOLS}
    encode([record], folder, ChatTemplate("{{ tools }}" + WITH_CALLS, {}, "complete"), tmp_path / "a.jsonl")
    thought = {"messages": [TURNS[1], {**TURNS[2], "thinking": "early"}, TURNS[1], {**TURNS[2], "thinking": ""}]}
    encode([thought], folder, ChatTemplate(SIMPLE, {}, "last turn without reasoning"), tmp_path / "a.jsonl")
    followed = {"messages": [TURNS[1], {**TURNS[2], "thinking": "before the last user's message"}, TURNS[1]]}
    encode([followed], folder, ChatTemplate(SIMPLE, {}, "user's message at the end"), tmp_path / "a.jsonl")
    doubled = {"messages": [TURNS[1], {**TURNS[2], "reasoning": "because", "reasoning_content": "because"}]}
    encode([doubled], folder, ChatTemplate(WITH_REASONING, {}, "one of two keys"), tmp_path / "a.jsonl")
    short = SIMPLE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    record = {"messages": [TURNS[1], {"role": "assistant", "content": "<think>hm</think>yes"}]}
    [(tokens, _)] = encode([record], folder, ChatTemplate(short, {}, "short"), tmp_path / "b.jsonl")
    assert load_tokenizer(folder / "tokenizer.json").decode(tokens).endswith("<assistant>yes\n")


@pytest.mark.parametrize(
    ("message", "output"),
    [
        ({"weight": 0}, r"messages\[1\]\.weight: 0 leaves the message out of the loss in other trainers"),
        ({"train": False}, r"messages\[1\]\.train: False"),
        ({"content": "a \U0010fffe b"}, r"the record: it has U\+10FFFE"),
        ({"content": "a \U0010ffff b"}, r"the record: it has U\+10FFFE or U\+10FFFF"),
    ],
)
def test_keys_and_characters_that_would_change_the_loss_are_refused(message, output, folder, tmp_path) -> None:
    answer = {"role": "assistant", "content": "yes"}
    with pytest.raises(DataError, match=output):
        encode([{"messages": [TURNS[1], answer | message]}], folder, load_chat_template(folder), tmp_path / "a.jsonl")
    encode(
        [{"messages": [TURNS[1], answer | {"weight": 1, "train": True}]}],
        folder,
        load_chat_template(folder),
        tmp_path / "a.jsonl",
    )


@pytest.mark.parametrize("completion", [" green", "green", "naïve", " 中文"])
@pytest.mark.parametrize("kind", ["llama", "metaspace first", "metaspace always", "unigram", "bytes"])
def test_a_completion_gets_no_blank_from_the_tokenizer(kind, completion, tmp_path) -> None:
    """A tokenizer that puts a blank before a text must not put it between a prompt and its completion."""
    tokenizer = tokenizer_of(kind)
    file = write(tmp_path / "a.jsonl", [{"prompt": "people like", "completion": completion}])
    [(_, _, encoded)] = encode_lines(read_lines([file]), tokenizer, None)
    text = tokenizer.decode(encoded.tokens[:-1])
    assert text == "people like" + completion


def test_damaged_special_tokens_are_refused(folder, tmp_path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "special_tokens_map.json").write_text('{"bos_token": "<s>"')
    with pytest.raises(DataError, match=r"special_tokens_map\.json cannot be read as JSON.*copy it again"):
        load_chat_template(copy)


def test_names_that_the_template_leaves_out_are_counted_in_a_note(tmp_path, folder):
    named = [{**TURNS[1], "name": "Ada"}, TURNS[2], {**TURNS[3], "name": "Bob"}, {**TURNS[4], "name": "Eva"}]
    file = write(tmp_path / "chat.jsonl", [{"messages": named}, {"messages": TURNS}])
    result = build_chat(tmp_path / "out", [file], tokenizer=folder)
    (note,) = result.manifest.notes
    assert note.endswith(
        " leaves out the name of 3 messages (1 of role assistant, 2 of role user); name a template that writes names "
        "with --chat-template if the model needs them"
    )
    template = tmp_path / "names.jinja"
    template.write_text(
        CHATML.replace("message['role'] + '\\n'", "message['role'] + ' ' + (message['name'] or '') + '\\n'")
    )
    assert "message['name']" in template.read_text()
    assert build_chat(tmp_path / "named", [file], tokenizer=folder, template=template).manifest.notes == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.zst", b"", r"\.zst is not read; give JSON lines, plain or compressed with gzip"),
        ("a.parquet", b"", r"\.parquet is not read"),
        ("a.json", b'\xef\xbb\xbf [{"prompt": "a"}]', r"begins with a list, and one record per line .*> a\.jsonl"),
        ("a.jsonl", b'[{"prompt": "a"}]', r"begins with a list, and one record per line .*> a-lines\.jsonl"),
        ("a.jsonl", LFS_POINTER + b"v1\n", r"is a pointer of Git LFS.*git lfs pull"),
    ],
)
def test_other_formats_of_conversations_have_a_remedy(name, data, message, tmp_path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"--chat=.*{name}:? {message}"):
        list(read_lines([tmp_path / name]))


def test_a_file_of_conversations_counts_once_and_may_be_named_in_capitals(tmp_path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(b'{"prompt": "a", "completion": "b"}\n'))
    (tmp_path / "link.gz").symlink_to(file)
    assert [line.number for line in read_lines([file])] == [1]
    with pytest.raises(DataError, match=r"link\.gz is named twice"):
        list(read_lines([file, tmp_path / "link.gz"]))


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"additional_special_tokens": ["<|turn|>"]}, "<|turn|>" + SIMPLE),
        ({"extra_special_tokens": {"turn_token": "<|turn|>"}}, "<|turn|>" + SIMPLE),
        ({"added_tokens_decoder": {"300": {"content": "<|turn|>"}}}, "<|turn|>" + SIMPLE),
        ({"bos_token": "<|turn|>"}, "{{ bos_token }}" + SIMPLE),
    ],
)
def test_special_tokens_that_the_vocabulary_lacks_are_refused(settings, source, folder, tmp_path) -> None:
    """transformers adds such a token, and the name would be encoded as several tokens here."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    values = json.loads((copy / "tokenizer_config.json").read_text()) | {"chat_template": source}
    (copy / "tokenizer_config.json").write_text(json.dumps(values | settings))
    records = [{"messages": [TURNS[1], {"role": "assistant", "content": f"answer {i}"}]} for i in range(4)]
    file = write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"declares the special tokens '<\|turn\|>', which the template .* save it"):
        build_chat(tmp_path / "out", [file], tokenizer=copy)
    assert not (tmp_path / "out").exists()
    (copy / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": "<|turn|>" + SIMPLE}))
    notes = build_chat(tmp_path / "out", [file], tokenizer=copy).manifest.notes
    assert [note.partition("writes ")[2] for note in notes] == [
        "<|turn|>, which is not a token of the tokenizer, but several"
    ]


def test_a_run_without_a_template_says_where_to_put_one(tmp_path) -> None:
    """The command generate --chat has no option for a template."""
    with pytest.raises(DataError, match=r"has no chat template .*; copy that of .* to .*chat_template\.jinja"):
        load_chat_template(tmp_path)


def test_a_date_that_the_template_writes_is_noted_and_kept(folder, tmp_path, megascale) -> None:
    """A build has a single time, also if a day ends within it. Only dates that were written count."""
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ 'Today: ' + strftime_now('%d %B %Y') + '\n' }}{% if false %}{{ strftime_now('%H') }}{% endif %}" + SIMPLE
    )
    records = [{"messages": [TURNS[1], {"role": "assistant", "content": f"answer {i}"}]} for i in range(4)]
    file = write(tmp_path / "a.jsonl", records)
    words = ["data", "build", "--chat", file, "--tokenizer", folder, "--out", tmp_path / "out"]
    result = megascale(*words, "--chat-template", template)
    assert result.returncode == 0, result.stderr
    manifest = read_manifest(tmp_path / "out")
    [(pattern, date)] = manifest.template_dates.items()
    assert pattern == "%d %B %Y"
    assert abs(datetime.strptime(date, pattern) - datetime.now()) < timedelta(days=2)
    assert " ".join(result.stdout.split()).count(f"wrote the date of this build ({date})") == 1
    tokens = IndexedDataset(tmp_path / "out" / "train").stream
    assert load_tokenizer(folder / "tokenizer.json").decode(tokens).count(f"Today: {date}") == 3
    plain = build_chat(tmp_path / "plain", [file], tokenizer=folder).manifest
    assert plain.template_dates == {}
    assert plain.notes == []


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": {"content": "<|unused|>"}},  # the template reads message['content']
        {"bos_token": "", "additional_special_tokens": [""]},
    ],
)
def test_keys_and_empty_names_are_not_special_tokens(settings, folder, tmp_path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text(
        json.dumps(json.loads((copy / "tokenizer_config.json").read_text()) | settings)
    )
    template = ChatTemplate("{{ bos_token }}" + SIMPLE, read_special_tokens(copy), "a template")
    assert not check_special_tokens(template, copy, load_tokenizer(copy / "tokenizer.json"))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"prompt": "a", "completion": "b", "prompt": "c"}', "prompt"),
        (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "role"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(line, key, folder, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1, {key}: the key occurs twice"):
        list(encode_lines(read_lines([tmp_path / "a.jsonl"]), load_tokenizer(folder / "tokenizer.json"), None))


def test_an_integer_beyond_the_limit_of_python_is_named(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a", "completion": "b", "id": ' + b"9" * 5000 + b"}\n")
    [line] = read_lines([file])
    with pytest.raises(DataError, match=r"line 1, the record: it has an integer of 5,000 characters; write it as a st"):
        parse_conversation(line)
