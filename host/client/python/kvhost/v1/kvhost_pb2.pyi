from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

ANSWER_LOAD: Answer
ANSWER_LOOKUP: Answer
ANSWER_STORE_PUBLISHED: Answer
ANSWER_STORE_READ: Answer
ANSWER_UNSPECIFIED: Answer
CHUNK_RESULT_FAILED: ChunkResult
CHUNK_RESULT_REFUSED: ChunkResult
CHUNK_RESULT_RESIDENT: ChunkResult
CHUNK_RESULT_SHED: ChunkResult
CHUNK_RESULT_STORED: ChunkResult
CHUNK_RESULT_UNSPECIFIED: ChunkResult
CODE_BUSY: Code
CODE_CANCELLED: Code
CODE_CLOSING: Code
CODE_DAMAGED: Code
CODE_DENIED: Code
CODE_DISAGREEMENT: Code
CODE_INTERNAL: Code
CODE_INVALID: Code
CODE_IO: Code
CODE_LEASE_OVER: Code
CODE_LIMIT: Code
CODE_UNKNOWN: Code
CODE_UNSPECIFIED: Code
DESCRIPTOR: _descriptor.FileDescriptor
DIRECTION_LOAD: Direction
DIRECTION_STORE: Direction
DIRECTION_UNSPECIFIED: Direction
DISCARD_RESULT_ABSENT: DiscardResult
DISCARD_RESULT_IN_USE: DiscardResult
DISCARD_RESULT_OTHER_TENANT: DiscardResult
DISCARD_RESULT_REMOVED: DiscardResult
DISCARD_RESULT_UNAVAILABLE: DiscardResult
DISCARD_RESULT_UNSPECIFIED: DiscardResult
END_REASON_ABORT: EndReason
END_REASON_LENGTH: EndReason
END_REASON_STOP: EndReason
END_REASON_TOOL_CALL: EndReason
END_REASON_UNSPECIFIED: EndReason
EVENT_KIND_EVICTED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_UNSPECIFIED: EventKind
HANDOVER_REPLAY: Handover
HANDOVER_STATE: Handover
HANDOVER_UNSPECIFIED: Handover
LOOKUP_KIND_MEMBERSHIP: LookupKind
LOOKUP_KIND_PREFIX: LookupKind
LOOKUP_KIND_UNSPECIFIED: LookupKind
POLICY_ROLE_ADMIT: PolicyRole
POLICY_ROLE_EVICT: PolicyRole
POLICY_ROLE_LAYOUT: PolicyRole
POLICY_ROLE_PLACE: PolicyRole
POLICY_ROLE_UNSPECIFIED: PolicyRole
POLICY_STATE_ACTING: PolicyState
POLICY_STATE_QUARANTINE: PolicyState
POLICY_STATE_SHADOW: PolicyState
POLICY_STATE_STANDIN: PolicyState
POLICY_STATE_UNSPECIFIED: PolicyState
ROOT_STATE_FULL: RootState
ROOT_STATE_IN_SERVICE: RootState
ROOT_STATE_OUT: RootState
ROOT_STATE_READ_ONLY: RootState
ROOT_STATE_UNSPECIFIED: RootState
ROUTE_DIRECT: Route
ROUTE_MEMORY: Route
ROUTE_STAGED: Route
ROUTE_UNSPECIFIED: Route

class AwaitCopies(_message.Message):
    __slots__ = ["jobs"]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, jobs: _Optional[_Iterable[int]] = ...) -> None: ...

