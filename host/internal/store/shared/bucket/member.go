package bucket

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// Objects is the store of the protocol's own objects. Names are relative to [shared.Dir].
type Objects interface {
	// Get reads an object and its version. data is nil if the version is known.
	Get(name, known string) (data []byte, version string, err error)
	// Put writes an object. over is the version that it replaces; if over is empty, the object must not exist. Put returns
	// fs.ErrExist or fs.ErrNotExist if that condition fails. After any other error the object may have been written, or may
	// still be.
	Put(name string, data []byte, over string) (version string, err error)
	Remove(name string) error
	// List returns the objects directly below name with their versions, and the names that have objects below them with an
	// empty version.
	List(name string) (versions map[string]string, err error)
}

type Config struct {
	Objects  Objects
	FS       staging.FS // holds the pieces
	Host     string     // [a-z0-9]+, unique among the running hosts
	Capacity int64
	Lapse    time.Duration // the time without a heartbeat after which a host is declared dead
	Log      *slog.Logger
	Unique   func() uint64        // never returns the same number twice
	Now      func() time.Duration // monotonic; its origin does not matter
	Workers  int                  // number of concurrent requests
}

// landing returns the time after which an abandoned request of a host that is not paused can no longer take effect.
func (c *Config) landing() time.Duration { return 2 * c.Lapse }

// auditEvery is the interval of audits when no host has died.
const auditEvery = time.Hour

// status is the content of a member's object below hosts.
type status struct {
	Beat      uint64           `json:"beat"`
	Log       uint64           `json:"log"`       // number of its last log object
	Published int64            `json:"published"` // bytes published according to its logs
	Vetoes    map[uint64][]int `json:"vetoes"`    // indices of the vetoed victims, for each acknowledged batch whose decision is not applied yet
	Granted   int64            `json:"granted"`   // its grant's Granted as the member read it last
	Scanned   bool             `json:"scanned"`   // set once the member has scanned the bucket
	shared.Claim
}

// mostLogs is above the number of log objects that any member writes. logsAtOnce limits the log objects read in one step.
const (
	mostLogs   = 1 << 32
	logsAtOnce = 1 << 10
)

func (s *status) decode(b []byte) error {
	err := cmp.Or(shared.DecodeControl(b, s), s.Check())
	if err == nil && s.Log > mostLogs {
		err = fmt.Errorf("%w: %d logs", shared.ErrDamaged, s.Log)
	}
	return err
}

// evictor is the content of the evictor's object.
type evictor struct {
	Term    uint64            `json:"term"`
	Owner   string            `json:"owner"` // empty if the evictor has left
	Beat    uint64            `json:"beat"`
	Grants  map[string]*grant `json:"seats"`
	Batches map[uint64]*batch `json:"batches"`
}

// grant is the evictor's account of one member.
type grant struct {
	Granted int64  `json:"granted"`
	End     uint64 `json:"end,omitempty"` // number after the last log object with records, once the member is gone; else 0
}

// batch is a batch of victims, or a member that is forgotten once all others have read its log.
type batch struct {
	Forget  string `json:"forget,omitempty"`
	Decided bool   `json:"decided,omitempty"`
	Spared  []int  `json:"spared,omitempty"` // indices of the victims that were not removed
	All     bool   `json:"all,omitempty"`    // set if members must treat all victims as spared
}

func decodeEvictor(b []byte) (*evictor, error) {
	var o evictor
	if err := shared.DecodeControl(b, &o); err != nil {
		return nil, err
	}
	for name, s := range o.Grants {
		if s == nil || s.End > mostLogs+1 {
			return nil, fmt.Errorf("%w: no grant of %s: %+v", shared.ErrDamaged, name, s)
		}
	}
	for n, b := range o.Batches {
		if b == nil {
			return nil, fmt.Errorf("%w: no batch %d", shared.ErrDamaged, n)
		}
	}
	return &o, nil
}

