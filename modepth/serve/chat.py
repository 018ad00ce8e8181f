"""Chat templates: from messages to the tokens that a model was tuned on, as tokenizer_config.json says."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modepth.tokenizer import LibraryTokenizer, Tokenizer, read_text, without_surrogates


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant says, for training; here its body is what it renders to."""

    tags = {"generation"}  # noqa: RUF012 - jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A template in jinja, run in a sandbox, since it came with a model; and a tokenizer that knows its marks.

    It finds what transformers gives a template: loop controls, `raise_exception`, `strftime_now`, plain `tojson`.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>", {})
    >>> template.render([{"role": "user", "content": "hi"}])
    '<user>hi<assistant>'
    """

    def __init__(self, source: str, variables: dict[str, str], tokenizer: tokenizers.Tokenizer | None = None) -> None:
        self.source, self.variables, self.tokenizer = source, variables, tokenizer

    @cached_property
    def template(self) -> Template:
        """When it is first asked for: a template that is none must not keep completions from being served."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
        environment.filters["tojson"] = plain_json
        return environment.from_string(self.source)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self.template.render(given | self.variables)
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"messages do not fit the model's chat template: {reason}") from error

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        assert self.tokenizer is not None
        ids: list[int] = self.tokenizer.encode(without_surrogates(self.render(messages)), add_special_tokens=False).ids
        return ids


def refuse(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def plain_json(value: Any, indent: int | None = None) -> str:
    """Not jinja's, which writes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def find_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """That of a folder, if it has one: chat_template.jinja, or a field of tokenizer_config.json."""
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads(read_text(folder / "tokenizer_config.json"))
    source = default_of(settings.get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja")
    if not isinstance(source, str) or not isinstance(tokenizer, LibraryTokenizer):
        return None
    # Here the marks are meant: in the text of a prompt they are plain text.
    marked = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    marked.encode_special_tokens = False
    named = {name: spelled(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(source, {name: text for name, text in named.items() if text is not None}, marked)


def default_of(source: Any) -> Any:
    """Of several templates, [{"name": ..., "template": ...}], the default."""
    if not isinstance(source, list):
        return source
    named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
    return named.get("default")


def spelled(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
