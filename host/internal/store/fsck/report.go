package fsck

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/kvhost/kvhost/host/kv"
)

// Kind is the kind of a problem.
type Kind string

const (
	Damaged    Kind = "damaged"     // header, table, size or a checksum is not what it should be
	WrongPiece Kind = "wrong-piece" // a sound piece under the built-in name of another piece
	Orphan     Kind = "orphan"      // a piece of a namespace that has no text; no host will find it
	NoPlan     Kind = "no-plan"     // a piece whose layout plan is missing; no host can read it
	Meta       Kind = "meta"        // a damaged metadata file of the store
	Stale      Kind = "stale"       // a temporary that is not being written
	Unreadable Kind = "unreadable"  // a file or directory that could not be read
	Later      Kind = "later"       // an unknown format version, flag or algorithm, probably of a later kvhost
	Misnamed   Kind = "misnamed"    // a sound piece that was renamed since it was stored; its header has another name
)

// advice holds the advice for each kind of problem that was not repaired.
var advice = map[Kind]string{
	Damaged:    "repair moves it to quarantine; its next lookup misses",
	WrongPiece: "repair moves it to quarantine; its next lookup misses",
	Orphan:     "put the namespace's text back, or let repair move it to quarantine",
	NoPlan:     "put the plan back, or let repair move it to quarantine",
	Meta:       "repair moves it to quarantine; the store writes it again when it needs it",
	Stale:      "repair removes it, and so does the next start of its host",
	Unreadable: "see the error; check the device, the mount and the permissions",
	Later:      "run the kvhost that wrote it, or remove it by hand",
	Misnamed:   "nothing: a start that scans the root finds it where it is",
}

// Problem is one problem of a file.
type Problem struct {
	Path   string `json:"path"`
	Kind   Kind   `json:"kind"`
	What   string `json:"what"`
	Bytes  int64  `json:"bytes"`            // allocated bytes on disk
	Done   string `json:"done,omitempty"`   // action of the repair; empty if none
	Failed string `json:"failed,omitempty"` // error of the repair; empty if none
	Advice string `json:"advice,omitempty"` // advice for the operator; empty if the problem was repaired
}

// Usage is a number of files and the bytes that they take on disk.
type Usage struct {
	Files int64 `json:"files"`
	Bytes int64 `json:"bytes"`
}

func (u *Usage) add(bytes int64) {
	u.Files++
	u.Bytes += bytes
}

// Compressed is the usage of compressed pieces, and the bytes of their payloads.
type Compressed struct {
	Usage
	Payload int64 `json:"payload_bytes"`
}

// Report is the result of a check.
type Report struct {
	Root        string               `json:"root"`
	Quick       bool                 `json:"quick"`
	InUse       bool                 `json:"in_use"`      // a host uses the root
	Pieces      Usage                `json:"pieces"`      // sound pieces
	Compressed  Compressed           `json:"compressed"`  // part of Pieces
	Temporaries Usage                `json:"temporaries"` // all temporaries; stale ones are also in Found
	Quarantine  Usage                `json:"quarantine"`  // files in quarantine after the check
	Foreign     Usage                `json:"foreign"`     // files that are not the store's
	Changing    int64                `json:"changing"`    // files that changed while they were read; they are not judged
	Read        int64                `json:"read_bytes"`
	Namespaces  map[kv.Digest]*Usage `json:"-"`
	Spaces      []SpaceUsage         `json:"namespaces"`
	Plans       int                  `json:"plans"`
	Found       map[Kind]*Usage      `json:"found"`    // problems by kind, including repaired ones
	Repaired    int64                `json:"repaired"` // number of problems repaired
	Remaining   int64                `json:"remaining"`
	Problems    []Problem            `json:"problems"`
	Left        int64                `json:"problems_left_out,omitempty"` // number of problems not listed, because of Options.Most
}

// SpaceUsage is the usage of the pieces of one namespace.
type SpaceUsage struct {
	Namespace string `json:"namespace"` // digest
	Model     string `json:"model,omitempty"`
	Usage
}

// Err returns ErrProblems if problems remain that were not repaired.
func (r *Report) Err() error {
	if r.Remaining == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d in %s", ErrProblems, r.Remaining, r.Root)
}

// WriteText writes the report as text.
func (r *Report) WriteText(out io.Writer) error {
	w := bufio.NewWriter(out)
	line := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	line("%s", r.Root)
	for _, p := range r.Problems {
		line("  %s: %s", p.Kind, p.Path)
		line("      %s", p.What)
		switch {
		case p.Failed != "":
			line("      repair failed: %s", p.Failed)
		case p.Done != "":
			line("      %s", p.Done)
		default:
			line("      %s", p.Advice)
		}
	}
	if r.Left > 0 {
		line("  and %d problems more", r.Left)
	}
	usage := func(name string, u Usage) { line("  %-12s %10d files %16d bytes", name, u.Files, u.Bytes) }
	usage("pieces", r.Pieces)
	for _, s := range r.Spaces {
		line("    %s %10d files %16d bytes  %s", s.Namespace, s.Files, s.Bytes, s.Model)
	}
	if n := r.Compressed; n.Files > 0 {
		line("    %-10s %10d files %16d bytes  of %d", "compressed", n.Files, n.Bytes, n.Payload)
	}
	usage("temporaries", r.Temporaries)
	usage("quarantine", r.Quarantine)
	usage("foreign", r.Foreign)
	for _, k := range slices.Sorted(maps.Keys(r.Found)) {
		usage(string(k), *r.Found[k])
	}
	if r.Changing > 0 {
		line("  %d files changed while they were read; they are not judged", r.Changing)
	}
	if r.InUse {
		line("  a host has the root: temporaries are left alone")
	}
	how := "read"
	if r.Quick {
		how = "read (headers only)"
	}
	line("  %d bytes %s; %d problems repaired, %d remain", r.Read, how, r.Repaired, r.Remaining)
	return w.Flush()
}

// Errors that Check and [Report.Err] return.
var (
	// ErrRoot means that the directory is not a root or cannot be read.
	ErrRoot = errors.New("fsck: not a root")
	// ErrProblems means that problems were found and not all of them were repaired.
	ErrProblems = errors.New("fsck: problems remain")
)

var (
	// errChanging means that a file changed each time it was read, so a host is writing it.
	errChanging = errors.New("fsck: the file changes")
	// errUnknownNamespace means that the root has no text of a piece's namespace.
	errUnknownNamespace = errors.New("unknown namespace")
)
