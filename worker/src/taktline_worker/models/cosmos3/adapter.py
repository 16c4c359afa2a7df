"""The Cosmos3 adapter: a published policy folder behind the interface of all families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import EngineConfig, WorldActionOptions

from taktline_worker.adapter import Answer, CapturedGraph, Description, ImaginedChunk
from taktline_worker.checkpoint import TensorFiles, read_sidecar, verify_digests
from taktline_worker.devices import choose_device
from taktline_worker.engine_options import config_error
from taktline_worker.models.cosmos3 import fp8, vae, video
from taktline_worker.models.cosmos3.config import Cosmos3Architecture, expected_shapes, open_transformer, parameters
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.group import PolicyGroup, Solved
from taktline_worker.models.cosmos3.mesh import Mesh, Place, Split, better_split, check_mesh, place_of
from taktline_worker.models.cosmos3.processor import Cosmos3Processor, PendingCosmosRow, PreparedRow
from taktline_worker.models.cosmos3.profile import Cosmos3Profile
from taktline_worker.models.cosmos3.ranks import PolicyRanks, check_devices
from taktline_worker.models.cosmos3.scheduler_file import check_scheduler
from taktline_worker.models.cosmos3.settings import PAGE, Serving, Sidecar, check_grid, resolve
from taktline_worker.models.cosmos3.tokenizer import ChatTokenizer
from taktline_worker.models.cosmos3.vae_config import VaeConfig
from taktline_worker.models.cosmos3.vae_weights import VaeWeights, load_vae
from taktline_worker.models.cosmos3.weights import Cosmos3Weights, load_weights
from taktline_worker.observation import EncodedImage, RobotInput

NANO = "cosmos3-nano"
EDGE = "cosmos3-edge"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_USUAL_INSTRUCTION = "pick up the yellow cup from the left side of the table and put it into the sink behind the plates"


class Cosmos3Adapter:
    """One loaded policy for one embodiment."""

    def __init__(
        self, processor: Cosmos3Processor, group: PolicyGroup, family: str, precision: str, coder: VaeConfig
    ) -> None:
        self.processor = processor
        self.group = group
        self._coder = coder
        serving = processor.serving
        self.description = Description(
            family=family,
            precision=precision,
            device=str(group.runner.device),
            cameras=processor.cameras,
            optional_cameras=(),
            state_dim=processor.state_dim,
            action_dim=serving.settings.raw_dims,
            horizon=serving.rows,
            control_period_s=serving.control_period_s,
            imagines=serving.imagine,
        )

    @property
    def runner(self) -> GraphRunner:
        """This process's runner; another one after a lost group has come back."""
        return self.group.runner

    def begin(self, observation: RobotInput, pool: Executor) -> PendingCosmosRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[PreparedRow], bucket: int) -> list[Solved] | TaktlineError:
        """Each row's actions in the model's units; or the error of a batch that was lost with a rank of the mesh."""
        del bucket  # the runner knows which batches it has buffers for
        try:
            return self.group.run([row.request for row in rows])
        except TaktlineError as error:
            return error

    def finish(
        self, rows: Sequence[PreparedRow], outputs: list[Solved] | TaktlineError
    ) -> list[Answer | TaktlineError]:
        """float32 (rows, D) in robot units, with the video where it was asked for, or a row's error."""
        if isinstance(outputs, TaktlineError):
            return [outputs] * len(rows)
        found: list[Answer | TaktlineError] = []
        for row, solved in zip(rows, outputs, strict=True):
            try:
                found.append(self._answer(row, solved))
            except TaktlineError as error:
                found.append(error)
        return found

    def _answer(self, row: PreparedRow, solved: Solved) -> Answer:
        actions = self.processor.actions(solved.outcome.actions)
        if row.imagine is None or solved.frames is None:
            return actions
        fps = self.processor.serving.settings.fps
        parts = video.encode_video(solved.frames, row.imagine, fps)
        return ImaginedChunk(actions, row.imagine.format, fps, parts)

    def close(self) -> None:
        """Lets the other ranks go."""
        self.group.close()

    def profile(self, *, views: int = 0, prompt_tokens: int = 0) -> Cosmos3Profile:
        """See `HasProfile`; 0 tokens take the prompt of calibration.

        Raises:
            TaktlineError: CONFIG_INVALID for another number of cameras, or on a mesh, whose ranks follow requests only.
        """
        if views:
            raise config_error("the views of this family are one picture", "leave --views out")
        if self.group.ranks is not None:
            raise config_error("engine.parallel asks for cfg or tp", "profile the policy with both at 1")
        tokens = prompt_tokens or len(self.largest_row().request.conditional)
        return Cosmos3Profile(self.description.family, self.runner, self._coder, self.description.precision, tokens)

    def largest_row(self) -> PreparedRow:
        """Every camera at the policy's own size and an instruction of usual length."""
        height, width = self.processor.serving.settings.content
        if len(self.processor.cameras) > 1:
            height = height * 2 // 3  # the wrist's part of the composed picture; the others are shrunk to fit
        frame = EncodedImage("raw", bytes(height * width * 3), (height, width, 3))
        observation = RobotInput(
            images=dict.fromkeys(self.processor.cameras, frame),
            state=np.zeros(self.processor.state_dim),
            instruction=_USUAL_INSTRUCTION,
            seed=0,
        )
        return self.processor.begin(observation, _Now()).result()

    def graphs(self) -> Sequence[CapturedGraph]:
        """The captured denoising loops; none on a CPU."""
        captured = self.runner.captured
        return [CapturedGraph(b.rows, graph.capture_s, graph.pool_bytes) for b, graph in captured.items()]

    def caches(self) -> Mapping[str, tuple[int, int]]:
        """Hits and misses of texts: of instructions, and of the empty prompt."""
        runner = self.runner
        return {name: (runner.hits[name], runner.misses[name]) for name in runner.hits}


