"""Every Python example that a reader can copy runs: in the pages and in the docstrings.

The blocks of a page run in order, in one namespace, as the only rank of a process group on
gloo. A block that cannot run says why in a comment right before it::

    <!-- no-run: needs two hosts -->

Run as a script, with a page or nothing (for the docstrings), this file is the runner: a
process of its own for each page, so that no page leaves a process group to the next. The tests
fork these from one that has imported torch, which takes longer than most pages.
"""

import doctest
import importlib
import json
import os
import pkgutil
import re
import select
import signal
import subprocess
import sys
import tempfile
import types
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if page.exists()]
EXAMPLE_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from 1
    code: str
    no_run: str | None = None


def blocks_of(text):
    """The fenced blocks of a Markdown text that say they are Python."""
    blocks = []
    reason = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            comment = re.fullmatch(r"<!--\s*no-run:\s*(.*?)\s*-->\s*", token.content, re.DOTALL)
            reason = comment and comment[1]
            continue
        if token.type == "fence" and token.info.split()[:1] in (["python"], ["py"], ["pycon"]):
            assert reason != "", f"line {token.map[0]}: say why the block cannot run"
            blocks.append(Block(token.map[0] + 2, token.content, reason))
        reason = None
    return blocks


def run_blocks(blocks, filename):
    """Runs the blocks in one namespace; line numbers in errors are those of the page."""
    page, runner = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = page  # torch.compile looks there for the names of a function
    try:
        run_in(vars(page), blocks, filename)
    finally:
        sys.modules["__main__"] = runner


def run_in(namespace, blocks, filename):
    for block in blocks:
        if block.no_run is not None:
            continue
        if block.code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(
                block.code, namespace, filename, filename, block.line - 1
            )
            runner = doctest.DocTestRunner(optionflags=EXAMPLE_FLAGS)
            assert runner.run(test, clear_globs=False).failed == 0, f"{filename}:{block.line}"
            namespace.update(test.globs)
        else:
            exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), namespace)


# --------------------------------------------------------------------------------------
# The tests


def cases():
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        blocks = blocks_of(page.read_text())
        if any(block.no_run is None for block in blocks):
            yield pytest.param(name, id=name)
        for block in blocks:
            if block.no_run is not None:
                skip = pytest.mark.skip(reason=f"no-run: {block.no_run}")
                yield pytest.param(name, id=f"{name}:{block.line}", marks=skip)


@pytest.mark.parametrize("page", list(cases()))
def test_the_blocks_of_the_page_run(page, run_as_script, tmp_path):
    run_as_script(page, cwd=tmp_path)


def test_the_examples_in_docstrings_run(run_as_script, tmp_path):
    run_as_script(cwd=tmp_path)


@pytest.fixture(scope="module")
def run_as_script(tmp_path_factory):
    output = tmp_path_factory.mktemp("runner") / "output"
    command = [sys.executable, __file__, "--serve", output]
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that a page that hangs can be ended with it
    ) as server:

        def run(*arguments, cwd):
            server.stdin.write(json.dumps([str(cwd), *arguments]).encode() + b"\n")
            server.stdin.flush()
            if not select.select([server.stdout], [], [], 100)[0]:
                os.killpg(server.pid, signal.SIGKILL)  # and the pages after this one fail at once
            code = server.stdout.readline().decode().strip()
            told = output.read_text(errors="replace") if output.exists() else ""
            assert code == "0", f"exit code {code or '(none, killed)'}\n{told}"

        try:
            yield run
        finally:
            os.killpg(server.pid, signal.SIGKILL)


PAGE = """\
# A page

```python
x = 1
```

<!-- no-run: needs a second host -->
```python
raise SystemExit
```

- in a list:

  ```python title="more"
  y = x + 1
  ```

```pycon
>>> y
2
```

```sh
rm -rf everything
```

````markdown
```python
nested, so not ours
```
````
"""


def test_blocks_are_found_with_their_lines_and_reasons():
    found = blocks_of(PAGE)
    assert [block.line for block in found] == [4, 9, 15, 19]
    assert [block.no_run for block in found] == [None, "needs a second host", None, None]
    assert found[2].code == "y = x + 1\n"


def test_blocks_share_a_namespace_and_a_wrong_result_is_an_error(capsys):
    run_blocks(blocks_of(PAGE), "page.md")
    with pytest.raises(AssertionError, match=r"page\.md:19"):
        run_blocks(blocks_of(PAGE.replace("x = 1", "x = 2")), "page.md")
    assert "Expected:\n    2\nGot:\n    3" in capsys.readouterr().out


def test_an_error_in_a_block_names_the_line_of_the_page():
    with pytest.raises(NameError) as caught:
        run_blocks(blocks_of(PAGE.replace("x + 1", "z + 1")), "page.md")
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == ("page.md", 15)


def test_a_block_that_does_not_run_must_say_why():
    with pytest.raises(AssertionError, match="say why"):
        blocks_of("<!-- no-run: -->\n```python\n1 / 0\n```\n")


# --------------------------------------------------------------------------------------
# The runner


def serve(output):
    """Fork for each line of the input: what that line asks for, with the output in a file."""
    importlib.import_module("gradsync")
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        cwd, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(cwd)
            with open(os.devnull) as nothing, open(output, "w") as file:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            return main(arguments)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


def main(arguments):
    if arguments[:1] == ["--serve"]:
        return serve(arguments[1])
    with tempfile.TemporaryDirectory() as folder:
        if not arguments:
            with only_rank(folder):
                return run_docstrings()
        (name,) = arguments
        text = (ROOT / name).read_text()
        # A page that shows how to start a process group starts its own.
        with only_rank(folder, start="init_process_group(" not in text):
            run_blocks(blocks_of(text), str(ROOT / name))
    return 0


@contextmanager
def only_rank(folder, start=True):
    """A world of one, as torchrun would describe it."""
    import torch.distributed as dist

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    if start:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=EXAMPLE_FLAGS)
    for module in public_modules():
        for test in finder.find(module, module.__name__):
            if test.examples and is_public(test.name):
                runner.run(test)
    print(f"{runner.tries} examples in docstrings, {runner.failures} of them wrong")
    return 1 if runner.failures else 0


def public_modules():
    package = importlib.import_module("gradsync")
    yield package
    for info in pkgutil.walk_packages(package.__path__, "gradsync."):
        if is_public(info.name):
            yield importlib.import_module(info.name)


def is_public(name):
    return not any(part.startswith("_") for part in name.split("."))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
