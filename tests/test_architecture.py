"""The house's contract, held by tests: where imports may point, what files may be called."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessella.cli import VERBS
from tessella.core import errors
from tessella.core.architectures import ARCHITECTURES

SOURCE = Path(__file__).parent.parent / "src" / "tessella"
MODULES = sorted(SOURCE.rglob("*.py"))

CONTRACTS = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
# From the top down; rooms on one line are siblings and do not know each other.
LAYERS = [line.split(" | ") for line in CONTRACTS[0]["layers"]]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FORBIDDEN = {
    source.partition(".")[2]: {room.partition(".")[2] for room in contract["forbidden_modules"]}
    for contract in CONTRACTS
    if contract["type"] == "forbidden"
    for source in contract["source_modules"]
}
MOST_PARAMETERS = 20
TESTS = Path(__file__).parent
VAGUE = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "base", "new"}


@pytest.fixture(autouse=True, scope="module")
def no_collection() -> Iterator[None]:
    """A million nodes of trees are kept, and looking through them takes two thirds of the time."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def functions_of(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, Function)]


def own_imports(
    statements: list[ast.stmt], *, hidden: bool = False
) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Every import of our own code that runs, the room that it reaches for, and whether it stands
    in a function.
    """
    for node in statements:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module == "tessella":
                names = [f"tessella.{a.name}" for a in node.names]
            else:
                names = [node.module or ""]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield from ((node, n.split(".")[1], hidden) for n in names if n.startswith("tessella."))
        for block in ("body", "orelse", "handlers", "cases", "finalbody"):
            inner = hidden or isinstance(node, Function)
            yield from own_imports(getattr(node, block, []), hidden=inner)


def test_imports_point_down_and_none_hide_in_functions() -> None:
    for path in MODULES:
        room = room_of(path)
        for node, target, hidden in own_imports(tree_of(path).body):
            where = f"{path.relative_to(SOURCE)}:{node.lineno}"
            assert not hidden, f"{where} hides an import inside a function"
            if room in LEVEL and target in LEVEL:
                assert target == room or LEVEL[target] > LEVEL[room], (
                    f"{where}: {room} may not import {target}"
                )
            assert target not in FORBIDDEN.get(room, set()), (
                f"{where}: {room} must not know {target}"
            )


def test_what_tests_share_lies_in_support() -> None:
    """tests/attack is a command, with modules of its own."""
    for path in TESTS.rglob("*.py"):
        here = "tests.attack." if path.parent.name == "attack" else "tests.support."
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute here"
                names = [f"{node.module}.{a.name}" for a in node.names]
            else:
                continue
            for name in (n for n in names if n.startswith("tests")):
                where = f"{path.relative_to(TESTS)}:{node.lineno} imports {name}"
                assert name.startswith((here, "tests.support.")), f"{where}: put it into support"
                assert not re.search(r"\.(test_|conftest)", name), f"{where}: put it into support"


def test_tests_lie_in_the_rooms_of_what_they_test() -> None:
    rooms = {p.name for p in TESTS.iterdir() if (p / "__init__.py").exists()}
    assert rooms - {"attack", "examples", "gpu", "support"} <= {room_of(p) for p in MODULES}


def test_every_room_has_its_level() -> None:
    rooms = {room_of(p) for p in MODULES} - {"__init__", "__main__"}
    assert rooms == set(LEVEL)


def test_every_family_of_kernels_is_independent_of_the_others() -> None:
    """``shared`` and ``epilogue`` are what several of them need."""
    (families,) = (c["modules"] for c in CONTRACTS if c["name"].startswith("Families of kernels"))
    folders = {p.parent.name for p in (SOURCE / "kernels").glob("*/__init__.py")}
    assert {name.rpartition(".")[2] for name in families} == folders - {"shared", "epilogue"}


def test_no_file_has_a_name_that_explains_nothing() -> None:
    assert [str(p) for p in MODULES if p.stem in VAGUE or re.search(r"[a-z]2$", p.stem)] == []


def test_every_module_says_its_place() -> None:
    silent = [
        str(p.relative_to(SOURCE))
        for p in MODULES
        if p.read_text().strip() and not ast.get_docstring(tree_of(p))
    ]
    assert silent == []


def test_the_error_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    classes = {
        name
        for name, c in vars(errors).items()
        if inspect.isclass(c) and issubclass(c, errors.TessellaError)
    }
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"\b([A-Z]\w+)\b(?=\s{2,})|[├└]── (\w+)", errors.__doc__))
    assert classes == {a or b for a, b in drawn}


def test_every_verb_has_its_file() -> None:
    files = {p.stem for p in (SOURCE / "cli").glob("*.py")} - {
        "__init__",
        "device",
        "output",
        "parsing",
        "tables",
    }
    assert files == set(VERBS)


COMPILED = re.compile(r"(triton|gluon)\.(jit|constexpr_function)\b")  # code of Triton and Gluon


def is_device_code(function: Function) -> bool:
    return any(COMPILED.match(ast.unparse(decorator)) for decorator in function.decorator_list)


def missing_annotations(function: Function) -> list[str]:
    """Its arguments without a type, but for a method's own, and ``return`` for its result."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    arguments += [a for a in (given.vararg, given.kwarg) if a is not None]
    bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    return bare if function.returns is not None else [*bare, "return"]


