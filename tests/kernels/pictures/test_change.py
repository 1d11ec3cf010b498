"""Pictures turned, coloured and made noisy by the kernel of a GPU, interpreted.

``tests/gpu/test_pictures.py`` has it on one.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.changed import CASES, most_off, off_the_host


@pytest.mark.parametrize("name", list(CASES))
def test_what_a_gpu_makes_is_what_the_host_makes(name: str) -> None:
    assert off_the_host(name, torch.device("cpu")) < most_off(name)
