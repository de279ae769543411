"""Chat templates: the same text as transformers renders, nothing forged, nothing endless."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from server.chat_template import ChatTemplate, ChatTemplateError
from server.model_store import default_cache_dir, resolve
from server.tokenizer import MARKER, ByteTokenizer, Tokenizer, Vocabulary, unprotect
from server.tokenizer_loader import load_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' +"
    " message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- set system = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' ~ message.role ~ '\\n' ~ message.content | trim ~ loop.index }}
    {%- if loop.last %}{{ '[last of ' ~ loop.length ~ ']' }}{% endif %}
{%- endfor %}"""
TOOLS = """{%- macro call(c) -%}
{{ c.function.name }}({{ c.function.arguments | tojson }})
{%- endmacro -%}
{%- set ns = namespace(seen=0) %}
{%- if tools %}
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ call(c) }}{% endfor %}{% endif %}
    {%- generation %}{{ m.content.split('</think>')[-1] }}{% endgeneration %}
    {%- if ns.seen >= 3 %}{% break %}{% endif %}
{% else %}
none
{%- endfor %}
{{ documents is none }} {{ extra is defined }} {{ 2 ** 3 * 4 + 1 }}"""

CONVERSATION: list[dict[str, str]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": '<think>Hmm</think> What is 2 < 3? 世界 & "co"'},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "</s>why"},
]
TOOL = {
    "type": "function",
    "function": {"name": "f<|im_end|>", "parameters": {"type": "object", "é": "<&>"}},
}


class Templated(ByteTokenizer):
    """The byte tokenizer with another template, and control texts that templates write."""

    def __init__(self, template: str | None) -> None:
        Tokenizer.__init__(
            self,
            Vocabulary(
                vocab_size=258,
                chat_template=template,
                special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
                control_texts=("<s>", "</s>", "<|start|>", "<|im_start|>", "<|im_end|>"),
            ),
        )


def render(template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    return unprotect(ChatTemplate(Templated(template)).render(messages, **options))


def by_transformers(template: str | None, messages: list[dict[str, str]], **options: Any) -> str:
    """The rendering that the templates' authors test with."""
    options = {"add_generation_prompt": True} | options
    rendered: Any = render_jinja_template([messages], chat_template=template, **options)
    (text,) = rendered[0]
    return str(text)


@functools.cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m", default_cache_dir()))


class TestSameAsTransformers:
    @pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
    @pytest.mark.parametrize("generate", [False, True])
    @pytest.mark.parametrize("tools", [None, [TOOL]])
    @pytest.mark.parametrize("first", [0, 1])
    def test_rendered_text(
        self, template: str, generate: bool, tools: list[Any] | None, first: int
    ) -> None:
        messages = CONVERSATION[first:]
        options = {"tools": tools, "add_generation_prompt": generate}
        theirs = by_transformers(template, messages, bos_token="<s>", **options)
        assert render(template, messages, **options) == theirs

    @pytest.mark.parametrize("template", [CHATML, LLAMA])
    @pytest.mark.parametrize("content", ["It is", " It is ", "It is<|im_end|>", ""])
    def test_continue_final_message(self, template: str, content: str) -> None:
        messages = [CONVERSATION[1], {"role": "assistant", "content": content}]
        ours = render(template, messages, add_generation_prompt=False, continue_final_message=True)
        turn = "assistant\n"
        kept = content.lstrip() if template is LLAMA else content
        assert ours.endswith(turn + kept)

    @pytest.mark.model
    def test_the_default_models_own_template(self) -> None:
        tokenizer = default_tokenizer()
        template = ChatTemplate(tokenizer)
        ours = unprotect(template.render(CONVERSATION))
        assert ours == by_transformers(tokenizer.chat_template, CONVERSATION)
        question = [{"role": "user", "content": "Hi"}]
        assert tokenizer.decode(template.encode(question), skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


class TestMessages:
    def test_text_parts_are_joined_by_lines(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"

    def test_null_content_is_no_text(self) -> None:
        messages: list[Any] = [{"role": "assistant", "content": None}, {"role": "user"}]
        assert render("{{ messages|map(attribute='content')|list }}", messages) == "['', '']"

    def test_a_tool_calls_arguments_become_an_object(self) -> None:
        call = {"id": "1", "function": {"name": "f", "arguments": '{"x": [1]}'}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        template = "{{ messages[0].tool_calls[0].function.arguments.x[0] + 1 }}"
        assert render(template, messages) == "2"

    def test_variables_from_the_client(self) -> None:
        options = {"template_kwargs": {"enable_thinking": False}}
        template = "{{ enable_thinking }} {{ other is defined }}"
        assert render(template, CONVERSATION, **options) == "False False"

    def test_the_messages_given_are_not_changed(self) -> None:
        before = json.dumps(CONVERSATION)
        render(CHATML, CONVERSATION, add_generation_prompt=False, continue_final_message=True)
        assert json.dumps(CONVERSATION) == before

    def test_strftime_now_uses_the_clock_handed_in(self) -> None:
        tokenizer = Templated("{{ strftime_now('%d %b %Y') }}")
        template = ChatTemplate(tokenizer, now=lambda: datetime(2026, 3, 1, tzinfo=UTC))
        assert template.render(CONVERSATION) == "01 Mar 2026"

    def test_the_hash_models_template(self) -> None:
        template = ChatTemplate(ByteTokenizer())
        ids = template.encode([{"role": "user", "content": "<bos>é"}])
        assert bytes(ids).decode() == "user: <bos>é\nassistant: "

    @pytest.mark.parametrize(
        ("messages", "options", "field"),
        [
            ([], {}, "messages"),
            ([{"content": "x"}], {}, "messages[0].role"),
            ([*CONVERSATION, {"role": "user", "content": 3}], {}, "messages[4].content"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                {},
                "messages[0].content[0].type: 'image_url'",
            ),
            (
                [{"role": "user", "content": [{"type": "text"}]}],
                {},
                "messages[0].content[0].text",
            ),
            ([{"role": "user", "content": ["x"]}], {}, "messages[0].content[0].type"),
            (
                [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
                {},
                "messages[0].tool_calls[0].function.arguments",
            ),
            (CONVERSATION, {"continue_final_message": True}, "continue_final_message"),
            (CONVERSATION, {"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            (CONVERSATION, {"template_kwargs": {"bos_token": ""}}, "chat_template_kwargs"),
        ],
    )
    def test_errors_begin_with_the_field(
        self, messages: list[Any], options: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(ChatTemplateError) as error:
            render(CHATML, messages, **options)
        assert str(error.value).startswith(field)

    def test_nesting_is_bounded(self) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(ChatTemplateError, match="nested too deeply"):
            render(CHATML, [{"role": "user", "content": "x", "extra": deep}])

    def test_continuing_a_message_that_the_template_leaves_out(self) -> None:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        with pytest.raises(ChatTemplateError, match="continue_final_message"):
            render("{{ messages[0].role }}", CONVERSATION, **options)


REPEAT = "{% for i in range(60) %}"


class TestTheTemplate:
    def test_a_model_without_one_is_an_error(self) -> None:
        with pytest.raises(ChatTemplateError, match="no chat template"):
            ChatTemplate(Templated(None))

    def test_a_broken_one_is_an_error_at_once(self) -> None:
        with pytest.raises(ChatTemplateError, match="not a Jinja template"):
            ChatTemplate(Templated("{% for %}"))

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('roles must alternate') }}",
            "{{ messages[0].content + 1 }}",
            "{{ nothing.at.all }}",
            "{{ messages[0]['content']() }}",
        ],
    )
    def test_a_refusal_is_told(self, template: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"^messages: the chat template"):
            render(template, CONVERSATION)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.getcwd() }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ (messages|map('__class__')|list)[0].mro() }}",
            "{{ '{0.__class__.__mro__}'.format(messages) | length + 'x' }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(role='x') }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}",
        ],
    )
    def test_it_cannot_leave_the_sandbox(self, template: str) -> None:
        with pytest.raises(ChatTemplateError):
            render(template, CONVERSATION)

    @pytest.mark.parametrize(
        "template",
        [
            "{% for i in range(10 ** 8) %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in 'x' * 99 %}{{ i }}{% endfor %}{% endfor %}",
            "{% set ns = namespace(s='x') %}" + REPEAT + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "{% set ns = namespace(s='x') %}" + REPEAT + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "{% set ns = namespace(n=3) %}" + REPEAT + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
            "{{ 'x' * 10 ** 9 }}",
            "{{ 10 ** 9 * [0] }}",
            "{{ 9 ** 9 ** 9 }}",
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
            "{% set x = 'x' * 9999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
        ],
    )
    @pytest.mark.timeout(20)
    def test_it_cannot_run_or_grow_without_end(self, template: str) -> None:
        with pytest.raises(ChatTemplateError):
            render(template, CONVERSATION)

    def test_the_limits_are_those_of_one_rendering(self) -> None:
        template = ChatTemplate(Templated("{% for i in range(90000) %}{% endfor %}done"))
        for _ in range(15):
            assert template.render(CONVERSATION) == "done"


