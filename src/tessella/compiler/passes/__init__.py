"""The passes, one a file; ``compiler.pipeline`` lists them in order, each with its why."""
