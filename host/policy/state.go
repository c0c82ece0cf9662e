package policy

import (
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// State is what an instance kept of itself for the next one. It is good for an instance of the same role whose module
// names the same format, and which has at least as many slots, each naming the same entry as when the state was kept. The
// zero State is none.
type State struct {
	Format string // the manifest's state_format
	Slots  uint32 // MaxSlots of the instance it comes from; 0 for roles without slots
	Data   []byte
}

// StateFormat names the form of the state that the module's instances keep; empty when they keep none.
func (m *Module) StateFormat() string { return m.manifest.StateFormat }

// KeepState says that a native module's guests are a [guest.Saver], and in what form.
func (m *Module) KeepState(format string) *Module {
	m.manifest.StateFormat = format
	return m
}

// takes says whether an instance of the module could make sense of a state.
func (m *Module) takes(s *State, slots uint32) bool {
	return s.Format != "" && s.Format == m.manifest.StateFormat && s.Slots <= slots
}

// saveNative and loadNative are the same for a guest that is linked in.
func (m *Module) saveNative(g any, limit uint32) ([]byte, bool) {
	s, ok := g.(guest.Saver)
	if !ok {
		return nil, false
	}
	data, err := s.Save(nil, int(min(limit, sandbox.MaxState)))
	if err != nil || len(data) > int(limit) {
		m.log.Warn("a policy's state could not be kept", "bytes", len(data), "most", limit, "error", err)
		return nil, false
	}
	return data, true
}

func (m *Module) loadNative(g any, state *State) bool {
	s, ok := g.(guest.Saver)
	if !ok {
		return false
	}
	if err := s.Load(state.Data); err != nil {
		m.unread(err)
		return false
	}
	return true
}

// unread tells that a state was of no use. It is no fault of the module's: another one wrote it, perhaps.
func (m *Module) unread(err error) {
	m.log.Warn("a policy could not take its state over; it starts empty", "format", m.manifest.StateFormat, "error", err)
}

// Save delivers the events that wait and asks the policy for its state, of at most limit bytes. ok is false when it keeps
// none. It may take long (0.75 ms for each 0.5 MB that lru keeps as a Go module, 14 ms for 8 MB): it is for a policy that is about
// to be replaced. An error is the policy's end, as with any call.
func (e *Evict) Save(limit uint32) (s State, ok bool, err error) {
	if err := e.Flush(); err != nil {
		return State{}, false, err
	}
	s = State{Format: e.m.StateFormat(), Slots: e.maxSlots}
	switch {
	case s.Format == "":
		return State{}, false, nil
	case e.in == nil:
		s.Data, ok = e.m.saveNative(e.guest, limit)
	default:
		if s.Data, ok, err = e.in.Save(limit, e.maxSlots); err != nil {
			return State{}, false, e.drop(err)
		}
	}
	if !ok {
		return State{}, false, nil
	}
	return s, true, nil
}

// Loaded says whether the policy took over the state it was made with. If not, it is empty and must be told what is
// resident.
func (e *Evict) Loaded() bool { return e.loaded }

// Save asks the policy for its state, of at most limit bytes. ok is false when it keeps none, or is down.
func (a *Admit) Save(limit uint32) (s State, ok bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s = State{Format: a.m.StateFormat()}
	switch {
	case a.err != nil:
		return State{}, false, a.err
	case s.Format == "":
	case a.guest != nil:
		s.Data, ok = a.m.saveNative(a.guest, limit)
	case a.in != nil:
		if s.Data, ok, err = a.in.Save(limit, 0); err != nil {
			return State{}, false, a.fell(err)
		}
	}
	if !ok {
		return State{}, false, nil
	}
	return s, true, nil
}

// Loaded says whether the policy took over the state it was made with.
func (a *Admit) Loaded() bool { return a.loaded }
