package shared

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Backend is the store behind a member. Its methods are called from [Member.Step], one at a time.
type Backend interface {
	// Learn takes in a piece that another host published.
	Learn(r *Record)
	// Touched notes uses by another host.
	Touched(prints []uint64)
	// Condemn stops granting and storing an entry until Decide, and is true; or it is false, a veto: the entry is leased, or
	// being written. An entry that is not known is condemned, too.
	Condemn(v *Victim) bool
	// Decide ends what Condemn began. A victim that was not removed may be granted again. Neither does it follow from removed
	// that it is not there, if it was learned since Condemn: it may have been published again.
	Decide(v *Victim, removed bool)
	// Fenced says that this host was given up: what it had leased may go at any time, and what is there is to be learned
	// again, by a scan, once it is admitted; see [Member.Ticket].
	Fenced()

	// The evictor asks the rest.

	// Victims chooses entries to be evicted, of so many bytes in all, that are neither in use nor condemned.
	Victims(bytes int64) []Victim
	// Used is the bytes on disk of all pieces that are known, condemned ones too, and of what else this host has found
	// there; not of temporaries.
	Used() int64
	// Paths are a victim's files.
	Paths(v *Victim) []string
	// Identify reads what a temporary is that was published: it has a second name.
	Identify(temp string, info staging.Info) (Record, error)
}

// Config makes a member.
type Config struct {
	Dir      string // the root
	Host     string // id, of [a-z0-9]: no two that run have the same
	Capacity int64
	High     float64       // part of the capacity at which eviction begins, 0: 0.95
	Low      float64       // and to which it goes, 0: 0.90
	Lapse    time.Duration // without a heartbeat, after which a host is given up
	LogBytes int64         // a log is rotated when it has so many; 0: 1 MiB
	FS       staging.FS
	Log      *slog.Logger
	Unique   func() uint64        // never gives the same number to two incarnations
	Now      func() time.Duration // a clock that only has to run
}

