"""Checkpoints for the tests: made from a seed, compared with it, harmed."""

import hashlib
import json
import os

import torch

from modepth.checkpoint import save, whole
from modepth.files import DTYPES
from modepth.manifest import seal

MODEL, OPTIMIZER = "model-00000-of-00001.safetensors", "optimizer-00000-of-00001.safetensors"


def tensors_of(seed, rows=7):
    """A group of every dtype, with a scalar, and with shapes that have no elements."""
    generator = torch.Generator().manual_seed(seed)
    group = {f"layers.{code}": torch.randn(rows, 3, generator=generator).mul(50).to(t) for code, t in DTYPES.items()}
    group |= {"scalar": torch.tensor(float(seed)), "no_rows": torch.empty(0, 3), "no_columns": torch.empty(5, 0)}
    return group


def groups_of(seed, rows=7):
    return {"model": whole(tensors_of(seed, rows)), "optimizer": whole({"step": torch.tensor(seed)})}


def save_seeded(run, step, seed=None, rows=7, **options):
    seed = step if seed is None else seed
    return save(run, step, groups_of(seed, rows), {"seed": seed}, **options)


def assert_holds(found, seed, rows=7):
    assert found.state == {"seed": seed}
    assert_same(found.load("model"), tensors_of(seed, rows))
    assert_same(found.load("optimizer"), {"step": torch.tensor(seed)})


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def names_in(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def edit_manifest(folder, change):
    """Change a manifest as a stranger could, its own hash and those of the files made right again."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    for name, facts in body["files"].items():
        contents = (folder / name).read_bytes()
        facts.update(size=len(contents), sha256=hashlib.sha256(contents).hexdigest())
    change(body)
    path.write_text(json.dumps({"sha256": seal(body), **body}))


def flip(path, place=None):
    """Change one bit of the byte at `place`, of the middle one by default."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2 if place is None else place] ^= 1
    path.write_bytes(contents)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)
