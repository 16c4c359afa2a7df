from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("encoding", "data", "shape")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    encoding: str
    data: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, encoding: _Optional[str] = ..., data: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BucketTime(_message.Message):
    __slots__ = ("batch", "median_ms", "p99_ms")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    median_ms: float
    p99_ms: float
    def __init__(self, batch: _Optional[int] = ..., median_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("policy", "family", "revision", "precision", "device", "cameras", "optional_cameras", "state_dim", "action_dim", "horizon", "dt_s", "t_sync", "rtc", "rtc_max_delay", "replicas", "cheaper", "batch_port", "batch_token", "batch_version", "image_fit", "search")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_CAMERAS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIM_FIELD_NUMBER: _ClassVar[int]
    ACTION_DIM_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    DT_S_FIELD_NUMBER: _ClassVar[int]
    T_SYNC_FIELD_NUMBER: _ClassVar[int]
    RTC_FIELD_NUMBER: _ClassVar[int]
    RTC_MAX_DELAY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CHEAPER_FIELD_NUMBER: _ClassVar[int]
    BATCH_PORT_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIT_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    policy: str
    family: str
    revision: str
    precision: str
    device: str
    cameras: _containers.RepeatedScalarFieldContainer[str]
    optional_cameras: _containers.RepeatedScalarFieldContainer[str]
    state_dim: int
    action_dim: int
    horizon: int
    dt_s: float
    t_sync: _containers.RepeatedCompositeFieldContainer[BucketTime]
    rtc: str
    rtc_max_delay: int
    replicas: int
    cheaper: _containers.RepeatedCompositeFieldContainer[CheaperLevel]
    batch_port: int
    batch_token: bytes
    batch_version: int
    image_fit: ImageFit
    search: SearchWork
    def __init__(self, policy: _Optional[str] = ..., family: _Optional[str] = ..., revision: _Optional[str] = ..., precision: _Optional[str] = ..., device: _Optional[str] = ..., cameras: _Optional[_Iterable[str]] = ..., optional_cameras: _Optional[_Iterable[str]] = ..., state_dim: _Optional[int] = ..., action_dim: _Optional[int] = ..., horizon: _Optional[int] = ..., dt_s: _Optional[float] = ..., t_sync: _Optional[_Iterable[_Union[BucketTime, _Mapping]]] = ..., rtc: _Optional[str] = ..., rtc_max_delay: _Optional[int] = ..., replicas: _Optional[int] = ..., cheaper: _Optional[_Iterable[_Union[CheaperLevel, _Mapping]]] = ..., batch_port: _Optional[int] = ..., batch_token: _Optional[bytes] = ..., batch_version: _Optional[int] = ..., image_fit: _Optional[_Union[ImageFit, _Mapping]] = ..., search: _Optional[_Union[SearchWork, _Mapping]] = ...) -> None: ...

class SearchWork(_message.Message):
    __slots__ = ("candidates", "rounds", "horizon", "anytime", "unit", "round_share", "max_candidates", "max_rounds", "max_horizon")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    ANYTIME_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MAX_HORIZON_FIELD_NUMBER: _ClassVar[int]
    candidates: int
    rounds: int
    horizon: int
    anytime: bool
    unit: int
    round_share: float
    max_candidates: int
    max_rounds: int
    max_horizon: int
    def __init__(self, candidates: _Optional[int] = ..., rounds: _Optional[int] = ..., horizon: _Optional[int] = ..., anytime: bool = ..., unit: _Optional[int] = ..., round_share: _Optional[float] = ..., max_candidates: _Optional[int] = ..., max_rounds: _Optional[int] = ..., max_horizon: _Optional[int] = ...) -> None: ...

class ImageFit(_message.Message):
    __slots__ = ("height", "width", "filter", "letterbox")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LETTERBOX_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    filter: str
    letterbox: bool
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., filter: _Optional[str] = ..., letterbox: bool = ...) -> None: ...

class CheaperLevel(_message.Message):
    __slots__ = ("solver_steps", "t_sync", "action_horizon")
    SOLVER_STEPS_FIELD_NUMBER: _ClassVar[int]
    T_SYNC_FIELD_NUMBER: _ClassVar[int]
    ACTION_HORIZON_FIELD_NUMBER: _ClassVar[int]
    solver_steps: int
    t_sync: _containers.RepeatedCompositeFieldContainer[BucketTime]
    action_horizon: int
    def __init__(self, solver_steps: _Optional[int] = ..., t_sync: _Optional[_Iterable[_Union[BucketTime, _Mapping]]] = ..., action_horizon: _Optional[int] = ...) -> None: ...

