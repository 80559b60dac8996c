"""Element types as NumPy arrays, and the casts that ``--dtype`` asks for.

NumPy has no bfloat16: its bits are carried as uint16. Results are torch's, bit for bit:
round to nearest even, float64 goes to 16 bits through float32. A NaN stays a NaN; its payload
is 0x7FC0 in bfloat16, where torch's depends on whether it took a vector or a scalar path.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..model.dtypes import ITEMSIZE

Array = npt.NDArray[np.generic]

_VALUES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8", "C128": "<c16",
}  # fmt: skip


def raw(dtype: str) -> np.dtype[np.generic]:
    """The NumPy type that moves elements without looking at them."""
    size = ITEMSIZE[dtype]
    return np.dtype(f"<u{size}") if size <= 8 else np.dtype(f"V{size}")


def values(array: Array, dtype: str) -> Array:
    """Raw elements as numbers; bfloat16 widens to float32, float8 has no NumPy form."""
    if dtype == "BF16":
        wide: Array = (array.astype(np.uint32) << 16).view(np.float32)
        return wide
    if dtype in _VALUES:
        return np.ascontiguousarray(array).view(_VALUES[dtype]).reshape(array.shape)
    return array


def cast(array: Array, src: str, dst: str) -> Array:
    """Raw elements of ``src`` as raw elements of ``dst``."""
    if src == dst:
        return array
    number = values(array, src)
    with np.errstate(over="ignore", invalid="ignore"):
        if dst in ("BF16", "F16") and src == "F64":
            number = number.astype(np.float32)
        if dst == "BF16":
            return _to_bfloat16(number.astype(np.float32))
        narrowed = number.astype(_VALUES[dst])
    bits: Array = narrowed.view(raw(dst))
    return bits


def _to_bfloat16(array: npt.NDArray[np.float32]) -> Array:
    bits = np.ascontiguousarray(array).view(np.uint32)
    odd = (bits >> 16) & 1  # ties go to the even neighbour
    with np.errstate(over="ignore"):
        rounded = ((bits + odd + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(array)
    if nan.any():
        rounded[nan] = 0x7FC0
    result: Array = rounded
    return result
