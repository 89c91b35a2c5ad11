"""A GGUF file: its metadata and where its tensors lie.

Read here rather than by gguf.GGUFReader, which needs seconds for a vocabulary's arrays; routers read only the metadata.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remora.platform.base.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    name: str
    #: As in torch: the slowest dimension first.
    shape: tuple[int, ...]
    #: gguf.GGMLQuantizationType's number.
    type_no: int
    #: From the start of the file.
    offset: int


class _Cursor:
    """Reads values one behind the other. Raises ModelError where the file ends too early."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def take(self, format_: str) -> Any:
        try:
            (value,) = struct.unpack_from(format_, self.data, self.position)
        except struct.error:
            raise ModelError(f"{self.path}: the GGUF file is cut off at byte {self.position}.") from None
        self.position += struct.calcsize(format_)
        return value

    def string(self) -> str:
        length = self.take("<Q")
        end = self.position + length
        if end > len(self.data):
            raise ModelError(f"{self.path}: the GGUF file is cut off at byte {self.position}.")
        text = self.data[self.position : end].decode(errors="replace")
        self.position = end
        return text

    def value(self, type_no: int) -> Any:
        if type_no == _STRING:
            return self.string()
        if type_no == _ARRAY:
            return self.array()
        if type_no not in _SCALARS:
            raise ModelError(f"{self.path}: unknown GGUF value type {type_no} at byte {self.position}.")
        return self.take(_SCALARS[type_no])

    def array(self) -> list[Any]:
        type_no, length = self.take("<I"), self.take("<Q")
        if length > len(self.data):
            raise ModelError(f"{self.path}: a GGUF array of {length} values at byte {self.position} is too long.")
        if type_no in _SCALARS:
            size = struct.calcsize(_SCALARS[type_no])
            end = self.position + size * length
            if end > len(self.data):
                raise ModelError(f"{self.path}: the GGUF file is cut off at byte {self.position}.")
            values = list(struct.unpack(f"<{length}{_SCALARS[type_no][1]}", self.data[self.position : end]))
            self.position = end
            return values
        return [self.value(type_no) for _ in range(length)]


class GGUFFile:
    """Read-only and mapped, never read as a whole. Keep it open as long as arrays from `raw` are in use."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for anything that is not a whole GGUF file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        cursor = _Cursor(self._data, path)
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path}: is not a GGUF file.")
        cursor.position = 4
        version = cursor.take("<I")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version} is not supported; 2 and 3 are.")
        num_tensors, num_values = cursor.take("<Q"), cursor.take("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.take("<I"))
        tensors = []
        for _ in range(num_tensors):
            name = cursor.string()
            dimensions = [cursor.take("<Q") for _ in range(cursor.take("<I"))]
            tensors.append((name, tuple(reversed(dimensions)), cursor.take("<I"), cursor.take("<Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        #: Bytes before the tensors' data.
        self.data_offset = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(name=name, shape=shape, type_no=type_no, offset=self.data_offset + offset)
            for name, shape, type_no, offset in tensors
        }

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture."""
        return self.metadata.get(key.replace("{arch}", self.architecture), default)

    def raw(self, tensor: GGUFTensor, num_bytes: int) -> NDArray[np.uint8]:
        """The tensor's bytes, a view of the mapped file. Raises ModelError when the file ends before them."""
        if tensor.offset + num_bytes > len(self._data):
            raise ModelError(f"{self.path}: the file is cut off inside tensor {tensor.name!r}.")
        return np.frombuffer(self._data, np.uint8, num_bytes, tensor.offset)

    def header(self) -> bytes:
        """Everything before the tensors' data: metadata and the tensors' names, shapes and types."""
        return self._data[: self.data_offset]
