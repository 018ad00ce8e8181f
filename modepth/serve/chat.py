"""Chat templates: from messages to the tokens that a model was tuned on, as tokenizer_config.json says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modepth.tokenizer import LibraryTokenizer, Tokenizer, read_text, without_surrogates


class ChatTemplate:
    """A template in jinja, run in a sandbox, since it came with a model; and a tokenizer that knows its marks.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>", {})
    >>> template.render([{"role": "user", "content": "hi"}])
    '<user>hi<assistant>'
    """

    def __init__(self, source: str, variables: dict[str, str], tokenizer: tokenizers.Tokenizer | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        self.template = environment.from_string(source)
        self.variables, self.tokenizer = variables, tokenizer

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            return self.template.render(messages=list(messages), add_generation_prompt=True, **self.variables)
        except TemplateError as error:
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        assert self.tokenizer is not None
        ids: list[int] = self.tokenizer.encode(without_surrogates(self.render(messages)), add_special_tokens=False).ids
        return ids


def refuse(message: str) -> None:
    raise TemplateError(message)


def find_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """That of a folder, if it has one: chat_template.jinja, or a field of tokenizer_config.json."""
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads(read_text(folder / "tokenizer_config.json"))
    source = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja")
    if not isinstance(source, str) or not isinstance(tokenizer, LibraryTokenizer):
        return None
    # Here the marks are meant: in the text of a prompt they are plain text.
    marked = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    marked.encode_special_tokens = False
    named = {name: spelled(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(source, {name: text for name, text in named.items() if text is not None}, marked)


def spelled(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
