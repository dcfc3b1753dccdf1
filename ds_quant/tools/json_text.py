"""Change keys of a JSON text and leave everything else as it is written, comments too."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_BLANK = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,{}\[\]:"#/]+')


@dataclass
class Member:
    """A key of an object as written: what stands before it, ``:`` and what follows the value."""

    lead: str
    key: str
    colon: str
    value: Object | str
    after: str = ""

    def text(self) -> str:
        value = self.value if isinstance(self.value, str) else self.value.text()
        return f"{self.lead}{json.dumps(self.key)}{self.colon}{value}{self.after}"


@dataclass
class Object:
    """Members and what stands after the last of them."""

    members: list[Member]
    tail: str
    head: str = ""  # before and after the braces of a whole file
    foot: str = ""

    def text(self) -> str:
        """As written, with what was changed."""
        inside = ",".join(member.text() for member in self.members)
        return f"{self.head}{{{inside}{self.tail}}}{self.foot}"

    def change(self, path: tuple[str, ...], value: Any) -> None:
        """Give the key at ``path`` another value, or remove it with None; add it if missing."""
        key, *rest = path
        found = next((member for member in self.members if member.key == key), None)
        if rest and found is not None and isinstance(found.value, Object):
            found.value.change(tuple(rest), value)
        elif value is None:
            self._remove(found)
        else:
            for part in reversed(rest):
                value = {part: value}
            if found is None:
                found = Member(self._lead(), key, ": ", "")
                self.members.append(found)
            found.value = self._written(value)

    def _remove(self, gone: Member | None) -> None:
        if gone is self.members[0] and len(self.members) > 1:  # the next one begins the object
            self.members[1].lead = gone.lead
        self.members = [member for member in self.members if member is not gone]

    def _lead(self) -> str:
        """Blanks before a new key, like those before the last one."""
        last = self.members[-1].lead if self.members else "\n  "
        return last[: len(last) - len(last.lstrip())] or " "

    def _written(self, value: Any) -> str:
        indent = self._lead().rpartition("\n")[2]
        text = json.dumps(value, indent=indent or None) if isinstance(value, dict) else None
        if text is None or len(json.dumps(value)) <= 60:
            return json.dumps(value)
        return text.replace("\n", f"\n{indent}") if indent else text


def parse(text: str) -> Object:
    """Read an object. Raises ``ValueError``, naming the line, for what is no JSON."""
    reader = _Reader(text)
    head = reader.blank()
    found = reader.value()
    if not isinstance(found, Object):
        raise ValueError("a DeepSpeed config is an object in braces")
    found.head, found.foot = head, reader.blank()
    if reader.at != len(text):
        raise reader.mistake()
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self.source, self.at = text, 0

    def blank(self) -> str:
        return self._take(_BLANK)

    def value(self) -> Object | str:
        if self._next("{"):
            return self._object()
        start = self.at
        if self._next("["):
            self.blank()
            while not self._next("]"):
                self.value()
                self.blank()
                self._next(",")
                self.blank()
            return self.source[start : self.at]
        return self._take(_SCALAR)

    def _object(self) -> Object:
        members: list[Member] = []
        while True:
            lead = self.blank()
            if self._next("}"):
                return Object(members, lead)
            if not self.source.startswith('"', self.at):
                raise self.mistake()
            key = json.loads(self._take(_SCALAR))
            start = self.at
            self.blank()
            if not self._next(":"):
                raise self.mistake()
            self.blank()
            colon = self.source[start : self.at]
            members.append(Member(lead, key, colon, self.value()))
            after = self.blank()
            if not self._next(","):
                if not self._next("}"):
                    raise self.mistake()
                return Object(members, after)
            members[-1].after = after

    def _next(self, character: str) -> bool:
        found = self.source.startswith(character, self.at)
        self.at += found
        return found

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.source, self.at)
        if match is None:
            raise self.mistake()
        self.at = match.end()
        return match.group()

    def mistake(self) -> ValueError:
        """What stands here is not expected."""
        line = self.source.count("\n", 0, self.at) + 1
        return ValueError(f"line {line}: no JSON: {self.source[self.at : self.at + 20]!r}")
