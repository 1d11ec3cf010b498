"""Finding the fastest kernel: every one that fits is run, timed, and its answer is checked."""
