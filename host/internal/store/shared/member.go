package shared

import (
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Dir is the directory of the protocol's files or objects, relative to a root.
const Dir = ".kvhost/shared"

// status is the description of a member that its evictor reads.
type status struct {
	Beat uint64 `json:"beat"`
	// indices of the vetoed victims, for each acknowledged batch whose decision is not applied yet
	Vetoes map[uint64][]uint16 `json:"vetoes"`
	claim
	Scanned bool `json:"scanned"` // set once the member knows all pieces and could be the evictor
}

// mostStatus returns the size of the longest status that is read, for a number of members. One that has vetoed all victims of
// mostBatches batches takes a third of a MiB.
func mostStatus(members int) int64 {
	return max(allStatuses/1024, allStatuses/max(32, int64(members)))
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
	presence
	credits
	outbox
	audits
	cfg    Config
	log    *slog.Logger
	back   Backend
	medium medium

	facts atomic.Pointer[Stats]

	// The fields below are used by Step only.
	incarnation
	lastStep time.Duration
	lookedAt time.Duration // when the others were last read without an error
	view     view
	seenAt   time.Duration // when the evictor, or its absence, was last seen to change
	term     *term         // nil unless this host is the evictor
}

// incarnation is the state that starts afresh each time this host joins.
type incarnation struct {
	name     string // <host id>.<life in hexadecimal>; empty while not joined
	admitted bool
	told     status              // last written status
	acks     map[uint64][]uint16 // vetoes of the docket in the last step in which all records were logged
	docket
	published int64    // bytes published according to this member's log
	retry     *attempt // the log write that failed; nil if none did. Others may have read part of it.
	relayed   bool     // set while pieces of members that are gone are not logged
	listed    bool     // set once the batches were listed
	earliest  uint64   // first batch that cannot have been judged in part before this member was admitted
	peers     map[string]*peer
}

// peer is the knowledge about a member; this host is one of them.
type peer struct {
	status
	seenAt    time.Duration // when the status was last seen to change
	here      bool          // set while the member is listed as one
	published int64         // bytes published according to the log read so far
	ended     bool          // set once the member is gone and its log is fully read
}

// view is the evictor's record as this member read it last.
type view struct {
	number  uint64 // of the term; 0 if there is no evictor
	owner   string // member that is the evictor; empty if there is none
	admits  bool   // set if this member has a grant
	granted int64
	batches map[uint64]bool // batches, and whether each is decided; nil if they cannot be known in this step
}

// New returns a member. It does not access the root before the first Step.
func New(cfg Config, back Backend) (*Member, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Member{cfg: cfg, log: cfg.Log, back: back}
	if cfg.Objects != nil {
		m.medium = &bucket{m: m}
	} else {
		m.medium = &directory{m: m, tree: tree{fs: cfg.FS, base: cfg.Dir + "/" + Dir}}
	}
	m.facts.Store(&Stats{})
	m.presence.init(cfg.Lapse, cfg.Now, cfg.Unique)
	m.credits.init(m.Fresh, m.Wake)
	m.outbox.init(m.Wake)
	m.audits.wake = m.Wake
	return m, nil
}

// Step makes one round: it follows the other members, writes the log and the status, and does the evictor's work if this host
// is the evictor. An error is that of the medium; the next step tries again.
func (m *Member) Step() error {
	now := m.cfg.Now()
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
			return nil // This host was expelled at once, because it had been paused.
		} else if err != nil {
			return err
		}
	}
	blind := m.look(now)
	if errors.Is(blind, ErrFenced) || blind != nil && now-m.lookedAt > m.cfg.Lapse/2 {
		return blind // A host that cannot acknowledge must not be waited for.
	}
	doubts := m.settleDoubts()
	// The records of this host must be in its log before others see its acknowledgement of a batch. Otherwise its record of a
	// victim could come after the decision.
	unlogged := m.flush(now)
	if errors.Is(unlogged, ErrFenced) {
		return unlogged
	}
	if unlogged == nil {
		m.acks = maps.Clone(m.docket.vetoes)
	}
	if err := m.heartbeat(); err != nil {
		return err
	}
	if err := errors.Join(blind, unlogged); err != nil {
		return errors.Join(err, doubts)
	}
	err := m.takeGrant()
	switch {
	case err != nil:
	case m.term == nil:
		err = m.medium.campaign(now)
	default:
		if err = m.term.step(now); err != nil && m.medium.deposed(err) {
			m.log.Warn("another host became the evictor", "term", m.term.number)
			m.term, err = nil, nil
		}
	}
	return errors.Join(err, doubts)
}

