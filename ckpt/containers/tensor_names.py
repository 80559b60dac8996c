"""The tensors inside a decoded pickle, named by their place in it.

Shared by the two forms of ``torch.save``: torch_zip.py and torch_legacy.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import CheckpointError
from ..model.dtypes import ITEMSIZE
from ..model.file_layout import Entry
from .pickles import Global, TensorRef, short

MAX_DEPTH = 64  # dicts and lists inside each other; Megatron's optimizer state has 6
MAX_NAME = 4_096  # characters of a joined name


def tensors(path: str, root: object, budget: int) -> dict[str, TensorRef]:
    """The tensors inside dicts, lists and tuples, in order, under their joined keys.

    ``budget`` limits the values that are visited: a few lists that hold each other twice make a
    huge tree. A shared dict, which is allowed, costs at least one byte of the file.
    """
    found: dict[str, TensorRef] = {}
    todo: list[tuple[str, object, int]] = [("", root, 0)]
    while todo:
        name, value, depth = todo.pop()
        if type(value) is TensorRef:
            if name in found:
                raise CheckpointError(f"{path}: two tensors whose place reads {short(name)}")
            found[name] = value
            continue
        children = _children(value)
        budget -= len(children)
        if budget < 0 or depth > MAX_DEPTH:
            raise CheckpointError(
                f"{path}: {short(name)}: values inside each other more than {MAX_DEPTH} deep, or "
                "without end"
            )
        for key, child in reversed(children):
            if type(child) in (TensorRef, dict, list, tuple):
                todo.append((_joined(path, name, key, depth), child, depth + 1))
    return found


def _children(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _joined(path: str, name: str, key: object, depth: int) -> str:
    text = f"{name}.{key_text(key)}" if depth else key_text(key)
    if len(text) > MAX_NAME or not _is_unicode(text):
        raise CheckpointError(
            f"{path}: {short(text)} is no name of a tensor: over {MAX_NAME} characters, or no "
            "Unicode"
        )
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file name or JSON can hold
        return False
    return True


def key_text(key: object) -> str:
    """A dict key as part of a name: ``(torch.bfloat16, torch.float32)`` as Megatron spells it."""
    if isinstance(key, str):
        return key
    if isinstance(key, Global):
        return key.path
    if isinstance(key, tuple):
        parts = (key_text(part) if isinstance(part, tuple) else short(part) for part in key)
        return f"({', '.join(parts)})"
    return short(key)


def extra(path: str, root: object) -> dict[str, object]:
    """The top-level values that are not tensors themselves."""
    if type(root) is TensorRef:
        return {}
    if not isinstance(root, (dict, list, tuple)):
        return {"": root}
    found: dict[str, object] = {}
    for key, value in _children(root):
        text = key_text(key)
        if text in found:
            raise CheckpointError(f"{path}: two values whose key reads {short(text)}")
        if type(value) is not TensorRef:
            found[text] = value
    return found


def no_tensors(extra: Mapping[str, object]) -> list[str]:
    """The keys whose values hold something else than tensors, and containers of them."""
    return [key for key, value in extra.items() if _holds_values(value)]


def _holds_values(value: object) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, (dict, list, tuple)):
            todo += [child for _, child in _children(item)]
        elif type(item) is not TensorRef:
            return True
    return False


def entry(path: str, name: str, view: TensorRef, storage_bytes: int) -> Entry:
    """A tensor as bytes of the file, once all of it lies inside its storage.

    ``storage_bytes`` is where the storage starts in the file.
    """
    itemsize = ITEMSIZE[view.dtype]
    holds = view.storage.numel * ITEMSIZE[view.storage.dtype]
    first = stop = view.offset_elems if 0 not in view.shape else 0  # an empty one lies anywhere
    if 0 not in view.shape:
        stop += 1 + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    if stop * itemsize > holds or math.prod(view.shape) * itemsize >= 2**63:
        raise CheckpointError(
            f"{path}: {name}: offset {view.offset_elems}, shape {view.shape} and strides "
            f"{view.strides} of {view.dtype} reach byte {stop * itemsize} of a storage of {holds}"
        )
    offset = storage_bytes + first * itemsize
    return Entry(name, view.dtype, view.shape, view.strides, offset)
