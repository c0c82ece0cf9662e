package codec

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// MaxModels is how many models have figures of their own. Clients choose them, so the number of series must be bounded.
const MaxModels = 64

// Other is the model under which the figures of further ones are.
const Other = "other"

// Set makes the namespaces of a store, and has their figures by model. The zero Set is ready.
type Set struct {
	Modes Modes // set before the first namespace is made

	encoding, decoding staging.Bandwidth // of the codec in a worker

	mu     sync.Mutex
	models map[string]*Model
}

// Model counts what the codec did for the namespaces of one model.
type Model struct {
	encoded, decoded flow
	plain            atomic.Int64
}

// flow counts one direction of the codec.
type flow struct{ pages, stored, took atomic.Int64 }

func (f *flow) add(pages, stored int64, took time.Duration) {
	f.pages.Add(pages)
	f.stored.Add(stored)
	f.took.Add(int64(took))
}

func (f *flow) read() Flow {
	return Flow{Pages: f.pages.Load(), Stored: f.stored.Load(), Took: time.Duration(f.took.Load())}
}

// Flow is bytes of extents as they are in pages and as they are stored, and the time that the codec took for them.
type Flow struct {
	Pages, Stored int64
	Took          time.Duration
}

// Figures are what the codec did for one model.
type Figures struct {
	Model            string
	Encoded, Decoded Flow
	Plain            int64 // page bytes of pieces that were not compressed because that would not be worth it
}

// Namespace is that of a namespace's text, of which nothing is known yet.
func (s *Set) Namespace(text string) *Namespace {
	return &Namespace{set: s, model: s.model(kv.Field(text, "model")), mode: s.Modes.of(text), trial: First}
}

func (s *Set) model(name string) *Model {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.models == nil {
		s.models = map[string]*Model{}
	}
	if s.models[name] == nil && len(s.models) >= MaxModels {
		name = Other
	}
	if s.models[name] == nil {
		s.models[name] = &Model{}
	}
	return s.models[name]
}

// Figures are those of all models, by name.
func (s *Set) Figures() (list []Figures) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, m := range s.models {
		list = append(list, Figures{name, m.encoded.read(), m.decoded.read(), m.plain.Load()})
	}
	slices.SortFunc(list, func(a, b Figures) int { return cmp.Compare(a.Model, b.Model) })
	return list
}
