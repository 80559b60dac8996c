"""Element types as NumPy arrays, and the casts that ``--dtype`` asks for.

NumPy has no bfloat16 and no float8: their bits are kept as unsigned integers, and become float32 if
values are needed. Casts give torch's results, bit for bit: round to nearest even, and float64
becomes 16 bits by way of float32. A NaN stays a NaN. Its payload in bfloat16 is 0x7FC0; torch's
depends on whether it used vector or scalar code.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from ..model.dtypes import ITEMSIZE

Array = npt.NDArray[np.generic]

_VALUES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8", "C128": "<c16",
}  # fmt: skip


# bits of the mantissa, bias of the exponent, and the codes that are no finite number
_INF, _NAN = float("inf"), float("nan")
_FLOAT8: dict[str, tuple[int, int, dict[int, float]]] = {
    "F8_E4M3": (3, 7, {0x7F: _NAN, 0xFF: _NAN}),
    "F8_E4M3FNUZ": (3, 8, {0x80: _NAN}),
    "F8_E5M2": (2, 15, {
        0x7C: _INF, 0x7D: _NAN, 0x7E: _NAN, 0x7F: _NAN,
        0xFC: -_INF, 0xFD: _NAN, 0xFE: _NAN, 0xFF: _NAN,
    }),
    "F8_E5M2FNUZ": (2, 16, {0x80: _NAN}),
    "F8_E8M0": (0, 127, {0xFF: _NAN}),  # powers of two: no sign, no mantissa, no zero
}  # fmt: skip


@cache
def _float8_table(dtype: str) -> npt.NDArray[np.float32]:
    """The value of each of the 256 codes."""
    mantissa_bits, bias, special = _FLOAT8[dtype]
    found = [_float8(code, mantissa_bits, bias, dtype == "F8_E8M0") for code in range(256)]
    for code, value in special.items():
        found[code] = value
    return np.array(found, np.float32)


def _float8(code: int, mantissa_bits: int, bias: int, unsigned: bool) -> float:
    if unsigned:
        return float(2.0 ** (code - bias))
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:  # subnormal
        return float(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
    return float(sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))


def raw(dtype: str) -> np.dtype[np.generic]:
    """The NumPy type that moves elements without looking at them."""
    size = ITEMSIZE[dtype]
    return np.dtype(f"<u{size}") if size <= 8 else np.dtype(f"V{size}")


def values(array: Array, dtype: str) -> Array:
    """Raw elements as numbers; bfloat16 and float8 widen to float32."""
    if dtype == "BF16":
        wide: Array = (array.astype(np.uint32) << 16).view(np.float32)
        return wide
    if dtype in _FLOAT8:
        decoded: Array = _float8_table(dtype)[array]
        return decoded
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


# dtype -> the bits of +infinity, as signed and unsigned integers of its size
_INFINITY = {"F16": ("<i2", "<u2", 0x7C00), "BF16": ("<i2", "<u2", 0x7F80),
             "F32": ("<i4", "<u4", 0x7F80_0000)}  # fmt: skip


def overflows(before: Array, src: str, after: Array, dst: str) -> int:
    """How many finite elements of ``before`` are infinite in ``after``, which is its cast.

    Usually there is none. Two integer maxima show that in a fraction of the cast's time, because
    infinities and NaNs have the largest bits of each sign.
    """
    if dst not in _INFINITY or not after.size:
        return 0
    signed, unsigned, bits = _INFINITY[dst]
    negative = bits + (1 << (8 * ITEMSIZE[dst] - 1))
    if after.view(signed).max() < bits and after.view(unsigned).max() < negative:
        return 0
    infinite = (after.view(unsigned) == bits) | (after.view(unsigned) == negative)
    return int(np.count_nonzero(infinite & np.isfinite(values(before, src))))


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
