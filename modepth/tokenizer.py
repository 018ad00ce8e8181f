"""Text to ids and back: plain bytes, a byte-level BPE trained here, or a tokenizer.json from elsewhere.

Each has one id for the end of a text. Bytes and BPE lose nothing: decode(encode(text)) is the text, even one
that spells the end-of-text token out. Lone surrogates, which no UTF-8 text holds, become U+FFFD.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from modepth.textfile import replace_text
from modepth.validation import check_count

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\ufffd"
# What others call it, the most usual first.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "<end_of_text>")
BYTES_JSON = json.dumps({"modepth": "bytes", "version": 1})
MIN_BPE = 257  # every byte and end_of_text
MAX_BPE = 1_000_000
TRAINING_PIECE = 2**14
LONGEST_WORD = 64


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer; ids run from 0 to vocab_size - 1."""

    vocab_size: int
    end_of_text: int
    end_of_text_name: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_json(self) -> str: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a text.

    >>> ByteTokenizer().encode("é!")
    [195, 169, 33]
    """

    vocab_size = 257
    end_of_text = 256
    end_of_text_name = END_OF_TEXT

    def encode(self, text: str) -> list[int]:
        return list(without_surrogates(text).encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8, as a cut character is, become U+FFFD, and so do ids that only a model has."""
        end = END_OF_TEXT.encode()
        parts = (bytes((i,)) if i < 256 else end if i == self.end_of_text else UNKNOWN.encode() for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def to_json(self) -> str:
        return BYTES_JSON


class LibraryTokenizer:
    """One of the `tokenizers` library, without what would truncate, pad or add tokens to a text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_of_text_name: str):
        self.tokenizer = tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # as text: a document cannot end itself
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())  # not their number: ids may have gaps
        self.end_of_text = vocabulary[end_of_text_name]
        self.end_of_text_name = end_of_text_name

    def encode(self, text: str) -> list[int]:
        # A batch of one, since only that has a fast form, which leaves out offsets.
        (encoding,) = self.tokenizer.encode_batch_fast([without_surrogates(text)], add_special_tokens=False)
        return encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        return self.tokenizer.to_str(pretty=True)


def as_library(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer in the form that `tokenizers` and transformers read.

    >>> as_library(ByteTokenizer()).encode("é!")
    [195, 169, 33]
    """
    if not isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    library = tokenizers.Tokenizer(models.BPE(byte_letters(), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    return LibraryTokenizer(library, END_OF_TEXT)


def byte_letters() -> dict[str, int]:
    """How the library writes a byte in its tokens: as itself where that can be seen, else as a letter from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token stands for, also where that is a part of a character, which by itself decodes to U+FFFD.

    >>> [token_bytes(ByteTokenizer(), token) for token in ByteTokenizer().encode("é!")]
    [b'\\xc3', b'\\xa9', b'!']
    """
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    if isinstance(tokenizer, ByteTokenizer):
        return bytes((token,))
    known = tokenizer.tokenizer.id_to_token(token) if isinstance(tokenizer, LibraryTokenizer) else None
    written = known or text
    if re.fullmatch("<0x[0-9A-F]{2}>", written):  # as SentencePiece writes a byte that is no token
        return bytes((int(written[3:5], 16),))
    letters = byte_letters()
    return bytes(letters[each] for each in written) if letters.keys() >= set(written) else text.encode()


def without_surrogates(text: str) -> str:
    return re.sub("[\ud800-\udfff]", UNKNOWN, text)


# -- training


def bpe_size(name: str) -> int | None:
    """N of `bpe:N`, None if `name` is something else."""
    if not name.startswith("bpe:"):
        return None
    digits = name.removeprefix("bpe:")
    size = int(digits) if re.fullmatch("[0-9]{1,9}", digits) else 0
    if not MIN_BPE <= size <= MAX_BPE:
        raise ValueError(
            f"tokenizer bpe:N needs a whole number N in {MIN_BPE}..{MAX_BPE} (256 bytes, the end of text, "
            f"and what is learned), got {name!r}; for example bpe:2048"
        )
    return size


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """A byte-level BPE of at most `vocab_size` ids; fewer where the texts repeat too little."""
    check_count("vocab_size", vocab_size, low=MIN_BPE)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_pieces(texts), trainer)
    return LibraryTokenizer(tokenizer, END_OF_TEXT)


def training_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Short pieces, since the trainer takes hundreds at a time, with overlong words broken.

    Each merge walks through every word that holds its pair, so one word of a megabyte would take hours.
    """
    for text in map(without_surrogates, texts):
        for start in range(0, len(text), TRAINING_PIECE):
            yield re.sub(rf"(\S{{{LONGEST_WORD}}})(?=\S)", r"\1\n", text[start : start + TRAINING_PIECE])


# -- files


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and, as transformers does, the name of the end of text in tokenizer_config.json."""
    replace_text(folder / "tokenizer.json", tokenizer.to_json())
    replace_text(folder / "tokenizer_config.json", json.dumps({"eos_token": tokenizer.end_of_text_name}))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder that holds tokenizer.json: prepared data, a run, a Hugging Face model."""
    return read_tokenizer(Path(folder) / "tokenizer.json")


def read_tokenizer(path: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """A tokenizer.json; the end of text is the one named, else that of tokenizer_config.json, else a known one."""
    path = Path(path)
    text = read_text(path)
    if text.strip() == BYTES_JSON:
        return ByteTokenizer()
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path}: not a tokenizer.json: {' '.join(str(error).split())}") from error
    return LibraryTokenizer(tokenizer, find_end_of_text(tokenizer, path, end_of_text))


def find_end_of_text(tokenizer: tokenizers.Tokenizer, path: Path, named: str | None) -> str:
    named = configured_end(path.with_name("tokenizer_config.json")) if named is None else named
    candidates = KNOWN_ENDS if named is None else (named,)
    for name in candidates:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise ValueError(
        f"{path}: no token for the end of a text among {', '.join(candidates)}; name one of its tokens "
        "with end_of_text (--end-of-text)"
    )


def configured_end(path: Path) -> str | None:
    """`eos_token` of a tokenizer_config.json, where there is one."""
    if not path.exists():
        return None
    try:
        settings = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    name = settings.get("eos_token") if isinstance(settings, dict) else None
    name = name.get("content") if isinstance(name, dict) else name
    return name if isinstance(name, str) else None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