PARTS = ["<|im_", "end|>", "<|im_end|>", "<", "|", "im_start|>", "<s>", "</", "s>", "a", "</think>"]


class TestForgery:
    """Control tokens in a prompt come from the template only."""

    JOINING = (
        "{{ messages[0].name }}{{ messages[0].content | replace('</think>', '') | trim }}"
        "{{ messages[0].content.split('</think>')[-1] }}{{ messages[0] | tojson }}"
        "{{ messages[0] | tojson(ensure_ascii=true) }}{{ tools | tojson }}{{ extra }}"
    )

    @given(*[st.lists(st.sampled_from(PARTS), max_size=6).map("".join)] * 3)
    def test_texts_that_a_template_cuts_and_joins(self, name: str, text: str, more: str) -> None:
        tokenizer = Templated(self.JOINING)
        rendered = ChatTemplate(tokenizer).render(
            [{"role": "user", "name": name, "content": text, more: more}],
            tools=[{more: [text]}],
            template_kwargs={"extra": more},
        )
        for control in tokenizer.vocabulary.control_texts:
            assert control not in rendered

    def test_the_marker_in_a_message_is_dropped(self) -> None:
        messages = [{"role": "user", "content": f"a{MARKER}{MARKER}b<{MARKER}|im_end|>"}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert render("{{ messages[0].content }}!", messages, **options) == "ab<|im_end|>"

    def test_ascii_json_has_no_traces_of_markers(self) -> None:
        template = "{{ messages[0].content | tojson(ensure_ascii=true) }}"
        messages = [{"role": "user", "content": "<|im_end|>é"}]
        assert render(template, messages) == '"<|im_end|>\\u00e9"'

    @pytest.mark.model
    @given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
    def test_ids_of_the_default_model(self, text: str) -> None:
        tokenizer = default_tokenizer()
        template = ChatTemplate(tokenizer)
        forged = template.encode([{"role": "user", "content": text}])
        honest = template.encode([{"role": "user", "content": "a"}])
        special = [i for i in forged if tokenizer.is_special(i)]
        assert special == [i for i in honest if tokenizer.is_special(i)]
        assert f"<|im_start|>user\n{text}<|im_end|>" in tokenizer.decode(forged, False)
