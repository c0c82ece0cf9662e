// Writing a path, and reading one back. There is one path at a time: the glue starts it before it calls the policy.

let start: usize = 0;
let room: u32 = 0;
let length: u32 = 0;

export function pathStart(p: usize, size: u32): void { start = p; room = size; length = 0; }
export function pathLength(): u32 { return length; } // more than there is room for when it did not fit

export function put(c: u8): void {
  if (length < room) store<u8>(start + length, c);
  length++;
}

export function putText(text: string): void {
  for (let i = 0; i < text.length; i++) put(<u8>text.charCodeAt(i));
}

export function putU32(v: u32): void {
  if (v >= 10) putU32(v / 10);
  put(<u8>(48 + v % 10));
}

export function putHex(p: usize, n: u32): void {
  for (let i: u32 = 0; i < n; i++) {
    const b = load<u8>(p + i);
    put(digit(b >> 4));
    put(digit(b & 15));
  }
}

function digit(v: u8): u8 { return v < 10 ? 48 + v : 87 + v; }

// Reading: each take... takes what it reads off the front and answers true, or answers false. Only what the writers above
// write is accepted: no leading zeros, small letters.
let next: usize = 0;
let end: usize = 0;

export function readStart(p: usize, n: u32): void { next = p; end = p + n; }
export function readRest(): u32 { return <u32>(end - next); }

export function take(c: u8): bool {
  if (next >= end || load<u8>(next) != c) return false;
  next++;
  return true;
}

export let taken: u32 = 0; // what takeU32 read

export function takeU32(): bool {
  let v: u64 = 0;
  let p = next;
  while (p < end && p < next + 10 && load<u8>(p) >= 48 && load<u8>(p) <= 57) v = v * 10 + (load<u8>(p++) - 48);
  if (p == next || (load<u8>(next) == 48 && p > next + 1) || v > 0xffffffff) return false;
  taken = <u32>v;
  next = p;
  return true;
}

export function takeHex(to: usize, n: u32): bool {
  if (end - next < 2 * n) return false;
  for (let i: u32 = 0; i < n; i++) {
    const a = nibble(load<u8>(next + 2 * i)), b = nibble(load<u8>(next + 2 * i + 1));
    if ((a | b) > 15) return false;
    store<u8>(to + i, (a << 4) | b);
  }
  next += 2 * n;
  return true;
}

function nibble(c: u8): u8 { return c >= 48 && c <= 57 ? c - 48 : c >= 97 && c <= 102 ? c - 87 : 255; }
