"""The scenario language: one command a line, read and checked before anything runs.

A file is text; :func:`parse` turns it into :class:`Command` values whose verbs, options and values
are known to be good, or raises :class:`ScenarioError` with the line and, for a misspelt word, a
suggestion. Names of requests and nodes are checked when the command runs. The reference is
``docs/scenarios.md``; the vocabulary is the table :data:`engine.sim.vocabulary.VERBS`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from engine.sim.values import BadValue, Word
from engine.sim.vocabulary import VERBS, Verb

REPEAT_LIMIT: Final = 100_000
"""Commands that one file may expand to."""


class ScenarioError(Exception):
    """The file cannot be used: its author has to change it. The message begins with file:line."""

    def __init__(self, file: str, line: int, message: str) -> None:
        super().__init__(f"{file}:{line}: {message}")
        self.line: Final = line


@dataclass(frozen=True, slots=True)
class Command:
    """One command, its options converted to the types of the vocabulary."""

    file: str
    line: int
    text: str
    verb: str
    words: tuple[str, ...]
    """What is neither an option nor a flag, in order."""
    options: dict[str, object] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    def error(self, message: str) -> ScenarioError:
        return ScenarioError(self.file, self.line, message)

    def unknown(self, what: str, word: str, known: Iterable[str]) -> ScenarioError:
        """An error for a word that is not one of ``known``, with the nearest one that is."""
        return self.error(f"unknown {what} {word!r}{suggestion(word, known)}")

    def integer(self, key: str, default: int) -> int:
        value = self.options.get(key, default)
        assert isinstance(value, int), key
        return value

    def optional(self, key: str) -> int | None:
        return self.integer(key, 0) if key in self.options else None

    def string(self, key: str, default: str = "") -> str:
        return str(self.options.get(key, default))


def suggestion(word: str, known: Iterable[str]) -> str:
    """`` (did you mean …?)``, or what there is if nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, 1, 0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return f" (known: {', '.join(names)})" if names else " (there are none)"


def parse(text: str, file: str) -> list[Command]:
    """All commands of a file, loops expanded. Raises :class:`ScenarioError`."""
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    commands = [
        _command(line, number, file) for number, line in _expand(numbered, {}, file) if line
    ]
    for command in commands:
        if command.verb not in ("requires", "cluster"):
            raise command.error("'cluster' has to come first")
        if command.verb == "cluster":
            break
    else:
        raise ScenarioError(file, max(len(numbered), 1), "there is no 'cluster' command")
    first = commands.index(command)
    for late in commands[first + 1 :]:
        if late.verb == "cluster":
            raise late.error("a scenario has one 'cluster'")
    return commands


Numbered = tuple[int, str]


def _expand(lines: list[Numbered], values: dict[str, int], file: str) -> list[Numbered]:
    """Unroll ``repeat N [NAME]`` … ``end``, replacing ``{NAME}`` (``{i}``) by 1 … N."""
    out: list[Numbered] = []
    index = 0
    while index < len(lines):
        number, raw = lines[index]
        line = _uncomment(raw).strip()
        index += 1
        if line.split(" ")[0] == "end":
            raise ScenarioError(file, number, "'end' without 'repeat'")
        if line.split(" ")[0] != "repeat":
            out.append((number, _fill(line, values, number, file)))
            continue
        line = _fill(line, values, number, file)
        match = re.fullmatch(r"repeat\s+(\d+)(?:\s+([a-z]\w*))?", line)
        if match is None:
            raise ScenarioError(file, number, "write 'repeat COUNT' or 'repeat COUNT NAME'")
        begin, depth = index, 1
        while depth:
            if index == len(lines):
                raise ScenarioError(file, number, "'repeat' without 'end'")
            word = _uncomment(lines[index][1]).strip().split(" ")[0]
            depth += (word == "repeat") - (word == "end")
            index += 1
        for value in range(1, int(match[1]) + 1):
            body = lines[begin : index - 1]
            out += _expand(body, {**values, match[2] or "i": value}, file)
            if len(out) > REPEAT_LIMIT:
                raise ScenarioError(file, number, f"expands to more than {REPEAT_LIMIT} lines")
    return out


def _fill(line: str, values: dict[str, int], number: int, file: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ScenarioError(
                file, number, f"no loop counts {{{match[1]}}}{suggestion(match[1], values)}"
            )
        return str(values[match[1]])

    return re.sub(r"\{(\w+)\}", value, line)


def _uncomment(line: str) -> str:
    """Cut a comment off: a ``#`` at the start of a word, outside quotes."""
    quoted = False
    for index, char in enumerate(line):
        if char == '"' and line[index - 1 : index] != "\\":
            quoted = not quoted
        if char == "#" and not quoted and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


_WORD: Final = re.compile(r'(?:([a-z_]+)=)?(?:"((?:[^"\\]|\\.)*)"|([^\s"]*))(?=\s|$)')
_ESCAPES: Final = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def _words(line: str, number: int, file: str) -> list[Word]:
    words = []
    position = 0
    while position < len(line):
        if line[position].isspace():
            position += 1
            continue
        match = _WORD.match(line, position)
        if match is None:
            raise ScenarioError(file, number, f"a quote is not closed: {line[position:]}")
        key, quoted, plain = match.groups()
        if quoted is not None:
            text = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), quoted)
            words.append(Word(text, key, True))
        else:
            words.append(Word(plain, key))
        position = match.end()
    return words


def _command(line: str, number: int, file: str) -> Command:
    first, *rest = _words(line, number, file)
    if first.key is not None or first.text not in VERBS:
        word = first.text if first.key is None else first.key
        raise ScenarioError(file, number, f"unknown command {word!r}{suggestion(word, VERBS)}")
    verb = VERBS[first.text]
    plain: list[str] = []
    options: dict[str, object] = {}
    flags: set[str] = set()
    for each in rest:
        if each.key is not None:
            key = verb.aliases.get(each.key, each.key)
            if key in options:
                raise ScenarioError(file, number, f"{each.key}= is given twice")
            options[key] = _value(verb, replace(each, key=key), number, file)
        elif each.text in verb.flags and not each.quoted:
            flags.add(each.text)
        else:
            plain.append(each.text)
    if not verb.least <= len(plain) <= verb.most:
        raise ScenarioError(file, number, f"write '{verb.usage}'")
    return Command(file, number, line, verb.name, tuple(plain), options, frozenset(flags))


def _value(verb: Verb, word: Word, number: int, file: str) -> object:
    assert word.key is not None
    kind = verb.options.get(word.key)
    if kind is None:
        raise ScenarioError(
            file,
            number,
            f"'{verb.name}' has no option {word.key!r}{suggestion(word.key, verb.options)}",
        )
    try:
        return kind(word)
    except BadValue as error:
        raise ScenarioError(file, number, f"{word.key}={word.text}: {error}") from None
