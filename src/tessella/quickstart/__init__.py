"""The quick starts: the user's way from pictures to a served network, without a download."""

from tessella.quickstart.classification import quickstart
from tessella.quickstart.detection import quickstart as detection_quickstart
from tessella.quickstart.segmentation import quickstart as segmentation_quickstart

__all__ = ["detection_quickstart", "quickstart", "segmentation_quickstart"]
