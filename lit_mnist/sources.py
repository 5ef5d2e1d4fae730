"""Where pixels come from: the bundled MNIST files, read directly and checked at every reading."""

import gzip
import hashlib
import zlib
from importlib.resources import files
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_mnist.errors import RunError

# SHA-256 of the uncompressed content of each bundled file (lit_mnist/mnist/README.md).
_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


class Samples(NamedTuple):
    """Images and their classes, in memory.

    Attributes:
        images: (N, 28, 28) uint8.
        labels: (N,) int64.
        digest: Names their content: the SHA-256 of the images' file and the labels' file, in hexadecimal.
    """

    images: Tensor
    labels: Tensor
    digest: str


def load_mnist(split: Literal["train", "t10k"]) -> Samples:
    """The official training set (`train`, N = 60,000) or test set (`t10k`, N = 10,000) from the package itself.

    Raises:
        RunError: If a file is missing, or its content is not MNIST's.
    """
    names = f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"
    images = _read(names[0], header=16).view(-1, 28, 28)
    labels = _read(names[1], header=8).long()
    return Samples(images, labels, " ".join(_SHA256[name] for name in names))


def _read(name: str, header: int) -> Tensor:
    """The bytes of an IDX file after its header, (size,) uint8."""
    path = files("lit_mnist") / "mnist" / f"{name}.gz"
    remedy = "install lit-mnist again, or restore the file from the repository"
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"data file {path} is missing: {remedy}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RunError(f"data file {path} is damaged ({error}): {remedy}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256[name]:
        raise RunError(
            f"data file {path} is damaged: SHA-256 of its content is {digest}, not {_SHA256[name]}: {remedy}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]
