"""What is served: a model, its tokenizer, and the settings of its dial; from a run, a Hugging Face folder, or our own.

The dial belongs to a request, not to the server: one that turned for all would change answers that are on their way.
A request names one of the settings, whose thresholds are found before the first one is served.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modepth.calibration import calibrate
from modepth.config import RoutingConfig
from modepth.loading import load_native, require_transformers
from modepth.model import Transformer
from modepth.ready import ready_to_generate
from modepth.run_data import data_of, held_out_tokens
from modepth.runlog import RunLog
from modepth.serve.chat import ChatTemplate, find_template
from modepth.textfile import replace_text
from modepth.tokenizer import Tokenizer, load_tokenizer
from modepth.validation import check_capacity

SETTINGS = (0.0625, 0.125, 0.25, 0.5, 1.0)
CALIBRATION_TOKENS = 2**13  # for each setting, before the first request
SHIPPED = Path(__file__).parent / "shipped"
DIAL_FILE = "dial.json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with all that requests need of it."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    dial: Mapping[float, RoutingConfig]
    log: RunLog | None = None  # of the run, if it is one

    def routing(self, capacity: float | None) -> RoutingConfig | None:
        """The setting that a request asks for; None: the model's own rule, as training left it."""
        if capacity is None:
            return None
        if capacity not in self.dial:
            settings = ", ".join(map(str, self.dial)) or "none, since this model was not calibrated"
            raise ValueError(f"must be one of the dial's settings ({settings}), got {capacity}")
        return self.dial[capacity]


def open_served(
    folder: Path | None, *, name: str | None = None, settings: Sequence[float] = SETTINGS, data: Path | None = None
) -> Served:
    """The model of a folder; its dial is that of its dial.json, else calibrated on `data` or the data of the run."""
    for capacity in settings:
        check_capacity(capacity)
    if folder is None:
        folder, name = SHIPPED, name or "modepth"
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder: name a run, or a Hugging Face model's folder")
    model = ready_to_generate(load_native(folder) if (folder / "checkpoints").is_dir() else open_native(folder))
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}"
        )
    log = RunLog(folder)
    dial = read_dial(folder, model) or make_dial(folder, model, settings, data)
    return Served(
        name=name or folder.resolve().name,
        model=model,
        tokenizer=tokenizer,
        template=find_template(folder, tokenizer),
        dial=dial,
        log=log if log.path.exists() else None,
    )


def open_native(folder: Path) -> Transformer:
    """A Llama of transformers, converted or not, as the native decoder that it is."""
    require_transformers()
    from modepth.hf.folder import open_model  # noqa: PLC0415 - an extra
    from modepth.hf.native import native_parts  # noqa: PLC0415

    config, weights = native_parts(open_model(folder))
    model = Transformer(config)
    model.load_state_dict(weights)
    return model.eval()


# -- the dial


def make_dial(
    folder: Path, model: Transformer, settings: Sequence[float], data: Path | None = None
) -> dict[float, RoutingConfig]:
    """Thresholds for each setting, from held-out tokens; without these only capacity 1, which needs none."""
    routing = model.config.routing
    if routing is None or routing.selection not in ("topk", "soft"):
        return {}
    dial = {1.0: replace(routing, capacity=1.0)} if 1.0 in settings else {}
    if data is None and (folder / "data.txt").exists():
        data = data_of(folder)
        data = data if data.is_dir() else None  # it may have moved since
    shares = [capacity for capacity in settings if capacity < 1]
    if data is not None and shares:
        tokens_BT = held_out_tokens(data, model.config, CALIBRATION_TOKENS)
        dial |= {capacity: calibrate(model, tokens_BT, capacity) for capacity in shares}
    return dict(sorted(dial.items()))


def write_dial(folder: Path, dial: Mapping[float, RoutingConfig]) -> None:
    settings = [{"capacity": capacity, "thresholds": routing.thresholds or ()} for capacity, routing in dial.items()]
    replace_text(folder / DIAL_FILE, json.dumps(settings, indent=1) + "\n")


def read_dial(folder: Path, model: Transformer) -> dict[float, RoutingConfig]:
    path, routing = folder / DIAL_FILE, model.config.routing
    if routing is None or not path.is_file():
        return {}
    try:
        return {
            each["capacity"]: replace(
                routing, capacity=each["capacity"], thresholds=tuple(map(tuple, each["thresholds"])) or None
            )
            for each in json.loads(path.read_text())
        }
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a dial: {error}; remove it to calibrate anew") from error
