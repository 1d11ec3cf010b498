"""What the operations are, apart from any kernel: one row each, and what their operands must be."""
