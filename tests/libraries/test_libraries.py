"""Only the folder of a library in nf4_patch/libraries/ names this library.

Two things count as naming a library: an import, and a string without spaces that the code compares or looks up, such as
the dotted path of a target. Sentences for the user, docstrings and comments may name any library. ``tools`` and
``callback.py`` are left out, because they compare with the libraries, report their releases, or plug into one.
"""

import ast
from pathlib import Path

import pytest

import nf4_patch
from nf4_patch.patching.target import function_at
from nf4_patch.patching.targets import LIBRARIES, MODULES, TARGETS

ROOT = Path(nf4_patch.__file__).parent
# With what a library's paths begin, by its folder
NAMES = {name: name for name in ("accelerate", "bitsandbytes", "peft", "transformers", "unsloth")} | {
    "liger": "liger_kernel"
}
ALLOWED = {
    ("__init__.py", "bitsandbytes"),  # bitsandbytes' entry point asks whether bitsandbytes is there
    *(("libraries/__init__.py", library) for library in NAMES),  # it lists the folders
}


def texts(tree):
    """Yield the strings of a module except docstrings, and where they are. The parts of an f-string are joined."""
    docs = {
        id(node.body[0].value) for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None
    }  # fmt: skip
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values), node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | inner):
            yield node.value, node.lineno


def names_in(tree):
    """Yield the dotted paths that a module imports, reads as attributes of torch.ops, or has as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
            yield node.attr, node.lineno
    yield from ((text, line) for text, line in texts(tree) if " " not in text)


def found(source, folder=""):
    """Return where a module names a library other than the library of its folder.

    A path belongs to the library with which it begins: ``transformers.integrations.peft`` is transformers' module.
    """
    where = []
    for text, line in names_in(ast.parse(source)):
        words = text.lower()
        named = [library for library, name in NAMES.items() if words.startswith(name)]
        named = named or [library for library, name in NAMES.items() if name in words]
        where += [(each, text, line) for each in named if each != folder and not words.startswith(".libraries.")]
    return where


LIST = ROOT / "libraries" / "__init__.py"  # lists the folders
FILES = sorted(
    path for path in ROOT.rglob("*.py") if "examples" not in path.parts and path.name != "callback.py" and path != LIST
)


@pytest.mark.parametrize("path", [path.relative_to(ROOT) for path in FILES if "tools" not in path.parts], ids=str)
def test_a_library_is_named_in_its_folder_only(path):
    folder = path.parts[1] if path.parts[0] == "libraries" and len(path.parts) > 2 else ""
    where = found((ROOT / path).read_text(), folder)
    assert [each for each in where if (str(path), each[0]) not in ALLOWED] == []


@pytest.mark.parametrize(
    ("source", "library"),
    [
        ("import peft.tuners", "peft"), ("def f():\n    from transformers import activations", "transformers"),
        ('x = sys.modules["bitsandbytes.nn"]', "bitsandbytes"), ('y = f"{x}.unsloth_zoo"', "unsloth"),
        ("torch.ops.bitsandbytes.gemm_4bit(x)", "bitsandbytes"), ('os.environ["UNSLOTH_COMPILE_LOCATION"]', "unsloth"),
        ('Target("liger_kernel.transformers.swiglu:LigerExperts.forward")', "liger"),
    ],
)  # fmt: skip
def test_what_counts_as_a_name(source, library):
    assert library in {each for each, *_ in found(source)}


def test_prose_is_no_name():
    assert found('"""peft and Unsloth."""\nprint("Upgrade peft")  # transformers\nfrom ..unsloth import MODULE') == []


def test_the_tables_name_all_that_is_replaced():
    """Each row is in its library's table.

    The replacement's path names the library, or belongs to the cache, which names no library.
    """
    assert [target for library in LIBRARIES for target in library.targets] == TARGETS
    assert sum(len(library.modules) for library in LIBRARIES) == len(MODULES)
    for target in TARGETS:
        assert target.replace.startswith((".libraries.", ".cache.replacements:")), target.name
        assert callable(function_at(target.replace))
        if target.timed:
            assert callable(function_at(target.timed))
