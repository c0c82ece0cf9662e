package shared

import (
	"errors"
	"log/slog"
	"maps"
	"sync/atomic"
	"time"
)

// Dir is the directory of the protocol's files, relative to a root.
const Dir = ".kvhost/shared"

// status is the content of the control file in which a member describes itself.
type status struct {
	Beat uint64 `json:"beat"`
	// indices of the vetoed victims, for each acknowledged batch whose decision is not applied yet
	Vetoes map[uint64][]int `json:"vetoes"`
	Claim
	Scanned bool `json:"scanned"` // set once the member knows all pieces and could be the evictor
}

// grantFile is the content of a grant file: the total credit granted to a member.
type grantFile struct {
	Granted int64 `json:"granted"`
}

// State is a member's progress in joining.
type State uint8

const (
	Joining  State = iota // not admitted yet, or expelled; the host neither leases nor writes entries
	Admitted              // member; the root is being scanned
	Active                // knows all pieces
)

// Member is this host's membership in a shared root. Step must be called again and again by one goroutine. The other methods
// are safe for concurrent use.
type Member struct {
	tree
	Presence
	Credits
	pending
	cfg  Config
	log  *slog.Logger
	back Backend

	facts atomic.Pointer[Stats]

	// The fields below are used by Step only.
	incarnation
	lastStep time.Duration
	term     *term // nil unless this host is the evictor
	seen     evictorSeen
}

// incarnation is the state that starts afresh each time this host joins.
type incarnation struct {
	name     string // <host id>.<life in hexadecimal>; empty while not joined
	dir      string
	life     uint64
	admitted bool
	status   status
	acks     map[uint64][]int // Docket.Vetoes as last written to the status
	Docket
	out   writer
	retry *attempt // the log write that failed; nil if none did. Others may have read part of it.
	tails map[string]*tail
}

// evictorSeen is the evictor as this member saw it last.
type evictorSeen struct {
	epoch  uint64 // 0 if there is no evictor
	beat   beat
	beatAt time.Duration // when beat was last seen to change
	vacant time.Duration // when the evictor was first seen to be missing
}

// beat is the content of the evictor's heartbeat file.
type beat struct {
	Owner string `json:"owner"`
	Beat  uint64 `json:"beat"`
	Took  bool   `json:"took"` // set once the journals of earlier epochs are copied into this one
}

// New returns a member. It does not access the root before the first Step.
func New(cfg Config, back Backend) (*Member, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Member{
		cfg: cfg, tree: tree{fs: cfg.FS, base: cfg.Dir + "/" + Dir}, log: cfg.Log, back: back,
	}
	m.facts.Store(&Stats{})
	m.Presence.Init(cfg.Lapse, cfg.Now, cfg.Unique)
	m.Credits.Init(m.Fresh, m.Wake)
	m.Outbox.Init(m.Wake)
	return m, nil
}

// Step makes one round: it writes the heartbeat, follows the other members, and does the evictor's work if this host is the
// evictor. An error is that of the file system; the next step tries again.
func (m *Member) Step() error {
	now := m.cfg.Now()
	if m.lastStep != 0 && now-m.lastStep > m.cfg.Lapse/2 {
		m.resetTimers(now)
	}
	m.lastStep = now
	err := m.step(now)
	if errors.Is(err, ErrFenced) {
		m.log.Warn("host given up by the others; joining again", "member", m.name)
		m.fence()
		err = nil
	}
	m.publishStats()
	return err
}

