"""``nf4-patch``: the command line, and the only module that prints.

A verb is a click.Command of this module: its options, and a call into a module that is imported when the verb is used, so
that ``nf4-patch --help`` imports neither torch nor the verb. That module knows neither click nor a console: it returns a
``report.Report`` and reports progress to a ``report.Progress``. This module writes the report to ``--json FILE`` (every verb
has that option, none declares it), prints it, and exits with its code. A wrong use is a ``click.UsageError``; what cannot be
done on this machine, a ``report.NotAvailable``.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from typing import Any

import click

from ..patching.config import Config, ConfigError
from ..patching.counters import FallbackError
from ..version import __version__
from . import output
from .llama import MODELS, projections
from .report import NotAvailable, Progress, Report, provenance_data, require_gpu, require_patch


class Verbs(click.Group):
    """A click group in the order of this module, whose commands have --json and fail in one line."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        option = click.Option(["--json"], metavar="FILE", help="Write the report to FILE as JSON.")
        option.callback, option.expose_value = remember_file, False
        cmd.params.append(option)
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(200)) for name, verb in self.commands.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno is None or error.filename is not None:  # not of a stream
                raise
            output.say(f"nf4_patch: the output was not written: {error.strerror}")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, FallbackError, NotAvailable, output.OutputError) as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "nf4_patch").startswith("nf4_patch"):
                raise
            raise click.ClickException(f"{error.name} is not installed: pip install {error.name}") from None


def remember_file(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    try:
        ctx.meta["nf4_patch.json"] = None if name is None else output.checked(name)
    except output.OutputError as error:
        raise click.BadParameter(str(error)) from None


class ProgressLine:
    """A report.Progress on stderr: one line that is written over on a terminal, a line for each new text elsewhere."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            output.say(f"\r\033[K{text}{f' {done}/{total}' if total else ''}", end="")
        elif text and text != self.text:
            output.say(text)
        self.text = text

    def clear(self) -> None:
        if self.text:
            self("")


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nf4-patch")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Fused Triton kernels for 4-bit fine-tuning, inside bitsandbytes and Unsloth, with the same bits."""
    ctx.obj = progress = ProgressLine()
    ctx.call_on_close(progress.clear)


@main.result_callback()
@click.pass_context
def finish(ctx: click.Context, report: Any) -> None:
    """Write a verb's JSON, print its report and exit with its code."""
    ctx.obj.clear()
    if file := ctx.meta.get("nf4_patch.json"):
        data = report.as_dict()
        output.write_json(file, data if "machine" in data else data | provenance_data())  # a machine says more
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without the character shows "?" instead of raising
    for text in report.render():
        print(wrapped(text) if terminal and "\n" not in text else text, flush=True)
    sys.exit(report.exit_code)


def wrapped(text: str) -> str:
    """Lines as wide as the terminal, and what is continued indented; a word that is longer stays whole."""
    width = shutil.get_terminal_size().columns
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@main.command()
@click.option("--unsloth", is_flag=True, help="Import Unsloth too (8 s) instead of judging by its release.")
@click.option("-v", "--verbose", is_flag=True, help="Show every function that is or is not replaced, and every kernel.")
@click.pass_obj
def doctor(tell: Progress, unsloth: bool, verbose: bool) -> Report:
    """Would training here gain, what to type for it, and if not, why."""
    from . import doctor

    return doctor.examine(unsloth, tell, verbose)


@main.command()
@click.pass_obj
def verify(tell: Progress) -> Report:
    """Compare the kernel with bitsandbytes on this machine's GPU, bit for bit."""
    require_gpu()
    from . import verify

    return verify.verify(tell)


ALL_RANKS = "Report on every process of a launcher; --json r.json then writes r.rank0.json, r.rank1.json, ..."


# What follows the first word of COMMAND belongs to it, options too, as after ``python``.
@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="COMMAND is a module, as after python -m.")
@click.option("-c", "code", is_flag=True, help="COMMAND is code, as after python -c.")
@click.option("--report", is_flag=True, help="At the end print hits, fallbacks with reasons, and advice on stderr.")
@click.option("--all-ranks", is_flag=True, help=ALL_RANKS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, module: bool, code: bool, report: bool, all_ranks: bool, command: tuple[str, ...]) -> None:
    """Run a command with the patch on, in every Python process that it starts.

    COMMAND is train.py, -m MODULE, python ..., torchrun ..., accelerate launch ... A process reports if it imports
    bitsandbytes; of several processes of a launcher only rank 0 does.
    """
    from . import run

    file = ctx.meta["nf4_patch.json"]
    if not command or not command[0]:
        taken = f" (--json writes to {file})" if file else ""
        raise click.UsageError(f"nothing to run: name a script, a command, or a module with -m{taken}")
    try:
        run.execute([*["-m"] * module, *["-c"] * code, *command], report, file, all_ranks)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from error


@main.command()
@click.option(
    "--step",
    type=click.Choice(["peft", "trl", "compiled", "moe", "unsloth"]),
    default="peft",
    show_default=True,
    help="peft: with and without the patch. trl: these, Liger and Unsloth, what is installed of them. moe: the same of a mixture "
    "of experts. compiled: with compiled layers. unsloth: Unsloth alone.",
)
@click.pass_obj
def bench(tell: Progress, step: str) -> Report:
    """Measure a whole QLoRA training step, with the patch and without it."""
    require_gpu()
    require_patch()
    from .bench import trl

    return trl.measure(step, tell)


def shape_of(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        raise click.UsageError(f"--shape {text}: give it as NxK, K a multiple of 64, such as 14336x4096")
    return int(n), int(k)


WHICH_MODEL = "Model whose layer shapes to measure; repeatable.  [default: llama-8b, unless --shape is given]"
WHICH_SHAPE = "A weight of N rows, K columns; repeatable."


@main.command()
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, help=WHICH_MODEL)
@click.option("--shape", "shapes", type=shape_of, multiple=True, metavar="NxK", help=WHICH_SHAPE)
@click.pass_obj
def calibrate(tell: Progress, models: tuple[str, ...], shapes: tuple[tuple[int, int], ...]) -> Report:
    """Tune the fused matmul for this GPU and save the result.

    What is saved: which config wins, by weight and rows of X. enable(matmul="auto") prefers it to the shipped tables, as long
    as the same releases are installed.
    """
    path = Config.read().calibration
    if path is None:
        raise click.UsageError("NF4_PATCH_CALIBRATION=off: unset it, or name a file")
    require_gpu()
    from .bench import calibrate

    chosen = models or (() if shapes else ("llama-8b",))
    wanted = dict.fromkeys((*(shape for model in chosen for shape in projections(MODELS[model])), *shapes))
    return calibrate.calibrate(path, list(wanted), tell)
