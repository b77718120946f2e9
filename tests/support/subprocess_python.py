"""A separate interpreter for tests that a process can run only once: import order, environment, silent imports.

The interpreter is forked from a process that has imported the parts of PyTorch that bitsandbytes imports. This saves 6
of the 7 CPU seconds of ``import bitsandbytes``. It also leaves without finalization, which saves another second. It is
started fresh on a GPU machine, with ``fresh``, and with a variable that Python itself reads.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

# Before anything else the kernels are imported under the interpreter, as conftest.py does.
INTERPRETED = "import quick_interpreter\nquick_interpreter.install()\n"
# Of other libraries' kernels too.
EVERY_KERNEL = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "interpreted": True}

# Reads requests, one a line, forks for each and answers its exit code. The child leaves the loop and runs the code, as its
# __main__; then it ends as Python does, less the taking apart.
SERVER = """
import json, os, sys
import torch, triton, torch._dynamo.backends.registry, torch._inductor.compile_fx

def run(code, names, sys=sys, exit=os._exit):
    import atexit, threading, traceback
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), names)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    exit(status)

for request in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
code, folder, path, environment, *outputs = json.loads(request)
for number, name in enumerate((os.devnull, *outputs)):
    os.dup2(os.open(name, os.O_RDWR), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.path[1:1] = path
run(code, globals())
"""


@functools.cache
def server() -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4_") and k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def forked(code: str, folder: Path, path: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        process = server()
        try:
            request = json.dumps([code, str(folder), path, environment, stdout.name, stderr.name])
            print(request, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BaseException:  # a test's time is up: the next one needs another server
            process.kill()
            server.cache_clear()
            raise
        return subprocess.CompletedProcess(code, int(answer), stdout.read(), stderr.read())


def python(
    code: str, *, interpreted: bool = False, path: Path | None = None, cwd: Path | None = None, check: bool = True,
    fresh: bool = False, **environ: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``code`` and return its completed process, with output as text. ``path`` and tests/support come before site-packages."""
    code = INTERPRETED * interpreted + textwrap.dedent(code)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4_") and k != "TRITON_INTERPRET"}
    environment |= environ
    paths = [str(each) for each in (path, Path(__file__).parent) if each is not None]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if fresh or torch.cuda.is_available() or any(name.startswith("PYTHON") for name in environ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd)
    else:
        done = forked(code, cwd or Path.cwd(), paths, environment)
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def script(file: Path, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python file WORDS``."""
    argv = [str(word) for word in (file, *words)]
    code = f"import sys\nsys.argv = {argv!r}\n__file__ = sys.argv[0]\nexec(compile(open(__file__).read(), __file__, 'exec'))"
    return python(code, **options)


def program(name: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run tests/programs/NAME.py."""
    return script(Path(__file__).parents[1] / "programs" / f"{name}.py", *words, **options)


def support(name: str, *words: object, **options: Any) -> list[str]:
    """Return the lines that tests/support/NAME.py prints. It compiles, so no kernel is interpreted."""
    return script(Path(__file__).with_name(f"{name}.py"), *words, **options).stdout.splitlines()


def command(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``nf4-patch WORDS``, and accept any exit code."""
    code = f"from nf4_patch.tools.cli import main\nmain({[str(word) for word in words]!r})"
    return python(code, check=False, **options)