class BudgetStatus(_message.Message):
    __slots__ = ["held", "limit", "most", "of", "own", "parts", "refused"]
    class PartsEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HELD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    held: int
    limit: int
    most: _containers.RepeatedCompositeFieldContainer[Holder]
    of: str
    own: int
    parts: _containers.ScalarMap[str, int]
    refused: int
    def __init__(self, of: _Optional[str] = ..., limit: _Optional[int] = ..., own: _Optional[int] = ..., held: _Optional[int] = ..., refused: _Optional[int] = ..., parts: _Optional[_Mapping[str, int]] = ..., most: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ["job"]
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: int
    def __init__(self, job: _Optional[int] = ...) -> None: ...

class ChunkFailure(_message.Message):
    __slots__ = ["blocks", "chunk", "code", "message"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    chunk: int
    code: Code
    message: str
    def __init__(self, chunk: _Optional[int] = ..., code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Discard(_message.Message):
    __slots__ = ["group", "keys"]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DiscardReply(_message.Message):
    __slots__ = ["results"]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[DiscardResult]
    def __init__(self, results: _Optional[_Iterable[_Union[DiscardResult, str]]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ["priority", "reason", "request", "return_after", "tokens_in", "tokens_out"]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RETURN_AFTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OUT_FIELD_NUMBER: _ClassVar[int]
    priority: int
    reason: EndReason
    request: int
    return_after: _duration_pb2.Duration
    tokens_in: int
    tokens_out: int
    def __init__(self, request: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., tokens_in: _Optional[int] = ..., tokens_out: _Optional[int] = ..., priority: _Optional[int] = ..., return_after: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ["code", "field", "message"]
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    field: str
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ["group", "key", "kind", "namespace_digest", "parent"]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    group: int
    key: bytes
    kind: EventKind
    namespace_digest: bytes
    parent: bytes
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., namespace_digest: _Optional[bytes] = ..., group: _Optional[int] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ["after", "epoch", "namespace_digest"]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    after: int
    epoch: int
    namespace_digest: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., epoch: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ["epoch", "events", "seq", "snapshot", "snapshot_end"]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    seq: int
    snapshot: bool
    snapshot_end: bool
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., snapshot: bool = ..., snapshot_end: bool = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ["blocks", "id", "lookup", "planes"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    id: int
    lookup: LookupKind
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupKind, str]] = ..., blocks: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ["device_uuid", "engine", "local_ranks", "namespace", "protocol", "rank", "role", "tenant", "unsealed_memory"]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    engine: str
    local_ranks: int
    namespace: Namespace
    protocol: int
    rank: int
    role: str
    tenant: int
    unsealed_memory: bool
    def __init__(self, protocol: _Optional[int] = ..., engine: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., local_ranks: _Optional[int] = ..., device_uuid: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., tenant: _Optional[int] = ..., unsealed_memory: bool = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ["descriptors", "key_bytes", "lease_time", "levels", "limits", "namespace_digest", "nonce", "pin_bytes", "protocol", "session", "units", "version"]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TIME_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    descriptors: str
    key_bytes: int
    lease_time: _duration_pb2.Duration
    levels: int
    limits: Limits
    namespace_digest: bytes
    nonce: bytes
    pin_bytes: int
    protocol: int
    session: int
    units: int
    version: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., nonce: _Optional[bytes] = ..., key_bytes: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., lease_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., descriptors: _Optional[str] = ..., namespace_digest: _Optional[bytes] = ..., session: _Optional[int] = ..., levels: _Optional[int] = ..., pin_bytes: _Optional[int] = ..., units: _Optional[int] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ["held", "name", "tenant"]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    held: int
    name: str
    tenant: int
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[int] = ..., held: _Optional[int] = ...) -> None: ...

class LatencyStatus(_message.Message):
    __slots__ = ["answer", "bounds", "buckets", "count", "sum"]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    answer: Answer
    bounds: _containers.RepeatedCompositeFieldContainer[_duration_pb2.Duration]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    count: int
    sum: _duration_pb2.Duration
    def __init__(self, answer: _Optional[_Union[Answer, str]] = ..., count: _Optional[int] = ..., sum: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., bounds: _Optional[_Iterable[_Union[_duration_pb2.Duration, _Mapping]]] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class LevelHits(_message.Message):
    __slots__ = ["bytes", "chunks", "level", "load_time"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    chunks: int
    level: int
    load_time: _duration_pb2.Duration
    def __init__(self, level: _Optional[int] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., load_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ["arena_bytes", "chunks_per_job", "jobs", "keys_per_lookup", "leases", "message_bytes", "requests"]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_PER_JOB_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    KEYS_PER_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    chunks_per_job: int
    jobs: int
    keys_per_lookup: int
    leases: int
    message_bytes: int
    requests: int
    def __init__(self, keys_per_lookup: _Optional[int] = ..., chunks_per_job: _Optional[int] = ..., message_bytes: _Optional[int] = ..., jobs: _Optional[int] = ..., leases: _Optional[int] = ..., requests: _Optional[int] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ["chunks", "layers", "lease", "silent", "timeline"]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[LoadChunk]
    layers: bool
    lease: int
    silent: bool
    timeline: Timeline
    def __init__(self, lease: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[LoadChunk, _Mapping]]] = ..., layers: bool = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., silent: bool = ...) -> None: ...

class LoadChunk(_message.Message):
    __slots__ = ["blocks", "index"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    index: int
    def __init__(self, index: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadDone(_message.Message):
    __slots__ = ["bytes", "cancelled", "failures"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    cancelled: bool
    failures: _containers.RepeatedCompositeFieldContainer[ChunkFailure]
    def __init__(self, bytes: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[ChunkFailure, _Mapping]]] = ..., cancelled: bool = ...) -> None: ...

class LoadLayer(_message.Message):
    __slots__ = ["failed", "layer"]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    failed: _containers.RepeatedScalarFieldContainer[int]
    layer: int
    def __init__(self, layer: _Optional[int] = ..., failed: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadPart(_message.Message):
    __slots__ = ["keys", "load_time"]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    keys: int
    load_time: _duration_pb2.Duration
    def __init__(self, keys: _Optional[int] = ..., load_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ["first", "group", "keys", "pin", "prefetch", "readers", "request"]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    first: int
    group: int
    keys: bytes
    pin: bool
    prefetch: bool
    readers: int
    request: int
    def __init__(self, request: _Optional[int] = ..., group: _Optional[int] = ..., keys: _Optional[bytes] = ..., first: _Optional[int] = ..., readers: _Optional[int] = ..., prefetch: bool = ..., pin: bool = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ["bits", "bytes", "hits", "lease", "levels", "load_parts", "load_time", "pending"]
    BITS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    LOAD_PARTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    bits: bytes
    bytes: int
    hits: int
    lease: int
    levels: _containers.RepeatedCompositeFieldContainer[LevelHits]
    load_parts: _containers.RepeatedCompositeFieldContainer[LoadPart]
    load_time: _duration_pb2.Duration
    pending: bool
    def __init__(self, pending: bool = ..., hits: _Optional[int] = ..., bits: _Optional[bytes] = ..., lease: _Optional[int] = ..., bytes: _Optional[int] = ..., load_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., load_parts: _Optional[_Iterable[_Union[LoadPart, _Mapping]]] = ..., levels: _Optional[_Iterable[_Union[LevelHits, _Mapping]]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ["context_parallel", "dtype", "engine", "extra", "groups", "hash_algorithm", "hash_seed", "key_bytes", "model", "page_dtype", "pipeline_stages", "replicated", "revision", "tensor_parallel", "tokens_per_block", "units"]
    class ExtraEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STAGES_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    context_parallel: int
    dtype: str
    engine: str
    extra: _containers.ScalarMap[str, str]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    hash_algorithm: str
    hash_seed: str
    key_bytes: int
    model: str
    page_dtype: str
    pipeline_stages: int
    replicated: bool
    revision: str
    tensor_parallel: int
    tokens_per_block: int
    units: int
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., engine: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., key_bytes: _Optional[int] = ..., tokens_per_block: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., pipeline_stages: _Optional[int] = ..., context_parallel: _Optional[int] = ..., replicated: bool = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., extra: _Optional[_Mapping[str, str]] = ..., page_dtype: _Optional[str] = ..., units: _Optional[int] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ["address", "asks", "blamed", "bytes", "entries", "failures", "heard", "keys", "name", "nixl", "nixl_bytes", "nixl_fallbacks", "offers", "reason", "state", "struck", "taken", "turnover"]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NIXL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NIXL_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STRUCK_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TURNOVER_FIELD_NUMBER: _ClassVar[int]
    address: str
    asks: int
    blamed: int
    bytes: int
    entries: int
    failures: int
    heard: _duration_pb2.Duration
    keys: int
    name: str
    nixl: bool
    nixl_bytes: int
    nixl_fallbacks: int
    offers: int
    reason: str
    state: str
    struck: int
    taken: int
    turnover: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., entries: _Optional[int] = ..., heard: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., asks: _Optional[int] = ..., failures: _Optional[int] = ..., keys: _Optional[int] = ..., struck: _Optional[int] = ..., bytes: _Optional[int] = ..., blamed: _Optional[int] = ..., turnover: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., offers: _Optional[int] = ..., taken: _Optional[int] = ..., nixl: bool = ..., nixl_bytes: _Optional[int] = ..., nixl_fallbacks: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Plane(_message.Message):
    __slots__ = ["layer", "page_bytes", "part"]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    layer: int
    page_bytes: int
    part: int
    def __init__(self, layer: _Optional[int] = ..., part: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class PolicyStatus(_message.Message):
    __slots__ = ["calls", "digest", "entries", "faults", "fuel", "memory", "module", "name", "reason", "records", "role", "root", "since", "state", "time", "trial", "version"]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    FUEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    calls: int
    digest: str
    entries: int
    faults: int
    fuel: int
    memory: int
    module: str
    name: str
    reason: str
    records: int
    role: PolicyRole
    root: str
    since: _timestamp_pb2.Timestamp
    state: PolicyState
    time: _duration_pb2.Duration
    trial: Trial
    version: str
    def __init__(self, role: _Optional[_Union[PolicyRole, str]] = ..., module: _Optional[str] = ..., digest: _Optional[str] = ..., calls: _Optional[int] = ..., records: _Optional[int] = ..., time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., faults: _Optional[int] = ..., fuel: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., root: _Optional[str] = ..., state: _Optional[_Union[PolicyState, str]] = ..., since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., entries: _Optional[int] = ..., trial: _Optional[_Union[Trial, _Mapping]] = ..., memory: _Optional[int] = ...) -> None: ...

class PolicyTaken(_message.Message):
    __slots__ = ["entries", "handover", "role", "root", "time"]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    entries: int
    handover: Handover
    role: PolicyRole
    root: str
    time: _duration_pb2.Duration
    def __init__(self, role: _Optional[_Union[PolicyRole, str]] = ..., root: _Optional[str] = ..., handover: _Optional[_Union[Handover, str]] = ..., entries: _Optional[int] = ..., time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., **kwargs) -> None: ...

class PromotePolicyRequest(_message.Message):
    __slots__ = ["name", "root"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    root: str
    def __init__(self, name: _Optional[str] = ..., root: _Optional[str] = ...) -> None: ...

class PromotePolicyResponse(_message.Message):
    __slots__ = ["swap"]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    swap: Swap
    def __init__(self, swap: _Optional[_Union[Swap, _Mapping]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ["blocks", "cuda_ipc", "memfd", "offset", "page_stride", "pages", "plane", "stride", "unit"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    cuda_ipc: bytes
    memfd: int
    offset: int
    page_stride: int
    pages: int
    plane: int
    stride: int
    unit: int
    def __init__(self, plane: _Optional[int] = ..., memfd: _Optional[int] = ..., cuda_ipc: _Optional[bytes] = ..., offset: _Optional[int] = ..., stride: _Optional[int] = ..., blocks: _Optional[int] = ..., pages: _Optional[int] = ..., page_stride: _Optional[int] = ..., unit: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ["group", "regions"]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    group: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, group: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ["lease"]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ["changed"]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[str]] = ...) -> None: ...

class RootStatus(_message.Message):
    __slots__ = ["capacity", "compression", "damaged", "entries", "evictions", "limit", "orphaned", "outages", "path", "quarantine", "reason", "scanning", "shared", "sheds", "since", "state", "used", "writing"]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_FIELD_NUMBER: _ClassVar[int]
    OUTAGES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SCANNING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SHEDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    compression: str
    damaged: int
    entries: int
    evictions: int
    limit: int
    orphaned: int
    outages: int
    path: str
    quarantine: int
    reason: str
    scanning: bool
    shared: bool
    sheds: int
    since: _timestamp_pb2.Timestamp
    state: RootState
    used: int
    writing: int
    def __init__(self, path: _Optional[str] = ..., capacity: _Optional[int] = ..., used: _Optional[int] = ..., entries: _Optional[int] = ..., state: _Optional[_Union[RootState, str]] = ..., reason: _Optional[str] = ..., since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., writing: _Optional[int] = ..., quarantine: _Optional[int] = ..., orphaned: _Optional[int] = ..., limit: _Optional[int] = ..., scanning: bool = ..., evictions: _Optional[int] = ..., sheds: _Optional[int] = ..., outages: _Optional[int] = ..., damaged: _Optional[int] = ..., shared: bool = ..., compression: _Optional[str] = ...) -> None: ...

class RouteStatus(_message.Message):
    __slots__ = ["busy", "bytes", "direction", "errors", "files", "gpu", "in_flight", "root", "route"]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    busy: _duration_pb2.Duration
    bytes: int
    direction: Direction
    errors: int
    files: int
    gpu: str
    in_flight: int
    root: str
    route: Route
    def __init__(self, gpu: _Optional[str] = ..., root: _Optional[str] = ..., route: _Optional[_Union[Route, str]] = ..., direction: _Optional[_Union[Direction, str]] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., errors: _Optional[int] = ..., in_flight: _Optional[int] = ..., busy: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Semaphores(_message.Message):
    __slots__ = ["count", "cuda_ipc", "memfd", "offset"]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    count: int
    cuda_ipc: bytes
    memfd: int
    offset: int
    def __init__(self, memfd: _Optional[int] = ..., cuda_ipc: _Optional[bytes] = ..., offset: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ["await_copies", "cancel", "discard", "end_request", "hello", "id", "load", "lookup", "ping", "register", "release", "semaphores", "store", "traceparent", "unregister", "withdrawals"]
    AWAIT_COPIES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    END_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SEMAPHORES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    await_copies: AwaitCopies
    cancel: Cancel
    discard: Discard
    end_request: EndRequest
    hello: Hello
    id: int
    load: Load
    lookup: Lookup
    ping: Ping
    register: Register
    release: Release
    semaphores: Semaphores
    store: Store
    traceparent: str
    unregister: Unregister
    withdrawals: Withdrawals
    def __init__(self, id: _Optional[int] = ..., traceparent: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., unregister: _Optional[_Union[Unregister, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., discard: _Optional[_Union[Discard, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., await_copies: _Optional[_Union[AwaitCopies, _Mapping]] = ..., end_request: _Optional[_Union[EndRequest, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., semaphores: _Optional[_Union[Semaphores, _Mapping]] = ..., withdrawals: _Optional[_Union[Withdrawals, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ["discard", "done", "error", "hello", "id", "load_done", "load_layer", "lookup", "store_published", "store_read"]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_DONE_FIELD_NUMBER: _ClassVar[int]
    LOAD_LAYER_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STORE_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    STORE_READ_FIELD_NUMBER: _ClassVar[int]
    discard: DiscardReply
    done: Done
    error: Error
    hello: HelloReply
    id: int
    load_done: LoadDone
    load_layer: LoadLayer
    lookup: LookupReply
    store_published: StorePublished
    store_read: StoreRead
    def __init__(self, id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., hello: _Optional[_Union[HelloReply, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., store_read: _Optional[_Union[StoreRead, _Mapping]] = ..., store_published: _Optional[_Union[StorePublished, _Mapping]] = ..., load_layer: _Optional[_Union[LoadLayer, _Mapping]] = ..., load_done: _Optional[_Union[LoadDone, _Mapping]] = ..., discard: _Optional[_Union[DiscardReply, _Mapping]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ["device", "engine", "jobs", "leases", "model", "number", "rank", "role", "since", "tenant", "tensor_parallel", "units"]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    device: str
    engine: str
    jobs: int
    leases: int
    model: str
    number: int
    rank: int
    role: str
    since: _timestamp_pb2.Timestamp
    tenant: int
    tensor_parallel: int
    units: int
    def __init__(self, number: _Optional[int] = ..., engine: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., tenant: _Optional[int] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., leases: _Optional[int] = ..., jobs: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., units: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ["arena_bytes", "budgets", "counters", "engines", "jobs", "latencies", "leases", "not_ready", "peers", "policies", "policy_memory", "policy_memory_limit", "roots", "routes", "serving", "session_list", "sessions", "uptime", "usage", "version"]
    class CountersEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    POLICY_MEMORY_FIELD_NUMBER: _ClassVar[int]
    POLICY_MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LIST_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    budgets: _containers.RepeatedCompositeFieldContainer[BudgetStatus]
    counters: _containers.ScalarMap[str, int]
    engines: int
    jobs: int
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyStatus]
    leases: int
    not_ready: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    policies: _containers.RepeatedCompositeFieldContainer[PolicyStatus]
    policy_memory: int
    policy_memory_limit: int
    roots: _containers.RepeatedCompositeFieldContainer[RootStatus]
    routes: _containers.RepeatedCompositeFieldContainer[RouteStatus]
    serving: bool
    session_list: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    sessions: int
    uptime: _duration_pb2.Duration
    usage: _containers.RepeatedCompositeFieldContainer[UsageStatus]
    version: str
    def __init__(self, version: _Optional[str] = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., sessions: _Optional[int] = ..., engines: _Optional[int] = ..., leases: _Optional[int] = ..., jobs: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., policies: _Optional[_Iterable[_Union[PolicyStatus, _Mapping]]] = ..., roots: _Optional[_Iterable[_Union[RootStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., policy_memory: _Optional[int] = ..., policy_memory_limit: _Optional[int] = ..., session_list: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[LatencyStatus, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[RouteStatus, _Mapping]]] = ..., usage: _Optional[_Iterable[_Union[UsageStatus, _Mapping]]] = ..., not_ready: _Optional[_Iterable[str]] = ..., serving: bool = ..., budgets: _Optional[_Iterable[_Union[BudgetStatus, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ["chunks", "group", "request", "timeline"]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[StoreChunk]
    group: int
    request: int
    timeline: Timeline
    def __init__(self, request: _Optional[int] = ..., group: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[StoreChunk, _Mapping]]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class StoreChunk(_message.Message):
    __slots__ = ["blocks", "depth", "key", "parent"]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    depth: int
    key: bytes
    parent: bytes
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class StorePublished(_message.Message):
    __slots__ = ["bytes", "cancelled", "failures", "results"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    cancelled: bool
    failures: _containers.RepeatedCompositeFieldContainer[ChunkFailure]
    results: _containers.RepeatedScalarFieldContainer[ChunkResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ChunkResult, str]]] = ..., failures: _Optional[_Iterable[_Union[ChunkFailure, _Mapping]]] = ..., bytes: _Optional[int] = ..., cancelled: bool = ...) -> None: ...

class StoreRead(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Swap(_message.Message):
    __slots__ = ["digest", "module", "taken"]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    digest: str
    module: str
    taken: _containers.RepeatedCompositeFieldContainer[PolicyTaken]
    def __init__(self, taken: _Optional[_Iterable[_Union[PolicyTaken, _Mapping]]] = ..., module: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class SwapPolicyRequest(_message.Message):
    __slots__ = ["config", "module", "name", "sha256"]
    class ConfigEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    config: _containers.ScalarMap[str, str]
    module: str
    name: str
    sha256: str
    def __init__(self, name: _Optional[str] = ..., module: _Optional[str] = ..., sha256: _Optional[str] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SwapPolicyResponse(_message.Message):
    __slots__ = ["swap"]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    swap: Swap
    def __init__(self, swap: _Optional[_Union[Swap, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ["done", "done_value", "status", "wait", "wait_value"]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DONE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_VALUE_FIELD_NUMBER: _ClassVar[int]
    done: int
    done_value: int
    status: int
    wait: int
    wait_value: int
    def __init__(self, wait: _Optional[int] = ..., wait_value: _Optional[int] = ..., done: _Optional[int] = ..., done_value: _Optional[int] = ..., status: _Optional[int] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ["capacity", "dropped", "hits", "keys", "live_hits", "used"]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LIVE_HITS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    dropped: int
    hits: int
    keys: int
    live_hits: int
    used: int
    def __init__(self, keys: _Optional[int] = ..., hits: _Optional[int] = ..., live_hits: _Optional[int] = ..., dropped: _Optional[int] = ..., capacity: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class Unregister(_message.Message):
    __slots__ = ["group"]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: int
    def __init__(self, group: _Optional[int] = ...) -> None: ...

class UsageStatus(_message.Message):
    __slots__ = ["hits", "keys", "loaded_bytes", "model", "stored_bytes", "tenant"]
    HITS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    hits: int
    keys: int
    loaded_bytes: int
    model: str
    stored_bytes: int
    tenant: int
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[int] = ..., keys: _Optional[int] = ..., hits: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class Withdrawals(_message.Message):
    __slots__ = ["memfd", "offset"]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    memfd: int
    offset: int
    def __init__(self, memfd: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class LookupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ChunkResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class DiscardResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Answer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Route(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PolicyRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PolicyState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class RootState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Handover(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
