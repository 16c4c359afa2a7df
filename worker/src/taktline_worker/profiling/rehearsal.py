"""An engine's set-up rehearsed for a GPU that is not here: its kernels, and what its captured code must not do.

Weights and buffers are fake tensors of a CUDA device: they have shapes and no memory, so that a policy of the published
size is prepared in seconds. Where the engine would capture a graph, the code runs once as the warm-up does, then once
watched: whatever a stream capture refuses (a value read back, a copy between host and device, indices whose number the
device finds, a stop for the device) is a finding with the line that does it.
"""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from taktline_kernels import ahead
from taktline_kernels.selector import REFERENCE, Choice, KernelSelector, Rule, Shape
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from taktline_worker import branches, graph_capture
from taktline_worker.profiling.kernels import Recorded, packaged_table, record, selecting_by
from taktline_worker.profiling.subject import RANDOM, RANDOM_POLICIES, Request

_aten = torch.ops.aten
# Operations whose result's size only the device knows: PyTorch stops and reads it.
_SIZED_BY_DATA = (_aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.bincount)
_OWN_CODE = ("taktline_worker", "taktline_kernels")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Something that a stream capture refuses.

    Attributes:
        where: file and line of this project that does it.
        what: in words.
    """

    where: str
    what: str


@dataclass
class Rehearsed:
    """What one policy's set-up would do on one architecture.

    Attributes:
        kernels: those it launches, each compiled.
        findings: what its captured code must not do.
        graphs: how many it captures.
        choices: of the selector: operation, shape, dtype, choice.
    """

    policy: str
    precision: str
    arch: str
    kernels: list[ahead.Compiled] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    graphs: int = 0
    choices: list[tuple[str, str, str, Choice]] = field(default_factory=list)

    @property
    def failed(self) -> list[ahead.Compiled]:
        """Kernels that the architecture cannot run."""
        return [one for one in self.kernels if one.error]

    @property
    def without_rule(self) -> list[str]:
        """Operations that run their torch reference, each once."""
        return sorted({op for op, _, _, choice in self.choices if choice.kernel == REFERENCE})


class _TableSelector(KernelSelector):
    """Decides as on a GPU that has this table; without rules every operation runs its reference."""

    def __init__(self, name: str, rules: tuple[Rule, ...]) -> None:
        super().__init__()
        self._name, self._own = name, rules

    def rules(self, device: torch.device) -> tuple[str, tuple[Rule, ...]]:
        """See `KernelSelector`."""
        del device
        return self._name, self._own

    def choose(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        """See `KernelSelector`; fake devices have no index of their own."""
        return super().choose(op, shape, dtype, torch.device(device.type))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes on the CPU, only shapes on the device; answers what is read back, and notes what a capture refuses."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self.inside = False
        self.graphs = 0
        self.found: set[Finding] = set()

    def note(self, what: str) -> None:
        """Keep a finding, if a capture is on."""
        if self.inside:
            self.found.add(Finding(_own_line(), what))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0], func)
        if func is _aten._pin_memory.default:  # which needs the driver
            return args[0]
        self._look(func, args, kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor | torch.device)]
        if any(isinstance(one, FakeTensor) or one.type == "cuda" for one in given):
            args, kwargs = tree_map_only(Tensor, self._shape_of, (args, kwargs))
            if func is _aten._scaled_mm.out:  # PyTorch states shapes for the other form only
                _aten._scaled_mm.default(*args, **{name: one for name, one in kwargs.items() if name != "out"})
                return kwargs["out"]
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):  # likewise
            kwargs = kwargs | {"pin_memory": False}
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _shape_of(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        packet = func.overloadpacket
        if packet in _SIZED_BY_DATA:
            self.note(f"{packet.__name__}: only the device knows the size of its result")
        elif packet in (_aten.index, _aten.index_put, _aten.index_put_):
            if any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
                self.note("indices by a mask: only the device knows how many")
        elif packet is _aten.repeat_interleave and func is _aten.repeat_interleave.Tensor:
            if kwargs.get("output_size") is None:
                self.note("repeat_interleave without output_size: only the device knows the size of its result")
        elif packet is _aten.copy_:
            self._copied(args[1], args[0].device)
        elif packet is _aten._to_copy and kwargs.get("device") is not None:
            self._copied(args[0], torch.device(kwargs["device"]))
        elif kwargs.get("generator") is not None:
            self.note(f"{packet.__name__} draws from a generator that the graph does not know")

    def _copied(self, source: Tensor, target: torch.device) -> None:
        if source.device.type != target.type:
            self.note(f"a copy from {source.device.type} to {target.type}")

    def _read(self, tensor: Tensor, func: Callable[[Tensor], Any]) -> Any:
        if tensor.device.type == "cuda":
            self.note("a value is read back from the device")
        if isinstance(tensor, FakeTensor):
            return 0.5 if tensor.dtype.is_floating_point else tensor.dtype == torch.bool or 1
        with unset_fake_temporarily():
            return func(tensor)


def _own_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if any(part in path.parts for part in _OWN_CODE) and path.name != Path(__file__).name:
            return f"{path.parent.name}/{path.name}:{frame.lineno}"
    return "outside this project"


@contextmanager
def pretended_gpu(
    arch: str, table: str = "", *, compiled: bool = True
) -> Iterator[tuple[ahead.Ledger, _Watch, _TableSelector]]:
    """A CUDA device of `arch` that has shapes only, with a table's kernels, for as long as this lasts.

    Args:
        arch: such as "sm_90".
        table: shipped table whose GPU it is; none runs what a GPU without a table runs.
        compiled: compile the kernels that are launched.
    """
    capability = ahead.compute_capability(arch)
    selector = _TableSelector(table or arch, packaged_table(table) if table else ())
    # Made before anything is replaced: PyTorch's compiler, which fake tensors import, looks at the same functions.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch(mode)
    cuda: dict[str, Any] = {
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: table.upper() or arch,
        "get_device_properties": lambda device=None: mock.Mock(
            shared_memory_per_block_optin=ahead.SHARED_BYTES[arch],
            multi_processor_count=ahead.PROCESSORS[arch],
        ),
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: watch.inside,
        "synchronize": lambda device=None: watch.note("a stop for the device"),
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 0),
    }
    with ExitStack() as stack:
        ledger = stack.enter_context(ahead.recording(arch, compiled=compiled))
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", _on_cpu(torch.Generator)))
        stack.enter_context(mock.patch.object(graph_capture.GraphPool, "compile", return_value=None))
        stack.enter_context(mock.patch.object(graph_capture.GraphPool, "capture", _watched_capture(watch)))
        stack.enter_context(mock.patch.object(graph_capture.Beside, "run", _one_after_the_other))
        stack.enter_context(mock.patch.object(branches, "_side", return_value=None))
        stack.enter_context(selecting_by(selector))
        stack.enter_context(mode)
        stack.enter_context(watch)
        yield ledger, watch, selector


def _on_cpu(made: type[torch.Generator]) -> Callable[..., torch.Generator]:
    def generator(device: object = None) -> torch.Generator:
        del device
        return made()

    return generator


def _one_after_the_other(
    self: graph_capture.Beside,
    leading: Callable[[graph_capture.Stage], None],
    following: Callable[[graph_capture.Stage], None],
) -> None:
    del self
    leading(lambda stage: None)
    following(lambda stage: None)


def _watched_capture(watch: _Watch) -> Callable[..., graph_capture.Captured]:
    @torch.inference_mode()
    def capture(self: graph_capture.GraphPool, compute: Callable[[], object], **shape: int) -> graph_capture.Captured:
        del self, shape
        compute()
        watch.inside = True
        try:
            compute()
        finally:
            watch.inside = False
        watch.graphs += 1
        return graph_capture.Captured(mock.Mock(), 0.0, 0)

    return capture


def rehearse(
    policy: str,
    arch: str,
    *,
    precision: str = "bf16",
    table: str = "",
    batches: tuple[int, ...] = (1,),
    compiled: bool = True,
) -> Rehearsed:
    """Prepares a random policy of the published widths, with few layers, for a GPU that is not here.

    Layers are alike, so that two of each kind launch what all of them do.

    Args:
        policy: a key of `POLICIES`.
        arch: such as "sm_90".
        table: shipped table whose GPU it is.
        batches: sizes to capture.
        compiled: compile the kernels; else they are only listed.
    """
    with (
        warnings.catch_warnings(),
        pretended_gpu(arch, table, compiled=compiled) as (ledger, watch, selector),
    ):
        # A kernel asks where its tensors lie to each other, which fake ones answer right.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        POLICIES[policy](policy, precision, batches)
    return Rehearsed(
        policy, precision, arch, list(ledger.kernels.values()), sorted(watch.found), watch.graphs, selector.explain()
    )


def explained(request: Request, arch: str, table: str) -> list[Recorded]:
    """What a request of a random policy would run on a GPU that is not here, each kind of call once.

    Args:
        request: of the published widths and depths, or of so many layers.
        arch: such as "sm_90".
        table: shipped table whose GPU it is; none for a GPU without one.
    """
    name = request.policy.removeprefix(RANDOM)
    with warnings.catch_warnings(), pretended_gpu(arch, table, compiled=False):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        module = importlib.import_module(RANDOM_POLICIES[name])
        profile = module.random_profile(name, request, _DEVICE, request.precision or "bf16")
        return record(profile, request.batches[0])


_DEVICE = torch.device("cuda")


def _pi(policy: str, precision: str, batches: tuple[int, ...]) -> None:
    from taktline_worker.models.pi import synthetic
    from taktline_worker.models.pi.runners import make_runner
    from taktline_worker.models.pi.weights import BF16_VISION, pack_weights

    published = {"pi05": synthetic.PI05, "pi0": synthetic.PI0}[policy]
    architecture = replace(published, vision_layers=2, depth=2)
    plan = synthetic.conventions(views=3, horizon=50, steps=2)
    tensors = dict(synthetic.stream_random_tensors(architecture, _DEVICE))
    weights = pack_weights(tensors, architecture, plan, BF16_VISION, _DEVICE)
    for guidance in (None, 5.0):
        make_runner(weights, architecture, plan, batches, precision, guidance)


def _random(policy: str, precision: str, batches: tuple[int, ...]) -> None:
    module = importlib.import_module(RANDOM_POLICIES[policy])
    layers = {"gr00t-n1.7": 3, "minicpm-robot": 4}.get(policy, 2)  # some of each kind
    module.random_profile(policy, Request(f"random:{policy}", batches, layers=layers), _DEVICE, precision)


def _planner(policy: str, precision: str, batches: tuple[int, ...]) -> None:
    del batches
    _random(policy, precision, (100,))


POLICIES: dict[str, Callable[[str, str, tuple[int, ...]], None]] = {
    "pi05": _pi,
    "pi0": _pi,
    "gr00t-n1.7": _random,
    "minicpm-robot": _random,
    "cosmos3-nano": _random,
    "cosmos3-edge": _random,
    "vjepa2-ac": _planner,
}
"""Policy -> what prepares it for the pretended GPU: (policy, precision, batches)."""


def precisions(policy: str, arch: str, wanted: str = "") -> tuple[str, ...]:
    """Number formats that the policy's engine has on such a GPU; only `wanted`, if it is among them.

    Raises:
        TaktlineError: CONFIG_INVALID where the engine would refuse `wanted`.
    """
    from taktline_worker.models.cosmos3.fp8 import CAPABILITY

    try:
        capability = ahead.compute_capability(arch)
    except ValueError as error:
        raise TaktlineError(ErrorCode.CONFIG_INVALID, str(error), "give --arch one of them") from error
    known = ("bf16",) if capability < CAPABILITY else ("bf16", "fp8")
    if wanted and wanted not in known:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{policy} has no {wanted} on {arch}",
            f"choose {' or '.join(known)}",
        )
    return (wanted,) if wanted else known
