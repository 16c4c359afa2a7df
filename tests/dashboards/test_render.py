"""Values and legends as the renderer writes them."""

from __future__ import annotations

import math

import pytest
from taktline_dashboards import render


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9991, "percentunit", "99.91 %"),
        (20_000.0, "ms", "20,000 ms"),
        (12.5, "reqps", "12.5/s"),
        (3 * 2**20, "bytes", "3 MiB"),
        (5 * 2**30, "bytes", "5 GiB"),
        (8 * 2**10, "Bps", "8 KiB/s"),
        (0.0, "Bps", "0 B/s"),
        (1.755e9, "hertz", "1755 MHz"),
        (math.nan, "ms", "–"),
        (3.0, "none", "3"),
    ],
)
def test_a_value_has_its_unit(value, unit, text):
    assert render.shown(value, unit) == text


def test_a_legend_is_filled_as_grafana_does():
    assert render._name({"policy": "a", "pool": "b"}, "{{policy}} {{pool}}") == "a b"
    assert render._name({"policy": "a"}, "{{policy}} {{pool}}") == "a pool"
    assert render._name({"__name__": "x", "policy": "a"}, "__auto") == "a"


def test_variables_are_filled_longest_name_first():
    source = render.Source("http://127.0.0.1:1", 0, 1, {"policy": "a", "policy_long": "b", "__rate_interval": "5s"})
    assert source.filled("x{p=~'$policy_long',q=~'$policy'}[$__rate_interval]") == "x{p=~'b',q=~'a'}[5s]"


@pytest.mark.parametrize("high", [1.0, 900.0, 128.3 * 2**20, 17 * 2**30])
def test_ticks_of_bytes_are_powers_of_two_apart_and_few(high):
    step = render.whole_step(0.0, high)
    assert math.log2(step).is_integer()
    assert 1 <= high / step <= 8
