"""Set-up of every test: safe kernels before torch is imported, repeatable examples."""

import os

# Some CPUs announce bfloat16 tile instructions that the system does not let a process use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# No test asks a server for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import Phase, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
# For broken code: that an example fails is enough, a smaller one would take minutes.
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def fp64():
    """New tensors and modules in float64, where equal means 1e-12."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_compiler():
    """Nothing compiled before, so that a limit on recompilations counts this test alone."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def browser():
    from tests.browser import new_browser  # noqa: PLC0415 - Playwright is not everywhere

    with new_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def shipped():
    """The model that comes with the package."""
    from modepth.serve.served import open_served  # noqa: PLC0415 - an extra

    return open_served(None)


@pytest.fixture(scope="module")
def served():
    """A tiny model to be served."""
    from tests.serving import tiny_served  # noqa: PLC0415 - needs an extra

    return tiny_served()


@pytest.fixture(scope="module")
def client(served):
    """Of a server of that model, which is left as it was found."""
    from tests.serving import engine_of, serving  # noqa: PLC0415

    with serving(lambda: served) as client:
        yield client
        assert engine_of(client).cache_bytes == 0
        assert engine_of(client).num_admitted == 0


def pytest_terminal_summary(terminalreporter):
    """What tests have to say of themselves, `record_property("summary", ...)`: processes of xdist cannot print."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    said = {(each.nodeid, text) for each in reports for name, text in each.user_properties if name == "summary"}
    for nodeid, text in sorted(said):
        terminalreporter.write_line(f"{nodeid.rpartition('::')[2]}: {text}")