class Search(_message.Message):
    __slots__ = ("candidates", "rounds", "elites", "horizon", "budget_ms", "anytime", "previous", "pending")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ELITES_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    ANYTIME_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    candidates: int
    rounds: int
    elites: int
    horizon: int
    budget_ms: float
    anytime: bool
    previous: Tensor
    pending: Tensor
    def __init__(self, candidates: _Optional[int] = ..., rounds: _Optional[int] = ..., elites: _Optional[int] = ..., horizon: _Optional[int] = ..., budget_ms: _Optional[float] = ..., anytime: bool = ..., previous: _Optional[_Union[Tensor, _Mapping]] = ..., pending: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Rtc(_message.Message):
    __slots__ = ("tail", "delay", "execution_horizon", "prefix_end")
    TAIL_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_HORIZON_FIELD_NUMBER: _ClassVar[int]
    PREFIX_END_FIELD_NUMBER: _ClassVar[int]
    tail: Tensor
    delay: int
    execution_horizon: int
    prefix_end: int
    def __init__(self, tail: _Optional[_Union[Tensor, _Mapping]] = ..., delay: _Optional[int] = ..., execution_horizon: _Optional[int] = ..., prefix_end: _Optional[int] = ...) -> None: ...

class RtcApplied(_message.Message):
    __slots__ = ("mode", "delay", "prefix_end", "schedule", "path")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_END_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    mode: str
    delay: int
    prefix_end: int
    schedule: str
    path: str
    def __init__(self, mode: _Optional[str] = ..., delay: _Optional[int] = ..., prefix_end: _Optional[int] = ..., schedule: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Imagine(_message.Message):
    __slots__ = ("format", "height")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    format: str
    height: int
    def __init__(self, format: _Optional[str] = ..., height: _Optional[int] = ...) -> None: ...

class ImaginedVideo(_message.Message):
    __slots__ = ("format", "fps", "parts")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    format: str
    fps: float
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, format: _Optional[str] = ..., fps: _Optional[float] = ..., parts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class InferItem(_message.Message):
    __slots__ = ("request_id", "robot_id", "seq", "images", "state", "instruction", "seed", "budget_ms", "search", "rtc", "imagine")
    class ImagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Image
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROBOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    RTC_FIELD_NUMBER: _ClassVar[int]
    IMAGINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    robot_id: str
    seq: int
    images: _containers.MessageMap[str, Image]
    state: Tensor
    instruction: str
    seed: int
    budget_ms: float
    search: Search
    rtc: Rtc
    imagine: Imagine
    def __init__(self, request_id: _Optional[str] = ..., robot_id: _Optional[str] = ..., seq: _Optional[int] = ..., images: _Optional[_Mapping[str, Image]] = ..., state: _Optional[_Union[Tensor, _Mapping]] = ..., instruction: _Optional[str] = ..., seed: _Optional[int] = ..., budget_ms: _Optional[float] = ..., search: _Optional[_Union[Search, _Mapping]] = ..., rtc: _Optional[_Union[Rtc, _Mapping]] = ..., imagine: _Optional[_Union[Imagine, _Mapping]] = ...) -> None: ...

class InferRequest(_message.Message):
    __slots__ = ("policy", "revision", "items", "solver_steps", "action_horizon")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SOLVER_STEPS_FIELD_NUMBER: _ClassVar[int]
    ACTION_HORIZON_FIELD_NUMBER: _ClassVar[int]
    policy: str
    revision: str
    items: _containers.RepeatedCompositeFieldContainer[InferItem]
    solver_steps: int
    action_horizon: int
    def __init__(self, policy: _Optional[str] = ..., revision: _Optional[str] = ..., items: _Optional[_Iterable[_Union[InferItem, _Mapping]]] = ..., solver_steps: _Optional[int] = ..., action_horizon: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "next_step", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    next_step: str
    retry_after_ms: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., next_step: _Optional[str] = ..., retry_after_ms: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("predicted_states", "energies", "stopped")
    PREDICTED_STATES_FIELD_NUMBER: _ClassVar[int]
    ENERGIES_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    predicted_states: Tensor
    energies: Tensor
    stopped: str
    def __init__(self, predicted_states: _Optional[_Union[Tensor, _Mapping]] = ..., energies: _Optional[_Union[Tensor, _Mapping]] = ..., stopped: _Optional[str] = ...) -> None: ...

class InferResult(_message.Message):
    __slots__ = ("request_id", "actions", "error", "plan", "rtc", "imagined")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RTC_FIELD_NUMBER: _ClassVar[int]
    IMAGINED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    actions: Tensor
    error: Error
    plan: Plan
    rtc: RtcApplied
    imagined: ImaginedVideo
    def __init__(self, request_id: _Optional[str] = ..., actions: _Optional[_Union[Tensor, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., rtc: _Optional[_Union[RtcApplied, _Mapping]] = ..., imagined: _Optional[_Union[ImaginedVideo, _Mapping]] = ...) -> None: ...

class InferResponse(_message.Message):
    __slots__ = ("results", "preprocess_ms", "engine_ms", "postprocess_ms", "total_ms", "bucket", "revision", "waited_ms")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_MS_FIELD_NUMBER: _ClassVar[int]
    POSTPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[InferResult]
    preprocess_ms: float
    engine_ms: float
    postprocess_ms: float
    total_ms: float
    bucket: int
    revision: str
    waited_ms: float
    def __init__(self, results: _Optional[_Iterable[_Union[InferResult, _Mapping]]] = ..., preprocess_ms: _Optional[float] = ..., engine_ms: _Optional[float] = ..., postprocess_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., bucket: _Optional[int] = ..., revision: _Optional[str] = ..., waited_ms: _Optional[float] = ...) -> None: ...
