"""Harmed or hostile checkpoints are refused, naming the file; nothing in them runs or floods the memory."""

import ast
import os
import pickle
import random
import re
import resource
import struct
import sys
from pathlib import Path

import pytest

from modepth import files
from modepth.checkpoint import newest, open_step
from modepth.files import MAX_JSON
from modepth.run_folder import prepare_run, step_folder
from tests.checkpoints import (
    MODEL,
    OPTIMIZER,
    assert_holds,
    edit_manifest,
    flip,
    save_seeded,
    truncate,
)

# -- harmed


def empty(path):
    os.truncate(path, 0)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def add_beside(path):
    path.with_name(path.name + ".extra").write_bytes(b"")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, empty, Path.unlink, replace_by_folder, add_beside])
def test_a_harmed_checkpoint_is_passed_over_with_a_warning_and_refused_by_name(tmp_path, harm, name):
    for step in (1, 2):
        save_seeded(tmp_path, step)
    harm(step_folder(tmp_path, 2) / name)
    with pytest.warns(UserWarning, match=rf"step-00000002/{name}.*: .+; passing over step 2"):
        assert_holds(newest(tmp_path), 1)
    with pytest.raises(ValueError, match=rf"step-00000002/{name}.*: "):
        open_step(tmp_path, 2)


def test_no_flipped_bit_is_loaded(tmp_path):
    folder, chance = save_seeded(tmp_path, 1), random.Random(0)
    for path in folder.iterdir():
        contents = path.read_bytes()
        for _ in range(60):
            place = chance.randrange(len(contents))
            harmed = bytearray(contents)
            harmed[place] ^= 1 << chance.randrange(8)
            path.write_bytes(harmed)
            try:
                found = open_step(tmp_path, 1)
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
            else:  # spaces of the manifest say nothing
                assert path.name == "manifest.json"
                assert_holds(found, 1)
        path.write_bytes(contents)
    assert_holds(open_step(tmp_path, 1), 1)


