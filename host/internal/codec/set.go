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

// MaxModels is the maximum number of models with figures of their own. Clients choose the models, so the number of metric
// series must be bounded.
const MaxModels = 64

// Other is the model under which the figures of further models are counted.
const Other = "other"

// Set creates the namespaces of a store, and has their figures by model. The zero Set is ready to use.
type Set struct {
	Modes Modes // set before the first namespace is created

	encoding, decoding staging.Bandwidth // speeds of the codec in one worker

	mu     sync.Mutex
	models map[string]*Model
}

// Model counts the work of the codec for the namespaces of one model.
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

// Flow is the page bytes and the stored bytes of extents, and the time that the codec took for them.
type Flow struct {
	Pages, Stored int64
	Took          time.Duration
}

// Figures are the totals of one model.
type Figures struct {
	Model            string
	Encoded, Decoded Flow
	Plain            int64 // page bytes of pieces stored plainly because compression would not have been worth it
}

// Namespace returns the record of a namespace, given its text. It is empty at first.
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

// Figures returns the figures of all models, sorted by name.
func (s *Set) Figures() (list []Figures) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, m := range s.models {
		list = append(list, Figures{name, m.encoded.read(), m.decoded.read(), m.plain.Load()})
	}
	slices.SortFunc(list, func(a, b Figures) int { return cmp.Compare(a.Model, b.Model) })
	return list
}
