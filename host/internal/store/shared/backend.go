package shared

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Backend is the store behind a member. Its methods are called from [Member.Step], one at a time.
type Backend interface {
	// Learn adds a piece that was published. It is false while this host is itself writing the piece: then whoever writes
	// finds it in its place.
	Learn(r *Record) bool
	// Touched records that another host used entries.
	Touched(fingerprints []uint64)
	// Propose stops granting and storing an entry until Decide, and returns true. It returns false, a veto, when the entry
	// is leased or being written. It returns true for an entry that is not known.
	Propose(v *Victim) bool
	// Decide ends what Propose began. A victim that was not removed may be granted again. A removed victim may exist all
	// the same when Learn was called for it since Propose: it may have been published again.
	Decide(v *Victim, removed bool)
	// Fenced reports that the other hosts gave this one up: any piece may go now without its knowledge. It forgets all
	// entries, leases and proposals; Decide does not follow. Once it is admitted again it scans the root; see
	// [Member.Ticket].
	Fenced()

	// The evictor calls the rest.

	// Victims chooses entries to evict, of this many bytes in total, that are neither in use nor proposed.
	Victims(bytes int64) []Victim
	// Used returns the bytes on disk of all known pieces, proposed ones included, and of other files that this host found;
	// temporaries are excluded.
	Used() int64
	// Paths returns a victim's files. A victim of a namespace that cannot be read is spared.
	Paths(v *Victim) ([]string, error)
	// Identify reads which piece a published temporary is; it has a second link. The error is [ErrDamaged] when the bytes
	// do not say, and the file is emptied then.
	Identify(temp string, info staging.Info) (Record, error)
}

type Config struct {
	Dir      string // the root
	Host     string // [a-z0-9]+, unique among the running hosts
	Capacity int64
	Lapse    time.Duration // a host without a heartbeat for this long is given up
	LogBytes int64         // size at which a log is rotated; 0: 1 MiB
	FS       staging.FS
	Log      *slog.Logger
	Unique   func() uint64        // never returns the same number twice
	Now      func() time.Duration // monotonic; its origin does not matter
}

func (c *Config) complete() error {
	if c.LogBytes <= 0 {
		c.LogBytes = logFull
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.FS == nil {
		c.FS = staging.Below(c.Dir)
	}
	if c.Dir == "" || c.Host == "" || strings.ContainsAny(c.Host, "./") || c.Capacity <= 0 || c.Lapse <= 0 ||
		c.Unique == nil || c.Now == nil {
		return fmt.Errorf("%w: root %q, host %q, capacity %d, lapse %s", ErrConfig, c.Dir, c.Host, c.Capacity, c.Lapse)
	}
	return nil
}
