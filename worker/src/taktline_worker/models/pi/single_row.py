"""A row that is alone, on its way to the GPU: what does not depend on it is ready, and one call launches all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from taktline_worker.devices import Letter, Running, Staged
from taktline_worker.graph_parts import Parts
from taktline_worker.models.pi.native_rows import Launch, NativeRows
from taktline_worker.models.pi.runner import PiRow

if TYPE_CHECKING:
    from taktline_worker.models.pi.camera import CameraBuffers
    from taktline_worker.models.pi.graphs import Bucket


class RowLetter:
    """A letter with all in it that is the same for every row of a bucket with so many images."""

    def __init__(self, staged: Staged, bucket: Bucket, images: int, tokens_per_image: int) -> None:
        self.bucket, self.images, self.letter = bucket, images, staged.letter()
        self._visual, text = images * tokens_per_image, bucket.views * tokens_per_image
        self._order = np.arange(text, text + bucket.prompt)
        sizes = {"tokens": bucket.prompt, "source": text + bucket.prompt}
        for name, array in self.letter.arrays.items():
            array[: sizes.get(name, 1)] = 0
        self.letter.arrays["source"][: self._visual] = np.arange(self._visual)

    def write(self, row: PiRow) -> Letter:
        """The letter, complete: what `GraphRunner.write` makes of a batch of this row."""
        arrays, count = self.letter.arrays, len(row.tokens)
        arrays["tokens"][:count] = row.tokens
        arrays["source"][self._visual : self._visual + count] = self._order[:count]
        arrays["lengths"][0] = self._visual + count
        arrays["actions"][0] = row.noise.numpy()
        if row.state is not None:
            arrays["state"][0] = row.state.numpy()
        return self.letter


class SingleRows:
    """Launches of a captured runner's buckets of one row.

    Args:
        graphs: what each bucket of one row was captured in.
        answers: (1, H, D) on the device, where they leave the actions.
    """

    def __init__(
        self,
        rows: NativeRows,
        staged: Staged,
        camera: CameraBuffers,
        graphs: Mapping[Bucket, Parts],
        tokens_per_image: int,
        answers: Tensor,
    ) -> None:
        self._staged, self._camera, self._tokens_per_image, self._answers = staged, camera, tokens_per_image, answers
        self._graphs = dict(graphs)  # what is launched by its address has to stay
        self._launches = {
            bucket: Launch(rows, [one.raw_cuda_graph_exec() for one in parts.graphs], 1 + bucket.views)
            for bucket, parts in sorted(graphs.items())
        }
        self._ready: RowLetter | None = None
        self._began: Any = None

    def draft(self, row: PiRow) -> RowLetter | None:
        """The letter of a row whose frames are not there yet; None where no bucket of one row holds it."""
        images, prompt = row.pixels.shape[0], len(row.tokens)
        bucket = next((one for one in self._launches if one.prompt >= prompt and one.views >= images), None)
        if bucket is None or row.rtc is not None:
            return None
        ready, self._ready = self._ready, None
        if ready is None or ready.bucket != bucket or ready.images != images:
            ready = RowLetter(self._staged, bucket, images, self._tokens_per_image)
        ready.write(row)
        return ready

    def launch(self, frames: Sequence[Tensor], draft: RowLetter) -> Running | None:
        """As `GraphRunner.launch`; None where the device has to be told more of the frames than their pixels."""
        targets = self._camera.targets(frames)
        if targets is None:
            return None
        began, self._began = self._began or _event(), None
        own = draft.letter
        copies = [(target, one.data_ptr(), one.numel()) for target, one in zip(targets, frames, strict=True)]
        stream = torch.cuda.current_stream()
        try:
            self._launches[draft.bucket].begin([*copies, own.copy], began.cuda_event, stream.cuda_stream)
            return Running(began, self._answers, (own, frames))
        except BaseException:
            stream.synchronize()  # PyTorch does not know that these copies read what is given back now
            raise

    def look_ahead(self, last: RowLetter) -> None:
        """Gets what the next row needs, most likely one as the last."""
        self._began = _event()
        self._ready = RowLetter(self._staged, last.bucket, last.images, self._tokens_per_image)


def _event() -> Any:
    """One that is there: PyTorch makes it when it is recorded."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
