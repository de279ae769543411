"""Chat messages to one prompt, by the Jinja template that came with the model.

The template is the model's, so it is the operator's choice, never the client's; still it is a
program from a download. It runs in Jinja's immutable sandbox, and within limits: steps of its
loops, size of what its operators build, length of the result.

Client text goes into it protected (:mod:`server.tokenizer`), so that only the template can write
control tokens.
What :meth:`ChatTemplate.render` returns therefore holds markers, is meant for
:meth:`~server.tokenizer.Tokenizer.encode`, and is shown to people after
:func:`~server.tokenizer.unprotect`.

A model without a template gets no made-up one: the request is answered with 400, because a model
that was never trained on ChatML answers nonsense to it, which is harder to notice than an error.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from server.tokenizer import MARKER, Tokenizer

MAX_LOOP_STEPS: Final = 1_000_000
"""Over all loops of one rendering."""
MAX_CHARACTERS: Final = 16_000_000
"""Of the prompt, and of anything the template puts together with an operator."""

_PART_SEPARATOR = "\n"
"""Between the text parts of one message, for templates that know only texts; as vLLM does."""

_CONTINUE_HERE: Final = MARKER * 2
"""Where the last message ends. Unique: protected text has no marker but behind an opener."""


class ChatTemplateError(ValueError):
    """The messages cannot be made a prompt: a 400. The message begins with the field at fault."""


class ChatTemplate:
    """A compiled chat template. It does not change: any number of threads may render at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """Raises :class:`ChatTemplateError` if the model has no template, or one that is no Jinja.

        ``now`` is what ``strftime_now`` in templates tells."""
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "messages: this model has no chat template; send a prompt to /v1/completions"
            )
        self._tokenizer = tokenizer
        environment = _Environment()
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            tree = _Limits().visit(environment.parse(tokenizer.chat_template))
            self._template = environment.from_string(tree)
        except TemplateError as error:
            raise ChatTemplateError(f"chat_template: not a Jinja template: {error}") from error

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of the prompt; arguments and errors are those of :meth:`render`."""
        return self._tokenizer.encode(self.render(messages, **options), add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with markers in it.

        A message is what the OpenAI API says: ``role``, ``content`` (a text, null, or a list of
        text parts), and whatever else the template understands. ``continue_final_message`` ends the
        prompt where the last message's content ends, so that the model goes on with it; it excludes
        ``add_generation_prompt``. ``template_kwargs`` are further variables for the template.

        Raises :class:`ChatTemplateError`, also when the template itself refuses the messages.
        """
        if not messages:
            raise ChatTemplateError("messages: at least one message is needed")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message: cannot be combined with add_generation_prompt"
            )
        given = {"messages": [_message(each, i) for i, each in enumerate(messages)], "tools": tools}
        own: dict[str, Any] = {**self._tokenizer.vocabulary.special_tokens}
        own["add_generation_prompt"] = add_generation_prompt
        for name in template_kwargs or {}:
            if name in given or name in own:
                raise ChatTemplateError(f"chat_template_kwargs: {name!r} is set by the server")
        try:
            variables = self._protected({"documents": None, **(template_kwargs or {}), **given})
        except RecursionError:
            raise ChatTemplateError("messages: nested too deeply") from None
        if continue_final_message:
            variables["messages"][-1]["content"] += _CONTINUE_HERE
        text = self._run(variables | own)
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(_CONTINUE_HERE)
        if not mark:
            raise ChatTemplateError(
                "continue_final_message: the chat template leaves out the last message's content"
            )
        return head

    def _run(self, variables: Mapping[str, Any]) -> str:
        outer = _steps_left.set(MAX_LOOP_STEPS)
        try:
            return _joined(self._template.generate(variables))
        except TemplateError as error:
            raise ChatTemplateError(f"messages: the chat template refused: {error}") from error
        except Exception as error:  # a template is a program: it can raise anything
            raise ChatTemplateError(f"messages: the chat template failed: {error!r}") from error
        finally:
            _steps_left.reset(outer)

    def _protected(self, value: Any) -> Any:
        """A copy in which no text, not even a key, can begin a control token."""
        match value:
            case str():
                return self._tokenizer.protect(value.replace(MARKER, ""))
            case Mapping():
                return {self._protected(key): self._protected(each) for key, each in value.items()}
            case list() | tuple():
                return [self._protected(each) for each in value]
        return value


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content is one text, a tool call's arguments an object."""
    field = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{field}.role: must be a string")
    result = dict(message) | {"content": _content(message.get("content"), f"{field}.content")}
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return result


def _content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(f"{field}: must be a string, null, or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ChatTemplateError(
                f"{field}[{i}].type: {kind!r} is not supported; this model takes only text parts"
            )
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{field}[{i}].text: must be a string")
        texts.append(part["text"])
    return _PART_SEPARATOR.join(texts)


def _tool_call(call: Any, field: str) -> Any:
    """The API carries a call's arguments as JSON text; templates print an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{field}.function.arguments: not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


# --- the language: Jinja as the template authors know it from transformers, with limits ---------


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return text.replace(json.dumps(MARKER)[1:-1], MARKER)


_steps_left: ContextVar[int] = ContextVar("steps_left", default=MAX_LOOP_STEPS)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        left = _steps_left.get()
        if not left:
            raise TemplateError(f"its loops take more than {MAX_LOOP_STEPS:,} steps")
        _steps_left.set(left - 1)
        yield item


def _joined(pieces: Iterable[str]) -> str:
    """The rendering, given up as soon as it is too long."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        _check_size(length)
        kept.append(piece)
    return "".join(kept)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"it makes more than {MAX_CHARACTERS:,} characters")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is a mere block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Limits(NodeTransformer):
    """Rewrites a template so that every loop counts its steps, and ``~`` becomes the ``+`` of texts
    that :meth:`_Environment.call_binop` watches."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the visitor's naming)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        first, *rest = (
            nodes.Filter(each, "string", [], [], None, None, lineno=node.lineno)
            for each in node.nodes
        )
        result: nodes.Expr = first
        for each in rest:
            result = nodes.Add(result, each, lineno=node.lineno)
        return result


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        extensions = [_GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters |= {"tojson": _tojson, "counted": _counted}
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Look at the size of a result before it exists."""
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "*" and (length := _length(left) + _length(right)):
            times = left if isinstance(left, int) else right
            _check_size(length * times if isinstance(times, int) else length)
        elif max(abs(left), abs(right)) > (64 if operator == "**" else 1e100):
            raise TemplateError("it calculates with numbers that are too large")
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0