func (m *Member) step(now time.Duration) error {
	if m.name == "" {
		if err := m.join(); missing(err) {
			m.name = "" // This host was expelled at once, because it had been paused.
			return nil
		} else if err != nil {
			m.name = ""
			return err
		}
	}
	epochs, err := m.readEpochs(now)
	if err != nil {
		return err
	}
	if m.admitted {
		m.LearnLater()
		// Every record of a removed victim was logged before the decision. All logs are read after the decisions were listed
		// and before they are applied, so no record of a victim is read after its removal. If a log was missed, the journal
		// waits for the next step.
		j, err := m.seen.journal(&m.tree)
		if err != nil {
			return err
		}
		if all, err := m.followAll(m.Docket.Learn); err != nil {
			return err
		} else if all {
			if err := m.apply(j); err != nil {
				return err
			}
		}
	}
	// The records of this host must be in its log before others see its acknowledgement of a batch. Otherwise its record of a
	// victim could come after the decision. The temporaries' names must be gone too, because a victim would survive its removal
	// under such a name.
	doubts := m.settleDoubts()
	unlogged := m.flush()
	if unlogged == nil {
		unlogged = m.retry.clear(m)
	}
	if errors.Is(unlogged, ErrFenced) {
		return unlogged
	}
	if unlogged == nil {
		m.acks = maps.Clone(m.Docket.Vetoes)
	}
	if err := m.heartbeat(now); err != nil {
		return err
	}
	if err := m.readGrant(epochs.top); err != nil {
		return err
	}
	if unlogged != nil {
		return errors.Join(unlogged, doubts)
	}
	if m.term == nil {
		return errors.Join(m.campaign(now, epochs), doubts)
	}
	err = m.term.step(now, epochs)
	if missing(err) && m.absent(m.term.dir) {
		m.log.Warn("another host became the evictor", "epoch", m.term.epoch)
		m.term = nil
		err = nil
	}
	return errors.Join(err, doubts)
}

func (m *Member) heartbeat(now time.Duration) error {
	peers := int64(max(1, len(m.tails)+1))
	s := &m.status
	s.Claim = m.Settle(m.cfg.Capacity / (4 * peers))
	s.Scanned = m.active()
	s.Beat++
	told := *s
	told.Vetoes = m.acks
	if err := m.put(m.dir+"/status", &told); missing(err) {
		return ErrFenced
	} else if err != nil {
		return err
	}
	if m.admitted {
		m.Beat(now)
	}
	return nil
}

func (m *Member) active() bool { return m.admitted && m.IsScanned() }

// Errors that a member returns.
var (
	// ErrFenced means that the other hosts declared this one dead, or that it left. A host that was declared dead joins again
	// by itself.
	ErrFenced = errors.New("shared: this host was given up by the others")
	// ErrCredit means that a piece was written without credit, so no other host would count its bytes.
	ErrCredit = errors.New("shared: no credit was taken")
	// ErrLinks means that the file system has no hard links. A root on it cannot be shared.
	ErrLinks = errors.New("shared: the file system has no hard links")
	// ErrDoubt means that it is not known yet whether a piece was published.
	ErrDoubt = errors.New("shared: it is in doubt whether the piece was published")
	// ErrDamaged means that a control file or a log record does not match its checksum.
	ErrDamaged = errors.New("shared: damaged control file")
	// ErrConfig means that the configuration is invalid.
	ErrConfig = errors.New("shared: bad configuration")
)

// Stats holds a member's state and counters.
type Stats struct {
	State   State
	Member  string
	Evictor bool
	Peers   int // number of other members
	Granted int64
	Free    int64 // free credit in bytes
	Want    int64
	Held    int64  // bytes of puts from earlier incarnations, which may have files open
	Refused uint64 // requests for credit that were refused
	Outside int64  // outstanding credit of all members in bytes; 0 unless this host is the evictor
	Terms   uint64 // times this host became the evictor
	Removed uint64 // entries that this host removed as the evictor
	GivenUp uint64 // members that this host expelled as the evictor
}

func (m *Member) publishStats() {
	old := m.facts.Load()
	s := Stats{
		Member: m.name, Evictor: m.term != nil,
		Terms: old.Terms, Removed: old.Removed, GivenUp: old.GivenUp,
	}
	switch {
	case m.active():
		s.State = Active
	case m.admitted:
		s.State = Admitted
	}
	s.Peers = len(m.tails)
	if r := m.term; r != nil {
		if !r.counted {
			r.counted = true
			s.Terms++
		}
		s.Outside = r.outside
		s.Removed, s.GivenUp = s.Removed+r.removed, s.GivenUp+r.givenUp
		r.removed, r.givenUp = 0, 0
	}
	m.facts.Store(&s)
}

// Stats returns the state and counters as of the latest step.
func (m *Member) Stats() Stats {
	s := *m.facts.Load()
	m.Tell(&s)
	return s
}
