"""`python -m opd.run RECIPE`: the entry, and the one place where the parts are put together.

recipe + --set ──► RunConfig ──► Plan (checks everything, starts nothing; --dry-run ends here)
                                  └──► run folder ──► Ray ──► teacher engines, learner ranks ──► loop.train
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from opd.config import RunConfig
from opd.device import HostProfile
from opd.errors import CheckpointError, ParityError, RolloutError, ScoringError, WorkerLost
from opd.recipes import config_json, keys_table, load_recipe, override

log = logging.getLogger(__name__)
FAILURES = (
    WorkerLost, ScoringError, RolloutError, ParityError, CheckpointError, FloatingPointError, ImportError, OSError
)  # fmt: skip
"""What ends a run that was rightly set up; ours say whom it concerns."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit status: 0 done, 1 the run failed, 2 a wrong setting, 130 interrupted."""
    args = _parser().parse_args(argv)
    try:
        return _main(args)
    except BrokenPipeError:  # `opd --list-keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted before the run began", file=sys.stderr)
        return 130
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opd", description="Distil a teacher into a student, as a recipe says.", allow_abbrev=False
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="a Python file with recipe(host), as recipes/*.py")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    parser.add_argument("--run-name", metavar="NAME", help="name of the run folder (default: the recipe's)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--list-keys", action="store_true", help="print every setting with type, default and help")
    return parser


def _main(args: argparse.Namespace) -> int:
    if args.list_keys:
        print(keys_table(shutil.get_terminal_size((120, 24)).columns))
        return 0
    if args.recipe is None:
        raise ValueError("name a recipe, as recipes/gkd_offpolicy.py; --help shows the options")
    host = HostProfile.detect()
    names = [f"name={args.run_name}"] if args.run_name else []
    config = override(load_recipe(args.recipe, host), [*args.set, *names])
    _quiet_libraries()

    from opd.plan import make_plan  # loads transformers, which takes seconds: after the settings are known to be right

    plan = make_plan(config, host)
    if args.dry_run:
        print(plan.describe())
        return 0
    from opd.session import run

    folder = new_run_folder(config)
    plan.data.refused.write(folder / "refused_rows.jsonl")
    outcome = asyncio.run(run(plan, folder))
    return 130 if outcome.stopped else 0


def new_run_folder(config: RunConfig) -> Path:
    """Make the run's folder with `config.json` in it; a name that is taken gets the next free number."""
    number = 1
    while True:
        name = config.name if number == 1 else f"{config.name}-{number}"
        folder = config.output_dir / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ValueError(
                f"output_dir is {str(config.output_dir)!r}, where no folder can be made ({error.strerror}); "
                "use --set output_dir=PATH"
            ) from error
        (folder / "config.json").write_text(config_json(config.model_copy(update={"name": name})))
        return folder


def _quiet_libraries() -> None:
    """Keep progress bars and notices of libraries off the screen; warnings of ours come through `progress`."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
