package shared

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Backend is the store behind a member. [Member.Step] calls its methods, one at a time.
type Backend interface {
	// Learn adds a published piece to the index. It returns false while this host itself writes the piece; the put will find
	// the file in place.
	Learn(r *Record) bool
	// Touched notes that another host used entries.
	Touched(fingerprints []uint64)
	// Propose stops leases and puts of an entry until Decide, and returns true. It returns false, a veto, if the entry is
	// leased or being written. It returns true for an unknown entry.
	Propose(v *Victim) bool
	// Decide ends a proposal. A victim that was not removed may be leased again. A removed victim may nevertheless exist if
	// Learn was called for it since Propose: it may have been published again.
	Decide(v *Victim, removed bool)
	// Fenced reports that the other hosts declared this one dead, so that any piece may now be removed without its
	// acknowledgement. The backend discards all entries, leases and proposals; Decide is not called for them. Once the host is
	// admitted again it scans the root; see [Member.Ticket].
	Fenced()

	// The methods below are called on the evictor only.

	// Victims chooses entries to evict that free the given number of bytes. It chooses no entry that is in use or proposed.
	Victims(bytes int64) []Victim
	// Used returns the bytes on disk of all known pieces, proposed ones included, and of other files that this host found;
	// temporaries are excluded.
	Used() int64
	// Paths returns the files of a victim. If the text of the victim's namespace cannot be read, it returns an error, and the
	// victim is spared.
	Paths(v *Victim) ([]string, error)
	// Identify reads from a published temporary, which has a second link, which piece it is. The error is [ErrDamaged] if the
	// header is damaged; the file is then emptied.
	Identify(temp string, info staging.Info) (Record, error)
}

// Objects is the store of the protocol's own objects in a bucket. Names are relative to [Dir].
type Objects interface {
	// Get reads an object and its version. data is nil if the version is known. An object of more than most bytes is cut off
	// there, so that its checksum is wrong.
	Get(name, known string, most int64) (data []byte, version string, err error)
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
	Dir      string     // the root
	FS       staging.FS // holds the pieces and, in a directory, the files of the protocol
	Objects  Objects    // nil unless the root is in a bucket
	Host     string     // [a-z0-9]+, unique among the running hosts
	Capacity int64
	Lapse    time.Duration // the time without a heartbeat after which a host is declared dead
	LogBytes int64         // size at which a log is rotated, in a directory; 1 MiB if 0
	Workers  int           // number of concurrent requests, in a bucket
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
	if c.Dir == "" && c.Objects == nil || c.Host == "" || strings.ContainsAny(c.Host, "./") || c.Capacity <= 0 || c.Lapse <= 0 ||
		c.Unique == nil || c.Now == nil {
		return fmt.Errorf("%w: root %q, host %q, capacity %d, lapse %s", ErrConfig, c.Dir, c.Host, c.Capacity, c.Lapse)
	}
	return nil
}