// Member is this host's membership in a shared bucket. Step must be called again and again by one goroutine. The other methods
// are safe for concurrent use.
type Member struct {
	shared.Presence
	shared.Credits
	shared.Outbox
	cfg  Config
	log  *slog.Logger
	back shared.Backend

	facts atomic.Pointer[shared.Stats]

	mu     sync.Mutex
	doubts []doubt
	audit  audit

	// The fields below are used by Step only.
	incarnation
	lastStep time.Duration
	evictor  *evictor      // as last read or written; nil if the object does not exist
	version  string        // the object's version; empty if it does not exist
	seenAt   time.Duration // when the object was last seen to change
	lookedAt time.Duration // when the other members were last read
	term     *term         // nil unless this host is the evictor
}

// incarnation is the state that starts afresh each time this host joins.
type incarnation struct {
	name     string // <host id>.<life in hexadecimal>; empty while not joined
	admitted bool
	told     status // last written status
	toldAs   string // version of the last written status
	shared.Docket
	logged    uint64 // number of the last log object written
	published int64
	retry     *attempt
	kept      []keptLog
	peers     map[string]*peer
	unread    map[uint64]int // failed reads of each batch
}

// peer is what this member knows of another member.
type peer struct {
	status
	here    bool   // set while the member's object exists
	version string // version of the member's object
	seenAt  time.Duration

	next      uint64 // number of the next log object to read
	published int64  // bytes published according to the log objects read
	ended     bool   // set once the member is gone and its log is fully read
	past      bool   // set if the member was gone before this host was admitted; its log is not read
	bad       int    // steps in which the next log object was damaged
}

