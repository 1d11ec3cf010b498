"""What several test files share: a test file imports from here, and from no other test file."""
