"""Frames at a policy's own size: once is enough, and whoever says the rule is understood."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.image_fit import fit_frame, fitted_size, pillow
from taktline_protocol.messages import ImageFit
from taktline_protocol.rpc import policy_info, to_image_fit

LETTERBOX = ImageFit(height=56, width=56, filter="bilinear", letterbox=True)
STRETCHED = ImageFit(height=48, width=56, filter="bicubic", letterbox=False)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("rule", [LETTERBOX, STRETCHED])
@pytest.mark.parametrize("size", [(48, 64), (224, 224), (7, 5), (200, 31)])
def test_a_fitted_frame_stays_as_it_is(rule, size):
    once = fit_frame(noise(*size), rule)
    assert once.shape == (rule.height, rule.width, 3)
    assert once.dtype == np.uint8
    assert np.array_equal(fit_frame(once, rule), once)


def test_a_letterbox_keeps_the_ratio_and_is_black_beside():
    square = fit_frame(np.full((48, 64, 3), 200, np.uint8), LETTERBOX)
    assert fitted_size(48, 64, 56, 56) == (42, 56)
    assert (square[7:49] == 200).all()
    assert not square[:7].any()
    assert not square[49:].any()
    assert (fit_frame(np.full((48, 64, 3), 200, np.uint8), STRETCHED) == 200).all()


def test_a_strip_of_which_nothing_would_be_left_is_refused():
    with pytest.raises(TaktlineError, match="no pixel left") as caught:
        fit_frame(noise(1, 300), LETTERBOX)
    assert caught.value.code is ErrorCode.IMAGE_CORRUPT


def test_without_pillow_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TaktlineError, match="Pillow") as caught:
        pillow()
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("rule", [LETTERBOX, STRETCHED, None])
def test_a_worker_s_rule_reaches_its_clients(rule):
    assert policy_info(worker_pb2.InfoResponse(policy="p", image_fit=to_image_fit(rule))).image_fit == rule


@pytest.mark.parametrize(
    "told",
    [
        worker_pb2.ImageFit(height=56, width=56, filter="lanczos"),
        worker_pb2.ImageFit(height=0, width=56, filter="bilinear"),
        worker_pb2.ImageFit(height=56, width=10**6, filter="bilinear"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_none(told):
    assert policy_info(worker_pb2.InfoResponse(policy="p", image_fit=told)).image_fit is None
