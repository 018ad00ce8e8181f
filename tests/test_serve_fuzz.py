"""Requests made up from the server's own schema: whatever comes, the answer is one that the schema knows, never 500."""

from collections import Counter

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


def ask_often(operation, mode, statuses):
    """Send requests of a route, right ones or wrong ones, and check each answer."""

    @seed(0)
    @settings(max_examples=EXAMPLES[operation.method.upper()], deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        response = case.call(timeout=20)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    ask()


def test_made_up_requests_get_answers_that_the_schema_knows(capsys):
    statuses = Counter()
    # A short context, since what is asked for may be all of it.
    with serving(lambda: tiny_served(max_length=24), limits=Limits(requests=16)) as client:
        schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        for operation in operations:
            ask_often(operation, GenerationMode.POSITIVE, statuses)
            if operation.method.upper() == "POST":  # in the others nothing can be wrong
                ask_often(operation, GenerationMode.NEGATIVE, statuses)
        wait_for(lambda: not engine_of(client).busy)
        assert engine_of(client).cache_bytes == 0
        assert client.get("/ready").status_code == 200
    assert len(operations) == 9
    assert statuses.total() >= 200
    assert statuses[200] >= 20
    assert statuses[400] >= 50
    with capsys.disabled():
        told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        print(f"\n{statuses.total()} made-up requests ({told})")
