// Package prefix is the eviction policy that knows it is caching the prefixes of conversations.
//
// The unit of decision is a segment: the run of chunks that one request touched last and that play one part in it. They
// are reused together or not at all. Each segment has a Gittins index: the best ratio, over all horizons T, of P(reused
// within T) to the expected time held until then, given its age. The segment with the lowest index is evicted first, and
// within it the deepest chunk, so that the rest is always a usable prefix.
//
// The probabilities are learned online, from every segment that ages, is reused, or is missed after it was evicted
// (a bounded table of ghosts remembers those):
//
//   - a baseline hazard of reuse over age, on a logarithmic scale, one per part (model.go): chunks that are new with
//     this request, chunks that it found, its last chunk (a partial block that the next turn replaces), what was left
//     over when a later request took another branch, prefixes that many branches share; and, for continuations, one
//     per length of the pause before this turn, because people and agents keep their pace;
//   - times a weight for what the request looked like (request.go): its turn number, and by how much it extended the
//     conversation, began one, or branched off;
//   - damped by a gamma frailty, because a segment that has lived long is likely to be a long-lived one. With frailty of
//     unit variance survival is 1/(1+wH), which needs no exponential.
//
// Nothing is assumed about the workload but this form. On a chat trace the policy learns that a first turn returns in
// one case of three and that last chunks never do; on an agent trace it learns that everything returns and behaves like
// least-recently-used; and it follows when one turns into the other, since the counts decay.
//
// All arithmetic is on integers. Memory comes with the slots that are used, and is bounded: 48 bytes per slot, 68 per
// segment with at most five segments (resident or ghost) per eight of these slots, and about half a megabyte of tables. An
// event costs O(1) plus a tournament of fixed height when a cell of segments becomes empty or stops being so.
//
// Related work: the Gittins index as an eviction rule and hit density over age (Beckmann, Chen, Cidon: LHD, NSDI 2018);
// proportional hazards (Cox 1972) with frailty (Vaupel 1979); per-category reuse probability of KV blocks (KVCache Cache
// in the Wild, ATC 2025); learned continuation probability (LPC, NeurIPS 2025); ghosts (ARC, FAST 2003).
// host/docs/lab/2026-11-prefix.md says what was tried and what each part gives.
package prefix