@pytest.mark.parametrize("room", ["device", "kernels"])
def test_functions_beside_device_code_are_typed(room: str) -> None:
    """mypy does not ask for types there, since functions for the GPU have none."""
    untyped = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {', '.join(missing)}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for node in functions_of(path)
        if not is_device_code(node) and (missing := missing_annotations(node))
    ]
    assert untyped == []


def parameters_of(function: Function) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len([*named, *filter(None, (given.vararg, given.kwarg))])


def cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """Functions of CUDA C++ for the GPU, in a file or in Python's text, and their parameters."""
    text = re.sub(r"__launch_bounds__\([^()]*\)", "", text)
    for found in re.finditer(r"__(?:global|device)__[^;{}()]*?(\w+)\s*\(", text):
        given, depth = "", 1
        for letter in text[found.end() :]:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                break
            given += letter if depth == 1 else ""
        yield found[1], given.count(",") + bool(given.strip())


def functions_with_parameters() -> Iterator[tuple[str, str, int]]:
    """Functions by their language, with how many parameters each takes."""
    for path in MODULES:
        where = path.relative_to(SOURCE)
        for node in functions_of(path):
            language = "Triton" if is_device_code(node) else "Python"
            yield language, f"{where}:{node.name}", parameters_of(node)
    for path in (p for p in SOURCE.rglob("*") if p.suffix in (".cu", ".cuh", ".py")):
        for name, count in cuda_functions(path.read_text()):
            yield "CUDA", f"{path.relative_to(SOURCE)}:{name}", count


def test_functions_take_their_arguments_in_groups() -> None:
    """A verb of the command line aside, whose parameters are its options, each by its name."""
    found = list(functions_with_parameters())
    for language, least in (("Triton", 200), ("CUDA", 50), ("Python", 5000)):
        assert len([name for spoken, name, _ in found if spoken == language]) > least
    many = [f"{name} takes {count}" for _, name, count in found if count > MOST_PARAMETERS]
    assert [name for name in many if not name.startswith("cli/")] == []


# Where an input is found by its number, outside of a kernel's ``bind`` and code for the GPU: how
# often, and why a name does not do. An operation's operands have names, ``node["bias"]``.
POSITIONS = {
    "operations/named.py": (2, "here names become positions; the first, whatever it is called"),
    "operations/problem.py": (1, "inputs of operations that take any number have no names"),
    "graph/aten.py": (1, "the first input of any operation, whatever it is called"),
    "studio/plan_accuracy.py": (1, "the first input of any step, whatever it is called"),
    "graph/nodes.py": (1, "here names become positions"),
    "compiler/choices/fuse_chains.py": (1, "a program of any number of inputs numbers them"),
    "kernels/shared/lowering.py": (1, "a program of any number of inputs numbers them"),
    "operations/torch_operators/arguments.py": (2, "a template of torch's arguments numbers them"),
    "operations/torch_operators/rules.py": (1, "a template of torch's arguments numbers them"),
    "graph/onnx/export_fallbacks.py": (1, "a template of torch's arguments numbers them"),
    "graph/onnx/call.py": (2, "ONNX defines the inputs of its operators by position"),
    "nn/prototxt/network.py": (1, "Caffe defines the bottoms of its layers by position"),
    "device/x86/code.py": (1, "a call's arguments have no names; the kernel's bind says which"),
    "artifacts/outline.py": (1, "the first input of a network, not of an operation"),
    "api/sources.py": (1, "the first input of a network, not of an operation"),
    "compiler/rewrites/take_pixels.py": (1, "an input of a network, not of an operation"),
    "graph/sample.py": (1, "the first input of a network, not of an operation"),
    "quickstart/workspace.py": (1, "the first input of a network, not of an operation"),
    "runtime/engine.py": (1, "the first input of a network, not of an operation"),
}
BY_NAME = re.compile(r"(name|.*\.name|.*\.image_input|'\w+')")  # of a mapping's keys


