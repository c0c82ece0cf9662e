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

// status is the control file in which a member describes itself.
type status struct {
	Beat uint64 `json:"beat"`
	// acknowledged batches, until their decisions are applied: indices of vetoed victims
	Vetoes map[uint64][]int `json:"vetoes"`
	Claim
	Scanned bool `json:"scanned"` // it knows all pieces, and could be the evictor
}

// grantFile is the total credit that the evictor granted to a member.
type grantFile struct {
	Granted int64 `json:"granted"`
}

// State is how far a member has come.
type State uint8

const (
	Joining  State = iota // not admitted yet, or given up; it grants and writes nothing
	Admitted              // it takes part; the root is being scanned
	Active                // it knows all pieces
)

// Member is this host's part in a shared root. Step is called again and again, by one goroutine; the rest is safe for
// concurrent use.
type Member struct {
	tree
	Presence
	Credits
	pending
	cfg  Config
	log  *slog.Logger
	back Backend

	facts atomic.Pointer[Stats]

	// The rest belongs to Step.
	incarnation
	lastStep time.Duration
	term     *term // not nil: this host is the evictor
	seen     evictorSeen
}

// incarnation is what begins anew whenever this host joins.
type incarnation struct {
	name     string // <host id>.<life in hexadecimal>; empty: not joined
	dir      string
	life     uint64
	admitted bool
	status   status
	acks     map[uint64][]int // Docket.Vetoes as others may see it
	Docket
	out   writer
	retry *attempt // the write of the log that failed: others may have read some of it
	tails map[string]*tail
}

// evictorSeen is the evictor as this member saw it last.
type evictorSeen struct {
	epoch  uint64 // 0: there is none
	beat   beat
	beatAt time.Duration // when beat was seen to change
	vacant time.Duration // since when there is none
}

// beat is the evictor's heartbeat file.
type beat struct {
	Owner string `json:"owner"`
	Beat  uint64 `json:"beat"`
	Took  bool   `json:"took"` // earlier journals have been copied into this one
}

// New makes a member. Nothing is touched before the first Step.
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

// Step makes one round: it writes the heartbeat, follows the other members, and does the evictor's work when this host
// is the evictor. An error comes from the file system; the next step tries again.
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
			m.name = "" // given up at once: this host was paused
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
		// What a decision removes was in a log before it was decided: all logs are read between the look for decisions and
		// their use, so nothing of a victim is read after it. When a log was missed the journal waits for the next step.
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
	// What this host published is in its log before others see that it has acknowledged a batch: else its record of a
	// victim would follow the decision. And it has no other name by then, by which it would outlast the removal.
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

// Errors of a member.
var (
	// ErrFenced means that the other hosts gave this one up, or that it left. It joins again by itself.
	ErrFenced = errors.New("shared: this host was given up by the others")
	// ErrCredit means that a piece was written without credit: no other host would know of its bytes.
	ErrCredit = errors.New("shared: no credit was taken")
	// ErrLinks means that the file system has no hard links: a root on it cannot be shared.
	ErrLinks = errors.New("shared: the file system has no hard links")
	// ErrDoubt means that it is not known yet whether a piece was published.
	ErrDoubt = errors.New("shared: it is in doubt whether the piece was published")
	// ErrDamaged means that a control file or a log record does not match its checksum.
	ErrDamaged = errors.New("shared: damaged control file")
	// ErrConfig means that the configuration is invalid.
	ErrConfig = errors.New("shared: bad configuration")
)

// Stats are a member's figures.
type Stats struct {
	State   State
	Member  string
	Evictor bool
	Peers   int // other members
	Granted int64
	Free    int64 // credit
	Want    int64
	Held    int64  // bytes of puts of earlier incarnations, which may have files open
	Refused uint64 // requests for credit that were refused
	Outside int64  // evictor: outstanding credit of all members
	Terms   uint64 // times this host became the evictor
	Removed uint64 // evictor: entries
	GivenUp uint64 // evictor: members given up
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

// Stats returns the figures of the latest step.
func (m *Member) Stats() Stats {
	s := *m.facts.Load()
	m.Tell(&s)
	return s
}
