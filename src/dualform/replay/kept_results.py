"""A folder of results of retraining, one file for each, found by the key of what was trained and what was read from it.

Each file (``<key>.safetensors``) appears whole or not at all, so a killed process loses what was under way, no more.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dualform.errors import WriteError


class KeptResults:
    """Results by key. Without a folder nothing is kept."""

    def __init__(self, folder: str | os.PathLike | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The result with this key; None if there is none, or if its file was damaged."""
        if self.folder is None or not self._file(key).is_file():
            return None
        try:
            return load_file(self._file(key))
        except (SafetensorError, OSError):
            return None

    def put(self, key: str, result: Mapping[str, Tensor]) -> None:
        """Keep a result: written under a name of this process, then renamed."""
        if self.folder is None:
            return
        partial = self.folder / f"{key}.{os.getpid()}.partial"
        content = save({name: tensor.detach().cpu().clone() for name, tensor in result.items()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._file(key))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise WriteError(f"cannot keep a result in {self.folder}: {error.strerror or error}.") from error

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def hash_of(parts: Iterable[Tensor | str]) -> str:
    """A hash of numbers and words, bit for bit: with the shape and the type of every tensor."""
    digest = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, str):
            content = part.encode()
        else:
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            content = save({"tensor": part.detach().cpu().contiguous()})
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()
