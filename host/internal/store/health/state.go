package health

// State is what a root is used for.
type State uint32

const (
	// In is used for everything.
	In State = iota
	// Full has met the end of its file system. It takes stores only in the place of what it evicts, and only when no other
	// root takes them.
	Full
	// ReadOnly takes no stores.
	ReadOnly
	// Out is used for nothing: lookups miss, and no operation is begun. It is probed, and returns.
	Out
	// Returning is as Out, but operations are begun: the root is brought up to date.
	Returning
)

func (s State) String() string {
	switch s {
	case Full:
		return "full"
	case ReadOnly:
		return "read-only"
	case Out, Returning:
		return "out"
	}
	return "in"
}
