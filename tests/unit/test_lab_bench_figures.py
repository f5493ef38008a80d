"""The arithmetic of `specdec bench`, against values worked out by hand."""

from __future__ import annotations

import pytest

from specdec.lab.bench.acceptance import Acceptance
from specdec.lab.bench.answer import Answer, Record
from specdec.lab.bench.figures import Spread, percentile, summarise
from specdec.lab.errors import RequestFailed


def record(
    *, ttft_s=0.5, num_tokens=11, decode_s=2.0, num_text_events=11, gaps_s=(), is_counted=True, **more
):
    """A request sent at 10 s."""
    first_s = 10.0 + ttft_s
    return Record(
        started_s=10.0,
        first_text_s=first_s,
        last_text_s=first_s + decode_s,
        ended_s=first_s + decode_s + 0.25,
        num_prompt_tokens=7,
        num_tokens=num_tokens,
        is_counted=is_counted,
        num_text_events=num_text_events,
        gaps_s=gaps_s,
        **more,
    )


def text(content):
    return {"choices": [{"delta": {"content": content}, "finish_reason": None}]}


FINISH = {"choices": [{"delta": {}, "finish_reason": "length"}]}


def usage(num_tokens):
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens}}


def answer_of(*events):
    """Events with their times; the request was sent at 1 s and is over at 9 s."""
    answer = Answer(started_s=1.0)
    for at_s, event in events:
        answer.add(at_s, event)
    return answer.finish(9.0, is_done=True)


def test_percentile_is_linear_between_ranks():
    values = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert percentile(values, 0) == 10.0
    assert percentile(values, 50) == 30.0
    assert percentile(values, 90) == pytest.approx(46.0)  # rank 3.6
    assert percentile(values, 99) == pytest.approx(49.6)  # rank 3.96
    assert percentile(values, 100) == 50.0


def test_percentile_of_one_value_is_the_value():
    assert percentile([3.0], 99) == 3.0


def test_spread_sorts_its_values():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(
        mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98)
    )


def test_spread_of_nothing_is_no_figure():
    assert Spread.of([]) is None


def test_tpot_is_per_token_after_the_first():
    assert record(num_tokens=11, decode_s=2.0).tpot_s == pytest.approx(0.2)
    assert record(num_tokens=1).tpot_s is None


def test_tpot_counts_tokens_and_not_events():
    counted = answer_of(
        (2.0, text("a")), (3.0, text("bcd")), (4.0, text("ef")), (4.0, FINISH), (4.1, usage(6))
    )
    assert counted.num_tokens == 6
    assert counted.num_text_events == 3
    assert counted.tpot_s == pytest.approx(2.0 / 5)
    assert counted.gaps_s == (1.0, 1.0)


def test_ttft_is_to_the_first_text_and_not_to_the_role():
    assert answer_of((1.5, text("")), (2.25, text("a")), (3.0, FINISH), (3.0, usage(1))).ttft_s == 1.25


def test_tokens_without_text_at_the_end_take_time_too():
    assert answer_of((2.0, text("a")), (5.0, FINISH), (5.0, usage(4))).tpot_s == pytest.approx(1.0)


def test_without_usage_events_stand_for_tokens_and_it_is_said():
    counted = answer_of((2.0, text("a")), (3.0, text("b")), (3.0, FINISH))
    assert (counted.num_tokens, counted.is_counted) == (2, False)


def test_text_completions_and_reasoning_are_text():
    completion = {"choices": [{"text": "a", "finish_reason": None}]}
    reasoning = {"choices": [{"delta": {"content": None, "reasoning_content": "b"}}]}
    assert answer_of((2.0, completion), (3.0, reasoning), (3.0, FINISH)).num_text_events == 2


def test_a_stream_that_breaks_off_has_no_record():
    answer = Answer(started_s=1.0)
    answer.add(2.0, text("a"))
    with pytest.raises(RequestFailed, match="broke off after 1 events"):
        answer.finish(3.0, is_done=False)


def test_a_finish_reason_ends_a_stream_as_well_as_done():
    answer = Answer(started_s=1.0)
    answer.add(2.0, text("a"))
    answer.add(2.0, FINISH)
    assert answer.finish(3.0, is_done=False).latency_s == 2.0


def test_an_error_event_fails_the_request():
    with pytest.raises(RequestFailed, match="no target worker") as caught:
        Answer(started_s=1.0).add(2.0, {"error": {"message": "no target worker"}})
    assert caught.value.kind == "error_event"


def test_figures_of_a_level():
    outcomes = [
        record(ttft_s=0.5, num_tokens=11, num_text_events=5, gaps_s=(0.1, 0.3)),
        record(ttft_s=1.5, num_tokens=21, num_text_events=11, gaps_s=(0.2,)),
        RequestFailed("timeout", "too late"),
        RequestFailed("http_503", "busy"),
        RequestFailed("timeout", "too late"),
    ]
    figures = summarise(2, outcomes, 4.0)
    assert (figures.num_requests, figures.num_succeeded) == (5, 2)
    assert figures.errors == {"timeout": 2, "http_503": 1}
    assert figures.first_error == "too late"
    assert (figures.num_tokens, figures.num_prompt_tokens) == (32, 14)
    assert (figures.tokens_per_s, figures.requests_per_s, figures.tokens_per_event) == (8.0, 0.5, 2.0)
    assert figures.ttft_s.p50 == 1.0
    assert figures.tpot_s.p50 == pytest.approx((0.2 + 0.1) / 2)
    assert figures.gap_s.p50 == 0.2
    assert figures.latency_s.mean == pytest.approx((2.75 + 3.75) / 2)
    assert figures.acceptance is None


def test_figures_of_failures_alone_have_no_times():
    figures = summarise(1, [RequestFailed("timeout", "too late")], 4.0)
    assert (figures.ttft_s, figures.tpot_s, figures.latency_s, figures.tokens_per_s) == (
        None,
        None,
        None,
        0.0,
    )


def test_one_guessed_count_marks_the_level():
    assert not summarise(1, [record(), record(is_counted=False)], 1.0).is_counted


def test_acceptance_of_answers_wins_over_the_servers_counters():
    outcomes = [record(acceptance=Acceptance(4, 8, 6)), record(acceptance=Acceptance(1, 2, 0)), record()]
    acceptance = summarise(1, outcomes, 1.0, Acceptance(100, 100, 100)).acceptance
    assert acceptance == Acceptance(5, 10, 6)
    assert acceptance.draft_acceptance_rate == 0.6
    assert acceptance.mean_acceptance_length == 2.2
    assert summarise(1, [record()], 1.0, Acceptance(1, 2, 1)).acceptance == Acceptance(1, 2, 1)


def test_rates_without_drafts_are_those_of_plain_decoding():
    assert (Acceptance().draft_acceptance_rate, Acceptance().mean_acceptance_length) == (0.0, 1.0)


PROMETHEUS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1.2e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
"""


def test_vllm_counters_are_summed_over_engines():
    assert Acceptance.from_prometheus(PROMETHEUS) == Acceptance(63, 120, 40)


def test_other_metrics_hold_no_acceptance():
    assert Acceptance.from_prometheus("python_info 1.0\n") is None


def test_counters_are_of_the_time_between_two_readings():
    assert Acceptance(63, 120, 40).since(Acceptance(60, 114, 39)) == Acceptance(3, 6, 1)
