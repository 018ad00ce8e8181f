"""The command `modepth`: reads arguments, calls the library, prints tables for people and JSON for programs."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from modepth.commands import bench, convert, data, demo, flops, generate, inspect, report, serve, sweep, train
from modepth.commands.table import printable
from modepth.run import DivergedError, Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except Stopped as stop:
        print(f"modepth {options.command}: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print(f"modepth {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who read our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, ImportError, DivergedError, FloatingPointError) as error:
        print(f"modepth {options.command}: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="modepth", description="Mixture-of-Depths for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, flops, data, train, inspect, generate, report, sweep, convert, serve, bench):
        command.add(commands)
    return parser
