"""Chat templates: what they are given, and what happens when they or the messages are bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_builders import make_card

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import Message
from dovetail.gateway.text.chat import ChatTemplate, TemplateFacts
from dovetail.gateway.text.chat_prompt import template_messages

HELLO = [{"role": "user", "content": "hello"}]


def render(folder: Path, template: str, **context: object) -> str:
    card = make_card(folder, chat_template=template, bos_token="<s>")
    return ChatTemplate(TemplateFacts(card).text).render(HELLO, **context)  # type: ignore[arg-type]


def test_messages_bos_and_generation_prompt_reach_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ eos_token }}"
    assert render(tmp_path, template) == "<s>hello><|end|>"
    assert render(tmp_path, template, add_generation_prompt=False) == "<s>hello<|end|>"


def test_white_space_and_loop_controls_follow_hugging_face(tmp_path: Path) -> None:
    template = "{% for i in range(5) %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}\n"
    assert render(tmp_path, template) == "0\n1\n"


def test_tojson_keeps_characters_as_they_are(tmp_path: Path) -> None:
    tools = [{"name": "<é>"}]
    assert render(tmp_path, "{{ tools | tojson }}", tools=tools) == '[{"name": "<é>"}]'


def test_generation_blocks_render_their_body(tmp_path: Path) -> None:
    assert render(tmp_path, "a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c") == "ab2c"


def test_a_final_message_can_be_continued(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    assert render(tmp_path, template, continue_final_message=True) == "<user>hello"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{{ bos_token }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request_that_names_it(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template of 'fake'") as caught:
        render(tmp_path, template)
    assert caught.value.param == "messages"
    assert "\n" not in caught.value.message


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no chat template"):
        TemplateFacts(make_card(tmp_path, chat_template=None))


def test_text_parts_become_one_text_and_images_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template_messages([Message(role="user", content=parts)])[0]["content"] == "a\nb"  # type: ignore[arg-type]
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(InvalidRequest, match="image_url"):
        template_messages([Message(role="user", content=image)])  # type: ignore[arg-type]


def test_messages_reach_the_template_in_the_form_that_templates_know() -> None:
    messages = [Message(role="developer", content="a"), Message(role="assistant"), Message(role="tool", content="b")]
    assert template_messages(messages) == [
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "b"},
    ]


def test_a_call_without_text_is_null_only_for_templates_that_ask_for_it(tmp_path: Path) -> None:
    messages = template_messages([Message(role="assistant", content=None, tool_calls=[{"id": "1"}])])
    plain = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{{ m.tool_calls[0].id }}{% endfor %}"
    asking = "{% for m in messages %}{% if m['content'] is none %}call {{ m.tool_calls[0].id }}{% endif %}{% endfor %}"
    named = (
        "{% for m in messages %}{% set content = m.content %}{% if content is not none %}text{% endif %}{% endfor %}"
    )
    for template, wanted in ((plain, "<>1"), (asking, "call 1"), (named, "")):
        assert ChatTemplate(TemplateFacts(make_card(tmp_path, chat_template=template)).text).render(messages) == wanted


def test_the_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}, {"function": {"name": "g", "arguments": "{"}}]
    (message,) = template_messages([Message(role="assistant", tool_calls=calls)])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"x": 1}, "{"]
