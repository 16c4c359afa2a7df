"""What `taktline profile` and `taktline bench engine` say of GR00T: phases, their work, and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from taktline_protocol import TaktlineError
from taktline_worker.models.groot import synthetic
from taktline_worker.models.groot.work import phase_work
from taktline_worker.profiling import report
from taktline_worker.profiling.subject import Request, open_subject


@pytest.mark.parametrize(
    ("images", "text", "gflop", "mbytes"),
    [
        # The published counts of LIBERO (2 frames, 156 tokens) and of DROID (4 frames, 277): GFLOP of a request, and MB
        # of weights, of which the head's are read at each of four steps.
        (2, 28, (350.0, 254.0 + 64.0, 15.7 + 279.0), (813.0, 1611.0 + 403.0, 201.0 + 6724.0)),
        (4, 21, (699.0, 456.0 + 114.0, 28.0 + 281.0), (813.0, 1611.0 + 403.0, 201.0 + 6724.0)),
    ],
)
def test_work_agrees_with_the_published_counts(
    images: int, text: int, gflop: tuple[float, ...], mbytes: tuple[float, ...]
) -> None:
    found = phase_work(synthetic.PUBLISHED, batch=1, grids=((16, 16),) * images, text=text, weight_bytes=2.0)
    assert [one.flops / 1e9 for one in found.values()] == pytest.approx(gflop, rel=0.015)
    assert [one.bytes / 1e6 for one in found.values()] == pytest.approx(mbytes, rel=0.015)


def test_a_served_folder_by_phase(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(kit.config(kit.folder(tmp_path / "policy"))))
    subject = open_subject(Request(str(path), (1, 2), device="cpu"))
    assert (subject.policy, subject.shape["images"], subject.captured) == ("gr00t-n1.7", 2, False)
    said: list[str] = []
    rows = report.profile(subject, [1, 2], said.append, runs=3, limit_s=1.0)
    assert [[phase.name for phase in row.phases] for row in rows] == [["vision", "text", "head"]] * 2
    for one, two in zip(rows[0].phases, rows[1].phases, strict=True):
        assert two.gflop == pytest.approx(2 * one.gflop)
        assert two.mbytes == pytest.approx(one.mbytes)
    with pytest.raises(TaktlineError, match="leave --views"):
        open_subject(Request(str(path), (1,), device="cpu", views=1))


def test_of_a_folder_with_several_embodiments_one_is_chosen(kit: Any, tmp_path: Path) -> None:
    folder = str(kit.folder(tmp_path / "policy"))
    chosen = open_subject(Request(folder, (1,), device="cpu", statistics="libero_sim"))
    assert chosen.shape["images"] == 2
    with pytest.raises(TaktlineError, match="--statistics"):
        open_subject(Request(folder, (1,), device="cpu"))
    with pytest.raises(TaktlineError, match="no statistics"):
        open_subject(Request("random:gr00t-n1.7", (1,), device="cpu", statistics="libero_sim"))


def test_random_weights_keep_their_scale(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = kit.architecture()
    monkeypatch.setattr(synthetic, "PUBLISHED", tiny)
    monkeypatch.setattr(synthetic, "SIDE", 4 * tiny.vision.patch)
    subject = open_subject(Request("random:gr00t-n1.7", (1, 2), device="cpu", views=2, prompt_tokens=4))
    assert subject.shape["tokens"] == 5 + 2 * (4 + 2) + 4
    for batch in (1, 2):
        actions = subject.whole(batch)()
        assert isinstance(actions, torch.Tensor)
        assert actions.shape[0] == batch
        assert 0.1 < float(actions.std()) < 30.0
    with pytest.raises(TaktlineError, match="needs a Hopper GPU"):
        open_subject(Request("random:gr00t-n1.7", (1,), device="cpu", precision="fp8"))


def test_more_images_than_tokens_is_refused() -> None:
    with pytest.raises(TaktlineError, match="images take"):
        synthetic.random_row(synthetic.PUBLISHED, 3, 100)
