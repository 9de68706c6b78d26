"""Readers of calls, by the form in which families of models write them. Text that is no call stays text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.gateway.text.reading import CallDelta, Parts, SteppingReader
from dovetail.gateway.text.tools.held import could_become, find_first, split_held
from dovetail.gateway.text.tools.json_call import JsonCall, JsonValue
from dovetail.gateway.text.tools.python_call import PythonCall

Body = Literal["object", "named", "python"]
# What some models put before calls that have no opening of their own.
_LEADS = ("<|python_tag|>", "<|python_start|>", "```tool_code\n")


@dataclass(frozen=True)
class CallForm:
    """Where calls stand in a text."""

    openings: tuple[str, ...] = ()  # what comes before calls; empty = they are the whole answer, from its first letter
    closing: str = ""  # what comes after each
    separators: str = ""  # characters around and between calls
    body: Body = "object"  # a JSON object; a name and then a JSON object; Python
    argument_mark: str = ""  # between name and arguments of body "named"
    id_mark: str = ""  # an id that may stand between them
    repeats: bool = True  # further calls may follow without another opening


class CallReader(SteppingReader):
    """Gives text and calls apart. White space around calls belongs to neither.

    text ─opening─▶ before ─first character─▶ call ─its end─▶ after ─closing─▶ text, or before the next call
    """

    def __init__(self, form: CallForm) -> None:
        super().__init__()
        self._form = form
        self._state: Literal["text", "before", "call", "after"] = "text" if form.openings else "before"
        self._spaces = ""  # at the end of the text so far; dropped if a call follows
        self._raw = ""  # since the opening, to be given back as text if no call comes
        self._call: JsonCall | PythonCall | _NamedCall | None = None
        self._is_told = False  # the name of the current call
        self._num_calls = 0
        self._is_over = False  # nothing but text can follow

    def flush(self) -> Parts:
        parts = Parts()
        if self._state == "call" and self._is_told:
            self._buffer = ""  # cut short; what there is of its arguments was given
        elif self._num_calls and self._is_in_call():
            self._buffer = ""  # the head of one more call, cut short
        elif self._state in ("before", "call"):
            self._give_up(parts)
        self._show(parts, self._buffer)
        self._buffer = ""
        if not self._num_calls:
            parts.content += self._spaces
        self._spaces = ""
        return parts

    def _is_in_call(self) -> bool:
        return self._state in ("before", "call") or could_become(self._buffer, self._form.openings)

    def _step(self, parts: Parts) -> bool:
        match self._state:
            case "text":
                return self._read_text(parts)
            case "before":
                return self._read_before(parts)
            case "call":
                return self._read_call(parts)
            case "after":
                return self._read_after(parts)

    def _read_text(self, parts: Parts) -> bool:
        openings = () if self._is_over else self._form.openings
        found = find_first(self._buffer, openings)
        if found is None:
            shown, self._buffer = split_held(self._buffer, openings)
            self._show(parts, shown)
            return False
        at, opening = found
        self._show(parts, self._buffer[:at])
        self._buffer = self._buffer[at + len(opening) :]
        self._state, self._raw = "before", self._spaces + opening
        self._spaces = ""
        return True

    def _read_before(self, parts: Parts) -> bool:
        """White space and separators up to the call's first character."""
        char = self._buffer[0]
        if char.isspace() or (char in self._form.separators and self._form.body == "object"):
            self._raw += char
            self._buffer = self._buffer[1:]
            return True
        if self._form.openings or self._skip_lead() is False:
            self._begin_call()
            return True
        return False

    def _skip_lead(self) -> bool:
        """True: wait for the rest of it, or for what follows."""
        for lead in _LEADS:
            if self._buffer.startswith(lead):
                self._raw += lead
                self._buffer = self._buffer[len(lead) :]
                return not self._buffer
            if could_become(self._buffer, (lead,)):
                return True
        return False

    def _begin_call(self) -> None:
        self._state, self._call, self._is_told = "call", self._new_call(), False

    def _new_call(self) -> JsonCall | PythonCall | _NamedCall:
        if self._form.body == "named":
            return _NamedCall(self._form.argument_mark, self._form.id_mark)
        return JsonCall() if self._form.body == "object" else PythonCall()

    def _read_call(self, parts: Parts) -> bool:
        call = self._call
        assert call is not None
        for count, char in enumerate(self._buffer, start=1):
            call.feed(char)
            if call.is_broken or call.is_done:
                self._buffer = self._buffer[count:]
                break
        else:
            self._buffer = ""
        if call.is_broken and not self._is_told:
            self._give_up(parts)
            return True
        if call.is_call and call.name is not None:
            self._tell(parts, call.name, call.take_arguments())
        elif call.is_done:  # an object, but no call
            self._give_up(parts)
            return True
        if call.is_done or call.is_broken:
            self._end_call()
        return bool(self._buffer)

    def _tell(self, parts: Parts, name: str, arguments: str) -> None:
        if not self._is_told:
            self._is_told = True
            parts.add(Parts(calls=[CallDelta(self._num_calls, name, arguments)]))
            self._num_calls += 1
        elif arguments:
            parts.add(Parts(calls=[CallDelta(self._num_calls - 1, None, arguments)]))

    def _end_call(self) -> None:
        self._state, self._call, self._raw, self._spaces = "after", None, "", ""

    def _give_up(self, parts: Parts) -> None:
        """It was no call: all of it is text. Calls that are a whole answer cannot come later."""
        raw = self._raw + (self._call.raw if self._call is not None else "")
        self._state, self._call, self._raw = "text", None, ""
        self._is_over |= not self._form.openings
        self._show(parts, raw)

    def _read_after(self, parts: Parts) -> bool:
        char, form = self._buffer[0], self._form
        if char.isspace() or char in form.separators:
            self._buffer = self._buffer[1:]
            return True
        if form.closing and self._buffer.startswith(form.closing):
            self._buffer = self._buffer[len(form.closing) :]
            return True
        if form.closing and could_become(self._buffer, (form.closing,)):
            return False
        if form.repeats and (char == "{" if form.body == "object" else char.isidentifier()):
            self._begin_call()
        else:
            self._state = "text"
            self._is_over |= not form.openings
        return True

    def _show(self, parts: Parts, text: str) -> None:
        """Text, but for white space at its end, which may stand before a call."""
        text = self._spaces + text
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        parts.content += shown


class _NamedCall:
    """A name, a mark, and then the arguments as a JSON object."""

    def __init__(self, mark: str, id_mark: str) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._mark, self._id_mark = mark, id_mark
        self._head = ""
        self._value = JsonValue()
        self._num_shown = 0

    def feed(self, char: str) -> None:
        self.raw += char
        if self.name is None:
            self._head += char
            if self._head.endswith(self._mark):
                name = self._head.removesuffix(self._mark).split(self._id_mark)[0].strip()
                self.name = name or None
                self.is_broken = not name
        elif self._value.text or not char.isspace():
            self._value.feed(char)
            self.is_broken = not self._value.text.startswith("{")
            self.is_done = self._value.is_done

    @property
    def is_call(self) -> bool:
        return self.name is not None and bool(self._value.text)

    def take_arguments(self) -> str:
        new = self._value.text[self._num_shown :]
        self._num_shown = len(self._value.text)
        return new
