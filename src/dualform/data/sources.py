"""The public sources of data files, with their sizes and checksums."""

from typing import NamedTuple


class Source(NamedTuple):
    """A file on the network: its addresses, its size, and its checksum ("sha256:…" or "md5:…")."""

    addresses: tuple[str, ...]
    size: int
    checksum: str


def _idx(addresses: tuple[str, ...], files: dict[str, tuple[int, str]]) -> dict[str, Source]:
    return {
        name: Source(tuple(f"{address}/{name}" for address in addresses), size, f"sha256:{checksum}")
        for name, (size, checksum) in files.items()
    }


_MNIST = _idx(
    ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    {
        "train-images-idx3-ubyte.gz": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        "train-labels-idx1-ubyte.gz": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        "t10k-images-idx3-ubyte.gz": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        "t10k-labels-idx1-ubyte.gz": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
)
_FASHION = _idx(
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    ),
    {
        "train-images-idx3-ubyte.gz": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        "train-labels-idx1-ubyte.gz": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        "t10k-images-idx3-ubyte.gz": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        "t10k-labels-idx1-ubyte.gz": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)
_WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
_STORIES = "https://huggingface.co/karpathy/tinyllamas/resolve/main/stories260K"

SOURCES: dict[str, Source] = {
    **{f"mnist/{name}": source for name, source in _MNIST.items()},
    **{f"fashion-mnist/{name}": source for name, source in _FASHION.items()},
    "cifar10/cifar-10-binary.tar.gz": Source(
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), 170052171, "md5:c32a1d4ab5d03f1284b67883e8d87530"
    ),
    "wikitext-2/train.txt": Source((f"{_WIKITEXT}/train.txt",), 10797148, "md5:34a77ebe59551b3a3b3d8c0a2797c976"),
    "wikitext-2/valid.txt": Source((f"{_WIKITEXT}/valid.txt",), 1121681, "md5:d756d22ab2310e7e60c094bea5c5a8eb"),
    "wikitext-2/test.txt": Source((f"{_WIKITEXT}/test.txt",), 1256449, "md5:781c9418ab9414bd09e4aad825aae752"),
    "aesop/aesop-stickney-pg49010.txt": Source(
        ("https://raw.githubusercontent.com/gutenbergbooks/49010/master/49010-0.txt",),
        160442,
        "sha256:ccc57f278fd84a9ea2193928cca1cbb14b37248c091f9b3edb7bb0b621bf9fc2",
    ),
    "stories260k/stories260K.bin": Source(
        (f"{_STORIES}/stories260K.bin",),
        1056540,
        "sha256:b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
    ),
    "stories260k/tok512.bin": Source(
        (f"{_STORIES}/tok512.bin",), 6227, "sha256:037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"
    ),
}
"""The source of each file, by its path in a data folder."""

PACKAGES = {"fashion-mnist": "/usr/share/datasets/fashion-mnist"}
"""Folders of data sets that system packages install (Debian's dataset-fashion-mnist)."""