class _Now(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]  # the base class's own signature
        """See Executor."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(frozen=True, slots=True)
class Opened:
    """A folder that passed all checks but those of its weights."""

    folder: Path
    architecture: Cosmos3Architecture
    files: TensorFiles
    sidecar: Sidecar
    serving: Serving
    tokenizer: ChatTokenizer
    scheduler: str

    @property
    def family(self) -> str:
        """The name that deployments use."""
        return family_of(self.architecture)


def family_of(a: Cosmos3Architecture) -> str:
    """`cosmos3-nano` or `cosmos3-edge`."""
    return EDGE if a.edge else NANO


def open_folder(config: EngineConfig) -> Opened:
    """Reads everything but the weights, and refuses what cannot work.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    folder, options = Path(config.model.path), config.engine
    if not folder.is_dir():
        raise config_error(f"model.path {folder} is no folder", "mount the volume that holds the checkpoint")
    sidecar = read_sidecar(folder, Sidecar, PAGE)
    architecture, files = open_transformer(folder)
    serving = resolve(
        sidecar, options, edge=architecture.edge, domains=architecture.domains, action_width=architecture.action_width
    )
    check_grid(serving.settings)
    asked = options.world_action.shift if options.world_action is not None else None
    scheduler = check_scheduler(folder, serving.settings.shift, stated=sidecar.shift is not None or asked is not None)
    tokenizer = ChatTokenizer(folder, architecture.vocabulary)
    return Opened(folder, architecture, files, sidecar, serving, tokenizer, scheduler)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank's share of a policy in memory; `member` makes its runner for a mesh that it has joined.

    Attributes:
        decoder: the VAE with its decoder; None where no video is served.
        encoder: the VAE; None on ranks that get no pixels.
    """

    opened: Opened
    weights: Cosmos3Weights
    encoder: VaeWeights | None
    decoder: VaeWeights | None
    buckets: tuple[int, ...]
    split: Split

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.weights.embedding.device

    def member(self, mesh: Mesh) -> GraphRunner:
        """This rank's runner, captured on a GPU: all ranks of a mesh make this call together."""
        runner = GraphRunner(
            self.weights,
            self.opened.architecture,
            self.opened.serving.settings,
            None if self.encoder is None else partial(vae.encode, self.encoder),
            mesh,
            rows=self.buckets,
            imagine=self.opened.serving.imagine,
        )
        if self.device.type == "cuda":
            runner.capture()
        return runner