// New returns a member. It makes no request before the first Step.
func New(cfg Config, back shared.Backend) (*Member, error) {
	if cfg.Objects == nil || cfg.Host == "" || strings.ContainsAny(cfg.Host, "./") || cfg.Capacity <= 0 || cfg.Lapse <= 0 ||
		cfg.Unique == nil || cfg.Now == nil {
		return nil, fmt.Errorf("%w: host %q, capacity %d, lapse %s", shared.ErrConfig, cfg.Host, cfg.Capacity, cfg.Lapse)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	m := &Member{cfg: cfg, log: cfg.Log, back: back}
	m.facts.Store(&shared.Stats{})
	m.Presence.Init(cfg.Lapse, cfg.Now, cfg.Unique)
	m.Credits.Init(m.Fresh, m.Wake)
	m.Outbox.Init(m.Wake)
	return m, nil
}

func (m *Member) active() bool { return m.admitted && m.IsScanned() }

// Step makes one round: it follows the other members, writes this member's log and status, and does the evictor's work if this
// host is the evictor. An error is that of a request; the next step tries again.
func (m *Member) Step() error {
	now := m.cfg.Now()
	m.lastStep = now
	err := m.step(now)
	if errors.Is(err, shared.ErrFenced) {
		m.log.Warn("host given up by the others; joining again", "member", m.name)
		m.fence()
		err = nil
	}
	m.publishStats()
	return err
}

func (m *Member) step(now time.Duration) error {
	if m.name == "" {
		if err := m.join(); err != nil {
			m.name = ""
			return err
		}
	}
	blind := m.look(now)
	if errors.Is(blind, shared.ErrFenced) {
		return blind
	}
	m.settleDoubts(now)
	// The records of this host must be in its log before others see its acknowledgement of a batch. Otherwise its record of a
	// victim could come after the decision.
	unlogged := m.flush(now)
	if errors.Is(unlogged, shared.ErrFenced) {
		return unlogged
	}
	if err := m.heartbeat(unlogged == nil); err != nil {
		return err
	}
	if err := errors.Join(blind, unlogged); err != nil {
		return err
	}
	m.takeGrant()
	if m.term == nil {
		return m.campaign(now)
	}
	return m.term.step(now)
}

// look reads the objects of the other members, and acts on the evictor's object.
func (m *Member) look(now time.Duration) error {
	if err := m.readOffice(now); err != nil {
		return err
	}
	if s := m.grant(); m.admitted && s == nil || s != nil && s.End > 0 {
		return shared.ErrFenced
	}
	if err := m.readPeers(now); err != nil {
		return err
	}
	if now-m.lookedAt > m.cfg.Lapse/2 { // This host may have missed heartbeats while it was paused or the server was unreachable.
		m.seenAt = now
		for _, p := range m.peers {
			p.seenAt = now
		}
	}
	m.lookedAt = now
	if !m.admitted {
		return nil
	}
	m.LearnLater()
	if err := m.followAll(); err != nil {
		return err
	}
	m.apply()
	return nil
}

// join writes the object of a new incarnation and removes the objects of earlier ones, which the evictor then declares dead.
// The operator must make sure that no two running hosts have the same id.
func (m *Member) join() error {
	life := max(1, m.cfg.Unique())
	name := m.cfg.Host + "." + strconv.FormatUint(life, 16)
	told := status{Beat: 1}
	b, err := shared.EncodeControl(&told)
	if err != nil {
		return err
	}
	version, err := m.cfg.Objects.Put("hosts/"+name, b, "")
	if err != nil {
		return err
	}
	m.incarnation = incarnation{
		name: name, told: told, toldAs: version, peers: map[string]*peer{}, unread: map[uint64]int{},
	}
	m.term = nil
	m.Docket.Begin(m.back)
	m.Reset(life)
	m.Begin(life)
	list, err := m.cfg.Objects.List("hosts")
	if err != nil {
		return err
	}
	for other := range list {
		if other != name && m.isOwn(other) {
			if err := m.cfg.Objects.Remove("hosts/" + other); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Member) isOwn(member string) bool {
	host, _, _ := strings.Cut(member, ".")
	return host == m.cfg.Host
}

// fence ends an incarnation that the others have declared dead, and discards all state that depends on it.
func (m *Member) fence() {
	m.Silence()
	m.End()
	m.mu.Lock()
	doubts := m.doubts
	m.doubts = nil
	m.mu.Unlock()
	for _, d := range doubts {
		m.Give(d.credit) // an audit finds objects that were stored
	}
	m.Reset(0)
	m.incarnation, m.term = incarnation{}, nil
	m.back.Fenced()
}

// readOffice reads the evictor's object, and notes the time if it has changed.
func (m *Member) readOffice(now time.Duration) error {
	b, version, err := m.cfg.Objects.Get("evictor", m.version)
	if errors.Is(err, fs.ErrNotExist) {
		if m.evictor != nil || m.seenAt == 0 {
			m.seenAt = max(1, now)
		}
		m.evictor, m.version, m.term = nil, "", nil
		return nil
	}
	if err != nil || version == m.version {
		return err
	}
	o, err := decodeEvictor(b)
	if err != nil { // A damaged object counts as removed. Otherwise no host could replace it.
		m.log.Error("the evictor's object is damaged; a new one is made", "error", err)
		m.evictor, m.version, m.seenAt, m.term = nil, version, now, nil
		return nil
	}
	m.version, m.seenAt = version, now
	if m.term != nil && (o.Owner != m.name || o.Term != m.term.number) {
		m.log.Warn("another host is the evictor now", "term", o.Term)
		m.term = nil
	}
	m.evictor = o
	if m.term == nil && o.Owner == m.name { // The write that elected this host had no answer. It may be so old that another host has been elected since.
		m.begin()
		m.term.wroteAt = now - m.cfg.Lapse
	}
	return nil
}

// readPeers lists the members and reads the statuses that have changed.
func (m *Member) readPeers(now time.Duration) error {
	list, err := m.cfg.Objects.List("hosts")
	if err != nil {
		return err
	}
	if _, here := list[m.name]; !here {
		return shared.ErrFenced
	}
	var changed []request
	for _, name := range slices.Sorted(maps.Keys(list)) {
		p, version := m.peers[name], list[name]
		if p == nil {
			p = &peer{seenAt: now, next: 1}
			m.peers[name] = p
		}
		if p.here = true; p.version != version && name != m.name {
			changed = append(changed, request{member: name, name: "hosts/" + name})
		}
	}
	m.fetch(changed)
	for i := range changed {
		q := &changed[i]
		p := m.peers[q.member]
		if errors.Is(q.err, fs.ErrNotExist) { // removed since the list
			p.here = false
			continue
		}
		var s status
		if q.err != nil {
			return fmt.Errorf("%s: %w", q.name, q.err)
		}
		p.version = q.version
		if err := s.decode(q.data); err != nil { // The member will write it again, or be declared dead.
			m.log.Warn("the object of a member is damaged", "member", q.member, "error", err)
			continue
		}
		p.status, p.seenAt = s, now
	}
	for name, p := range m.peers {
		if _, listed := list[name]; !listed {
			p.here = false
		}
		if m.evictor != nil && !p.here && m.evictor.Grants[name] == nil {
			delete(m.peers, name)
		}
	}
	return nil
}

// request is a read of a member's status or log object.
type request struct {
	member, name string
	number       uint64
	data         []byte
	version      string
	err          error
}

// fetch makes the reads concurrently.
func (m *Member) fetch(list []request) {
	get := func(q *request) { q.data, q.version, q.err = m.cfg.Objects.Get(q.name, "") }
	parallel(m.cfg.Workers, len(list), func(i int) { get(&list[i]) })
}

// parallel calls do for each number below n on at most workers goroutines, and returns when all calls have returned.
func parallel(workers, n int, do func(i int)) {
	if workers <= 1 || n <= 1 {
		for i := range n {
			do(i)
		}
		return
	}
	var next atomic.Int64
	var work sync.WaitGroup
	for range min(workers, n) {
		work.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	work.Wait()
}

// heartbeat writes this member's status if it has changed, or if the last write is a quarter of Lapse old. Acknowledgements are
// included only if logged is set.
func (m *Member) heartbeat(logged bool) error {
	at := m.cfg.Now()
	s := m.told
	s.Log, s.Published, s.Scanned = m.logged, m.published, m.active()
	s.Claim = m.Settle(m.cfg.Capacity / (4 * int64(max(1, len(m.peers)))))
	if g := m.grant(); g != nil {
		s.Granted = g.Granted
	}
	if logged {
		s.Vetoes = maps.Clone(m.Docket.Vetoes)
	}
	if s.Free >= s.Want && m.told.Free >= m.told.Want { // Changes of Free and Want do not matter while the free credit covers the wish.
		s.Free, s.Want = m.told.Free, m.told.Want
	}
	if m.admitted && reflect.DeepEqual(&s, &m.told) && at-m.BeatAt() < m.cfg.Lapse/4 {
		return nil
	}
	s.Beat++
	b, err := shared.EncodeControl(&s)
	if err != nil {
		return err
	}
	version, err := m.replace("hosts/"+m.name, b, m.toldAs, func([]byte) bool { return true }) // the object has no other writer
	if errors.Is(err, errReplaced) {
		return shared.ErrFenced
	} else if err != nil {
		return err
	}
	m.told, m.toldAs = s, version
	if m.admitted {
		m.Beat(at)
	}
	return nil
}

// errReplaced means that another host has written the object, or that it is gone.
var errReplaced = errors.New("bucket: the object was replaced or removed")

// replace writes an object over the version over. If the object has another version that own accepts, an earlier write of this
// host took effect without an answer, and replace writes over that version.
func (m *Member) replace(name string, b []byte, over string, own func([]byte) bool) (version string, err error) {
	for range 2 {
		version, err = m.cfg.Objects.Put(name, b, over)
		if !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
			return version, err
		}
		now, other, gerr := m.cfg.Objects.Get(name, "")
		switch {
		case errors.Is(gerr, fs.ErrNotExist) || gerr == nil && !own(now):
			return "", errReplaced
		case gerr != nil:
			return "", gerr
		}
		over = other
	}
	return "", err
}

// grant returns this member's grant, or nil before it is admitted.
func (m *Member) grant() *grant {
	if m.evictor == nil {
		return nil
	}
	return m.evictor.Grants[m.name]
}

// takeGrant takes the credit that was granted. When it first finds this member's grant it admits this host: the evictor now waits
// for its acknowledgements, so the host notes where the other logs end and then scans.
func (m *Member) takeGrant() {
	s := m.grant()
	if s == nil {
		return
	}
	m.Grant(s.Granted)
	if m.admitted {
		return
	}
	// Logs are followed from their current end. The scan finds the entries that were published before and still exist; older
	// log objects also record entries that were evicted long ago.
	for name, other := range m.evictor.Grants {
		if m.peers[name] == nil {
			m.peers[name] = &peer{next: 1}
		}
		p := m.peers[name]
		p.past = !p.here || other.End > 0
	}
	for _, p := range m.peers {
		p.next, p.published = p.Log+1, p.status.Published
	}
	m.admitted = true
	m.Beat(m.lastStep) // the time of this step's heartbeat
	m.ScanAgain()
	m.log.Info("admitted to the shared bucket", "member", m.name, "term", m.evictor.Term)
	m.Wake()
}

// apply applies the decisions and acknowledges the batches of the evictor's object, which was read before the logs.
func (m *Member) apply() {
	if m.evictor == nil {
		return
	}
	for _, n := range slices.Sorted(maps.Keys(m.Batches)) {
		if b := m.evictor.Batches[n]; b == nil || b.Decided {
			m.Retire(n, b != nil, func(i int) bool { return b.All || slices.Contains(b.Spared, i) })
		}
	}
	for _, n := range slices.Sorted(maps.Keys(m.evictor.Batches)) {
		b := m.evictor.Batches[n]
		if _, acked := m.Docket.Vetoes[n]; !acked && !b.Decided {
			if err := m.acknowledge(n, b); err != nil {
				m.unread[n]++
				m.log.Warn("cannot read a batch of victims; it is read again", "batch", n, "error", err)
			}
		}
	}
}

func (m *Member) acknowledge(n uint64, b *batch) error {
	var victims []shared.Victim
	if p := m.peers[b.Forget]; b.Forget != "" && p != nil && !p.ended {
		return nil // The member's log must be read first.
	} else if b.Forget == "" {
		var err error
		if victims, err = m.victims(n); err != nil {
			return err
		}
	}
	m.Acknowledge(n, victims)
	return nil
}

// victims reads a batch.
func (m *Member) victims(n uint64) ([]shared.Victim, error) {
	b, _, err := m.cfg.Objects.Get(batchName(n), "")
	if err != nil {
		return nil, fmt.Errorf("batch %d: %w", n, err)
	}
	list, err := shared.DecodeVictims(b)
	if err != nil {
		return nil, fmt.Errorf("batch %d: %w", n, err)
	}
	return list, nil
}

func batchName(n uint64) string { return "batch/" + strconv.FormatUint(n, 10) }

// Leave ends this host's membership. All puts and leases must have ended.
func (m *Member) Leave() error {
	if m.name == "" {
		return nil
	}
	err := m.flush(m.cfg.Now())
	m.mu.Lock()
	doubts := len(m.doubts)
	m.mu.Unlock()
	if err == nil && doubts == 0 && m.admitted {
		_, err = m.cfg.Objects.Put(logName(m.name, m.logged+1), end, "")
	}
	m.Silence()
	if m.term != nil {
		err = errors.Join(err, m.term.leave())
	}
	err = errors.Join(err, m.cfg.Objects.Remove("hosts/"+m.name))
	m.incarnation, m.term = incarnation{}, nil
	m.Reset(0)
	m.publishStats()
	return err
}

func (m *Member) publishStats() {
	old := m.facts.Load()
	s := shared.Stats{
		Member: m.name, Evictor: m.term != nil,
		Terms: old.Terms, Removed: old.Removed, GivenUp: old.GivenUp,
	}
	switch {
	case m.active():
		s.State = shared.Active
	case m.admitted:
		s.State = shared.Admitted
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

// Stats returns the counters and the state as of the latest step.
func (m *Member) Stats() shared.Stats {
	s := *m.facts.Load()
	m.Tell(&s)
	return s
}
