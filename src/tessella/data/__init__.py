"""Images become a dataset (``importing``), and a split becomes batches (``loading``).

Imports no torch: listing and importing start fast.
"""

from tessella.data.importing import ImportSettings, images, import_images

__all__ = ["ImportSettings", "images", "import_images"]
