"""UniPC of order two for flow matching: every coefficient is a number that is known before the first request.

Sources: UniPC (arXiv 2302.04867), predictor and corrector in the data-prediction form with B(h) = e^-h - 1 ("bh2"); the
noise levels of the official policy server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TRAIN_STEPS = 1000


@dataclass(frozen=True, slots=True)
class SolverStep:
    """One step: x0 = x - sigma * velocity, then the corrector, then the predictor, each a sum with fixed weights.

    Attributes:
        time: integer time that the network gets.
        sigma: noise level.
        corrector: weights of (x of the last step, its x0, the x0 before that, this x0); None at the first step.
        predictor: weights of (corrected x, this x0, the last x0).
    """

    time: int
    sigma: float
    corrector: tuple[float, float, float, float] | None
    predictor: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class History:
    """What a step leaves to the next one, fp32 of one shape: x after its corrector, its x0, and the x0 before."""

    x: Tensor
    data: Tensor
    earlier: Tensor | None


def noise_levels(steps: int, shift: float) -> tuple[float, ...]:
    """The noise levels of a flow schedule: evenly spaced below 0.999, warped once by `shift`; the final 0 is left out.

    Four steps and shift 5 give 0.9998, 0.937265, 0.833055, 0.624687. Rounded to fp32, as the official server has them.
    """
    even = np.linspace(1.0 - 1.0 / TRAIN_STEPS, 0.0, steps + 1)[:-1]
    return tuple(float(np.float32(level)) for level in shift * even / (1.0 + (shift - 1.0) * even))


def make_schedule(steps: int, shift: float) -> tuple[SolverStep, ...]:
    """All steps of the solver.

    The first and the last step are of order one, those between of order two; the corrector has the order of the step
    before it.

    Raises:
        ValueError: fewer than one step, or a shift that is not positive.
    """
    if steps < 1 or not shift > 0:
        raise ValueError(f"{steps} steps with shift {shift:g}")
    even = np.linspace(1.0 - 1.0 / TRAIN_STEPS, 0.0, steps + 1)[:-1]
    times = [int(TRAIN_STEPS * level) for level in shift * even / (1.0 + (shift - 1.0) * even)]
    sigmas = (*noise_levels(steps, shift), 0.0)
    orders = [min(2, index + 1, steps - index) for index in range(steps)]
    return tuple(
        SolverStep(
            time=times[index],
            sigma=sigmas[index],
            corrector=_corrector(sigmas, index, orders[index - 1]) if index else None,
            predictor=_predictor(sigmas, index, orders[index]),
        )
        for index in range(steps)
    )


def advance(step: SolverStep, x: Tensor, velocity: Tensor, history: History | None) -> tuple[Tensor, History]:
    """One solver step.

    Args:
        x: fp32, any shape: what the network saw.
        velocity: likewise; noise minus data.
        history: of the step before; None at the first.

    Returns:
        x of the next step, and the history for it.
    """
    data = x - step.sigma * velocity
    if history is not None and step.corrector is not None:
        of_x, of_data, of_earlier, of_this = step.corrector
        x = of_x * history.x + of_data * history.data + of_this * data
        if history.earlier is not None and of_earlier:
            x = x + of_earlier * history.earlier
    of_x, of_this, of_data = step.predictor
    if not of_x:  # the last step: all noise is gone
        return data, History(x, data, None)
    following = of_x * x + of_this * data
    if history is not None and of_data:
        following = following + of_data * history.data
    return following, History(x, data, None if history is None else history.data)


def _log_snr(sigma: float) -> float:
    return math.log(1.0 - sigma) - math.log(sigma) if sigma else math.inf


def _predictor(sigmas: tuple[float, ...], index: int, order: int) -> tuple[float, float, float]:
    here, there = sigmas[index], sigmas[index + 1]
    if not there:
        return 0.0, 1.0, 0.0
    h = _log_snr(there) - _log_snr(here)
    gain = (1.0 - there) * -math.expm1(-h)
    if order == 1:
        return there / here, gain, 0.0
    ratio = (_log_snr(sigmas[index - 1]) - _log_snr(here)) / h
    slope = gain * 0.5 / ratio
    return there / here, gain - slope, slope


def _corrector(sigmas: tuple[float, ...], index: int, order: int) -> tuple[float, float, float, float]:
    before, here = sigmas[index - 1], sigmas[index]
    h = _log_snr(here) - _log_snr(before)
    gain = (1.0 - here) * -math.expm1(-h)
    if order == 1:
        return here / before, gain * 0.5, 0.0, gain * 0.5
    ratio = (_log_snr(sigmas[index - 2]) - _log_snr(before)) / h
    # The two moments that the corrector matches, in closed form.
    first = (math.expm1(-h) / -h - 1.0) / math.expm1(-h)
    second = ((math.expm1(-h) / -h - 1.0) / -h - 0.5) * 2.0 / math.expm1(-h)
    of_earlier = (first - second) / (1.0 - ratio)
    of_this = first - of_earlier
    return here / before, gain * (1.0 - of_earlier / ratio - of_this), gain * of_earlier / ratio, gain * of_this
