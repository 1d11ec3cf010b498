"""The snippets of docs/add-a-kernel.md, docs/add-an-operation.md and docs/add-a-network.md."""
