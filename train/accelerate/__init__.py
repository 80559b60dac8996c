"""The API of Hugging Face Accelerate, on our engine."""

import os

# With this variable Accelerate would import Megatron-LM for an engine of its own.
_asks = os.environ.pop("ACCELERATE_USE_MEGATRON_LM", None)
import accelerate.utils  # noqa: E402, F401

if _asks is not None:
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = _asks
