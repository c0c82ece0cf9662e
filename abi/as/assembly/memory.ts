// Memory that is never given back, and the buffers, one per kind.
import { BUFFER_KINDS } from "./records";

// alloc gives zeroed memory, or 0 when the limit of the manifest's memory_pages is reached: allocate in onInit, bounded by
// what Info says, and not later. The stub runtime would trap where memory cannot grow, so it is grown first.
export function alloc(bytes: u64): usize {
  if (bytes > 0x3ff00000) return 0;
  if (memory.grow(<i32>((bytes + 64) >> 16) + 1) < 0) return 0;
  return heap.alloc(<usize>max(bytes, 16));
}

const places = memory.data(48, 16); // by kind: where, and how much

export function bufferAt(kind: u32): usize { return load<u32>(places + (kind << 3)); }
export function bufferSize(kind: u32): u32 { return load<u32>(places + (kind << 3), 4); }

export function buffer(kind: u32, len: u32): usize {
  if (kind >= BUFFER_KINDS) return 0;
  if (!bufferAt(kind) || bufferSize(kind) < len) {
    const p = alloc(len);
    if (!p) return 0;
    store<u32>(places + (kind << 3), p);
    store<u32>(places + (kind << 3), len, 4);
  }
  return bufferAt(kind);
}

// together says whether n records of a stride stand in so much room, and moves those that stand further apart than this kit
// has them next to each other.
export function together(p: usize, room: u64, n: u32, stride: u32, size: u32): bool {
  if (stride < size || <u64>n * stride > room) return false;
  if (stride > size)
    for (let i: u32 = 1; i < n; i++) memory.copy(p + i * size, p + i * stride, size);
  return true;
}

export function pack(status: i32, count: u32): u64 { return (<u64><u32>status << 32) | count; }
