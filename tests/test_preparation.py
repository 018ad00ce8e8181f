"""Text to tokens: sources, documents, splits, tokenizers, the output folder, the commands."""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from modepth import preparation, progress
from modepth.cli import main
from modepth.corpus import Corpus, cut, documents, split_of
from modepth.data import SPLITS, open_tokens
from modepth.preparation import OUTPUTS, check_prepared, prepare
from modepth.tokenizer import END_OF_TEXT, ByteTokenizer, load_tokenizer, read_tokenizer, train_bpe
from tests.documents import run_commands, run_snippets, text_of

ROOT = Path(__file__).parent.parent


def write_files(folder, number=60):
    """Small texts in nested folders, enough of them that no split is empty."""
    for index in range(number):
        path = folder / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Text {index}: the quick brown fox, naïve and über, jumps {index * 7} times.\n" * 5)
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_files(tmp_path / "texts")


def corpus_of(*sources, **options):
    return Corpus(sources=tuple(map(str, sources)), **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- sources and documents


def test_folders_are_read_whole_and_sorted_without_hidden_binary_and_linked_files(tmp_path):
    for name in ("b/2.txt", "b/1.md", "a.txt", ".git/config", "b/.hidden", "c.bin", "empty"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes({"c.bin": b"\0\1", "empty": b""}.get(name, name.encode()))
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "a.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    found = list(documents(corpus_of(tmp_path / "in")))
    assert [document.name for document in found] == ["a.txt", "b/1.md", "b/2.txt"]
    assert [document.text for document in found] == ["a.txt", "b/1.md", "b/2.txt"]


def test_a_file_that_is_named_is_read_even_with_nul(tmp_path):
    (tmp_path / "x").write_bytes(b"a\0b")
    assert [(document.name, document.text) for document in documents(corpus_of(tmp_path / "x"))] == [("x", "a\0b")]


def test_stdlib_is_pythons_library_without_tests_and_packages():
    names = [document.name for document in documents(corpus_of("stdlib"))]
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert 400 < len(names) < 1000
    assert not [name for name in names if re.search(r"(^|/)(tests?|site-packages|__pycache__|idle_test)/", name)]
    assert all(".py" in name for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))


@given(
    raw=st.one_of(st.binary(max_size=60), st.text(alphabet="aé€😀\n", max_size=40).map(str.encode)),
    limit=st.integers(4, 20),
)
def test_files_are_cut_after_lines_else_between_characters(raw, limit):
    pieces = list(cut(io.BytesIO(raw), limit))
    assert b"".join(pieces) == raw
    assert all(0 < len(piece) <= limit for piece in pieces)
    start = 0
    for piece in pieces[:-1]:
        assert piece.endswith(b"\n") == (b"\n" in raw[start : start + limit])
        start += len(piece)
    if len(raw) <= limit:
        assert len(pieces) == (1 if raw else 0)
    if is_utf8(raw):
        assert all(map(is_utf8, pieces))


def is_utf8(raw):
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(raw=st.lists(st.sampled_from([b"a", b"\xff", b"\xed\xa0\x80", "\ufffd".encode(), b"\xc3", b"\0"])).map(b"".join))
def test_what_is_not_utf8_is_replaced_and_counted(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("in") / "x"
    path.write_bytes(raw)
    found = list(documents(corpus_of(path)))
    assert "".join(document.text for document in found) == raw.decode("utf-8", "replace")
    ignored = raw.decode("utf-8", "ignore")
    assert sum(document.num_replaced for document in found) == len(raw.decode("utf-8", "replace")) - len(ignored)


def test_sources_that_share_text_are_refused(tmp_path, texts):
    for pair in ((texts, texts), (texts, texts / "part0"), (texts / "part0" / "0.txt", texts)):
        with pytest.raises(ValueError, match="share text, which would be read twice"):
            corpus_of(*pair)
    with pytest.raises(ValueError, match="does not exist; give text files, folders"):
        corpus_of(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        corpus_of(tmp_path / "pipe")


# -- splits


@given(name=st.text(), shares=st.lists(st.floats(0.01, 0.3), min_size=3, max_size=3))
def test_a_larger_share_takes_documents_from_train_alone(name, shares):
    source = str(ROOT / "README.md")
    low, high, other = *sorted(shares[:2]), shares[2]
    for split, rest in (("validation", "test"), ("test", "validation")):
        before = split_of(name, corpus_of(source, **{split: low, rest: other}))
        after = split_of(name, corpus_of(source, **{split: high, rest: other}))
        assert after == before or (before, after) == ("train", split)


def test_the_split_follows_shares_and_names_alone(tmp_path, texts):
    corpus = corpus_of(texts, validation=0.2, test=0.1)
    numbers = [split_of(str(index), corpus) for index in range(5000)]
    assert numbers.count("validation") == pytest.approx(1000, rel=0.1)
    assert numbers.count("test") == pytest.approx(500, rel=0.1)
    alone = {document.name: document.split for document in documents(corpus)}
    (texts / "part0" / "00.txt").write_text("one more")
    more = corpus_of(write_files(tmp_path / "others", 3), texts, validation=0.2, test=0.1)
    with_others = [(document.name, document.split) for document in documents(more)]
    assert len(with_others) == len(alone) + 4
    assert all(split == alone[name] for name, split in with_others if name in alone)


@pytest.mark.parametrize(
    ("number", "shares", "message"),
    [
        (
            1,
            {},
            r"the (train|validation|test) split would be empty: none of 1 documents .*--document-bytes, now 1048576",
        ),
        (
            60,
            {"validation": 1e-9},
            r"the validation split would be empty: .* a larger validation share \(--validation\)",
        ),
        (60, {"test": 1e-9}, r"the test split would be empty: .* a larger test share \(--test\)"),
        (9, {"test": 0.5, "validation": 0.4999999}, "the train split would be empty: .* a smaller validation or test"),
        (0, {}, "no text in "),
    ],
)
def test_an_empty_split_is_an_error_that_names_it_and_the_fix(tmp_path, number, shares, message):
    (tmp_path / "in").mkdir()
    corpus = corpus_of(write_files(tmp_path / "in", number), **shares)
    with pytest.raises(ValueError, match=message):
        prepare(corpus, tmp_path / "out", tokenizer="bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("shares", [{"validation": 0}, {"test": 1.0}, {"test": "x"}, {"test": 0.5, "validation": 0.5}])
def test_impossible_shares_are_refused(texts, shares):
    with pytest.raises(ValueError, match=r"must be a share of the documents in \(0, 1\)|must leave documents to train"):
        corpus_of(texts, **shares)


# -- tokenizers


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the quick brown fox jumps over the lazy dog, naïve and über\n" * 20], 300)


@given(
    text=st.one_of(st.text(), st.sampled_from([END_OF_TEXT, f"a {END_OF_TEXT}\0b", "\r\n\x00", "über the\n\n  fox"]))
)
def test_decode_undoes_encode(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= one < tokenizer.vocab_size and one != tokenizer.end_of_text for one in ids)


def test_bytes_are_those_of_utf8_and_the_end_is_256():
    assert ByteTokenizer().encode("a€\0") == list("a€\0".encode())
    assert ByteTokenizer().decode([97, 256, 0xE2, 98]) == f"a{END_OF_TEXT}\ufffdb"


def test_lone_surrogates_become_replacement_characters(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_bpe_learns_and_has_the_size_asked_for(bpe):
    assert bpe.vocab_size == 300
    text = "the quick brown fox"
    assert len(bpe.encode(text)) < len(ByteTokenizer().encode(text)) / 2


def test_words_of_a_megabyte_do_not_stall_bpe():
    assert train_bpe(["ab" * 2**19 + "".join(map(str, range(2**16)))], 300).vocab_size == 300


@pytest.mark.parametrize("name", ["bpe:", "bpe:x", "bpe:256", "bpe:-5", "bpe:1.5", "bpe:99999999999", "words", ""])
def test_impossible_tokenizers_are_refused(tmp_path, texts, name):
    message = r"needs a whole number N in 257\.\." if name.startswith("bpe:") else "tokenizer must be bytes, bpe:N"
    with pytest.raises(ValueError, match=f"{message}.*got {name!r}"):
        prepare(corpus_of(texts), tmp_path / "out", tokenizer=name)


def word_tokenizer(*, end, settings=None, folder):
    vocabulary = {"[UNK]": 0, "the": 1, "fox": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([end])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("end", "settings", "named"),
    [
        ("</s>", None, None),
        ("<fin>", None, "<fin>"),
        ("<fin>", {"eos_token": "<fin>"}, None),
        ("<fin>", {"eos_token": {"content": "<fin>"}}, None),
    ],
)
def test_a_tokenizer_file_is_used_without_its_truncation_and_kept_with_its_end(tmp_path, texts, end, settings, named):
    path = word_tokenizer(end=end, settings=settings, folder=tmp_path / "model")
    prepare(corpus_of(texts), tmp_path / "out", tokenizer=str(path), end_of_text=named)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.encode("the fox the fox the") == [1, 70_000, 1, 70_000, 1]
    assert tokenizer.vocab_size == 70_001  # ids have gaps
    tokens = open_tokens(tmp_path / "out" / "train.tokens")
    assert tokens.dtype == "uint32"
    assert tokens.ids[-1] == tokenizer.end_of_text
    assert tokenizer.tokenizer.id_to_token(tokenizer.end_of_text) == end


def test_a_tokenizer_file_without_an_end_is_refused(tmp_path):
    path = word_tokenizer(end="<fin>", folder=tmp_path / "model")
    with pytest.raises(ValueError, match=r"tokenizer.json: no token for the end of a text .*--end-of-text"):
        read_tokenizer(path)
    with pytest.raises(ValueError, match=r"tokenizer.json: no token for the end of a text among <end>"):
        read_tokenizer(path, end_of_text="<end>")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer.json"):
        read_tokenizer(path)


def test_an_end_of_text_for_bytes_is_refused(tmp_path, texts):
    with pytest.raises(ValueError, match=r"end_of_text is for a tokenizer.json; bytes has its own"):
        prepare(corpus_of(texts), tmp_path / "out", tokenizer="bytes", end_of_text="</s>")


# -- preparing


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_token_files_hold_each_document_and_an_end(tmp_path, texts, tokenizer):
    (texts / "broken.txt").write_bytes(b"caf\xe9 " * 3)
    (texts / "empty.txt").write_bytes(b"")
    corpus = corpus_of(texts, document_bytes=200)
    summary = prepare(corpus, tmp_path / "out", tokenizer=tokenizer)
    assert set(contents(tmp_path / "out")) == OUTPUTS
    assert json.loads((tmp_path / "out" / "data.json").read_text()) == summary == check_prepared(tmp_path / "out")
    loaded = load_tokenizer(tmp_path / "out")
    for split in SPLITS:
        of_split = [document.text for document in documents(corpus) if document.split == split]
        tokens = open_tokens(tmp_path / "out" / f"{split}.tokens")
        assert loaded.decode(tokens.ids.tolist()) == "".join(text + END_OF_TEXT for text in of_split)
        assert tokens.num_bytes == sum(len(text.encode()) for text in of_split)
        expected = {"documents": len(of_split), "bytes": tokens.num_bytes, "tokens": tokens.count}
        assert summary["splits"][split] == expected
        assert tokens.ids.tolist().count(loaded.end_of_text) == len(of_split)
    assert (summary["replaced_characters"], summary["skipped_files"]) == (3, 1)


def test_bpe_is_trained_on_the_train_split_alone(tmp_path, texts):
    def learned(out):
        prepare(corpus_of(texts), out, tokenizer="bpe:400")
        return (out / "tokenizer.json").read_bytes()

    before = learned(tmp_path / "before")
    for document in list(documents(corpus_of(texts))):
        if document.split != "train":
            (texts / document.name).write_text("zyzzyva " * 500)
    assert learned(tmp_path / "after") == before
    name = next(document.name for document in documents(corpus_of(texts)) if document.split == "train")
    (texts / name).write_text("zyzzyva " * 500)
    assert learned(tmp_path / "changed") != before


def test_bpe_takes_a_bounded_sample_of_a_large_train_split(tmp_path, texts, monkeypatch):
    lengths = []
    monkeypatch.setattr(preparation, "BPE_SAMPLE_BYTES", 4000)
    monkeypatch.setattr(
        preparation, "train_bpe", lambda texts, size: train_bpe((lengths.append(len(t)) or t for t in texts), size)
    )
    prepare(corpus_of(texts), tmp_path / "out", tokenizer="bpe:300")
    assert 2000 < sum(lengths) < 8000


def test_the_same_text_gives_the_same_bytes_in_another_process(tmp_path, texts):
    prepare(corpus_of(texts), tmp_path / "here", tokenizer="bpe:400")
    run_python(
        "import sys; from modepth.cli import main; main(sys.argv[1:])",
        *("data", "prepare", texts, tmp_path / "there", "--tokenizer", "bpe:400"),
        PYTHONHASHSEED="7",
    )
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_the_corpus_hash_is_of_names_and_text(tmp_path, texts):
    def corpus_hash(tokenizer="bytes"):
        return prepare(corpus_of(texts), tmp_path / "out", tokenizer=tokenizer, overwrite=True)["corpus_sha256"]

    before = corpus_hash()
    assert corpus_hash("bpe:300") == before
    (texts / "part0" / "0.txt").write_text("another")
    changed = corpus_hash()
    (texts / "part0" / "0.txt").rename(texts / "part0" / "000.txt")
    assert len({before, changed, corpus_hash()}) == 3


def run_python(script, *arguments, check=True, **environment):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment, cwd=ROOT)


MEMORY = """
import re, sys
from modepth.cli import main
def peak():  # not getrusage, which keeps what the parent used before exec
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = peak()
assert main(["data", "prepare", *sys.argv[1:], "--tokenizer", "bytes", "--validation", "0.2", "--test", "0.2"]) == 0
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_one_line_of_60_mb_takes_less_than_64_mb(tmp_path):
    with (tmp_path / "line.txt").open("wb") as file:
        for _ in range(60):
            file.write("naïve ".encode() * (10**6 // 7))
    result = run_python(MEMORY, tmp_path / "line.txt", tmp_path / "out")
    assert float(result.stdout.splitlines()[-1]) < 64
    counts = json.loads(result.stdout.splitlines()[-2])["splits"]
    assert sum(split["bytes"] for split in counts.values()) == (tmp_path / "line.txt").stat().st_size


# -- the output folder

KILLED = """
import os, signal, sys
from modepth import preparation
from modepth.corpus import Corpus
source, out = sys.argv[1:]
def die(stage, done, total):
    if stage == wanted and done > 5000:
        os.kill(os.getpid(), signal.SIGKILL)
def sync(path):
    die(wanted if wanted == "renaming" else "", 9999, None)
preparation.sync = sync
for wanted in ("reading", "training BPE", "tokenizing", "renaming"):
    child = os.fork()
    if not child:
        preparation.prepare(Corpus(sources=(source,)), out, tokenizer="bpe:300", overwrite=True, report=die)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_kill_leaves_no_output_and_an_earlier_one_as_it_was(tmp_path, texts):
    result = run_python(KILLED, texts, tmp_path / "new")
    assert result.stdout.split() == ["-9"] * 4
    assert not (tmp_path / "new").exists()
    prepare(corpus_of(texts), tmp_path / "old", tokenizer="bytes")
    before = contents(tmp_path / "old")
    assert run_python(KILLED, texts, tmp_path / "old").stdout.split() == ["-9"] * 4
    assert contents(tmp_path / "old") == before
    prepare(corpus_of(texts), tmp_path / "new", tokenizer="bytes")  # what is left does not stand in the way


def test_an_error_leaves_nothing_behind(tmp_path, texts, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation.TokenWriter, "add", full)
    with pytest.raises(ValueError, match=r"out: cannot be written: .*No space left"):
        prepare(corpus_of(texts), tmp_path / "out", tokenizer="bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_only_prepared_data_is_replaced_and_only_when_asked(tmp_path, texts):
    out = tmp_path / "out"
    prepare(corpus_of(texts), out, tokenizer="bytes")
    before = contents(out)
    with pytest.raises(ValueError, match=r"out exists already: .*--overwrite"):
        prepare(corpus_of(texts), out, tokenizer="bpe:300")
    assert contents(out) == before
    prepare(corpus_of(texts), out, tokenizer="bpe:300", overwrite=True)
    assert contents(out) != before
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds more than prepared data \(thesis.tex\), so it is not replaced"):
        prepare(corpus_of(texts), out, tokenizer="bytes", overwrite=True)
    with pytest.raises(ValueError, match="which is read: choose a folder outside of it"):
        prepare(corpus_of(texts), texts / "out", tokenizer="bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_what_another_process_wrote_meanwhile_is_not_replaced(tmp_path, texts):
    def intrude(stage, done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(ValueError, match="out exists already"):
        prepare(corpus_of(texts), tmp_path / "out", tokenizer="bytes", report=intrude)
    assert list((tmp_path / "out").iterdir()) == []


def test_files_of_two_preparations_are_noticed(tmp_path, texts):
    for name, tokenizer in (("a", "bytes"), ("b", "bpe:300")):
        prepare(corpus_of(texts), tmp_path / name, tokenizer=tokenizer)
    (tmp_path / "a" / "test.tokens").write_bytes((tmp_path / "b" / "test.tokens").read_bytes())
    with pytest.raises(ValueError, match=r"test.tokens: data.json says .* not of one preparation"):
        check_prepared(tmp_path / "a")


# -- the commands


def run_command(capsys, *arguments):
    code = main([*map(str, arguments)])
    result = capsys.readouterr()
    return code, result.out, result.err


def test_prepare_and_inspect_print_a_table_and_json(tmp_path, texts, capsys):
    (texts / "part0" / "escape.txt").write_text("\x1b[31mred" * 3)
    code, out, err = run_command(capsys, "data", "prepare", texts, tmp_path / "out", "--tokenizer", "bytes")
    assert code == 0
    summary = json.loads(out.splitlines()[-1])
    assert summary["splits"] == check_prepared(tmp_path / "out")["splits"]
    assert out.splitlines()[0].split() == ["split", "documents", "bytes", "tokens", "bytes/token"]
    train = summary["splits"]["train"]
    assert out.splitlines()[1].split()[:2] == ["train", str(train["documents"])]
    total = sum(path.stat().st_size for path in texts.rglob("*.txt"))
    assert err.splitlines() == [f"reading: {total:,} bytes", f"tokenizing: {total:,} bytes"]

    code, out, _ = run_command(capsys, "data", "inspect", tmp_path / "out")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["splits"] == summary["splits"]
    first = next(document.text for document in documents(corpus_of(texts)) if document.split == "validation")
    assert first[:200] in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar_for_each_stage(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["data", "prepare", str(texts), str(tmp_path / "out"), "--tokenizer", "bpe:300"]) == 0
    bars = sys.stderr.getvalue()
    assert re.search(r"reading: .*B/s", bars)
    assert re.search(r"training BPE: 100%\|.*B/s", bars)
    assert re.search(r"tokenizing: 100%\|.*B/s", bars)


def test_elsewhere_a_long_stage_prints_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1)
    with progress.ByteProgress() as report:
        for done in (1000, 2000):
            report("reading", done, 2000)
    assert capsys.readouterr().err == "reading: 1,000 bytes\nreading: 2,000 bytes\nreading: 2,000 bytes\n"


def test_inspect_shows_no_control_characters(tmp_path, texts, capsys):
    for path in texts.rglob("*.txt"):
        path.write_text("\x1b[31mred\u202e 🦊")
    prepare(corpus_of(texts), tmp_path / "out", tokenizer="bytes")
    _, out, _ = run_command(capsys, "data", "inspect", tmp_path / "out")
    assert "\\x1b[31mred\\u202e 🦊" in out


@pytest.mark.parametrize("damage", ["hash", "missing", "json", "number", "folder"])
def test_inspect_names_what_is_damaged(tmp_path, texts, capsys, damage):
    out = tmp_path / "out"
    prepare(corpus_of(texts), out, tokenizer="bytes")
    tokens = out / "train.tokens"
    if damage == "hash":
        tokens.write_bytes(tokens.read_bytes()[:-2] + b"\1\0")
    elif damage == "missing":
        tokens.unlink()
    elif damage == "json":
        (out / "data.json").write_text('{"format": 1}')
    elif damage == "number":
        (out / "data.json").write_text((out / "data.json").read_text().replace('"bytes": ', '"bytes": 1', 1))
    code, _, err = run_command(capsys, "data", "inspect", tmp_path if damage == "folder" else out)
    message = {
        "hash": "train.tokens: from byte 512 on the sha256",
        "missing": "train.tokens: cannot be read",
        "json": "data.json: not what `modepth data prepare` writes",
        "number": "train.tokens: data.json says",
        "folder": "data.json: cannot be read",
    }[damage]
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith("modepth data inspect: ")
    assert message in err


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    code, out, err = run_command(capsys, "data", "prepare", tmp_path / "none", tmp_path / "out")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("modepth data prepare: ")


@pytest.mark.parametrize("action", ["prepare", "inspect"])
def test_help_shows_examples(capsys, action):
    with pytest.raises(SystemExit):
        main(["data", action, "--help"])
    assert f"examples:\n  modepth data {action} " in capsys.readouterr().out


def test_the_documents_commands_and_snippet_run(tmp_path, monkeypatch):
    text = text_of("data.md")
    write_files(tmp_path / "notes")
    (tmp_path / "book.txt").write_text("It was a bright cold day in April.\n" * 9000)
    monkeypatch.chdir(tmp_path)
    run_commands(text)
    run_snippets(text)


@pytest.mark.skipif(not Path(sysconfig.get_path("stdlib")).is_dir(), reason="no source of the standard library")
def test_the_embedded_corpus_gives_millions_of_tokens(tmp_path):
    splits = prepare(corpus_of("stdlib"), tmp_path / "out", tokenizer="bytes")["splits"]
    assert splits["train"]["tokens"] > 6_000_000
    assert min(splits[split]["tokens"] for split in SPLITS) > 100_000
