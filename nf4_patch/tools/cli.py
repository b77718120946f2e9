"""``nf4-patch``: the command line, and the only module that prints.

A verb is a row of VERBS. Its command is a click.Command that is imported when the verb is used, so that
``nf4-patch --help`` imports neither torch nor the verb. The conventions of a command:

* It returns a ``report.Report`` and prints nothing. This module writes ``report.as_dict()`` where
  ``--json FILE`` was given (every verb has that option, none declares it), prints ``report.render()`` and exits
  with ``report.exit_code``.
* An option that names a file to write is an ``output.OutputFile``: checked before the work.
* It takes progress from click's context: ``@click.pass_obj`` gives a ``report.Progress``, called as
  ``tell("compiling", 3, 24)``. It appears on stderr.
* A wrong use is a ``click.UsageError``; what cannot be done on this machine, a ``report.NotAvailable``.

The verbs of this module call a function of a module of the same name, which knows neither click nor a console.
"""

from __future__ import annotations

import datetime
import importlib
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import click

from .. import notices
from ..config import Config, ConfigError
from ..patching.counters import FallbackError
from ..version import __version__
from . import output
from .report import NotAvailable, commit, installed_releases


class Verb(NamedTuple):
    command: str  # "module:attribute" of its click.Command
    help: str


VERBS = {
    "doctor": Verb("nf4_patch.tools.cli:doctor", "What would be patched on this machine, by what, and why not."),
    "verify": Verb("nf4_patch.tools.cli:verify", "Compare the kernel with bitsandbytes on this machine, bit for bit."),
    "run": Verb("nf4_patch.tools.cli:run", "Enable the patch, then run a script or a module."),
    "demo": Verb("nf4_patch.tools.cli:demo", "Fine-tune a small QLoRA model without and with the patch."),
    "bench": Verb("nf4_patch.tools.bench.command:command", "Measure the kernel next to what it replaces."),
    "calibrate": Verb(
        "nf4_patch.tools.bench.calibrate:command", "Tune the fused matmul for this GPU and save the result."
    ),
}


class Verbs(click.Group):
    """A click group that walks VERBS and imports a verb when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = super().get_command(ctx, name)  # of run_alone
        if command is None:
            if name not in VERBS:
                return None
            module, attribute = VERBS[name].command.split(":")
            command = getattr(importlib.import_module(module), attribute)
            command.help = command.help or VERBS[name].help
        if not any(parameter.name == "json_file" for parameter in command.params):
            command.params.append(json_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, FallbackError, NotAvailable) as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "nf4_patch").startswith("nf4_patch"):
                raise
            raise click.ClickException(
                f"{error.name} is not installed: pip install '.[demo]' in a checkout of nf4_patch"
            ) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError:
            if code := output.flushed(0):  # stdout took no more: said in one line
                sys.exit(code)
            raise


def json_option() -> click.Option:
    def remember(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
        ctx.meta["nf4_patch.json"] = value

    return click.Option(
        ["--json", "json_file"], type=output.OutputFile(), metavar="FILE",
        expose_value=False, callback=remember, help="Write the report to FILE as JSON.",
    )  # fmt: skip


class ProgressBar:
    """A report.Progress on stderr: a bar on a terminal, a line for each new text elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.text = ""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        from rich import progress

        if self.bar is None:
            self.bar = progress.Progress(
                progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn(),
                console=console(stderr=True), transient=True,
            )  # fmt: skip
            self.bar.add_task(text)
        if self.bar.console.is_terminal:
            self.bar.start()
            self.bar.update(self.bar.task_ids[0], description=text, completed=done, total=total)
        elif text != self.text:
            self.bar.console.print(text)
        self.text = text

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def console(stderr: bool = False) -> Any:
    """A rich console that prints strings as they are; outside a terminal wide enough for every table."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.closed:
        stream.reconfigure(errors="replace")  # an encoding without the character shows "?" instead of raising
    result = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not result.is_terminal:
        result.width = 120
    return result


def wrapped(text: str, width: int) -> str:
    """At words, what is continued two columns further in; a longer word stays whole."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines.append(
            textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nf4-patch")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Fused Triton kernels for 4-bit fine-tuning, inside bitsandbytes and Unsloth, with the same bits."""
    notices.silenced = ctx.invoked_subcommand != "run"
    ctx.obj = progress = ProgressBar()
    ctx.call_on_close(progress.stop)


