"""bf16 matrices, fp32 products: the one place that knows how, for the learner's loss and the teacher's head.

A bf16 product would round a logit near 20 by up to 0.06, which biases a divergence by several per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_fp32_precision(precision: str) -> str:
    """Set how oneDNN multiplies fp32 matrices on a CPU, `ieee` or `bf16`; give what was set before.

    `bf16` rounds the operands (exact where they were bf16 before), runs on the bf16 units, and adds up and answers in
    fp32.
    """
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue] - made when torch is imported
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    return before


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """Set it for a while; see `set_fp32_precision`."""
    before = set_fp32_precision(precision)
    try:
        yield
    finally:
        set_fp32_precision(before)