def test_without_hashes_the_sizes_are_still_compared(tmp_path):
    folder = save_seeded(tmp_path, 1)
    flip(folder / "state.json")
    assert open_step(tmp_path, 1, hashes=False).step == 1
    (folder / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state\.json: 2 bytes instead of 11"):
        open_step(tmp_path, 1, hashes=False)


def test_when_all_are_harmed_there_is_none(tmp_path):
    for step in (1, 2):
        truncate(save_seeded(tmp_path, step) / MODEL)
    with pytest.warns(UserWarning, match="passing over") as caught:
        assert newest(tmp_path) is None
    assert len(caught) == 2


def test_a_step_that_is_not_there_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step-00000003: no such checkpoint"):
        open_step(tmp_path, 3)
    prepare_run(tmp_path)
    step_folder(tmp_path, 3).write_text("")
    with pytest.raises(ValueError, match="step-00000003: not a folder"):
        open_step(tmp_path, 3)


def set_entry(**facts):
    return lambda body: body["groups"]["model"]["layers.F32"].update(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format=2), "format 2 is newer than this modepth reads"),
        (lambda body: body.update(format="1"), "not a manifest"),
        (lambda body: body.update(step=2), "is of step 2"),
        (lambda body: body.update(world_size=0), "world_size must be"),
        (lambda body: body.pop("groups"), "not a manifest of modepth: KeyError"),
        (lambda body: body.update(groups=[]), "not a manifest"),
        (lambda body: body.update(files={}), "not a file of this checkpoint"),
        (lambda body: body.update(files={MODEL: 7}), "not a manifest"),
        (lambda body: body["groups"].pop("optimizer"), "optimizer-.*: not a file of this checkpoint"),
        (set_entry(shape=[7]), "model-.*: differs from the manifest in layers.F32"),
        (set_entry(dtype="I32"), "model-.*: differs from the manifest in layers.F32"),
        (set_entry(dtype="F128"), "layers.F32: dtype must be one of"),
        (set_entry(dtype=[]), "not a manifest"),
        (set_entry(shape=[-7, -3]), "shape must be a whole number"),
        (set_entry(shape=[2**62, 3]), "the pieces hold 7 rows of"),
        (set_entry(pieces=[]), "the pieces hold 0 rows of 7"),
        (set_entry(pieces=[[MODEL, 0, 2**62]], shape=[2**62, 3]), "differs from the manifest"),
        (set_entry(pieces=[[MODEL, 7 * n, 7] for n in range(9)], shape=[63, 3]), "layers.F32 is used twice"),
        (set_entry(pieces=[[MODEL, 0, 7, 7]]), "not a manifest|too many values"),
        (set_entry(pieces=[[7, 0, 7]]), "not a manifest"),
        (lambda body: body["groups"]["model"].pop("layers.F32"), "differs from the manifest in layers.F32"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path, change, message):
    edit_manifest(save_seeded(tmp_path, 1), change)
    with pytest.raises(ValueError, match=f"step-00000001/.*{message}"):
        open_step(tmp_path, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000, "\xff", '{"format": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (save_seeded(tmp_path, 1) / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest\.json: not "):
        open_step(tmp_path, 1)


# -- from a stranger


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../b.safetensors", "..", "", "x\0"])
@pytest.mark.parametrize("kind", ["piece", "file"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name, kind):
    def change(body):
        if kind == "file":
            body["files"][name] = body["files"][MODEL]
        else:
            set_entry(pieces=[[name, 0, 7]])(body)

    edit_manifest(save_seeded(tmp_path, 1), change)
    with pytest.raises(ValueError, match=r"not a file of this checkpoint|must be in a plainly named"):
        open_step(tmp_path, 1)


@pytest.mark.parametrize("name", [MODEL, "state.json", "manifest.json"])
def test_links_are_refused_even_to_the_same_contents(tmp_path, name):
    path = save_seeded(tmp_path, 1) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{name}: not a plain file"):
        open_step(tmp_path, 1)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    folder = save_seeded(tmp_path, 1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="step-00000001: not a folder"):
        open_step(tmp_path, 1)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model.pkl", MODEL])
def test_a_pickle_is_never_run(tmp_path, name):
    folder, marker = save_seeded(tmp_path, 1), tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    edit_manifest(folder, lambda body: body["files"].update({name: body["files"][MODEL]}))
    edit_manifest(folder, lambda body: None)  # with the pickle's own hash
    with pytest.raises(ValueError, match=rf"{name}: (not a file of this checkpoint|cannot be read)"):
        open_step(tmp_path, 1)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists()  # it would have


UNPICKLING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNNING = {"torch.load", "torch.save", "np.load", "eval", "exec", "yaml.unsafe_load", "yaml.full_load"}


@pytest.mark.parametrize("path", sorted(Path(files.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_in_the_package_can_unpickle(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not imported & UNPICKLING
    for node in nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in RUNNING
            assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", called)  # torch's, which pickle
            if called == "yaml.load":
                assert [ast.unparse(keyword) for keyword in node.keywords] == ["Loader=StrictLoader"]


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("length", [2**60, 2**63 + 1, 10**9, 200])
def test_a_header_bomb_is_an_error_in_bounded_memory(tmp_path, length):
    folder = save_seeded(tmp_path, 1)
    (folder / MODEL).write_bytes(struct.pack("<Q", length) + b'{"w": ')
    edit_manifest(folder, lambda body: None)
    before = peak_memory()
    with pytest.raises(ValueError, match=rf"{MODEL}: cannot be read: .*[hH]eader"):
        open_step(tmp_path, 1)
    assert peak_memory() - before < 32 * 2**20


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_json_bomb_is_refused_unread(tmp_path, name):
    folder = save_seeded(tmp_path, 1)
    os.truncate(folder / name, 2**33)  # no blocks on disk
    before = peak_memory()
    with pytest.raises(ValueError, match=f"{name}: "):
        open_step(tmp_path, 1)
    assert peak_memory() - before < 32 * 2**20


def test_the_largest_json_that_is_read_is_64_mib(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("7" + " " * (MAX_JSON - 1))
    assert files.read_json(path) == 7
    with path.open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match="67,108,865 bytes of JSON, more than the 67,108,864 that are read"):
        files.read_json(path)
