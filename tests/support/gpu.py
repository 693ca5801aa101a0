"""Devices that tests run on: the CPU always, and CUDA where there is a GPU."""

from __future__ import annotations

import pytest
import torch

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED HERE: copies to CUDA need an NVIDIA GPU"
)

DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
