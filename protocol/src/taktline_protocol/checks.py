"""Semantic checks of an observation: against the limits, and against the policy that is to serve it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.images import check_image
from taktline_protocol.limits import Limits
from taktline_protocol.messages import Array, Observation, PolicyInfo, Rtc

_ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4, "float64": 8}
_FORMATS = {"float32": "f", "float64": "d"}
_FEW = 64
"""Numbers of a state that are looked at without NumPy, which has rested since the last request and takes 50 us."""


def check_array(name: str, array: Array, code: ErrorCode = ErrorCode.INVALID_BODY) -> None:
    """Raises `code` where shape, dtype and byte count of `array` disagree."""
    expected = math.prod(array.shape) * _ITEM_BYTES[array.dtype]
    if expected != len(array.data):
        raise TaktlineError(
            code,
            f"{name}: {array.dtype} of shape {list(array.shape)} needs {expected} bytes, not {len(array.data)}",
            "send C-contiguous little-endian data of exactly that shape",
        )


def check_observation(observation: Observation, limits: Limits) -> None:
    """Checks what needs no knowledge of the policy. No image is decoded.

    Raises:
        TaktlineError: `budget_invalid`, `deadline_expired`, `invalid_body`, `instruction_invalid`, `state_invalid`,
            `search_invalid`, `rtc_invalid`, `camera_unknown` (too many), `image_corrupt`, `image_too_large`.
    """
    _check_time(observation, limits)
    _check_instruction(observation.instruction, limits)
    state_length(observation.state, limits)
    if observation.search is not None:
        for name in ("previous", "pending"):
            plan = getattr(observation.search, name)
            if plan is not None:
                check_array(f"search.{name}", plan, ErrorCode.SEARCH_INVALID)
    if observation.rtc is not None:
        _check_rtc(observation.rtc, limits)
    if len(observation.images) > limits.cameras:
        raise TaktlineError(
            ErrorCode.CAMERA_UNKNOWN,
            f"the observation has {len(observation.images)} images; at most {limits.cameras} are read",
            "send only the cameras that the policy names (GET /v1/policies/{policy})",
        )
    for camera, image in observation.images.items():
        check_image(camera, image, limits)


def check_policy_fit(observation: Observation, info: PolicyInfo) -> None:
    """Checks cameras, state length and RTC tail against what `info` says the policy reads.

    Raises:
        TaktlineError: `camera_missing`, `camera_unknown`, `state_invalid` or `rtc_invalid`.
    """
    sent = observation.images
    missing = [camera for camera in info.cameras if camera not in sent]
    if missing:
        raise TaktlineError(
            ErrorCode.CAMERA_MISSING,
            f"policy {info.policy!r} needs {_names(missing)}; the observation has {_names(list(sent))}",
            f"send an image for each of {_names(list(info.cameras))}",
        )
    if len(sent) != len(info.cameras):
        known = {*info.cameras, *info.optional_cameras}
        unknown = [camera for camera in sent if camera not in known]
        if unknown:
            raise TaktlineError(
                ErrorCode.CAMERA_UNKNOWN,
                f"policy {info.policy!r} has no {_names(unknown)}",
                f"send only {_names(sorted(known))}, or map the name in spec.model.cameras",
            )
    state = observation.state
    length = len(state) if isinstance(state, list) else state.shape[0]
    if info.state_dim and length != info.state_dim:
        raise TaktlineError(
            ErrorCode.STATE_INVALID,
            f"the state has {length} numbers; policy {info.policy!r} reads {info.state_dim}",
            "send the state in the order and length that the policy was trained on",
        )
    if observation.rtc is not None and observation.rtc.tail is not None and info.action_dim:
        _check_tail_fit(observation.rtc, observation.rtc.tail, info)


def state_length(state: list[float] | Array, limits: Limits) -> int:
    """Length of a state vector after checking form, length and finiteness. Raises `state_invalid`."""
    if isinstance(state, Array) and (few := _few_finite(state)) and few <= limits.state_length:
        return few
    length = len(state_vector(state, limits))
    if length == 0:
        raise TaktlineError(
            ErrorCode.STATE_INVALID,
            "the state is empty",
            "send the robot's state, as many numbers as state_dim of GET /v1/policies/{policy} (taktline policies)",
        )
    return length


def _few_finite(state: Array) -> int:
    """How many numbers a short vector has whose sum is finite, as then each of them is; 0 where that is not known."""
    code, length = _FORMATS.get(state.dtype), len(state.data) // _ITEM_BYTES[state.dtype]
    if code is None or state.shape != (length,) or not 0 < length <= _FEW:
        return 0
    if len(state.data) != length * _ITEM_BYTES[state.dtype]:
        return 0
    return length if math.isfinite(sum(struct.unpack(f"<{length}{code}", state.data))) else 0


def state_vector(state: list[float] | Array, limits: Limits) -> NDArray[np.float64]:
    """The state as float64 (D,), checked. Raises `state_invalid`."""
    if isinstance(state, Array):
        if state.dtype not in ("float32", "float64") or len(state.shape) != 1:
            raise _state(f"the state is {state.dtype} of shape {list(state.shape)}")
        check_array("state", state, ErrorCode.STATE_INVALID)
        values = state.to_numpy().astype(np.float64)
    else:
        values = np.asarray(state, dtype=np.float64)
    if len(values) > limits.state_length:
        raise _state(f"the state has {len(values)} numbers; at most {limits.state_length} are read")
    if not math.isfinite(np.add.reduce(values)) and not np.isfinite(values).all():  # finite numbers may add up to inf
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _state(f"state[{where}] is {values[where]}")
    return values


def _check_rtc(rtc: Rtc, limits: Limits) -> None:
    if rtc.execution_horizon is not None and rtc.prefix_end is not None:
        raise rtc_error(
            "execution_horizon and prefix_end are both given; they state the same thing",
            "send the actions you execute of each chunk as execution_horizon, or where guidance ends as prefix_end",
        )
    tail = rtc.tail
    if tail is None:
        return
    if tail.dtype not in ("float32", "float64") or len(tail.shape) != 2 or 0 in tail.shape:
        raise rtc_error(
            f"the tail is {tail.dtype} of shape {list(tail.shape)}",
            "send the unexecuted rows of the last chunk as float32 (n, D), or leave tail out where none is left",
        )
    check_array("rtc.tail", tail, ErrorCode.RTC_INVALID)
    if tail.shape[0] > limits.tail_steps or tail.shape[1] > limits.state_length:
        raise rtc_error(
            f"the tail has shape {list(tail.shape)}; at most {limits.tail_steps} x {limits.state_length} is read",
            "send only actions that have not been executed yet",
        )
    finite = np.isfinite(tail.to_numpy()).all(axis=1)
    if not finite.all():
        raise rtc_error(
            f"tail[{int(np.flatnonzero(~finite)[0])}] holds a NaN or infinity", "send the actions as they were received"
        )


def _check_tail_fit(rtc: Rtc, tail: Array, info: PolicyInfo) -> None:
    if not info.rtc:
        raise rtc_error(
            f"policy {info.policy!r} is served without real-time chunking",
            "leave rtc out of the observation, or set spec.engine.rtc where the policy's family has it",
        )
    length, width = tail.shape
    if width != info.action_dim or length > info.horizon:
        raise rtc_error(
            f"the tail has shape {[length, width]}; chunks of policy {info.policy!r} have {info.horizon} actions of"
            f" {info.action_dim} numbers",
            "send unexecuted rows of a chunk of this policy",
        )
    check_delay(rtc.delay, rtc.execution_horizon, info.horizon, info.rtc_max_delay if info.rtc == "trained" else None)


def check_delay(delay: int | None, execution_horizon: int | None, horizon: int, trained: int | None) -> None:
    """The paper's bound d <= s <= H - d, and the one of a checkpoint trained with delays up to `trained`.

    Raises:
        TaktlineError: `rtc_invalid`.
    """
    if delay is not None and delay > horizon:
        raise rtc_error(
            f"the delay is {delay} actions, a chunk has {horizon}",
            "ask for the next chunk while enough of the last one is left",
        )
    if delay is not None and trained is not None and delay > trained:
        raise rtc_error(
            f"the delay is {delay} actions, the checkpoint was trained for at most {trained}",
            "shorten the round trip, lower the control rate, or set spec.engine.rtc.mode to guided",
        )
    if execution_horizon is not None and not (delay or 0) <= execution_horizon <= horizon - (delay or 0):
        raise rtc_error(
            f"with a delay of {delay or 0} actions and chunks of {horizon}, the execution horizon must lie between"
            f" {delay or 0} and {horizon - (delay or 0)}; it is {execution_horizon}",
            "execute more actions of each chunk, or shorten the round trip",
        )


def rtc_error(message: str, next_step: str) -> TaktlineError:
    """An `rtc_invalid` error about the observation's `rtc`."""
    return TaktlineError(ErrorCode.RTC_INVALID, message, next_step)


