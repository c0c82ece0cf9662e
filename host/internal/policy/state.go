package policy

import (
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// State is the saved state of an instance. It is valid for an instance of the same role and state format with at least
// as many slots, if each slot holds the same entry as when it was saved. The zero State is empty.
type State struct {
	Format string // the manifest's state_format
	Slots  uint32 // MaxSlots of the saving instance; 0 for roles without slots
	Data   []byte
}

// StateFormat returns the format of the states that the module's instances save; empty if they save none.
func (m *Module) StateFormat() string { return m.manifest.StateFormat }

// KeepState declares that a native module's guests are [guest.Saver]s, with a state format.
func (m *Module) KeepState(format string) *Module {
	m.manifest.StateFormat = format
	return m
}

// acceptsState reports whether an instance of the module can use a state.
func (m *Module) acceptsState(s *State, slots uint32) bool {
	return s.Format != "" && s.Format == m.manifest.StateFormat && s.Slots <= slots
}

// saveNative and loadNative save and load the state of a native guest.
func (m *Module) saveNative(g any, limit uint32) ([]byte, bool) {
	s, ok := g.(guest.Saver)
	if !ok {
		return nil, false
	}
	data, err := s.Save(nil, int(min(limit, sandbox.MaxState)))
	if err != nil || len(data) > int(limit) {
		m.log.Warn("policy state not saved", "bytes", len(data), "limit", limit, "error", err)
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
		m.logUnusable(err)
		return false
	}
	return true
}

// logUnusable logs that a state cannot be used. It is not a fault: another module may have written the state.
func (m *Module) logUnusable(err error) {
	m.log.Warn("policy cannot load its state; it starts empty", "format", m.manifest.StateFormat, "error", err)
}

// Save delivers the queued events and asks the policy for its state, of at most limit bytes. ok is false if it saves
// none. It may take long (lru as a Go module: 0.75 ms for 0.5 MB, 14 ms for 8 MB), so it is for a policy that is about
// to be replaced. An error ends the policy, as with any call.
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

// Loaded reports whether the policy loaded the given state. If not, it is empty and must get the resident entries.
func (e *Evict) Loaded() bool { return e.loaded }

// Save asks the policy for its state, of at most limit bytes. ok is false if it saves none or is down.
func (a *Admit) Save(limit uint32) (s State, ok bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s = State{Format: a.m.StateFormat()}
	switch {
	case a.err != nil:
		return State{}, false, a.err
	case s.Format == "":
	case a.native:
		s.Data, ok = a.m.saveNative(a.guest, limit)
	case a.in != nil:
		if s.Data, ok, err = a.in.Save(limit, 0); err != nil {
			return State{}, false, a.failed(err)
		}
	}
	if !ok {
		return State{}, false, nil
	}
	return s, true, nil
}

// Loaded reports whether the policy loaded the given state.
func (a *Admit) Loaded() bool { return a.loaded }
