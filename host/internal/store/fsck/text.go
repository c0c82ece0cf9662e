package fsck

import (
	"bufio"
	"fmt"
	"io"
)

// WriteText writes the report for people.
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
	for _, k := range r.kinds() {
		usage(string(k), *r.Found[k])
	}
	if r.Changing > 0 {
		line("  %d files changed while they were read; they are not judged", r.Changing)
	}
	if r.InUse {
		line("  a host has the root: temporaries were left alone")
	}
	how := "read"
	if r.Quick {
		how = "read (headers only)"
	}
	line("  %d bytes %s; %d problems repaired, %d remain", r.Read, how, r.Repaired, r.Remaining)
	return w.Flush()
}