def _state(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, message, "send a flat vector of finite float32 or float64 numbers")


def _check_time(observation: Observation, limits: Limits) -> None:
    budget = observation.budget_ms
    if not math.isfinite(budget) or budget < 0 or budget > limits.budget_ms:
        raise TaktlineError(
            ErrorCode.BUDGET_INVALID,
            f"budget_ms is {budget}",
            f"send the milliseconds left until the hand-off deadline, above 0 and at most {limits.budget_ms:g}",
        )
    sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
    if not all(map(math.isfinite, (observation.captured_at, observation.actuate_ms, observation.network_ms, sent_at))):
        raise TaktlineError(ErrorCode.INVALID_BODY, "a time of the observation is not finite", "send finite numbers")
    if sent_at < observation.captured_at:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"sent_at {sent_at} is before captured_at {observation.captured_at}",
            "read both from one monotonic clock of the robot, in seconds",
        )
    if 1e3 * (sent_at - observation.captured_at) > limits.budget_ms:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"captured_at {observation.captured_at:g} is more than {limits.budget_ms:g} ms before sent_at {sent_at:g}",
            "read both from one monotonic clock of the robot, in seconds, and send frames of now",
        )
    reserved = observation.actuate_ms + observation.network_ms
    if budget <= reserved:
        left = f"{budget:g} ms left when sent, {reserved:g} ms of it reserved by the robot"
        spent = TaktlineError(
            ErrorCode.DEADLINE_EXPIRED,
            f"the control budget is spent: {left if budget else 'nothing was left of it when it was sent'}",
            "send the observation earlier: ask for the next chunk while the buffer still holds actions",
        )
        spent.safe_action, spent.buffer_ms = "hold", 0.0
        raise spent


def _check_instruction(instruction: str, limits: Limits) -> None:
    if not instruction.strip():
        raise TaktlineError(ErrorCode.INSTRUCTION_INVALID, "the instruction is empty", "say the task in words")
    if len(instruction) > limits.instruction_chars:
        raise TaktlineError(
            ErrorCode.INSTRUCTION_INVALID,
            f"the instruction has {len(instruction)} characters; the limit is {limits.instruction_chars}",
            "shorten it: policies are trained on a sentence or two",
        )


def _names(cameras: Sequence[str]) -> str:
    if not cameras:
        return "no camera"
    shown = ", ".join(repr(camera[:64]) for camera in cameras[:8])
    more = f" and {len(cameras) - 8} more" if len(cameras) > 8 else ""
    return f"camera{'s' if len(cameras) > 1 else ''} {shown}{more}"