def test_operands_are_found_by_name() -> None:
    counted = {
        str(path.relative_to(SOURCE)): count
        for path in MODULES
        if (count := len(list(positions(tree_of(path)))))
    }
    assert counted == {path: count for path, (count, _) in POSITIONS.items()}


def positions(tree: ast.AST) -> Iterator[ast.Subscript]:
    """Each ``…inputs[n]``, but for those in ``bind`` and in code for the GPU."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and (node.name == "bind" or is_device_code(node)):
            continue
        yield from positions(node)
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
            of, at = ast.unparse(node.value), ast.unparse(node.slice)
            if of.rpartition(".")[2] == "inputs" and not BY_NAME.fullmatch(at):
                yield node


LONGEST = 60  # lines of a function without its docstring, code for the GPU aside
# These are longer, and were so before there was a limit; a shorter one leaves the list.
LONGER = {
    "cli/kernels.py:kernels": 71,
    "kernels/conv/hopper/dgrad.py:bind": 62,
    "kernels/conv/hopper/direct.py:bind": 68,
    "kernels/conv/hopper/implicit_gemm.py:_run": 106,
    "kernels/conv/hopper/wgrad.py:bind": 63,
    "kernels/conv/tiles.py:launch": 63,
    "kernels/gemm/normed.py:bind": 66,
    "kernels/gemm/wgmma.py:bind": 120,
    "kernels/gemm/wgmma.py:call": 77,
    "kernels/pool/shifted.py:bind": 61,
}


def test_functions_are_read_in_one_look() -> None:
    long = {
        f"{path.relative_to(SOURCE)}:{node.name}": length
        for path in MODULES
        for node in functions_of(path)
        if not is_device_code(node) and (length := lines_of_code(node)) > LONGEST
    }
    assert long == LONGER


def lines_of_code(function: Function) -> int:
    """Its lines without those of its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_the_machine_is_asked_for_its_multiprocessors() -> None:
    """A number of them in arithmetic is that of one chip: a grid for 132 is wrong on any other."""
    counts = {architecture.multiprocessors for architecture in ARCHITECTURES.values()}
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in MODULES
        if "x86" not in path.parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.BinOp)
        for side in (node.left, node.right)
        if isinstance(side, ast.Constant) and side.value in counts - POWERS
    ]
    assert found == []


POWERS = {1 << bits for bits in range(12)}


def test_cuda_lies_in_files_of_its_own() -> None:
    """``device/cuda`` takes what a user writes, and looks for the function in it."""
    inside = [
        p for p in MODULES if re.search(r'extern "C" __global__ void \w|#include', p.read_text())
    ]
    assert [str(p.relative_to(SOURCE)) for p in inside] == []
    assert len([*SOURCE.rglob("*.cu"), *SOURCE.rglob("*.cuh")]) > 5


EPILOGUE = {"bias", "residual", "scale", "alpha", "beta", "gamma", "activation"}


def test_an_epilogue_is_passed_whole() -> None:
    """Users name its parts where they call an operation; everything else takes the record."""
    loose = {
        f"{path.relative_to(SOURCE)}:{node.name}"
        for path in MODULES
        for node in functions_of(path)
        if not is_device_code(node)
        if len(EPILOGUE & {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}) > 3
    }
    assert loose == set()


def test_types_are_checked_strictly() -> None:
    """Only where Triton's and Gluon's functions lie may one be without types; see above for the
    others there.
    """
    settings = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"]
    assert {"tessella", "benchmarks"} <= set(settings["packages"])
    untyped = {
        name
        for override in settings["overrides"]
        if override.get("ignore_errors")
        or "no-untyped-def" in override.get("disable_error_code", ())
        for name in override["module"]
    }
    assert untyped == {"tessella.device.*", "tessella.kernels.*"}
