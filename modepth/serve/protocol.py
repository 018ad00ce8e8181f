"""The bodies of requests, as OpenAI's clients send them, and of answers.

Values are not converted: "7" is no number; null stands for a field that is not there. Fields that are not known are
refused, since a client that sends one expects it to do something; of OpenAI's that are not supported only the values
that change nothing are taken.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from modepth.depth import Cost
from modepth.depth import Depth as TextDepth

DEFAULT_MAX_TOKENS = 16  # OpenAI's
DEFAULT_CHAT_TOKENS = 1024

Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at the first thing that is wrong: a megabyte of wrong items would be as many errors, and seconds for all.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]


def say_nullable(schema: dict[str, Any]) -> None:
    """Let the published schema of a body say that null stands for an absent field."""
    for name, field in schema["properties"].items():
        choices = field.get("anyOf", [field])
        if name not in schema.get("required", []) and {"type": "null"} not in choices and field.get("type") != "null":
            told = {key: field.pop(key) for key in ("title", "default", "description") if key in field}
            schema["properties"][name] = {"anyOf": [*field.get("anyOf", [field]), {"type": "null"}], **told}


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=say_nullable)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        """OpenAI's clients send null for what they do not set."""
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in optional}


class StreamOptions(StrictBody):
    include_usage: bool = False


class Sampled(StrictBody):
    """What both kinds of completion share."""

    model: str | None = Field(None, description="the name that /v1/models lists; without one: the one that is served")
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="ignored")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="not supported")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="not supported")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(None, description="not supported")
    depth: bool = Field(False, description="also tell which layers computed each token, and the share of FLOPs")
    capacity: float | None = Field(None, gt=0, le=1, description="a setting of the dial, as /v1/models lists them")

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream; other answers have it always."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampled):
    prompt: Text | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, le=2**31, description=f"{DEFAULT_MAX_TOKENS} if not given")
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=1, description="not supported")
    suffix: None = Field(None, description="not supported")


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class Message(StrictBody):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] = Field(
        description="parts are joined by line breaks"
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatBody(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description=f"if not given {DEFAULT_CHAT_TOKENS}, or what the context leaves, whichever is less",
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31, description="the newer name of max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class DepthBody(StrictBody):
    model: str | None = None
    text: Text
    capacity: float | None = Field(None, gt=0, le=1)


# -- answers


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorDetail


class Status(TypedDict):
    status: Literal["ok", "ready"]


class ModelFacts(TypedDict):
    num_layers: int
    routed_layers: list[int]
    max_length: int
    vocab_size: int
    num_parameters: int
    capacity: float | None  # None: dense
    dial: list[float]
    chat: bool
    log: bool  # whether /v1/run has its rows


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    modepth: ModelFacts


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Depth(TypedDict):
    """Tokens, the prompt's first, and the layers that computed each but the last, which was not read."""

    tokens: list[str]
    layers: list[list[int]]
    scores: list[list[float]]  # of the routed layers
    cost: NotRequired[Cost]  # at the end


class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: dict[str, Any] | None
    text: NotRequired[str]
    message: NotRequired[dict[str, str]]
    delta: NotRequired[dict[str, str]]
    depth: NotRequired[Depth]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage | None]


class DepthAnswer(TextDepth):
    model: str
    capacity: float | None


class RunRows(TypedDict):
    """The rows of a run's log from `start` on: all of them where the caller's were those of another log."""

    run: str
    log: str
    start: int
    rows: list[dict[str, Any]]
    seconds_since: float | None  # the last one was written; None: there is none
