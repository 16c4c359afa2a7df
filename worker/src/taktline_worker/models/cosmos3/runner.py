"""The runner of Cosmos3: static buffers a bucket, texts kept between requests, and the whole denoising loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from taktline_kernels import ops
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.cosmos3 import modules
from taktline_worker.models.cosmos3.buffers import Bucket, Buffers, Lanes
from taktline_worker.models.cosmos3.config import PATCH_VALUES, Cosmos3Architecture
from taktline_worker.models.cosmos3.mesh import Mesh, OneRank, Place
from taktline_worker.models.cosmos3.request import LATENT_CHANNELS, PolicyOutcome, PolicyRequest, RequestSettings
from taktline_worker.models.cosmos3.solver import advance, make_schedule
from taktline_worker.models.cosmos3.weights import Cosmos3Weights

Encoder = Callable[[Tensor], Tensor]
"""Frames fp32 (B, 3, T, H, W) -> normalised latents (B, 48, t, h, w)."""

StepObserver = Callable[[int, Tensor, Tensor], None]
"""Called with (step, state before it, guided velocity), packed as `unpack` takes them; for tests of single steps."""

TEXT_STEP = 64
"""Text slots of a bucket are a multiple of it."""
KEPT_BUFFERS = 4
"""Buckets whose buffers stay where nothing is captured."""
KEPT_TEXTS = 32
"""Instructions whose keys and values stay on the device: 30 MB each for Nano at 200 tokens."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch as every rank of a mesh takes it: no pixels, the observed frame is encoded.

    Attributes:
        conditional: token ids by row; `unconditional` likewise.
        clean: fp32 (B, 48, h, w), the observed frame's latent, cut to the content.
        state: fp32 (B, raw_dims); None without a state row.
        video: fp32 (B, 48, t - 1, h, w), noise of the frames to come.
        actions: fp32 (B, actions, raw_dims), noise.
        imagine: whether the video is wanted by any row.
    """

    conditional: tuple[tuple[int, ...], ...]
    unconditional: tuple[tuple[int, ...], ...]
    clean: Tensor
    state: Tensor | None
    video: Tensor
    actions: Tensor
    imagine: bool


class Cosmos3Runner:
    """Denoises batches; a row's answer does not depend on the other rows.

    Reused between requests: keys and values of the empty prompt (for the process), of the last instructions (for the
    checkpoint: they depend on the token ids alone), rotary tables by text length, solver numbers and time embeddings
    (static). On a CUDA device `compute` is made of captured work over `Buffers`; on a CPU it runs eagerly.

    Args:
        weights: this rank's share.
        architecture: dimensions.
        settings: shape and solver of every request.
        encoder: the VAE's; only needed where pixels come in, which is rank 0.
        mesh: the other ranks; None = this process alone.
    """

    def __init__(
        self,
        weights: Cosmos3Weights,
        architecture: Cosmos3Architecture,
        settings: RequestSettings,
        encoder: Encoder | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.weights, self.architecture, self.settings = weights, architecture, settings
        self.encoder = encoder
        self.mesh: Mesh = mesh or OneRank()
        self.device = weights.embedding.device
        self.schedule = make_schedule(settings.steps, settings.shift)
        self.guided = tuple(is_guided(settings, step.time) for step in self.schedule)
        rows, columns = modules.frame_tokens(settings)
        self.frame_tokens = rows * columns
        self.video_tokens = (settings.latent_grid[0] - 1) * self.frame_tokens
        self.tokens = self.frame_tokens + self.video_tokens + settings.action_rows
        self.video_values = self.video_tokens * PATCH_VALUES
        self.state_values = self.video_values + settings.actions * settings.raw_dims
        self.branches = 2 if any(self.guided) else 1
        self.branches_here = self.branches if self.mesh.place.branches == 1 else 1
        # Steps without guidance: the ranks of the second branch would wait.
        self.wide: Mesh | None = None if all(self.guided) else self.mesh.everyone
        self.hits: dict[str, int] = {"instruction": 0, "empty_prompt": 0}
        self.misses: dict[str, int] = {"instruction": 0, "empty_prompt": 0}
        self._mask = self._cell_mask()
        self._buffers: OrderedDict[Bucket, Buffers] = OrderedDict()
        self._texts: OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._empty_texts: OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], tuple[Tensor, Tensor]] = OrderedDict()

    def run(self, rows: Sequence[PolicyRequest], observer: StepObserver | None = None) -> list[PolicyOutcome]:
        """Encodes, denoises and reads out a batch; on a mesh every rank calls `solve` with what `prepare` gave."""
        inputs = self.prepare(rows)
        return self.outcomes(rows, inputs, self.solve(inputs, observer))

    @torch.inference_mode()
    def prepare(self, rows: Sequence[PolicyRequest]) -> Inputs:
        """Encodes the observed frames and cuts latents and noise to what is denoised.

        Raises:
            ValueError: there is no encoder.
        """
        _, height, width = self.settings.latent_grid
        raw, first = self.settings.raw_dims, int(self.settings.state_row)
        # First all that comes from the host: a copy behind the encoder would hold the host up until that has run.
        states = [row.state for row in rows if row.state is not None]
        state = torch.stack(states).to(self.device) if self.settings.state_row else None
        video = torch.stack([row.video_noise[:, 1:] for row in rows]).to(self.device)
        actions = torch.stack([row.action_noise[first:, :raw] for row in rows]).to(self.device)
        latents = self.encode(torch.stack([row.frames for row in rows]))
        return Inputs(
            conditional=tuple(row.conditional for row in rows),
            unconditional=tuple(row.unconditional for row in rows),
            clean=latents[:, :, 0, :height, :width],
            state=state,
            video=video,
            actions=actions,
            imagine=any(row.imagine for row in rows),
        )

    def encode(self, frames: Tensor) -> Tensor:
        """Frames fp32 (B, 3, T, H, W) -> normalised latents fp32 (B, 48, t, h, w). Raises ValueError: see `prepare`."""
        if self.encoder is None:
            raise ValueError("this rank has no encoder")
        return self.encoder(frames.to(self.device)).float()

    @torch.inference_mode()
    def solve(self, inputs: Inputs, observer: StepObserver | None = None) -> Tensor:
        """The denoised state fp32 (B, values) on the device: video tokens, then actions. All ranks give the same.

        Where no row imagines, the video is left as it was before the last step.
        """
        rows = len(inputs.conditional)
        bucket = self.bucket_for(rows, max(map(len, inputs.conditional + inputs.unconditional)), inputs.imagine)
        buffers = self.load(inputs, bucket)
        self.compute(buffers, observer)
        return buffers.result[:rows].clone()  # the next batch writes over the buffer

    @torch.inference_mode()
    def outcomes(self, rows: Sequence[PolicyRequest], inputs: Inputs, result: Tensor) -> list[PolicyOutcome]:
        """Actions, and the latents of all frames for the rows that asked for them, on the CPU."""
        video, actions = self.unpack(result)
        latents = torch.cat((inputs.clean[:, :, None].to(video), video), dim=2).cpu() if inputs.imagine else None
        return [
            PolicyOutcome(own, latents[index] if latents is not None and row.imagine else None)
            for index, (row, own) in enumerate(zip(rows, actions.cpu(), strict=True))
        ]

    def unpack(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(B, values) -> latents (B, 48, t - 1, h, w) and actions (B, actions, raw_dims)."""
        settings = self.settings
        _, height, width = settings.latent_grid
        video = state[:, : self.video_values].reshape(len(state), -1, PATCH_VALUES)
        actions = state[:, self.video_values :].reshape(len(state), settings.actions, settings.raw_dims)
        return modules.unpatchify(video, LATENT_CHANNELS, height, width), actions

    def bucket_for(self, rows: int, text: int, imagine: bool) -> Bucket:
        """The bucket that a batch runs in: its own size, the text slots rounded up."""
        return Bucket(rows, -(-text // TEXT_STEP) * TEXT_STEP, imagine)

    def buffers(self, bucket: Bucket) -> Buffers:
        """The bucket's buffers, made at its first use."""
        if bucket not in self._buffers:
            while len(self._buffers) >= KEPT_BUFFERS:
                self._buffers.popitem(last=False)
            self._buffers[bucket] = self.make_buffers(bucket)
        self._buffers.move_to_end(bucket)
        return self._buffers[bucket]

    def make_buffers(self, bucket: Bucket) -> Buffers:
        """New buffers of a bucket."""
        lanes = self._lanes(bucket.rows * self.branches_here, bucket.text, self.mesh.place)
        wide = None if self.wide is None else self._lanes(bucket.rows, bucket.text, self.wide.place)
        return Buffers(bucket, lanes, wide, self.settings, self.frame_tokens, self.state_values)

    def _lanes(self, count: int, text: int, place: Place) -> Lanes:
        return Lanes(count, text, self.weights, self.architecture, place.shards, self._own_tokens(place))

    def _own_tokens(self, place: Place) -> int:
        return -(-self.tokens // place.parts)

    def load(self, inputs: Inputs, bucket: Bucket) -> Buffers:
        """Copies a batch into the bucket's buffers; rows beyond it keep what they had and nobody reads them."""
        buffers = self.buffers(bucket)
        rows = len(inputs.conditional)
        branches, place = (inputs.conditional, inputs.unconditional), self.mesh.place
        here = branches[: self.branches_here] if place.branches == 1 else branches[place.branch :]
        for branch in range(self.branches_here):
            for row, tokens in enumerate(here[branch]):
                text = self._text(tokens, here[branch] is inputs.unconditional)
                buffers.lanes.put(branch * bucket.rows + row, tokens, text, self._table(len(tokens), place))
        if self.wide is not None and buffers.wide is not None:
            for row, tokens in enumerate(inputs.conditional):
                text = self._text(tokens, False, counted=place.branch == 1)
                buffers.wide.put(row, tokens, text, self._table(len(tokens), self.wide.place))
        buffers.clean[:rows].copy_(modules.patchify(inputs.clean[:, :, None]))
        if inputs.state is not None:
            buffers.state[:rows].copy_(inputs.state[:, None])
        buffers.noise[:rows, : self.video_values].copy_(modules.patchify(inputs.video).flatten(1))
        buffers.noise[:rows, self.video_values :].copy_(inputs.actions.flatten(1))
        return buffers

    def compute(self, buffers: Buffers, observer: StepObserver | None = None) -> None:
        """The whole denoising loop over the buffers, noise in and result out; nothing in it depends on their values."""
        x, history = buffers.noise, None
        clean = self.weights.patch_in(buffers.clean.to(self.weights.dtype))
        state = self.weights.action_in(buffers.state.to(self.weights.dtype))
        for index, step in enumerate(self.schedule[:-1]):
            velocity = self._velocity(buffers, clean, state, x, index)
            if observer is not None:
                observer(index, x, velocity)
            x, history = advance(step, x, velocity, history)
        # The last step takes all noise off: x0 it is, and of the actions alone where nobody wants the video.
        first = 0 if buffers.bucket.imagine or observer is not None else self.video_values
        velocity = self._velocity(buffers, clean, state, x, len(self.schedule) - 1, actions_only=first > 0)
        if observer is not None:
            observer(len(self.schedule) - 1, x, velocity)
        buffers.result[:, :first].copy_(x[:, :first])
        buffers.result[:, first:].copy_(advance(self.schedule[-1], x[:, first:], velocity, None)[0])

    def _velocity(
        self, buffers: Buffers, clean: Tensor, state: Tensor, x: Tensor, index: int, actions_only: bool = False
    ) -> Tensor:
        """fp32 (rows, values) with guidance: u + g (c - u); on a mesh one exchange between the branches."""
        guided, place = self.guided[index], self.mesh.place
        if not guided and self.wide is not None and buffers.wide is not None:
            return self._forward(self.wide, buffers.wide, len(x), clean, state, x, index, actions_only)
        if not guided and place.branch == 1:
            values = self.state_values - (self.video_values if actions_only else 0)
            own = x.new_zeros(len(x), values)  # nothing to do here; the other branch's rank has it
        else:
            lanes = len(x) * (self.branches_here if guided else 1)
            own = self._forward(self.mesh, buffers.lanes, lanes, clean, state, x, index, actions_only)
        if place.branches == 1 and not guided:
            return own
        conditional, unconditional = self.mesh.both(own)
        if not guided:
            return conditional
        return unconditional + self.settings.guidance * (conditional - unconditional)

    def _forward(
        self,
        mesh: Mesh,
        read: Lanes,
        lanes: int,
        clean: Tensor,
        state: Tensor,
        x: Tensor,
        index: int,
        actions_only: bool,
    ) -> Tensor:
        """One pass of the tower over the first `lanes` of `read`: fp32 (lanes, values), or of the actions alone."""
        w, a, settings = self.weights, self.architecture, self.settings
        rows, parts, own = len(x), mesh.place.parts, self._own_tokens(mesh.place)
        video = x[:, : self.video_values].reshape(rows, -1, PATCH_VALUES).to(w.dtype)
        actions = x[:, self.video_values :].reshape(rows, settings.actions, -1).to(w.dtype)
        h = torch.cat((clean, w.patch_in(video) + w.times[index], state, w.action_in(actions) + w.times[index]), dim=1)
        if parts > 1:
            h = functional.pad(h, (0, 0, 0, parts * own - self.tokens))
            h = h[:, mesh.place.part * own :][:, :own]
        if lanes > rows:
            h = h.repeat(lanes // rows, 1, 1)
        # What nobody reads of the last layer is not computed: the observed frame, and the video at the last step.
        unread = self.tokens - settings.actions if actions_only else self.frame_tokens
        added: Tensor | None = None
        for number, layer in enumerate(w.joint):
            h, added = modules.joint_layer(
                layer,
                a,
                h,
                added,
                read.cos[:lanes],
                read.sin[:lanes],
                read.keys[number, :lanes],
                read.values[number, :lanes],
                read.lengths[:lanes],
                mesh,
                text_multipliers=None if read.multipliers is None else read.multipliers[number, :lanes],
                tokens=self.tokens,
                first=unread if number == a.layers - 1 and parts == 1 else 0,
            )
        assert added is not None
        h = ops.add_rms_norm(h, added, w.joint_norm, a.norm_eps)[1]
        if parts > 1:
            both = mesh.gather(torch.cat((w.patch_out(h), w.action_out(h)), dim=-1))()[:, unread : self.tokens]
            video, actions = both[..., :PATCH_VALUES], both[..., PATCH_VALUES:]
        else:
            video, actions = h, w.action_out(h[:, -settings.actions :])
        actions = actions[:, -settings.actions :].float().flatten(1)
        if actions_only:
            return actions
        video = video[:, : self.video_tokens]
        video = (video if parts > 1 else w.patch_out(video)).float()
        return torch.cat(((video * self._mask).flatten(1), actions), dim=1)

    def _text(self, tokens: tuple[int, ...], empty: bool, *, counted: bool = True) -> tuple[Tensor, Tensor]:
        """Keys and values of a prompt; the empty one's are never given up for an instruction's."""
        kept, name = (self._empty_texts, "empty_prompt") if empty else (self._texts, "instruction")
        if tokens in kept:
            self.hits[name] += counted
            kept.move_to_end(tokens)
            return kept[tokens]
        self.misses[name] += counted
        found = self.encode_text(tokens)
        while len(kept) >= (1 if empty else KEPT_TEXTS):
            kept.popitem(last=False)
        kept[tokens] = found
        return found

    def encode_text(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values (layers, L, kv heads, head_dim) of a prompt's token ids; not kept. All ranks call it."""
        cos, sin = modules.rope_table(self.architecture, modules.text_positions(len(tokens)))
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        return modules.encode_text(
            self.weights, self.architecture, ids, cos.to(self.device), sin.to(self.device), self.mesh
        )

    def _table(self, length: int, place: Place) -> tuple[Tensor, Tensor]:
        """Rotary table of this rank's tokens at `place` behind a text of `length` tokens."""
        key = length, place.parts
        if key not in self._tables:
            while len(self._tables) >= 2 * KEPT_TEXTS:
                self._tables.popitem(last=False)
            a, own = self.architecture, self._own_tokens(place)
            positions = modules.joint_positions(a, self.settings, length)
            positions = functional.pad(positions, (0, 0, 0, place.parts * own - self.tokens))
            cos, sin = modules.rope_table(a, positions[place.part * own :][:own])
            self._tables[key] = cos.to(self.device), sin.to(self.device)
        return self._tables[key]

    def _cell_mask(self) -> Tensor:
        """(video tokens, values) fp32, 0 at the cells that only fill an odd side up: they stay zero."""
        frames, height, width = self.settings.latent_grid
        return modules.patchify(torch.ones(1, LATENT_CHANNELS, frames - 1, height, width))[0].to(self.device)


def is_guided(settings: RequestSettings, time: int) -> bool:
    """Whether guidance runs at an integer time: strictly inside the interval, where there is one."""
    if settings.guidance == 1.0:
        return False
    return settings.interval is None or settings.interval[0] < time < settings.interval[1]
