// Package prefix is an eviction policy for prefixes of conversations.
//
// The unit of decision is a segment: the run of chunks that the same request touched last and that have the same part in it.
// They are reused together or not at all. Each segment has a Gittins index, which depends on its age. It is the best ratio,
// over all horizons T, of the probability of a reuse within T to the expected time until that reuse or T. The segment with the
// lowest index is evicted first, and within it the deepest chunk, so that the rest is always a usable prefix.
//
// The probabilities are learned online from every segment that ages, is reused, or is missed after it was evicted.
// Evicted segments are kept in a bounded table of ghosts. The probability has three factors:
//
//   - a baseline hazard of reuse over age, on a logarithmic scale, for each part (model.go). The parts are: chunks that
//     are new with this request, chunks that it found, its last chunk (a partial block that the next turn replaces),
//     chunks left over when a later request took another branch, and prefixes that many branches share. Continuations
//     have a baseline for each length of the pause before this turn, because people and agents keep their pace.
//   - a weight for the features of the request (request.go): its turn number, and by how much it extended the
//     conversation, began one, or branched off.
//   - a gamma frailty that dampens the weight with age, because a segment that has lived long is likely to be a long-lived one.
//     With a frailty of unit variance, survival is 1/(1+wH), which needs no exponential.
//
// Nothing else is assumed about the workload. On a chat trace the policy learns that a first turn returns in one case
// of three, and that last chunks never do. On an agent trace it learns that everything returns, and then behaves like
// least-recently-used. Since the counts decay, it follows a change from one workload to the other.
//
// All arithmetic is on integers. Memory is allocated for the slots that are used: 48 bytes per slot, 68 bytes per segment with
// at most five segments (resident or ghost) for eight slots, and about half a megabyte of tables. An event takes O(1), and
// additionally a tournament of fixed height if a cell of segments becomes empty or non-empty.
//
// Related work: the Gittins index as an eviction rule and hit density over age (Beckmann, Chen, Cidon: LHD, NSDI 2018);
// proportional hazards (Cox 1972) with frailty (Vaupel 1979); per-category reuse probability of KV blocks (KVCache Cache in the
// Wild, ATC 2025); learned continuation probability (LPC, NeurIPS 2025); ghosts (ARC, FAST 2003).
// host/docs/lab/2026-11-prefix.md describes the experiments and the gain of each part.
package prefix
