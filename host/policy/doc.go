// Package policy runs the decisions that kvhost leaves to others: which entries go, which are stored, what their files
// are called and how their bytes are ordered.
//
// The one idea: the rest of the host asks a [Module] for an [Evict], [Admit], [Place] or [Layout] and never learns
// whether WebAssembly or native Go answers. Every call into a guest is made by one internal type, instance, so that the
// fence has one place to live: pointers checked, answers judged, a fault turned into an [ErrFault] and the instance
// dropped.
package policy
