// aligned: blocks one after the other, each from a multiple of so many bytes on.
//
// A chunk holds many blocks, and an engine that wants only some of them reads only those: all pages of a block stand
// together, by layer and part. Storage is read in sectors, and direct I/O in nothing else; where pages are of odd sizes, a
// block that starts in the middle of a sector costs a sector more at both ends, which are the neighbours'. So each block is
// moved to the next boundary by a gap of zeros, at most 4,095 bytes.
//
// Where that would make more segments than a plan may have, runs of blocks share one in each plane: they are then
// contiguous and aligned as a run.
import { LayoutHeader, NONE, Plane, Segment, at, fail, onInit, onLayout, settingNumber } from "../../../abi/as/assembly";
export { kvhost_abi_1, kv_buffer, kv_init } from "../../../abi/as/assembly/module";
export { kv_layout } from "../../../abi/as/assembly/layout";

const MOST_PLANES: u32 = 4096;
const order = memory.data(16384, 16); // u32 by place: the planes by layer and part
const spare = memory.data(16384, 16);

let alignment: u32 = 4096;

onInit((info) => {
  const n = settingNumber(info, "alignment", 4096);
  if (n < 1 || n > 4096 || (n & (n - 1)) != 0) return fail("alignment: want a power of two, at most 4096");
  alignment = <u32>n;
  return 0;
});

function rank(planes: usize, i: u32): u64 {
  const p = at<Plane>(planes, i);
  return (<u64>p.layer << 32) | p.part;
}

// sort merges runs of growing length from one array to the other and back; a call must end soon, whatever the order.
function sort(planes: usize, n: u32): void {
  let from = order, to = spare;
  for (let i: u32 = 0; i < n; i++) store<u32>(from + (i << 2), i);
  for (let width: u32 = 1; width < n; width *= 2) {
    for (let start: u32 = 0; start < n; start += 2 * width) merge(planes, from, to, start, min(start + width, n), min(start + 2 * width, n));
    const swap = from;
    from = to;
    to = swap;
  }
  if (from != order) memory.copy(order, from, n << 2);
}

function merge(planes: usize, from: usize, to: usize, start: u32, middle: u32, end: u32): void {
  let a = start, b = middle;
  for (let k = start; k < end; k++) {
    const left = a < middle && (b >= end || rank(planes, load<u32>(from + (a << 2))) <= rank(planes, load<u32>(from + (b << 2))));
    store<u32>(to + (k << 2), load<u32>(from + ((left ? a : b) << 2)));
    if (left) a++;
    else b++;
  }
}

onLayout((h, planes, out, room) => {
  if (h.planes > MOST_PLANES) return NONE;
  sort(planes, h.planes);
  let run: u32 = 1; // blocks that share a segment
  while (<u64>((h.blocks + run - 1) / run) * h.planes > room) run++;
  let n: u32 = 0;
  let end: u64 = 0; // of the payload so far
  for (let block: u32 = 0; block < h.blocks; block += run) {
    const blocks = min(run, h.blocks - block);
    for (let i: u32 = 0; i < h.planes; i++) {
      const plane = load<u32>(order + (i << 2));
      const s = at<Segment>(out, n++);
      s.plane = plane;
      s.block = block;
      s.blocks = blocks;
      s.pageOff = 0;
      s.pageLen = at<Plane>(planes, plane).pageBytes;
      s.gap = i ? 0 : <u32>((alignment - (end & (alignment - 1))) & (alignment - 1));
      end += <u64>s.gap + <u64>s.pageLen * blocks;
    }
  }
  return n;
});
