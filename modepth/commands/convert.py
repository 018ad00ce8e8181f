"""`modepth convert` and `modepth export`: transformers models are routed, and runs become transformers models."""

import argparse
import json
from pathlib import Path

from modepth.config import RoutingConfig, build
from modepth.flags import add_flags, flags_given
from modepth.loading import load, require_transformers
from modepth.model import Transformer
from modepth.run_data import copy_tokenizer
from modepth.tokenizer import as_library, load_tokenizer, save_tokenizer

CONVERT_EXAMPLES = """\
examples:
  modepth convert models/llama models/llama-mod --capacity 0.5
  modepth convert models/llama models/llama-mod --capacity 0.25 --part attention --dry-run
  modepth convert models/llama models/llama-mod --layers "[5, 7, 9]" --predictor 64
"""
EXPORT_EXAMPLES = """\
examples:
  modepth export runs/tiny models/tiny
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    convert = commands.add_parser(
        "convert",
        help="route some layers of a Hugging Face model",
        description="Route some layers of a causal language model in a folder, and write it to another. Weights stay "
        "as they are; routers are added, which do nothing until they are trained. The last line is JSON.",
        epilog=CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument("source", metavar="SRC", type=Path, help="a folder with config.json and .safetensors files")
    convert.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which must not exist")
    convert.add_argument("--dry-run", action="store_true", help="say what would be routed, and write nothing")
    add_flags(convert, RoutingConfig)
    convert.set_defaults(run=run_convert)
    export = commands.add_parser(
        "export",
        help="write the model of a run as a Hugging Face model",
        description="Write a run's model, and its tokenizer, as a transformers model: a native one as a Llama, with "
        "routers where layers are routed; one that was trained with --model as what it is. The last line is JSON.",
        epilog=EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run")
    export.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which must not exist")
    export.set_defaults(run=run_export)


def run_convert(options: argparse.Namespace) -> None:
    require_transformers()
    from modepth.hf.convert import convert, summary, would_convert  # noqa: PLC0415
    from modepth.hf.folder import new_folder, open_config, open_model  # noqa: PLC0415

    routing: RoutingConfig = build(RoutingConfig, flags_given(options), where="")
    if options.dry_run:
        found = would_convert(open_config(options.source), routing)
        print(found)
        print(json.dumps({**found._asdict(), "out": None}))
        return
    with new_folder(options.out) as out:
        model = convert(open_model(options.source), routing)
        model.save_pretrained(out)
        copied = copy_tokenizer(options.source, out)
    print(f"written to {options.out}, with {', '.join(copied) or 'no tokenizer'}")
    print(json.dumps({**summary(model)._asdict(), "out": str(options.out)}))


def run_export(options: argparse.Namespace) -> None:
    require_transformers()
    from modepth.hf.adoption import Adopted  # noqa: PLC0415
    from modepth.hf.export import export  # noqa: PLC0415
    from modepth.hf.folder import new_folder  # noqa: PLC0415

    trained = load(options.folder)
    tokenizer = as_library(load_tokenizer(options.folder)) if (options.folder / "tokenizer.json").exists() else None
    with new_folder(options.out) as out:
        if isinstance(trained, Adopted):
            model = trained.base
            copy_tokenizer(options.folder, out)
        else:
            assert isinstance(trained, Transformer)
            end_of_text = None if tokenizer is None else tokenizer.end_of_text
            model = export(trained.config, trained.state_dict(), end_of_text=end_of_text)
            if tokenizer is not None:
                save_tokenizer(tokenizer, out)
        model.save_pretrained(out)
    name = type(model).__name__
    print(f"written to {options.out}: a {name}, {'without' if tokenizer is None else 'with its'} tokenizer")
    print(json.dumps({"out": str(options.out), "model": name}))
