"""What each operation means, in plain torch, and its row: one file a family."""
