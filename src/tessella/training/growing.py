"""Progressive resizing: a training begins with small, cheap images and ends with whole ones.

Howard's entry to DAWNBench (2018) and Touvron et al. (2019) are the sources. The size is a function
of the progress alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella.core.errors import UsageError

SIZES = 5  # different small ones: a library measures its algorithms for each anew
WHOLE_FROM = 0.75  # of the training: a network has to get used to what it will see


def share_of_side(grow_from: float, progress: float) -> float:
    """The side of the images as a share of the whole one, at a progress from 0 to 1."""
    reached = min(int(SIZES * progress / WHOLE_FROM + 1e-9), SIZES)
    return grow_from + (1 - grow_from) * reached / SIZES


def resized(images: Tensor, share: float) -> Tensor:
    """Images [N, C, H, W] with sides of this share, as a camera with fewer pixels sees them."""
    if share == 1:
        return images
    size = [max(1, round(side * share)) for side in images.shape[-2:]]
    small = F.interpolate(images, size, mode="bilinear", antialias=True)
    on_end = images.is_contiguous(memory_format=torch.channels_last)  # the layout of a GPU's
    return small.contiguous(memory_format=torch.channels_last) if on_end else small


def require_any_size(module: nn.Module, shape: tuple[int, ...], grow_from: float) -> None:
    """Refuse a network that takes images of one size alone.

    Args:
        shape: channels, height and width of a whole image.
    """
    device = next(module.parameters()).device
    image = resized(torch.zeros(1, *shape, device=device), grow_from)
    was = module.training
    try:
        with torch.no_grad():
            module.eval()(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(
            "the network does not take smaller images, so it cannot begin with them",
            seen=f"{list(image.shape)}: {str(error)[:200]}",
            fix="leave grow_from out, use a larger share, or a network that pools at its end",
        ) from error
    finally:
        module.train(was)
