"""The database of the store: opened, migrated to the newest schema, its errors as ``JobError``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from tessella.core.errors import JobError, first_line

BUSY_TIMEOUT_MS = 10_000  # transactions last milliseconds: after this long something is wrong
_MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """Short transactions on SQLite (WAL) or whatever SQLAlchemy finds behind a URL.

    Args:
        url: a database URL of SQLAlchemy, ``sqlite:///queue.db`` or ``postgresql+psycopg://…``.

    Raises:
        JobError: the database cannot be opened, is damaged, or is newer than this Tessella.
    """

    def __init__(self, url: str) -> None:
        with self._errors_translated():
            self._engine = create_engine(url)
            self.name = self._engine.url.render_as_string(hide_password=True)
            if self._engine.dialect.name == "sqlite":
                _prepare_sqlite(self._engine)
                self._check_pages()
        self.migrate("head")

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._errors_translated(), Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end, or leaves nothing behind."""
        writing = self._engine.execution_options(writes=True)
        with (
            self._errors_translated(),
            Session(writing, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def migrate(self, revision: str) -> None:
        """Bring the schema to ``revision`` (``head``, ``base`` or an id), in one transaction."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        writing = self._engine.execution_options(writes=True)
        with self._errors_translated(), writing.begin() as connection:
            config.attributes["connection"] = connection
            try:
                if revision == "base":
                    command.downgrade(config, revision)
                else:
                    command.upgrade(config, revision)
            except CommandError as error:
                raise JobError(
                    "the job store has a schema that this Tessella does not know",
                    seen=f"{self.name}: {error}",
                    fix="use the Tessella that wrote it, or a newer one",
                ) from error

    def close(self) -> None:
        self._engine.dispose()

    def _check_pages(self) -> None:
        with self._engine.connect() as connection:
            found = connection.execute(text("PRAGMA quick_check(1)")).scalar_one()
        if found != "ok":
            raise _damaged(self.name, found)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Raise an error of the database as a ``JobError``."""
        try:
            yield
        except IntegrityError:
            raise  # not the database's fault: the caller knows what it tried
        except (DBAPIError, sqlite3.Error) as error:
            seen = first_line(getattr(error, "orig", error))
            name = getattr(self, "name", "")
            if "malformed" in seen or "not a database" in seen:
                raise _damaged(name, seen) from error
            raise JobError(
                "the job store cannot be read or written",
                seen=f"{seen} ({name})",
                fix="check that the database can be reached, that the disk has space and that "
                "no other program holds it locked",
            ) from error
        except (SQLAlchemyError, ImportError) as error:
            if not hasattr(self, "name"):
                raise JobError(
                    "the job store's address cannot be used",
                    seen=first_line(error),
                    fix="give a path, or a URL such as postgresql+psycopg://user@host/name",
                ) from error
            raise


def _damaged(name: str, seen: object) -> JobError:
    return JobError(
        "the job store is damaged",
        seen=f"{seen} ({name})",
        fix="move the file away: a new queue is made; datasets, runs and plans are not in it",
    )


def _prepare_sqlite(engine: Engine) -> None:
    """Set up WAL, foreign keys, and transactions that begin with an explicit BEGIN."""

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would come too late, see below
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer locks before it reads: what it saw free is still free when it takes it.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