def load(config: EngineConfig) -> Cosmos3Adapter:
    """Loads the checkpoint that `config` names, after all startup checks, and starts the other ranks of its mesh.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    opened = _checked(config)
    # Before the weights: a wrong camera name, or a GPU that is not there, must not cost minutes of loading.
    processor = Cosmos3Processor(
        opened.serving,
        opened.tokenizer,
        config.model.cameras,
        opened.architecture.action_width,
        config.engine.max_image_pixels,
    )
    # Every rank must share the same: they are told, and do not look at their own GPU.
    config = _settled(config, opened)
    parallel, device = config.engine.parallel, choose_device(config.engine.device)
    size = parallel.cfg * parallel.tp
    check_devices(size, device)
    loaded = _load(config, opened, 0)
    ranks = PolicyRanks(config, parallel.cfg, parallel.tp, loaded.split, device) if size > 1 else None
    group = PolicyGroup(loaded.member, loaded.decoder, ranks)
    assert loaded.encoder is not None  # this is rank 0
    return Cosmos3Adapter(processor, group, opened.family, config.engine.precision, loaded.encoder.config)


def load_rank(config: EngineConfig, rank: int) -> LoadedRank:
    """The share of a rank other than 0. Raises TaktlineError as `load`."""
    return _load(config, _checked(config), rank)


def _checked(config: EngineConfig) -> Opened:
    """Everything that is refused before the weights are read."""
    options = config.engine
    if options.precision == "fp8":
        fp8.check_device(choose_device(options.device))
    if options.parallel.search != 1:
        raise config_error("engine.parallel.search is for planners", "use cfg and tp, or dp, one replica a GPU")
    if options.rtc.mode not in ("auto", "off"):
        raise config_error(f"engine.rtc.mode is {options.rtc.mode}", "this family follows no tail: set auto or off")
    verify_digests(Path(config.model.path), config.model.sha256)
    opened = open_folder(config)
    if opened.family != config.model.family:
        raise config_error(
            f"model.family is {config.model.family}, the checkpoint is {opened.family}",
            f"set model.family to {opened.family}, or mount the other checkpoint",
        )
    guided = opened.serving.settings.guidance != 1.0
    check_mesh(opened.architecture, _place(_settled(config, opened), 0), guided)
    return opened


def _settled(config: EngineConfig, opened: Opened) -> EngineConfig:
    """The same, and what the ranks of a branch share said in it."""
    options, asked = config.engine, config.engine.world_action or WorldActionOptions()
    if options.parallel.tp == 1 or asked.split is not None:
        return config
    device = choose_device(options.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    size = parameters(expected_shapes(opened.architecture)) * _DTYPES[options.precision].itemsize
    said = msgspec.structs.replace(asked, split=better_split(size, memory))
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(options, world_action=said))


def _place(config: EngineConfig, rank: int) -> Place:
    options = config.engine
    split = options.world_action.split if options.world_action is not None else None
    return place_of(rank, options.parallel.cfg, options.parallel.tp, split or "tensor")


def _load(config: EngineConfig, opened: Opened, rank: int) -> LoadedRank:
    options, place = config.engine, _place(config, rank)
    device, dtype = choose_device(options.device), _DTYPES[options.precision]
    imagine = opened.serving.imagine
    weights = load_weights(opened.files, opened.architecture, opened.serving.settings, dtype, device, place)
    whole = load_vae(opened.folder, dtype, device, decoder=imagine) if imagine or rank == 0 else None
    return LoadedRank(
        opened=opened,
        weights=fp8.quantise(weights) if options.precision == "fp8" else weights,
        encoder=whole if rank == 0 else None,
        decoder=whole if imagine else None,
        buckets=options.buckets,
        split=place.split,
    )
