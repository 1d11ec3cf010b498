"""The room of tasks: what a network can be asked about a picture, or about a volume.

A task is a folder with the same files: ``examples`` (targets on disk and in a dataset), ``head``
(outputs of the network and the plan), ``loss``, ``metrics``, ``answers`` (what a server and a
terminal say) and ``charts`` (what the studio may draw); and
``errors``, where answers err in several ways, and ``tiles``, where those to parts of a picture can
be joined. A new task is a new folder: nothing lists it. docs/tasks.md describes the parts.
"""

from tessella.tasks.block import Block
from tessella.tasks.folders import counted_examples, counted_names, named, names, of, verbs
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Moves, still, turn
from tessella.tasks.pieces import Piece, joined
from tessella.tasks.targets import column_of, for_defaults, targets_of
from tessella.tasks.task import LossSettings, Query, Report, Targets, Task
from tessella.tasks.view import View

__all__ = [
    "Block", "Found", "LossSettings", "Moves", "Piece", "Query", "Report", "Request", "Source",
    "Targets", "Task", "View", "column_of", "counted_examples", "counted_names", "for_defaults",
    "joined", "named", "names", "of", "still", "targets_of", "turn", "verbs",
]  # fmt: skip
