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
	// Learn takes in a piece that another host published.
	Learn(r *Record)
	// Touched notes uses by another host.
	Touched(fingerprints []uint64)
	// Propose stops granting and storing an entry until Decide, and is true; or it is false, a veto: the entry is leased, or
	// being written. An entry that is not known is proposed, too.
	Propose(v *Victim) bool
	// Decide ends what Propose began. A victim that was not removed may be granted again. Neither does it follow from removed
	// that it is not there, if it was learned since Propose: it may have been published again.
	Decide(v *Victim, removed bool)
	// Fenced says that this host was given up: what it had leased may go at any time, and what is there is to be learned
	// again, by a scan, once it is admitted; see [Member.Ticket].
	Fenced()

	// The evictor asks the rest.

	// Victims chooses entries to be evicted, of so many bytes in all, that are neither in use nor proposed.
	Victims(bytes int64) []Victim
	// Used is the bytes on disk of all pieces that are known, proposed ones too, and of what else this host has found
	// there; not of temporaries.
	Used() int64
	// Paths are a victim's files. A victim that cannot be named at present is spared.
	Paths(v *Victim) ([]string, error)
	// Identify reads what a temporary is that was published: it has a second name. The error is [ErrDamaged] when its bytes do
	// not tell.
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
