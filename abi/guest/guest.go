// Package guest is the Go kit for kvhost policies.
//
// A policy is an ordinary Go type with the methods of its roles ([Evictor], [Admitter], [Placer], [Layouter]). The same
// source is built to a wasm module, linked into the host as the native fallback, and run natively in tests that compare
// its decisions with those of its wasm build.
//
// The roles of a module are its exports, so each role has a package under abi/guest/export, and a module exports only the
// functions of the packages that it imports. Its main package is five lines:
//
//	package main
//
//	import (
//		"example.com/mypolicy"
//		"github.com/kvhost/kvhost/abi/guest/export/evict"
//	)
//
//	func init() { evict.Export(mypolicy.New) }
//
//	func main() {}
//
// Build it with GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared. Registration happens in init because main does not
// run in such a module. A module may take several roles, each with its own value.
//
// A policy is single-threaded: the host makes one call at a time per instance. It should allocate only in its
// constructor, and bound its memory by [Info].MaxSlots.
package guest

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/kvhost/kvhost/abi"
)

// Info describes the instance for a constructor.
type Info struct {
	MaxSlots      uint32 // all slots are below this number; 0 for roles without slots
	MaxBatch      uint32
	MaxVictims    uint32
	MaxNamespaces uint32
	Capacity      uint64 // capacity of the root in bytes
	Features      uint64
	Seed          uint64
	Config        Config
}

// Evictor decides which entries of one root are evicted.
type Evictor interface {
	// Events applies a batch. The slice belongs to the host and is valid only during the call.
	Events(batch []abi.Event)
	// Victims writes up to len(dst) slots to dst, best victim first, and returns their number. The slots must be
	// resident, unpinned and distinct. A named entry stays resident until an OpRemove for it arrives. If none of the
	// named entries can be evicted and another entry can, the host evicts by last touch.
	Victims(ask abi.Ask, dst []uint32) int
}

// Admitter decides which entries are stored at all, and which are copied to another level.
type Admitter interface {
	// Admit writes one answer for each candidate. dst has the length of batch.
	Admit(batch []abi.Candidate, dst []bool)
}

// Elsewhere applies the host's own rule for candidates that concern other hosts. Under this rule all hosts together keep one copy of a
// chunk, as one cache would. decided is false if the rule does not apply, so that the number of uses should decide.
func Elsewhere(c *abi.Candidate) (admits, decided bool) {
	switch demotion := c.Kind == abi.KindDemotion; {
	case demotion && c.To == abi.PeerLevel:
		return c.Copies == 0, true
	case demotion && c.From == abi.PeerLevel:
		return c.Copies <= 1, true // the one copy belongs to the host that offers it
	case demotion && c.Copies > 0, c.Kind == abi.KindPromotion && c.From == abi.PeerLevel && c.Flags&abi.CandidateLast != 0:
		return false, true
	}
	return false, false
}

// Placer names new pieces. It is asked once for each piece, and the name is stored with the piece.
type Placer interface {
	// Place appends the relative path of the piece to dst and returns it with the chosen root. It returns abi.None if
	// the host should choose the root.
	Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) (path []byte, root uint32)
}

// Layouter orders the page bytes of a chunk's payload.
type Layouter interface {
	// Layout appends the segments to dst.
	Layout(h abi.LayoutHeader, planes []abi.Plane, dst []abi.Segment) []abi.Segment
}

// Namespacer is implemented by policies that need the text of namespaces.
type Namespacer interface {
	// Namespace is called once for each namespace, before any record with its id.
	Namespace(id uint32, text string)
}

// ErrStateSize means that a state is larger than the host's limit. It is not a fault: the next instance starts empty.
var ErrStateSize = errors.New("the state takes more than the limit")

// Saver is implemented by policies with state that outlives the instance. The manifest's state_format names its format.
type Saver interface {
	// Save appends the state to dst, at most limit bytes, or returns [ErrStateSize].
	Save(dst []byte, limit int) ([]byte, error)
	// Load restores the result of Save. After an error, the policy must be as New made it.
	Load(state []byte) error
}

// Config is a policy's configuration: keys and values as the operator wrote them.
type Config map[string]string

// Int parses a whole number between least and most.
func (c Config) Int(key string, def, least, most int64) (int64, error) {
	s, ok := c[key]
	if !ok {
		return def, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("config %s = %q: not a whole number", key, s)
	}
	if n < least || n > most {
		return 0, fmt.Errorf("config %s = %d: want %d to %d", key, n, least, most)
	}
	return n, nil
}

// Bool parses true or false.
func (c Config) Bool(key string, def bool) (bool, error) {
	s, ok := c[key]
	if !ok {
		return def, nil
	}
	b, err := strconv.ParseBool(s)
	if err != nil {
		return false, fmt.Errorf("config %s = %q: not true or false", key, s)
	}
	return b, nil
}

// String returns text.
func (c Config) String(key, def string) string {
	if s, ok := c[key]; ok {
		return s
	}
	return def
}
