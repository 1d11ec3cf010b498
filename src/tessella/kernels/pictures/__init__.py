"""Pictures on a GPU: from a JPEG's planes to the pixels that the host's decoder would have made."""
