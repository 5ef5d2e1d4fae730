"""The bundled files against torchvision's reading of them, and what happens when they are damaged."""

import gzip
import importlib.resources
import shutil
from pathlib import Path

import pytest
import torch
from torchvision.datasets import MNIST

from lit_mnist import sources
from lit_mnist.errors import RunError

BUNDLED = Path(str(importlib.resources.files("lit_mnist") / "mnist"))


@pytest.mark.parametrize(("split", "train"), [("train", True), ("t10k", False)])
def test_holds_what_torchvision_reads(split: str, train: bool, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in BUNDLED.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    theirs = MNIST(tmp_path, train=train)
    ours = sources.load_mnist(split)  # type: ignore[arg-type]
    assert torch.equal(ours.images, theirs.data)
    assert torch.equal(ours.labels, theirs.targets)


def flip(file: Path) -> None:
    content = bytearray(gzip.decompress(file.read_bytes()))
    content[1000] ^= 1
    file.write_bytes(gzip.compress(bytes(content), 1))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])


def overwrite(file: Path) -> None:
    file.write_bytes(b"no gzip at all")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip, "SHA-256 of its content is"), (truncate, "damaged"), (overwrite, "damaged"), (Path.unlink, "is missing")],
)
def test_names_a_damaged_file(damage: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(BUNDLED, tmp_path / "mnist")
    monkeypatch.setattr(sources, "files", lambda package: tmp_path)
    sources.load_mnist("t10k")  # whole so far
    damage(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz")  # type: ignore[operator]
    with pytest.raises(RunError, match=message) as error:
        sources.load_mnist("t10k")
    assert "t10k-labels-idx1-ubyte.gz" in str(error.value)
    assert "install lit-mnist again" in str(error.value)