@main.result_callback()
@click.pass_context
def finish(ctx: click.Context, report: Any) -> None:
    """Write a verb's JSON, print its report and exit with its code."""
    ctx.obj.stop()
    if file := ctx.meta.get("nf4_patch.json"):
        data = report.as_dict()
        if "machine" not in data:  # which says as much and more
            data |= {"releases": installed_releases(), "date": datetime.date.today().isoformat(), "commit": commit()}
        text = json.dumps(data, indent=2, default=str) + "\n"
        output.write(file, lambda path: path.write_text(text, encoding="utf-8"))
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
        out = console()
        try:
            for renderable in report.render():
                if isinstance(renderable, str):
                    out.print(wrapped(renderable, out.width) if out.is_terminal else renderable, soft_wrap=True)
                else:
                    out.print(renderable)
        except OSError as error:
            sys.exit(output.lost(error))
    sys.exit(output.flushed(report.exit_code))


def run_alone(command: click.Command, invocation: str) -> None:
    """Run a command that is no verb as one, with --json, progress and errors in one line: a benchmark, a script.

    Args:
        invocation: how it is called, e.g. "python -m benchmarks.challenge".
    """
    program, _, name = invocation.rpartition(" ")
    main.add_command(command, name)
    main([name, *sys.argv[1:]], prog_name=program)


@click.command()
@click.option("--unsloth", is_flag=True, help="Import Unsloth too (8 s) instead of judging by its release.")
@click.pass_obj
def doctor(tell: ProgressBar, unsloth: bool) -> Any:
    from . import doctor

    return doctor.examine(unsloth, tell)


@click.command()
@click.option("--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SAFETENSORS",
              help="Verify on the 4-bit weights of a saved checkpoint instead of on made ones.")  # fmt: skip
@click.pass_obj
def verify(tell: ProgressBar, weights: Path | None) -> Any:
    from . import verify

    return verify.verify(weights, tell)


class PassThrough(click.Command):
    """What follows the script or ``-m MODULE`` belongs to it, options too, as after ``python``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {name for option in self.params if isinstance(option, click.Option) and not option.is_flag
                      for name in option.opts}  # fmt: skip
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            word = args[index]
            index += 2 if word in with_value else 1
            if word.startswith("-m"):
                break
        if index > len(args):  # the last option lacks its value, which click says
            return super().parse_args(ctx, args)
        rest = args[index + 1 :] if args[index : index + 1] == ["--"] else args[index:]
        return super().parse_args(ctx, [*args[:index], "--", *rest])


@click.command(cls=PassThrough, options_metavar="[--report] [--json FILE] (SCRIPT | -m MODULE)")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.option("--report", is_flag=True, help="At the end print hits, fallbacks with reasons, and advice.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(module: str | None, report: bool, arguments: tuple[str, ...]) -> Any:
    from . import run

    if module is None and not arguments:
        file = click.get_current_context().meta.get("nf4_patch.json")
        taken = f" (--json writes to {file})" if file else ""
        raise click.UsageError(f"nothing to run: name a script, or a module with -m{taken}")
    notices.silenced = report  # which says more
    try:
        return run.run(module, arguments, report)
    except OSError as error:
        raise click.UsageError(f"can't open {arguments[0]!r}: {error.strerror}") from error


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps of training.")
@click.option("--size", type=click.Choice(["tiny", "small", "large"]), help="Default: large with a GPU, small without.")
@click.option("--png", type=output.OutputFile(), default="nf4-patch-demo.png",
              show_default=True, help="Where the picture goes.")  # fmt: skip
@click.pass_obj
def demo(tell: ProgressBar, steps: int, size: str | None, png: Path) -> Any:
    if Config.read().forbidden:
        raise click.UsageError(
            "NF4_PATCH=0 or NF4_USE_TRITON=0 keeps the patch off, and the demo compares training with and without it: "
            "unset the variable"
        )
    from . import demo

    return demo.demo(steps, size, png, tell)
