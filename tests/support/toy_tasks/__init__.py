"""Tasks that only tests have, each a folder as those of ``tessella.tasks`` are."""
