// The export of the role layout.
import { BAD_INPUT, BUFFER_ARGS, BUFFER_RESULT, LayoutHeader, NO_SPACE, Plane, Segment } from "./records";
import { bufferAt, bufferSize, pack, together } from "./memory";

let layout: ((header: LayoutHeader, planes: usize, out: usize, room: u32) => u32) | null = null;

// onLayout: writes segments, at<Segment>(out, i), as many as there is room for, and answers how many it has. Planes are
// at<Plane>(planes, i).
export function onLayout(f: (header: LayoutHeader, planes: usize, out: usize, room: u32) => u32): void { layout = f; }

export function kv_layout(n: u32, stride: u32): u64 {
  const f = layout, args = bufferAt(BUFFER_ARGS);
  const size = bufferSize(BUFFER_ARGS), room = bufferSize(BUFFER_RESULT) / <u32>offsetof<Segment>();
  if (!f || size < <u32>offsetof<LayoutHeader>()) return pack(BAD_INPUT, 0);
  const h = changetype<LayoutHeader>(args), planes = args + offsetof<LayoutHeader>();
  if (h.planes != n || !together(planes, size - <u32>offsetof<LayoutHeader>(), n, stride, offsetof<Plane>())) return pack(BAD_INPUT, 0);
  const count = f(h, planes, bufferAt(BUFFER_RESULT), room);
  return count > room ? pack(NO_SPACE, 0) : pack(0, count);
}
