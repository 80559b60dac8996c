"""Element types, under the names that safetensors gives them.

Moving needs the bytes per element and nothing else. Only casts and statistics need values; they are
in ``move/cast.py`` and ``inspect.py``, which import NumPy.
"""

from __future__ import annotations

from ..errors import CheckpointError

# One entry per type that a whole number of bytes holds. Sub-byte types (F4, F6)
# have no byte address per element, so a strided view cannot name them.
ITEMSIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
    "C128": 16,
}  # fmt: skip

# torch attribute name -> our name
FROM_TORCH: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16",
    "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
TO_TORCH: dict[str, str] = {ours: torch for torch, ours in FROM_TORCH.items()}

# The types that ``--dtype`` casts from and to; everything else is moved as it is.
CASTABLE = ("F64", "F32", "F16", "BF16")
HALF = ("BF16", "F16")  # which optimizers keep fp32 masters of

_SPELLINGS = {
    "fp64": "F64", "float64": "F64", "double": "F64",
    "fp32": "F32", "float32": "F32", "float": "F32",
    "fp16": "F16", "float16": "F16", "half": "F16",
    "bf16": "BF16", "bfloat16": "BF16",
}  # fmt: skip


def dtype_named(text: object) -> str:
    """``bf16``, ``bfloat16``, ``torch.bfloat16`` or ``BF16`` -> ``BF16``; others as they are."""
    key = str(text).strip().removeprefix("torch.")
    return _SPELLINGS.get(key.lower(), key.upper())


def parse_dtype(text: str) -> str:
    """A type that ``--dtype`` casts to; CheckpointError for any other."""
    dtype = dtype_named(text)
    if dtype not in CASTABLE:
        known = ", ".join(sorted(_SPELLINGS))
        raise CheckpointError(f"--dtype {text}: not a type to cast to; choose one of {known}")
    return dtype
