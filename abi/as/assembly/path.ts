// Writing a path. There is one at a time: the glue starts it before it calls the policy.

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
