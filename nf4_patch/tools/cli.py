"""``nf4-patch``: the command line, and the only module that prints.

A verb is a click.Command of this module: its options, and a call into a module that is imported when the verb is used, so
that ``nf4-patch --help`` imports neither torch nor the verb. That module knows neither click nor a console. The conventions:

* A command returns a ``report.Report`` and prints nothing. This module writes ``report.as_dict()`` where
  ``--json FILE`` was given (every verb has that option, none declares it), prints ``report.render()`` and exits
  with ``report.exit_code``.
* An option that names a file to write is an ``output.OutputFile``: checked before the work.
* It takes progress from click's context: ``@click.pass_obj`` gives a ``report.Progress``, called as
  ``tell("compiling", 3, 24)``. It appears on stderr.
* A wrong use is a ``click.UsageError``; what cannot be done on this machine, a ``report.NotAvailable``.
"""

from __future__ import annotations

import datetime
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from .. import notices
from ..config import Config, ConfigError
from ..patching.counters import FallbackError
from ..version import __version__
from . import output
from .llama import MODELS, projections
from .report import NotAvailable, Progress, Report, commit, installed_releases, require_gpu, require_patch


class Verbs(click.Group):
    """A click group in the order of this module, whose commands have --json and fail in one line."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(json_option())
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(verb)) for name, verb in self.commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, FallbackError, NotAvailable) as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "nf4_patch").startswith("nf4_patch"):
                raise
            raise click.ClickException(
                f"{error.name} is not installed: pip install '.[bench]' in a checkout of nf4_patch"
            ) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError:
            if code := output.flushed(0):  # stdout took no more: said in one line
                sys.exit(code)
            raise


def summary(verb: click.Command) -> str:
    """What it does, in a sentence."""
    return verb.short_help or verb.help or ""


def json_option() -> click.Option:
    def remember(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
        ctx.meta["nf4_patch.json"] = value

    option = click.Option(["--json", "json_file"], type=output.OutputFile(), expose_value=False, callback=remember)
    option.metavar, option.help = "FILE", "Write the report to FILE as JSON."
    return option


class ProgressBar:
    """A report.Progress on stderr: a bar on a terminal, a line for each new text elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.text = ""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        from rich import progress

        if self.bar is None:
            columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False)]
            columns += [progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
            self.bar = progress.Progress(*columns, console=console(stderr=True), transient=True)
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


@main.command()
@click.option("--unsloth", is_flag=True, help="Import Unsloth too (8 s) instead of judging by its release.")
@click.pass_obj
def doctor(tell: Progress, unsloth: bool) -> Report:
    """What would be patched on this machine, by what, and why not."""
    from . import doctor

    return doctor.examine(unsloth, tell)


CHECKPOINT = click.Path(exists=True, dir_okay=False, path_type=Path)
WHICH_WEIGHTS = "Verify on the 4-bit weights of a saved checkpoint instead of on made ones."


@main.command()
@click.option("--weights", type=CHECKPOINT, metavar="SAFETENSORS", help=WHICH_WEIGHTS)
@click.pass_obj
def verify(tell: Progress, weights: Path | None) -> Report:
    """Compare the kernel with bitsandbytes on this machine, bit for bit."""
    from . import verify

    return verify.verify(weights, tell)


# What follows the script or the module belongs to it, options too, as after ``python``.
@main.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[--report] [--json FILE] (SCRIPT | -m MODULE)",
)
@click.option("-m", "module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--report", is_flag=True, help="At the end print hits, fallbacks with reasons, and advice.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(module: bool, report: bool, arguments: tuple[str, ...]) -> Report:
    """Enable the patch, then run a script or a module."""
    from . import run

    if not arguments:
        file = click.get_current_context().meta.get("nf4_patch.json")
        taken = f" (--json writes to {file})" if file else ""
        raise click.UsageError(f"nothing to run: name a script, or a module with -m{taken}")
    notices.silenced = report  # which says more
    try:
        return run.run(module, arguments, report)
    except OSError as error:
        raise click.UsageError(f"can't open {arguments[0]!r}: {error.strerror}") from error


@main.command(short_help="Measure the kernel next to what it replaces.")
@click.option("--step", type=click.Choice(["peft"]), help="A whole QLoRA training step, the patch on and off, instead.")
@click.pass_obj
def bench(tell: Progress, step: str | None) -> Report:
    """Measure the kernel next to what it replaces: GPU time of a dequantization, and host time of a call."""
    require_gpu()
    require_patch()
    from .bench import dequantize
    from .bench import step as training_step

    return training_step.measure(tell) if step else dequantize.measure(tell)


def shape_of(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        raise click.UsageError(f"--shape {text}: give it as NxK, K a multiple of 64, such as 14336x4096")
    return int(n), int(k)


WHICH_MODEL = "Model whose layer shapes to measure; repeatable.  [default: llama-8b, unless --shape is given]"
WHICH_SHAPE = "A weight of N rows, K columns; repeatable."


@main.command(short_help="Tune the fused matmul for this GPU and save the result.")
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, help=WHICH_MODEL)
@click.option("--shape", "shapes", type=shape_of, multiple=True, metavar="NxK", help=WHICH_SHAPE)
@click.pass_obj
def calibrate(tell: Progress, models: tuple[str, ...], shapes: tuple[tuple[int, int], ...]) -> Report:
    """Measure on this GPU which config of the fused matmul wins, by weight and rows of X, and remember it.

    enable(matmul="auto") then prefers it to the shipped tables, as long as the same releases are installed.
    """
    path = Config.read().calibration
    if path is None:
        raise click.UsageError("NF4_PATCH_CALIBRATION=off: unset it, or name a file")
    require_gpu()
    from .bench import calibrate

    chosen = models or (() if shapes else ("llama-8b",))
    wanted = dict.fromkeys((*(shape for model in chosen for shape in projections(MODELS[model])), *shapes))
    try:
        return calibrate.calibrate(path, list(wanted), tell)
    except (OSError, output.OutputError) as error:
        raise click.ClickException(str(error)) from error
