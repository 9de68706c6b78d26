"""How each family of models writes a call, found by what its own chat template says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.gateway.text.reading import Reader
from dovetail.gateway.text.tools import harmony
from dovetail.gateway.text.tools.readers import CallForm, CallReader


@dataclass(frozen=True)
class ToolFormat:
    name: str
    form: CallForm
    argument_key: str = "arguments"  # in JSON objects
    opening: str = ""  # what a forced answer begins with
    item: tuple[str, str] = ("", "")  # around each call
    separator: str = ""  # between calls
    end: str = ""  # after the last
    marks: tuple[str, ...] = ()  # all of its special tokens, where the form does not say them

    def reader(self) -> Reader:
        return harmony.HarmonyReader(reads_calls=True) if self is HARMONY else CallReader(self.form)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single tokens, hidden from an answer's text unless it is read for calls."""
        if self.marks:
            return self.marks
        marks = (*self.form.openings, self.form.closing, self.form.argument_mark, self.form.id_mark, "<|python_tag|>")
        return tuple(mark for mark in marks if mark)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call, as the model would write it."""
        return self.item[0] + self.call_head(name) + self._arguments(arguments) + self.call_tail() + self.item[1]

    def write_all(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return self.opening + self.separator.join(self.write(*call) for call in calls) + self.end

    def call_head(self, name: str) -> str:
        """Before the arguments."""
        if self.form.body == "object":
            return f'{{"name": {json.dumps(name)}, "{self.argument_key}": '
        return f"{name}(" if self.form.body == "python" else f"{name}{self.form.argument_mark}"

    def call_tail(self) -> str:
        return {"object": "}", "python": ")", "named": ""}[self.form.body]

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.form.body != "python":
            return json.dumps(arguments, ensure_ascii=False)
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


HERMES = ToolFormat(  # Qwen 2.5 and 3, Hermes, and what is used where a template knows no tools
    "hermes",
    CallForm(("<tool_call>",), "</tool_call>", repeats=False),
    item=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
)
LLAMA3_JSON = ToolFormat("llama3_json", CallForm(separators=";,"), "parameters", separator="; ")
PYTHONIC = ToolFormat(  # Llama 3.2 and 4, Gemma
    "pythonic", CallForm(separators=",]`", body="python"), opening="[", separator=", ", end="]"
)
MISTRAL = ToolFormat(
    "mistral", CallForm(("[TOOL_CALLS]",), separators="[,]"), opening="[TOOL_CALLS][", separator=", ", end="]"
)
MISTRAL_ARGS = ToolFormat(  # since its tokenizer of 2025
    "mistral_args",
    CallForm(("[TOOL_CALLS]",), body="named", argument_mark="[ARGS]", id_mark="[CALL_ID]", repeats=False),
    item=("[TOOL_CALLS]", ""),
)
BARS = ToolFormat(  # Granite 3, Phi-4-mini
    "bars",
    CallForm(("<|tool_call|>",), "<|/tool_call|>", separators="[,]"),
    opening="<|tool_call|>[",
    separator=", ",
    end="]",
)
HARMONY = ToolFormat(  # gpt-oss; read by a reader of its own, because thoughts and calls are not apart in it
    "harmony",
    CallForm(
        (harmony.CHANNEL,), body="named", argument_mark=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}", repeats=False
    ),
    item=(f"{harmony.CHANNEL}commentary to=functions.", ""),
    separator=f"{harmony.END}{harmony.START}assistant",
    marks=harmony.MARKS,
)


def format_in(template: str) -> ToolFormat | None:
    """The form that a chat template tells its model to use; None if it names none that is known."""
    if harmony.is_harmony(template):
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|tool_call|>" in template:
        return BARS
    if "[func_name1(" in template:
        return PYTHONIC
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return LLAMA3_JSON
    return None
