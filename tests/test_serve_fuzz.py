"""Requests made up from the server's own schema: whatever comes, the answer is one that the schema knows, never 500."""

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from modepth.runlog import RunLog
from modepth.serve.limits import Limits
from tests.serving import engine_of, serving, tiny_served, wait_for

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
EXAMPLES = {"POST": 35, "GET": 4}  # requests, for each route and each way of making them


def ask_often(operation, mode, statuses, times):
    """Send requests of a route, right ones or wrong ones, and check each answer."""
    count = times * EXAMPLES[operation.method.upper()]

    @seed(0)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        response = case.call(timeout=20)
        statuses[operation.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    ask()


def can_be_wrong(operation):
    """Whether a request of this route has anything that the schema could find fault with."""
    return operation.method.upper() == "POST" or bool(list(operation.query))


def ask_all(folder, times):
    """Requests of all routes; how many got which answer."""
    statuses = Counter()
    (folder / "log.jsonl").write_text("".join(f'{{"step": {n}, "loss": {5 - n}}}\n' for n in range(3)))
    # A short context, since what is asked for may be all of it.
    with serving(lambda: tiny_served(max_length=24, log=RunLog(folder)), limits=Limits(requests=16)) as client:
        schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        for operation in operations:
            ask_often(operation, GenerationMode.POSITIVE, statuses, times)
            if can_be_wrong(operation):
                ask_often(operation, GenerationMode.NEGATIVE, statuses, times)
        wait_for(lambda: not engine_of(client).busy)
        assert engine_of(client).cache_bytes == 0
        assert client.get("/ready").status_code == 200
    assert len(operations) == 9
    return statuses


def check(statuses, record_property, at_least):
    by_status = Counter()
    for (_, status), count in statuses.items():
        by_status[status] += count
    told = ", ".join(f"{status}: {count}" for status, count in sorted(by_status.items()))
    record_property("summary", f"{statuses.total()} made-up requests ({told})")
    assert statuses.total() >= at_least
    assert by_status[200] >= at_least // 10
    assert by_status[400] >= at_least // 4
    assert statuses["/v1/run", 200] >= 1
    assert statuses["/v1/run", 400] >= 1


def test_made_up_requests_get_answers_that_the_schema_knows(tmp_path, record_property):
    check(ask_all(tmp_path, times=1), record_property, at_least=200)


@pytest.mark.long
def test_thousands_of_made_up_requests_get_answers_that_the_schema_knows(tmp_path, record_property):
    check(ask_all(tmp_path, times=20), record_property, at_least=3000)
