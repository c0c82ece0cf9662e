// The records of the contract: little-endian, natural alignment, as section 13 has them. A class here is a view: at<T>(p, i)
// is record i of those at p.

export const ABI: u32 = 1;
export const NONE: u32 = 0xffffffff; // no parent resident, the host's choice of root, any tenant
export const SIZE_UNIT: u32 = 4096; // the unit of every u32 size
export const KEY_BYTES: u32 = 32;
export const ROOT_WRITABLE: u32 = 1; // RootFacts.flags: it takes stores at present
export const PARENT_RESIDENT: u32 = 1; // Candidate.flags
export const CONTINUED: u32 = 2; // Candidate.flags: a child is resident, in any level, or stored with it
export const NO_LEVEL: u8 = 0xff; // Candidate.from of what an engine stores
export const FEATURE_LEVELS: u64 = 2; // Info.features: candidates tell kind, from, to and hits
export const KIND_NEW: u8 = 0; // Candidate.kind
export const KIND_DEMOTION: u8 = 1;
export const KIND_PROMOTION: u8 = 2;

// Status of a call: 0 is success, above 0 leaves the call to the host, below 0 is a fault.
export const DEFAULT: i32 = 1;
export const BAD_INPUT: i32 = -1;
export const NO_SPACE: i32 = -2;
export const INTERNAL: i32 = -3;

export const OP_INSERT: u8 = 1;
export const OP_TOUCH: u8 = 2;
export const OP_REMOVE: u8 = 3;
export const OP_LINK: u8 = 4;
export const OP_PIN: u8 = 5;
export const OP_UNPIN: u8 = 6;
export const OP_RESIDENT: u8 = 7;
export const OP_REQUEST_END: u8 = 8;

export const BUFFER_INFO: u32 = 0;
export const BUFFER_EVENTS: u32 = 1;
export const BUFFER_ARGS: u32 = 2;
export const BUFFER_RESULT: u32 = 3;
export const BUFFER_ROOTS: u32 = 4;
export const BUFFER_STATE: u32 = 5;
export const BUFFER_KINDS: u32 = 6;

export const LEVEL_DEBUG: i32 = 0;
export const LEVEL_INFO: i32 = 1;
export const LEVEL_WARN: i32 = 2;
export const LEVEL_ERROR: i32 = 3;

// @ts-ignore: decorator
@inline export function at<T>(p: usize, i: u32): T {
  return changetype<T>(p + <usize>i * offsetof<T>());
}

@unmanaged export class Event {
  slot: u32; parent: u32; key: u64; parentKey: u64; size: u32; depth: u32; request: u32; tenant: u32;
  op: u8; tier: u8; flags: u16; reserved: u32; time: u64;
}
// What an engine tells about a request when it ends, if Info.features has FEATURE_HINTS. 0 is unknown. It is a view of a
// REQUEST_END event: changetype<RequestEnd>(event).
export const FEATURE_HINTS: u64 = 1;
export const END_STOP: u8 = 1;
export const END_LENGTH: u8 = 2;
export const END_TOOL_CALL: u8 = 3;
export const END_ABORT: u8 = 4;
@unmanaged export class RequestEnd {
  slot: u32; parent: u32; returnMs: u64; priority: i32; priorityHigh: u32; tokensIn: u32; tokensOut: u32; request: u32;
  tenant: u32; op: u8; reason: u8; flags: u16; reserved: u32; time: u64;
}
@unmanaged export class Info {
  size: u32; abi: u32; features: u64;
  eventStride: u32; askStride: u32; admitStride: u32; placeStride: u32; reserved: u32; planeStride: u32; rootStride: u32;
  maxSlots: u32; maxBatch: u32; maxVictims: u32; maxNamespaces: u32; configLen: u32;
  capacity: u64; seed: u64;
}
@unmanaged export class Ask {
  bytes: u64; maxVictims: u32; tenant: u32;
}
@unmanaged export class Candidate {
  key: u64; parentKey: u64; namespace: u32; group: u32; size: u32; depth: u32; request: u32; tenant: u32;
  flags: u32; reserved: u32; time: u64; kind: u8; from: u8; to: u8; reserved2: u8; hits: u32;
}
@unmanaged export class PlaceQuery {
  namespace: u32; group: u32; rank: u32; keyLen: u32; size: u32; reserved: u32;
  key0: u64; key1: u64; key2: u64; key3: u64; // the key's 32 bytes; keyOf gives their address
}
@unmanaged export class PlaceAnswer {
  root: u32; off: u32; len: u32; reserved: u32;
}
@unmanaged export class RootsHeader {
  count: u32; stride: u32;
}
@unmanaged export class RootFacts {
  id: u32; flags: u32; capacity: u64; free: u64; readBps: u64; writeBps: u64;
}
@unmanaged export class LayoutHeader {
  namespace: u32; group: u32; blocks: u32; planes: u32;
}
@unmanaged export class Plane {
  layer: u32; part: u32; pageBytes: u32; reserved: u32;
}
@unmanaged export class Segment {
  plane: u32; block: u32; blocks: u32; pageOff: u32; pageLen: u32; gap: u32;
}

// @ts-ignore: decorator
@inline export function keyOf(q: PlaceQuery): usize { return changetype<usize>(q) + offsetof<PlaceQuery>("key0"); }
// @ts-ignore: decorator