// join begins a new incarnation. Earlier incarnations of this host end. The operator must make sure that no two running hosts
// have the same id.
func (m *Member) join() error {
	life := max(1, m.cfg.Unique())
	m.incarnation = incarnation{name: m.cfg.member(life), peers: map[string]*peer{}}
	m.term = nil
	m.docket.begin(m.back)
	if err := m.medium.join(); err != nil {
		m.name = ""
		return err
	}
	m.credits.reset(life)
	m.outbox.begin(life)
	return nil
}

// member returns the name of this host in an incarnation.
func (c *Config) member(life uint64) string { return c.Host + "." + strconv.FormatUint(life, 16) }

func (m *Member) isOwn(member string) bool {
	host, _, _ := strings.Cut(member, ".")
	return host == m.cfg.Host
}

// peer returns a member, which it adds if it is unknown.
func (m *Member) peer(name string) *peer {
	p := m.peers[name]
	if p == nil {
		p = &peer{seenAt: m.lastStep}
		m.peers[name] = p
	}
	return p
}

// look reads the evictor's record and the other members, and acts on the evictor's batches. Every record of a removed victim was
// logged before the batch was acknowledged, and so before it was decided. All logs are read after the batches and before the
// decisions are applied, so no record of a victim is read after its removal. If a log was missed, the batches wait for the next
// step.
func (m *Member) look(now time.Duration) error {
	if err := m.medium.look(now); err != nil {
		return err
	}
	if now-m.lookedAt > m.cfg.Lapse/2 { // This host was paused or could not read, and may have missed heartbeats.
		m.seenAt = now
		for _, p := range m.peers {
			p.seenAt = now
		}
	}
	if m.admitted {
		m.learnLater()
		all, err := m.medium.follow(m.docket.learn)
		if err == nil && all {
			err = m.apply()
		}
		if err != nil {
			return err
		}
	}
	m.lookedAt = now
	return nil
}

// takeGrant takes the credit that was granted. The first grant admits this host: the evictor now waits for its
// acknowledgements, so the host notes where the other logs end and then scans.
func (m *Member) takeGrant() error {
	if !m.view.admits {
		return nil
	}
	m.grant(m.view.granted)
	if m.admitted {
		return nil
	}
	// Logs are followed from their current end. The scan finds the pieces that were published before and still exist; older
	// records also name entries that were evicted long ago.
	if all, err := m.medium.follow(nil); err != nil || !all {
		return err
	}
	m.admitted = true
	m.beat(m.lastStep) // the time of this step's heartbeat
	m.scanAgain()
	m.log.Info("admitted to the shared root", "member", m.name, "term", m.view.number)
	m.Wake()
	return nil
}

// relay learns and logs a piece that a member which is gone has published and not logged. temp is its temporary if there is one.
func (m *Member) relay(r Record, temp string) {
	r.Op, m.relayed = Relayed, true
	m.docket.learn(&r)
	m.outbox.relay(r, temp)
}

// heartbeat writes this member's status.
func (m *Member) heartbeat() error {
	at := m.cfg.Now()
	s := status{
		Beat: m.told.Beat + 1, Vetoes: m.acks, claim: m.settle(m.cfg.Capacity / (4 * int64(max(1, len(m.peers))))),
		Scanned: m.active(),
	}
	if written, err := m.medium.tell(&s, at); err != nil || !written {
		return err
	}
	m.told, m.peer(m.name).status = s, s
	if m.admitted {
		m.beat(at)
	}
	return nil
}

func (m *Member) active() bool { return m.admitted && m.isScanned() }

// fence ends an incarnation that the others have declared dead. It discards all state that depends on it: credit, records that
// are not logged, proposals, and the store's index.
func (m *Member) fence() {
	m.silence()
	for _, d := range m.outbox.end() {
		m.Give(d.credit) // The evictor finds published pieces, and no host has the file open.
	}
	m.credits.reset(0)
	m.incarnation, m.term = incarnation{}, nil
	m.back.Fenced()
}

// Leave ends this host's membership. All puts and leases must have ended.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush(m.cfg.Now())
	m.silence()
	err = errors.Join(err, m.medium.leave(err == nil && m.admitted && m.outbox.sure()))
	m.incarnation, m.term = incarnation{}, nil
	m.credits.reset(0)
	m.publishStats()
	return err
}

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
	for name, p := range m.peers {
		if name != m.name && p.here {
			s.Peers++
		}
	}
	if t := m.term; t != nil {
		if !t.counted {
			t.counted = true
			s.Terms++
		}
		s.Outside = t.outside
		s.Removed, s.GivenUp = s.Removed+t.removed, s.GivenUp+t.givenUp
		t.removed, t.givenUp = 0, 0
	}
	m.facts.Store(&s)
}

// Stats returns the state and counters as of the latest step.
func (m *Member) Stats() Stats {
	s := *m.facts.Load()
	m.tell(&s)
	return s
}
