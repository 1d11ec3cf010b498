"""``python -m tessella``: the same as the ``tessella`` command."""

from tessella.cli import main

main()
