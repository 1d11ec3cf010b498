"""Images become a dataset (``importing``), and a split becomes batches (``loading``).

Imports no torch: listing and importing start fast.
"""

from tessella.data.doctor import examine, leave_out
from tessella.data.importing import ImportSettings, images, import_images
from tessella.data.unfinished import discard

__all__ = ["ImportSettings", "discard", "examine", "images", "import_images", "leave_out"]
