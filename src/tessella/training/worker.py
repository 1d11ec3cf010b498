"""``python -m tessella.training.worker``: a process that torchrun starts (see ``parallel``).

With ``--recipe`` it is a trial of a sweep instead, and trains that recipe on its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import traceback
from pathlib import Path

from tessella.artifacts.run import Recipe, Run
from tessella.core.errors import TessellaError, TrainError
from tessella.core.events import silent
from tessella.core.record import from_plain, parse_json
from tessella.training.loop import train, train_run
from tessella.training.machines import LOST
from tessella.training.parallel import ERROR_FILE, LOG_FILE, end_with_parent, is_lost, joined
from tessella.training.sharing import shared


def main() -> int:
    parser = argparse.ArgumentParser(description="a training process; started by tessella train")
    parser.add_argument("out", type=Path)
    parser.add_argument("--resumed", action="store_true")
    parser.add_argument("--began", type=float, help="when, in seconds since 1970")
    parser.add_argument("--recipe", type=Path)
    arguments = parser.parse_args()
    asked = threading.Event()
    threading.Thread(target=end_with_parent, args=(asked.set,), daemon=True).start()
    try:
        if arguments.recipe is not None:
            plain = parse_json(arguments.recipe.read_bytes(), where=str(arguments.recipe))
            recipe = from_plain(Recipe, plain, where="recipe")
            # every trial steps in the usual way: their scores differ by their settings alone
            train(recipe, arguments.out, resume=True, races=False)
            return 0
        begun = Run(arguments.out)
        with (
            joined(asked.is_set) as world,
            shared(
                world, lambda _: begun.info, begun.path, lambda: (begun, arguments.resumed)
            ) as given,
        ):
            run, resumed = given
            train_run(run, world, resumed=resumed, began=arguments.began, emit=silent)
    except KeyboardInterrupt:  # as the parent asked, which knows
        return 0
    except TessellaError as error:
        _report(arguments.out, error)
        return error.exit_code
    except Exception as error:  # whatever it is, the parent has to be told
        traceback.print_exc()
        process = f"training failed in process {os.environ.get('RANK')}"
        _report(
            arguments.out,
            TrainError(
                LOST if is_lost(error) else process,
                seen=f"{type(error).__name__}: {error}",
                fix=f"read {arguments.out / LOG_FILE}",
            ),
        )
        return 1
    return 0


def _report(out: Path, error: TessellaError) -> None:
    """Write the error for the parent; only the first one, as it makes the other workers fail."""
    draft = out / f".{ERROR_FILE}.{os.getpid()}"
    draft.write_text(json.dumps(error.to_json()))
    try:
        os.link(draft, out / ERROR_FILE)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


if __name__ == "__main__":
    sys.exit(main())
