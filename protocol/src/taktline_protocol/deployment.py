"""What the operator writes and the gateway and workers read: the resolved engine config and the routing table."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from taktline_protocol.messages import PriorityName


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which checkpoint to load, and how its inputs are named.

    Attributes:
        path: checkpoint folder, as the worker sees it.
        sha256: expected digest of each named file in the folder (file name -> hex digest).
        cameras: robot camera name -> checkpoint image key; empty means the names are the checkpoint's own.
        statistics: statistics file or asset id where the checkpoint holds several; empty picks the only one.
    """

    family: str
    path: str
    revision: str
    sha256: dict[str, str] = {}
    cameras: dict[str, str] = {}
    statistics: str = ""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a planner searches, and how far a request may change it. The defaults are the published planner's.

    Attributes:
        candidates: action sequences a round; likewise rounds, elites and horizon of the search.
        max_step_m: bound of each xyz delta of one action, in metres.
        momentum_mean: share of the old mean that a round keeps, for xyz; likewise the other three.
        pins: x, y, z or gripper -> fixed delta.
        close_gripper: from this step of the plan on the gripper closes; None leaves it to the search.
        convergence: stop when no standard deviation is above this share of its first value; 0 never. `cem` only.
        temperature: `mppi` only: how softly candidates are weighed, as a share of the spread of a round's energies.
        anytime: answer with the best plan found when the hand-off deadline comes.
        max_candidates: the most that a request may ask for; likewise rounds and horizon (None = this horizon).
        micro_batch: candidates of one unit of computation; None = chosen by device. Plans are bit-identical at any
            number of ranks for one value of it.
    """

    optimiser: Literal["cem", "mppi"] = "cem"
    candidates: int = 400
    rounds: int = 10
    elites: int = 10
    horizon: int = 2
    max_step_m: float = 0.05
    momentum_mean: float = 0.15
    momentum_std: float = 0.15
    momentum_mean_gripper: float = 0.15
    momentum_std_gripper: float = 0.15
    pins: dict[str, float] = {}
    close_gripper: int | None = None
    convergence: float = 0.0
    temperature: float = 0.25
    anytime: bool = False
    max_candidates: Annotated[int, Meta(ge=2)] = 4096
    max_rounds: Annotated[int, Meta(ge=1)] = 100
    max_horizon: Annotated[int, Meta(ge=1)] | None = None
    micro_batch: Annotated[int, Meta(ge=1)] | None = None


class RtcOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Real-time chunking (arXiv 2506.07339): how the unexecuted tail of a robot's last chunk shapes the next one.

    Attributes:
        mode: `auto` = `trained` where the checkpoint was trained for it, else `guided`; `off` refuses tails.
        schedule: how the weight of the tail falls from the delay to the end of the prefix; None takes the checkpoint's
            own, else linear.
        max_guidance_weight: bound of the guidance weight; None takes the checkpoint's own, else 10.
        gradient: `identity` takes the denoised chunk's derivative for the identity, as LeRobot computes it; `vjp` runs
            a backward pass through the network at each solver step, as the paper states it, for about three times the
            solver's time.
    """

    mode: Literal["auto", "guided", "trained", "off"] = "auto"
    schedule: Literal["linear", "exp", "ones", "zeros"] | None = None
    max_guidance_weight: Annotated[float, Meta(gt=0)] | None = None
    gradient: Literal["identity", "vjp"] = "identity"


class WorldActionOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a world-action model (Cosmos3) is asked; what is left out is the checkpoint's own, else the official request.

    Attributes:
        preset: the request's shape and solver: `official`, which the released weights were trained for, or `paper`, the
            shape of a published benchmark.
        embodiment: row of the checkpoint's embodiment tables, by its published name.
        guidance: weight of classifier-free guidance, 1 to 20; 1 is the conditional branch alone.
        guidance_interval: solver times (0 to 1001) strictly between these two run guidance.
        shift: warp of the solver's noise levels.
        prompt: whether the instruction is put into the JSON object of the training or into plain sentences.
        imagine: serve the imagined video to clients that ask for it; costs the memory of the video decoder.
        split: what the `parallel.tp` ranks of a branch share: the matrices (`tensor`), or the tokens with the whole
            weights on each rank (`sequence`). Left out: the tokens, where each GPU has room for the whole weights.
    """

    preset: Literal["official", "paper"] | None = None
    embodiment: str = ""
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    shift: float | None = None
    prompt: Literal["json", "plain"] | None = None
    imagine: bool = False
    split: Literal["tensor", "sequence"] | None = None


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one worker spreads over the GPUs of its pod; dp x cfg x tp of them, or `search` for a planner.

    Attributes:
        dp: replicas, each a process with the whole policy on its own GPU; so many batches run at a time.
        cfg: 2 runs the two branches of classifier-free guidance on different GPUs, where the family has them.
        tp: ranks that share the matrices of one policy, where the family can be cut.
        search: ranks that share the candidates of a planner's search; plans are the same bytes at any number.
    """

    dp: Annotated[int, Meta(ge=1, le=64)] = 1
    cfg: Annotated[int, Meta(ge=1, le=2)] = 1
    tp: Annotated[int, Meta(ge=1, le=64)] = 1
    search: Annotated[int, Meta(ge=1, le=64)] = 1


class QuantisationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Weights kept in a byte a number, which become bf16 where they are multiplied; activations stay bf16.

    Attributes:
        expert: format of the action expert's matrices, with a scale an output channel: `fp8` (e4m3) or `int8`.
        max_batch: largest batch bucket that reads them. A larger batch is bound by arithmetic, not by the weights'
            bytes, and reads them in bf16.
    """

    expert: Literal["fp8", "int8"]
    max_batch: Annotated[int, Meta(ge=1)] = 4


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the worker runs the checkpoint. None keeps the checkpoint's own value; `search` is for planners only.

    `fp8` is bf16 with the widest products in FP8, on a Hopper GPU: those of π0's and π0.5's vision tower and prefix, of
    GR00T's and MiniCPM-Robot's vision blocks and text layers, of vjepa2-ac's predictor, of Cosmos3's tower of video and
    actions; it moves actions further than bf16 does. Camera frames over
    `max_image_pixels` are refused by their header, before any pixel is decoded. `frame_cache_mb` is the memory for
    frames seen before: their pixels on the host and, where that is exact, as much again for what the vision tower made
    of them on the device; 0 keeps none.
    `cheaper_steps` are solver steps, fewer than the policy's own and divisors of them, that a batch may ask for where
    there is no time for all; `shorter_horizons` likewise actions of a chunk, all that is denoised then.
    Both are for π0 and π0.5. `quantisation` is for π0 and π0.5 on a GPU; None keeps every weight as `precision` says.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    buckets: tuple[Annotated[int, Meta(ge=1)], ...] = (1, 2, 4, 8)
    solver_steps: int | None = None
    cheaper_steps: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    shorter_horizons: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    action_horizon: int | None = None
    control_period_ms: float | None = None
    max_image_pixels: Annotated[int, Meta(ge=1)] = 16_000_000
    search: SearchOptions | None = None
    rtc: RtcOptions = RtcOptions()
    world_action: WorldActionOptions | None = None
    parallel: ParallelOptions = ParallelOptions()
    quantisation: QuantisationOptions | None = None
    frame_cache_mb: Annotated[int, Meta(ge=0, le=65_536)] = 64


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`engine.json`: everything one worker process needs, resolved."""

    policy: str
    model: ModelConfig
    engine: EngineOptions = EngineOptions()


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker endpoint of a policy: gRPC `host:port`."""

    address: str
    pool: str = "default"
    revision: str = ""


ClientProtocol = Literal["openpi", "vla-eval", "kserve", "groot", "lerobot"]
"""Wire protocols of clients that already exist, which the gateway speaks besides its own."""


class ClientMapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How observations of one client protocol become this policy's. An empty field takes the rule of docs/compat.md.

    Attributes:
        images: the client's image key -> camera name; what is not listed is not read.
        state: the client's state keys, concatenated in this order.
        instruction: the client's key of the task text.
        default_instruction: task text of a client that sends none.
        control_hz: actions a second that these robots execute; 0 takes the checkpoint's own rate.
        execute_steps: actions of a chunk that are used before a new one is asked for, where the server holds the
            chunk (vla-eval); 0 uses all.
        actions: name -> width, in order, where the client wants the action row cut into named parts (GR00T).
        metadata: what the server tells a client on connecting: added to openpi's metadata, e.g. `reset_pose`; the
            observation parameters of vla-eval, e.g. `send_wrist_image`.
    """

    images: dict[str, str] = {}
    state: tuple[str, ...] = ()
    instruction: str = ""
    default_instruction: str = ""
    control_hz: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    execute_steps: Annotated[int, Meta(ge=0)] = 0
    actions: dict[str, Annotated[int, Meta(ge=1)]] = {}
    metadata: dict[str, bool | float | str | list[float]] = {}


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A second revision of a policy that is on trial beside the one that serves.

    Attributes:
        id: names this trial; a new one begins with empty counts.
        step: names the present step of it; counts are kept by step.
        weight: percent of the robots that it serves.
        mirror: percent of the other robots' observations that it also gets, without its answers being used.
        tolerance: largest difference of an action from the serving revision's that counts as equal, in robot units.
        tolerances: the same by action dimension, in place of `tolerance`; empty uses that for all.
        rows: rows of a chunk that are compared; 0 compares all.
        hold_s: a robot in the middle of a session stays with its revision for so long after a step has begun.
    """

    id: str
    step: str = ""
    revision: str = ""
    targets: tuple[Target, ...] = ()
    weight: Annotated[float, Meta(ge=0, le=100)] = 0.0
    mirror: Annotated[float, Meta(ge=0, le=100)] = 0.0
    tolerance: Annotated[float, Meta(ge=0)] = 0.0
    tolerances: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    rows: Annotated[int, Meta(ge=0)] = 0
    hold_s: Annotated[float, Meta(ge=0)] = 30.0


class DegradeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may be made cheaper before a robot is refused; each answer says what it got. Nothing where left out.

    Attributes:
        min_solver_steps: the fewest solver steps that are still good enough; 0 keeps the policy's own.
        min_action_horizon: the shortest chunk that is still good enough: no fewer actions than any robot executes of
            one, with those that pass while it is made and those that must be left when the next is asked for; 0 keeps
            the policy's own.
        fallback_policy: a smaller policy of the same gateway with the same robot interface, which takes an observation
            that this policy's workers cannot serve in time.
    """

    min_solver_steps: Annotated[int, Meta(ge=0)] = 0
    min_action_horizon: Annotated[int, Meta(ge=0)] = 0
    fallback_policy: str = ""


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the gateway serves one policy.

    Attributes:
        control_budget_ms: the SLO's budget, shown to clients; each observation still carries its own.
        max_batch: upper bound of a batch, whatever the worker's buckets allow.
        max_wait_ms: how long the first queued observation may wait for company; longer only where a plan of robots
            in a known rhythm saves a deadline by it. 0: nobody waits.
        clients: how the observations of each client protocol are read.
        candidate: a revision on trial; absent unless a rollout is under way.
        robot_weights: robot id -> share of a contended worker against the other robots of its tenant; 1 where absent.
        priority: class of its observations that claim none, which is to say `production`.
        priority_ceilings: tenant -> highest class that its observations may claim, `*` for the tenants not named
            (`production` where it is missing); what claims more is served in that class. Empty caps nobody.
        degrade: what may be made cheaper before a robot is refused.
    """

    policy: str
    family: str = ""
    revision: str = ""
    targets: tuple[Target, ...] = ()
    control_budget_ms: float = 0.0
    max_batch: int = 8
    max_wait_ms: float = 5.0
    clients: dict[ClientProtocol, ClientMapping] = {}
    candidate: Candidate | None = None
    robot_weights: dict[str, Annotated[float, Meta(gt=0, le=1000)]] = {}
    priority: PriorityName = "production"
    priority_ceilings: dict[str, PriorityName] = {}
    degrade: DegradeOptions = DegradeOptions()


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`routes.json`: all policies of one gateway."""

    routes: tuple[Route, ...] = ()
