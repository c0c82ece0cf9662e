// The exports of the role place.
import {
  BAD_INPUT, BUFFER_ARGS, BUFFER_RESULT, BUFFER_ROOTS, NONE, NO_SPACE, PlaceAnswer, PlaceQuery, RootFacts, RootsHeader, at,
} from "./records";
import { bufferAt, bufferSize, pack, together } from "./memory";
import { pathLength, pathStart } from "./path";

let place: ((q: PlaceQuery, roots: usize, count: u32) => i32) | null = null;

// chosen is the root for the query: an index into the roots, or NONE, which it is before each.
export let chosen: u32 = NONE;
export function choose(root: u32): void { chosen = root; }

// onPlace: writes the path with the put... functions, may choose(root), answers a status. Roots are at<RootFacts>(roots, i).
export function onPlace(f: (q: PlaceQuery, roots: usize, count: u32) => i32): void { place = f; }

export function kv_place(n: u32, stride: u32): u64 {
  const f = place, queries = bufferAt(BUFFER_ARGS), out = bufferAt(BUFFER_RESULT), room = bufferSize(BUFFER_RESULT);
  if (!f || !together(queries, bufferSize(BUFFER_ARGS), n, stride, offsetof<PlaceQuery>())) return pack(BAD_INPUT, 0);
  if (<u64>n * offsetof<PlaceAnswer>() > room) return pack(NO_SPACE, 0);
  let roots = bufferAt(BUFFER_ROOTS), count: u32 = 0;
  if (roots && bufferSize(BUFFER_ROOTS) >= <u32>offsetof<RootsHeader>()) {
    const h = changetype<RootsHeader>(roots);
    roots += offsetof<RootsHeader>();
    if (together(roots, bufferSize(BUFFER_ROOTS) - <u32>offsetof<RootsHeader>(), h.count, h.stride, offsetof<RootFacts>())) {
      count = h.count;
      h.stride = offsetof<RootFacts>(); // they stand together now
    }
  }
  let off: u32 = n * <u32>offsetof<PlaceAnswer>();
  for (let i: u32 = 0; i < n; i++) {
    chosen = NONE;
    pathStart(out + off, room - off);
    const status = f(at<PlaceQuery>(queries, i), roots, count);
    if (status) return pack(status, 0);
    if (pathLength() > room - off) return pack(NO_SPACE, 0);
    const a = at<PlaceAnswer>(out, i);
    a.root = chosen;
    a.off = off;
    a.len = pathLength();
    a.reserved = 0;
    off += pathLength();
  }
  return pack(0, n);
}
