// The export of the role admit.
import { BAD_INPUT, BUFFER_ARGS, BUFFER_RESULT, Candidate, NO_SPACE } from "./records";
import { bufferAt, bufferSize, pack, together } from "./memory";

let admit: ((batch: usize, n: u32, out: usize) => void) | null = null;

// onAdmit: writes a byte of 1 or 0 to out for each candidate, at<Candidate>(batch, i).
export function onAdmit(f: (batch: usize, n: u32, out: usize) => void): void { admit = f; }

export function kv_admit(n: u32, stride: u32): u64 {
  const f = admit, batch = bufferAt(BUFFER_ARGS);
  if (!f || !together(batch, bufferSize(BUFFER_ARGS), n, stride, offsetof<Candidate>())) return pack(BAD_INPUT, 0);
  if (n > bufferSize(BUFFER_RESULT)) return pack(NO_SPACE, 0);
  f(batch, n, bufferAt(BUFFER_RESULT));
  return pack(0, n);
}
