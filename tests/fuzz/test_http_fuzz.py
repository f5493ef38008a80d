"""HTTP: whatever is sent, the answer is what the published document says, and never a server error.

`make fuzz` runs 5,000 cases; without it a few hundred. ``SPECDEC_FUZZ_CASES`` is the number.
"""

from __future__ import annotations

import json

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.bodies import BODIES
from tests.fuzz.scale import num_cases

TIMEOUT_S = 30.0
LAST_FRAMES = {
    "/v1/chat/completions": "data: [DONE]\n\n",
    "/v1/completions": "data: [DONE]\n\n",
    "/v1/responses": "\n\n",
}
PROMPT = {"prompt": "one", "max_tokens": 2, "temperature": 0}

run_settings = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
load_all_checks()


def assert_alive(url: str) -> None:
    """A request that is known to be good is answered as ever."""
    answer = httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "length")


@pytest.fixture(scope="session")
def operations(gateway):
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    return {
        (item.method.upper(), item.path): item
        for item in (found.ok() for found in schema.get_all_operations())
    }


def test_the_published_document_is_kept_by_every_answer(gateway, operations):
    session = requests.Session()
    with_parameters = [item for item in operations.values() if item.body or item.path_parameters]
    assert len(with_parameters) >= 5
    statuses = set()

    for operation in operations.values():
        is_varied = operation in with_parameters

        @settings(run_settings, max_examples=num_cases(0.4) // len(with_parameters) if is_varied else 1)
        @given(case=operation.as_strategy())
        def ask(case):
            answer = case.call(session=session, timeout=TIMEOUT_S)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            case.validate_response(
                answer,
                checks=[
                    status_code_conformance,
                    content_type_conformance,
                    response_headers_conformance,
                    response_schema_conformance,
                    negative_data_rejection,
                ],
            )

        ask()
        assert_alive(gateway.url)
    assert statuses >= {200, 400}


def test_requests_that_are_nearly_right_are_answered_or_refused_by_name(gateway, operations):
    statuses = []

    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as client:

        @settings(run_settings, max_examples=num_cases(0.6))
        @given(request=BODIES)
        def ask(request):
            path, body = request
            content = json.dumps(body)
            headers = {"Content-Type": "application/json"}
            answer = client.post(path, content=content, headers=headers)
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 404, 429), answer.text
            if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith(LAST_FRAMES[path])
                assert '"error":{' not in answer.text
            elif answer.status_code == 200:
                operations["POST", path].validate_response(answer)
            else:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        ask()
    assert_alive(gateway.url)
    assert len(statuses) >= num_cases(0.6) // 2
    assert statuses.count(200) > len(statuses) // 10, "too few come far enough to be served"
