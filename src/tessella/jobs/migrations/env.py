"""Alembic's entry: runs the revisions on the connection that ``jobs.database`` passes."""

from alembic import context

from tessella.jobs.tables import Table

connection = context.config.attributes["connection"]
# One transaction is open around all revisions: SQLite can roll back DDL, Alembic assumes it cannot.
context.configure(
    connection=connection,
    target_metadata=Table.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