func (c *Config) complete() error {
	if c.High == 0 {
		c.High = 0.95
	}
	if c.Low == 0 {
		c.Low = min(0.9, c.High)
	}
	if c.LogBytes <= 0 {
		c.LogBytes = logFull
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.FS == nil {
		c.FS = staging.OS()
	}
	if c.Dir == "" || c.Host == "" || strings.ContainsAny(c.Host, "./") || c.Capacity <= 0 || c.Lapse <= 0 || c.Unique == nil || c.Now == nil {
		return fmt.Errorf("%w: root %q, host %q, capacity %d, lapse %s", ErrConfig, c.Dir, c.Host, c.Capacity, c.Lapse)
	}
	return nil
}

// Dir is where the protocol's files are, below a root.
const Dir = ".kvhost/shared"

// status is what a member says of itself.
type status struct {
	Beat     uint64           `json:"beat"`
	Vetoes   map[uint64][]int `json:"vetoes"` // by batch that was acknowledged, until its decision was followed: indices of victims
	Returned int64            `json:"returned"`
	Free     int64            `json:"free"` // credit
	Want     int64            `json:"want"`
	Scanned  bool             `json:"scanned"` // it knows all pieces, and could be the evictor
}

// grantFile is what the evictor has handed out to a member, in all.
type grantFile struct {
	Granted int64 `json:"granted"`
}

// State is how far a member has come.
type State uint8

const (
	Joining  State = iota // not admitted yet, or given up: it grants and writes nothing
	Admitted              // it takes part; the root is being scanned
	Active                // it knows all pieces
)

func (s State) String() string { return [...]string{"joining", "admitted", "active"}[s] }

// Member is this host's part in a shared root. Step is called again and again, by one goroutine; the rest is safe for
// concurrent use.
type Member struct {
	cfg  Config
	fs   staging.FS
	log  *slog.Logger
	back Backend
	base string // <root>/.kvhost/shared
	part []byte // for reading logs

	credits credits
	pending pending
	kick    chan struct{}
	beatAt  atomic.Int64 // when the last heartbeat was out, by Config.Now; 0 while fenced
	ticket  atomic.Uint64
	scanned atomic.Uint64
	facts   atomic.Pointer[Stats]

	// The rest is Step's.
	name     string // of this incarnation
	dir      string
	life     uint64
	admitted bool
	status   status
	batches  map[uint64]*batch // that were acknowledged and not decided
	out      writer
	tails    map[string]*tail
	lag      time.Duration
	lastStep time.Duration
	forced   map[ID]Victim // damaged entries, for the evictor
	reported map[ID]bool   // those that are in the journal

	reign  *reign        // this host is the evictor
	epoch  uint64        // of the evictor that was seen last; 0: there is none
	beat   beat          // of that one
	beatAs time.Duration // when beat was seen to change
	vacant time.Duration // since when there is none
}

// beat is what an evictor shows that it lives.
type beat struct {
	Owner string `json:"owner"`
	Beat  uint64 `json:"beat"`
	Took  bool   `json:"took"` // earlier journals are in this one's
}

// New makes a member. Nothing is touched before the first Step.
func New(cfg Config, back Backend) (*Member, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Member{cfg: cfg, fs: cfg.FS, log: cfg.Log, back: back, base: cfg.Dir + "/" + Dir, kick: make(chan struct{}, 1)}
	m.facts.Store(&Stats{})
	return m, nil
}

func (m *Member) hosts() string            { return m.base + "/hosts" }
func (m *Member) gone() string             { return m.base + "/gone" }
func (m *Member) epochDir(n uint64) string { return m.base + "/e" + strconv.FormatUint(n, 10) }
func (m *Member) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// Wake asks for a step.
func (m *Member) Wake() { m.wake() }

// Kicked tells that a step is worth while now.
func (m *Member) Kicked() <-chan struct{} { return m.kick }

// Fresh says that this host is admitted, and has told the others that it lives less than half of Lapse ago. Without that
// nothing may be granted or written.
func (m *Member) Fresh() bool {
	at := m.beatAt.Load()
	return at != 0 && m.cfg.Now()-time.Duration(at) < m.cfg.Lapse/2
}

// Ticket changes when the root is to be scanned; it is 0 while this host is not admitted.
func (m *Member) Ticket() uint64 { return m.ticket.Load() }

// Scanned says that everything in the root was looked at, beginning after Ticket gave this one.
func (m *Member) Scanned(ticket uint64) { m.scanned.Store(ticket) }

// Step does everything once: tells that this host lives, follows the others, and does the evictor's work where this is it.
// An error is of the file system; the next step tries again.
func (m *Member) Step() error {
	now := m.cfg.Now()
	if m.lastStep != 0 {
		m.lag = now - m.lastStep
	}
	m.lastStep = now
	if m.lag > m.cfg.Lapse/2 {
		m.overslept(now)
	}
	err := m.step(now)
	if errors.Is(err, ErrFenced) {
		m.log.Warn("this host was given up by the others; it joins again", "member", m.name)
		m.forget()
		err = nil
	}
	m.tell()
	return err
}

func (m *Member) step(now time.Duration) error {
	if m.name == "" {
		if err := m.join(); missing(err) {
			m.name = "" // given up at once: this host was asleep
			return nil
		} else if err != nil {
			m.name = ""
			return err
		}
	}
	epochs, err := m.look(now)
	if err != nil {
		return err
	}
	if m.admitted {
		// Logs before the journal: what a decision removes was published before this member acknowledged its batch, so by the
		// time that the decision is seen the publication has been read, and cannot come back after it.
		if err := m.followAll(m.learn); err != nil {
			return err
		}
		if err := m.readJournal(epochs.top); err != nil {
			return err
		}
	}
	if err := m.heartbeat(now); err != nil {
		return err
	}
	if err := m.readGrant(epochs.top); err != nil {
		return err
	}
	if err := m.flush(); err != nil {
		return err
	}
	if m.reign == nil {
		return m.stand(now, epochs)
	}
	err = m.rule(now, epochs)
	if missing(err) && !m.exists(m.reign.dir) {
		m.log.Warn("another host is the evictor now", "epoch", m.reign.epoch)
		m.reign = nil
		return nil
	}
	return err
}

// join makes this incarnation's directory.
func (m *Member) join() error {
	m.life = max(1, m.cfg.Unique())
	name := m.cfg.Host + "." + strconv.FormatUint(m.life, 16)
	dir := m.hosts() + "/" + name
	for _, d := range []string{m.hosts(), m.gone(), dir, dir + "/t"} {
		if err := m.fs.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	if err := m.probe(dir); err != nil {
		return err
	}
	m.name, m.dir, m.admitted = name, dir, false
	if err := m.buryEarlier(); err != nil {
		return err
	}
	m.status = status{Vetoes: map[uint64][]int{}}
	m.batches, m.tails = map[uint64]*batch{}, map[string]*tail{}
	m.forced, m.reported = map[ID]Victim{}, map[ID]bool{}
	m.out, m.reign = writer{}, nil
	m.credits.reset(m.life)
	m.pending.reset(m.life)
	return nil
}

// buryEarlier gives this host's earlier incarnations up at once: whoever starts a host sees to it that no other one of the
// same id runs.
func (m *Member) buryEarlier() error {
	names, err := m.list(m.hosts())
	if err != nil {
		return err
	}
	for _, name := range names {
		if name != m.name && m.mine(name) {
			if err := ignoreMissing(m.fs.Rename(m.hosts()+"/"+name, m.gone()+"/"+name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Member) mine(member string) bool {
	host, _, _ := strings.Cut(member, ".")
	return host == m.cfg.Host
}

// probe sees that the file system has hard links.
func (m *Member) probe(dir string) error {
	a, b := dir+"/t/probe", dir+"/t/probed"
	if err := m.put(a, status{}); err != nil {
		return err
	}
	err := m.fs.Link(a, b)
	switch {
	case err == nil:
		err = m.remove(b)
	case !missing(err):
		err = fmt.Errorf("%w: %w", ErrLinks, err)
	}
	return errors.Join(err, m.remove(a))
}

// forget ends an incarnation that the others have given up.
func (m *Member) forget() {
	m.beatAt.Store(0)
	m.ticket.Store(0)
	m.credits.reset(0)
	m.pending.reset(0)
	for _, b := range m.batches {
		b.decide(m.back, func(int) bool { return false }) // whatever became of them: the scan will tell
	}
	m.name, m.admitted, m.reign, m.batches = "", false, nil, nil
	m.back.Fenced()
}

// heartbeat tells the others that this host lives, and what it has seen.
func (m *Member) heartbeat(now time.Duration) error {
	peers := int64(max(1, len(m.tails)+1))
	m.status.Returned, m.status.Free, m.status.Want = m.credits.settle(m.cfg.Capacity / (4 * peers))
	m.status.Scanned = m.active()
	m.status.Beat++
	if err := m.put(m.dir+"/status", &m.status); missing(err) {
		return ErrFenced
	} else if err != nil {
		return err
	}
	if m.admitted {
		m.beatAt.Store(int64(max(1, now)))
	}
	return nil
}

func (m *Member) active() bool { return m.admitted && m.scanned.Load() == m.ticket.Load() }

// readGrant sees what credit there is. The first one admits this host: from then on the evictor waits for its
// acknowledgements, so now is the time to take note of where the others' logs end, and then to scan.
func (m *Member) readGrant(epoch uint64) error {
	if epoch == 0 {
		return nil
	}
	var g grantFile
	switch err := m.get(m.epochDir(epoch)+"/grants/"+m.name, &g); {
	case missing(err):
		return nil
	case errors.Is(err, ErrDamaged):
		m.log.Warn("a grant cannot be read", "error", err)
		return nil
	case err != nil:
		return err
	}
	m.credits.grant(g.Granted)
	if m.admitted {
		return nil
	}
	// What was published up to now the scan will find, unless it has been removed since.
	if err := m.followAll(func(*Record) {}); err != nil {
		return err
	}
	m.admitted = true
	m.beatAt.Store(int64(max(1, m.lastStep))) // this step's heartbeat
	m.ticket.Store(max(1, m.cfg.Unique()))
	m.log.Info("admitted to the shared root", "member", m.name, "epoch", epoch)
	return m.readJournal(epoch)
}

// followAll reads the logs of all other members, also of those that are gone.
func (m *Member) followAll(each func(r *Record)) error {
	live, err := m.list(m.hosts())
	if err != nil {
		return err
	}
	dead, err := m.list(m.gone())
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for i, name := range slices.Concat(live, dead) {
		if name == m.name || seen[name] {
			continue
		}
		seen[name] = true
		dir := m.hosts() + "/" + name
		if i >= len(live) {
			dir = m.gone() + "/" + name
		}
		t := m.tails[name]
		if t == nil {
			t = &tail{}
			m.tails[name] = t
		}
		err := m.follow(t, dir, each)
		switch {
		case missing(err): // it went from one place to the other, or altogether
		case errors.Is(err, ErrDamaged):
			m.log.Warn("a log cannot be read", "error", err)
		case err != nil:
			return err
		default:
			t.ended = i >= len(live)
		}
		if t.lost {
			t.lost = false
			if m.admitted {
				m.log.Warn("a log was rotated before it was read; the root is scanned again", "log", name)
				m.ticket.Store(max(1, m.cfg.Unique()))
			}
		}
	}
	for name := range m.tails {
		if !seen[name] {
			delete(m.tails, name)
		}
	}
	return nil
}

func (m *Member) learn(r *Record) {
	switch r.Op {
	case Published, Relayed:
		m.back.Learn(r)
	case Touched:
		m.back.Touched(r.Prints)
	case Damaged:
		m.force(r)
	}
}

// force notes a damaged entry: whoever is the evictor, now or next, puts it into the journal.
func (m *Member) force(r *Record) {
	if !m.reported[r.ID()] && len(m.forced) < maxForced {
		m.forced[r.ID()] = Victim{Namespace: r.Namespace, Group: r.Group, Key: r.Key, Pieces: r.Pieces, Detour: r.Detour, Bytes: r.Bytes}
	}
}

const maxForced = 1 << 16

// Leave ends this host's part: what it has published is told, and its directory goes to the others to be cleared. Puts and
// leases that are still out are the caller's bug.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush()
	m.beatAt.Store(0)
	err = errors.Join(err, ignoreMissing(m.fs.Rename(m.dir, m.gone()+"/"+m.name)))
	if m.reign != nil {
		err = errors.Join(err, ignoreMissing(m.fs.Rename(m.reign.dir, fmt.Sprintf("%s/x%d.%s", m.base, m.reign.epoch, m.name))))
		m.reign = nil
	}
	m.name, m.admitted = "", false
	m.ticket.Store(0)
	m.credits.reset(0)
	m.tell()
	return err
}

func ignoreMissing(err error) error {
	if missing(err) {
		return nil
	}
	return err
}
