"""The command line ``nf4-patch``.

Each command imports the module of the same name only when the command runs, so that ``--help`` does not import torch.
The modules of doctor and verify use neither click nor the console. They return a ``report.Report``, and call a
``report.Progress``.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from ..patching.config import ConfigError
from ..patching.counters import FallbackError
from ..version import __version__
from . import output
from .report import NotAvailable, Progress, Report, provenance_data, require_gpu, require_patch


class Verbs(click.Group):
    """A click group that lists commands in order of definition, adds --json to each, and prints errors in one line."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        option = click.Option(
            ["--json"], type=output.OutputFile(), metavar="FILE", help="Write the report to FILE as JSON.",
            callback=remember_file, expose_value=False,
        )  # fmt: skip
        cmd.params.append(option)
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(200)) for name, verb in self.commands.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno is None or error.filename is not None:  # the error is not about stdout or stderr
                raise
            output.say(f"nf4_patch: the output could not be written: {error.strerror}")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, FallbackError, NotAvailable) as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "nf4_patch").startswith("nf4_patch"):
                raise
            raise click.ClickException(f"{error.name} is not installed: pip install {error.name}") from None


def remember_file(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    ctx.meta["nf4_patch.json"] = file


class ProgressLine:
    """A report.Progress on stderr. It overwrites a single line on a terminal, and writes a line per new text into a file."""

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
    """Faster QLoRA training in less GPU memory, for peft, TRL and Unsloth, with one line of code."""
    ctx.obj = progress = ProgressLine()
    ctx.call_on_close(progress.clear)


@main.result_callback()
@click.pass_context
def finish(ctx: click.Context, report: Any) -> None:
    """Write a command's report as JSON, print the report, and exit with its code."""
    ctx.obj.clear()
    if file := ctx.meta.get("nf4_patch.json"):
        data = report.as_dict()
        # A benchmark's report already has its provenance under "machine". Add the provenance to other reports.
        output.write_json(file, data if "machine" in data else data | provenance_data())
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # prints "?" for a character that the encoding lacks
    for text in report.render():
        print(wrapped(text) if terminal and "\n" not in text else text, flush=True)
    sys.exit(report.exit_code)


def wrapped(text: str) -> str:
    """Wrap a text to the width of the terminal without breaking words, and indent its continuation lines."""
    width = shutil.get_terminal_size().columns
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@main.command()
@click.option("--unsloth", is_flag=True, help="Import Unsloth too, which takes 8 s, instead of judging by its release.")
@click.option("-v", "--verbose", is_flag=True, help="Show every target, replaced or not, and every kernel.")
@click.option("--offload", metavar="MODEL", help="Also say what offload= a model needs, by its name or folder.")
@click.option(
    "--measure", metavar="[MODEL]", is_flag=False, flag_value="", help="Instead, time training steps on this GPU with "
    "and without the patch, in two minutes. MODEL is the name or folder of a dense model, by default Llama-3.1-8B.",
)  # fmt: skip
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True, help="Layers to measure, if they fit.")
@click.pass_obj
def doctor(
    tell: Progress, unsloth: bool, verbose: bool, offload: str | None, measure: str | None, layers: int
) -> Report:  # fmt: skip
    """Say whether training on this machine would get faster, and what to type, or why not."""
    if offload == "":
        raise click.UsageError("--offload needs the name or folder of a model")
    if measure is not None:
        if offload:
            raise click.UsageError("--measure and --offload are two questions. Ask one at a time")
        if unsloth:
            raise click.UsageError("--measure times peft's layers, which --unsloth would patch. Use one of the two")
        require_gpu()
        require_patch()
        from . import measure as measuring

        return measuring.measure(measure, layers, tell)
    from . import doctor

    return doctor.examine(unsloth, tell, verbose, offload or "")


@main.command()
@click.pass_obj
def verify(tell: Progress) -> Report:
    """Compare the kernel with bitsandbytes on this machine's GPU, bit for bit."""
    require_gpu()
    from . import verify

    return verify.verify(tell)


ALL_RANKS = "Report every process of a launcher. --json r.json then writes r.rank0.json, r.rank1.json, ..."


# Options after the first word of COMMAND belong to COMMAND, not to ``nf4-patch run``, as with ``python``.
@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="COMMAND is a module, as in python -m.")
@click.option("-c", "code", is_flag=True, help="COMMAND is code, as in python -c.")
@click.option("--fast", is_flag=True, help='Turn on every option that needs no decision, as enable("fast") does.')
@click.option(
    "--report",
    is_flag=True,
    help="At the end, print to stderr what ran in the kernel, what each option did, and what to change.",
)
@click.option("--all-ranks", is_flag=True, help=ALL_RANKS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, module: bool, code: bool, fast: bool, report: bool, all_ranks: bool, command: tuple[str, ...]
) -> None:  # fmt: skip
    """Run a command with the patch on, in every Python process that it starts.

    COMMAND can be train.py, -m MODULE, python ..., torchrun ..., or accelerate launch ... With --report or --json, each
    process that imports bitsandbytes reports. Of the processes of a launcher such as torchrun, only rank 0 reports,
    unless --all-ranks is given.
    """
    from . import run

    file = ctx.meta["nf4_patch.json"]
    if not command or not command[0]:
        taken = f" (--json took {file} as its file)" if file else ""
        raise click.UsageError(f"no command to run. Name a script, a command, or a module with -m{taken}")
    try:
        run.execute([*["-m"] * module, *["-c"] * code, *command], fast, report, file, all_ranks)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from error
