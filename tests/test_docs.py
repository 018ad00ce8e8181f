"""The documentation: its code runs, its site builds without a warning and fetches nothing."""

import re
import shlex
import subprocess
import sys

import pytest

from modepth.cli import make_parser
from tests.documents import ROOT, blocks, run_snippets, text_of

# Every page whose code claims to run, and the test that runs it.
RUN_BY = {
    "README.md": "tests/test_project.py::test_the_readmes_snippets_run_and_print_what_they_say",
    "converting.md": "tests/test_hf.py::test_the_python_of_the_page_on_converting_runs",
    "data.md": "tests/test_preparation.py::test_the_documents_commands_and_snippet_run",
    "distributed.md": "tests/test_distributed.py::test_the_script_of_the_documents_runs_on_two_processes",
    "encoder.md": "tests/test_encoder.py::test_the_snippets_of_the_page_run_and_print_what_they_say",
    "experts.md": "tests/test_experts.py::test_the_python_of_the_page_on_experts_runs_and_prints_what_it_says",
    "generation.md": "tests/test_commands.py::test_the_commands_and_the_snippet_of_the_page_on_generation_run",
    "how.md": "tests/test_docs.py::test_the_python_of_a_page_runs_and_prints_what_it_says",
    "index.md": "tests/test_docs.py::test_the_python_of_a_page_runs_and_prints_what_it_says",
    "serving.md": "tests/test_serve_command.py::test_the_pages_python_runs_and_prints_what_it_says",
    "smollm2.md": "tests/test_smollm2.py::test_the_study_of_a_real_model_runs_on_a_tiny_one",
    "sweeps.md": "tests/test_sweep_run.py::test_the_commands_of_the_page_on_sweeps_run",
    "training.md": "tests/test_commands.py::test_the_commands_and_the_snippet_of_the_page_on_training_run",
}


def test_every_page_with_code_is_run_by_a_test():
    pages = ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))]
    assert {name for name in pages if blocks(text_of(name), "(?:python|sh)")} == set(RUN_BY)
    for name, test in RUN_BY.items():
        path, function = test.split("::")
        text = (ROOT / path).read_text()
        assert f"def {function}(" in text, test
        assert f'"{name}"' in text, test


def commands_of(name):
    """Our commands in the `sh` blocks of a page, a list of words each."""
    lines = "".join(blocks(text_of(name), "sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[1:] for each in words if each and each[0].rpartition("/")[2] == "modepth"]


@pytest.mark.parametrize("name", RUN_BY)
def test_every_command_of_a_page_is_one(name):
    for words in commands_of(name):
        assert " ".join(words).startswith(make_parser().parse_args(words).command), words


def test_commands_are_found_in_the_pages():
    assert {words[0] for name in RUN_BY for words in commands_of(name)} >= {
        "serve",
        "train",
        "sweep",
        "convert",
        "flops",
    }


@pytest.mark.parametrize("name", [name for name, test in RUN_BY.items() if "test_docs" in test])
def test_the_python_of_a_page_runs_and_prints_what_it_says(name):
    run_snippets(text_of(name))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: warnings that are not shown are not counted either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_builds_without_a_warning_and_fetches_nothing(site):
    for path in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]* (?:src|href)=\"?(https?:[^\" >]+)", path.read_text())
        assert [url for url in fetched if "rel=canonical" not in url] == [], path.name
    assert (site / "results" / "2026-11-16_training" / "token_map_MoD.png").is_file()


def test_the_names_of_the_package_stand_in_the_site_with_their_examples(site):
    text = (site / "api.html").read_text()
    import modepth  # noqa: PLC0415

    for name in modepth.__all__:
        assert f'id="modepth.{name}"' in text, name
    assert "&gt;&gt;&gt; " in text or 'class="gp"' in text
    assert "<blockquote>" not in text
