"""The command line: `sol-gym ...`. It parses, calls the library and prints; it decides nothing."""

from __future__ import annotations

import sys

import click

from .. import __version__
from ..errors import SolGymError


class _Group(click.Group):
    """Turns the library's own errors into one line on standard error and exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SolGymError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sol-gym")
def main() -> None:
    """sol_gym: GPU kernels scored against the hardware's Speed-of-Light bound."""


from . import audit, bounds, demo, evaluation, machine, problems, redteam  # noqa: E402

for command in (
    demo.demo,
    evaluation.evaluate,
    bounds.sol,
    bounds.learn_rules,
    audit.audit,
    redteam.redteam,
    problems.problems,
    machine.doctor,
    machine.calibrate,
):
    main.add_command(command)
