"""The classes of converted models, made when first needed: a family's own, with routing added.

`ModLlamaForCausalLM` is `LlamaForCausalLM` whose config says how layers are routed, under a `model_type` of its own.
Without this package nobody knows the type `mod_llama`, so that such a model is never loaded as a dense one.
"""

import functools
import inspect
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modepth.hf.model import PREFIX, RoutedModel


@functools.cache
def config_class(base: Any) -> Any:
    body = {
        "model_type": PREFIX + base.model_type,
        "auto_map": {},  # some trainers read it
        "routing": None,
        "__annotations__": {"routing": dict | None},
        "__module__": __name__,
    }
    made: Any = type(f"Mod{base.__name__}", (base,), body)
    AutoConfig.register(made.model_type, made, exist_ok=True)
    return made


@functools.cache
def model_class(base: Any) -> Any:
    """The routed class of a causal language model, registered so that the Auto classes find it."""
    made_config = config_class(base.config_class)

    def forward(self: RoutedModel, *args: Any, **kwargs: Any) -> Any:
        return RoutedModel.forward(self, *args, **kwargs)

    # Trainers and generate read the signature to learn what the model takes.
    forward = functools.wraps(base.forward)(forward)
    body = {
        "forward": forward,
        "config_class": made_config,
        "argument_names": tuple(inspect.signature(base.forward).parameters)[1:],
        "__module__": __name__,
    }
    made = type(f"Mod{base.__name__}", (RoutedModel, base), body)
    AutoModelForCausalLM.register(made_config, made, exist_ok=True)
    conversion = get_checkpoint_conversion_mapping(base.config_class.model_type)
    if conversion is not None:
        register_checkpoint_conversion_mapping(made_config.model_type, conversion, overwrite=True)
    return made


def base_of(model_type: str) -> Any:
    """The dense causal language model of a family."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def register_families() -> None:
    """Let the Auto classes know all routed types, without loading any: a stand-in makes the class when it is asked."""
    for base_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:

        def from_dict(cls: Any, /, values: dict[str, Any], base_type: str = base_type, **kwargs: Any) -> Any:
            return model_class(base_of(base_type)).config_class.from_dict(values, **kwargs)

        name = PREFIX + base_type
        stand_in = type(name, (PreTrainedConfig,), {"model_type": name, "from_dict": classmethod(from_dict)})
        AutoConfig.register(name, stand_in, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Generated classes by name, for unpickling."""
    base: Any = getattr(transformers, name.removeprefix("Mod"), None) if name.startswith("Mod") else None
    for kind, make in ((PreTrainedModel, model_class), (PreTrainedConfig, config_class)):
        if inspect.isclass(base) and issubclass(base, kind):
            made: Any = make
            return made(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
