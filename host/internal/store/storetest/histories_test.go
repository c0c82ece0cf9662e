package storetest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// ErrSyntax is a history that cannot be read.
var ErrSyntax = errors.New("storetest: bad history")

// History is a list of operations and the settings of the hosts that they run on.
type History struct {
	Kind   Kind
	Seed   uint64
	Hosts  []Host
	Faults []string // rules of package faultfs that hold in every life of every host
	Ops    []Op
}

// Host is what stays the same in all lives of a host.
type Host struct {
	ID     string
	Strict bool // a piece is durable before it is resident
}

// Op is one operation: a verb on a host, with arguments.
type Op struct {
	Host string
	Verb string
	Args []Arg
}

// Arg is an argument of an operation.
type Arg struct{ Name, Value string }

func newOp(host, verb string, args ...any) Op {
	op := Op{Host: host, Verb: verb}
	for i := 0; i < len(args); i += 2 {
		op.Args = append(op.Args, Arg{args[i].(string), fmt.Sprint(args[i+1])})
	}
	return op
}

func (o Op) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s.%s(", o.Host, o.Verb)
	for i, a := range o.Args {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(a.Name + "=" + a.Value)
	}
	b.WriteByte(')')
	return b.String()
}

// get returns an argument's value, or an empty string.
func (o Op) get(name string) string {
	for _, a := range o.Args {
		if a.Name == name {
			return a.Value
		}
	}
	return ""
}

func (o Op) has(name string) bool { return o.get(name) != "" }

// number returns a number among the arguments; one that is not there is 0.
func (o Op) number(name string) uint64 {
	n, _ := strconv.ParseUint(o.get(name), 10, 64) // the generator wrote it
	return n
}

// String is the history's text. [Parse] reads it back.
func (h *History) String() string { return h.text(nil) }

// text is the history's text, with what came of its first operations.
func (h *History) text(results []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "kind %s\nseed %d\n", h.Kind.Name, h.Seed)
	for _, host := range h.Hosts {
		durability := "none"
		if host.Strict {
			durability = "strict"
		}
		fmt.Fprintf(&b, "host %s %s\n", host.ID, durability)
	}
	for _, rule := range h.Faults {
		fmt.Fprintf(&b, "fault %s\n", rule)
	}
	b.WriteByte('\n')
	for i, op := range h.Ops {
		if i < len(results) {
			fmt.Fprintf(&b, "%-56s // %s\n", op, strings.ReplaceAll(results[i], "\n", " "))
		} else {
			fmt.Fprintln(&b, op)
		}
	}
	return b.String()
}

// Parse reads the text of a history that was saved. It skips empty lines and what follows "//".
func Parse(text string) (*History, error) {
	h := &History{}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "//")
		line = strings.TrimSpace(line)
		word, rest, _ := strings.Cut(line, " ")
		var err error
		switch word {
		case "":
		case "kind":
			h.Kind, err = kindNamed(rest)
		case "seed":
			h.Seed, err = strconv.ParseUint(rest, 10, 64)
		case "host":
			id, durability, _ := strings.Cut(rest, " ")
			h.Hosts = append(h.Hosts, Host{ID: id, Strict: durability == "strict"})
		case "fault":
			h.Faults = append(h.Faults, rest)
		default:
			var op Op
			op, err = parseOp(line)
			h.Ops = append(h.Ops, op)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %q: %w", ErrSyntax, line, err)
		}
	}
	return h, nil
}

func (h *History) host(id string) int {
	return slices.IndexFunc(h.Hosts, func(host Host) bool { return host.ID == id })
}

// parseOp reads HOST.VERB(NAME=VALUE, ...).
func parseOp(line string) (Op, error) {
	head, tail, _ := strings.Cut(line, "(")
	host, name, _ := strings.Cut(head, ".")
	op := Op{Host: host, Verb: name}
	if _, known := verbs[name]; !known {
		return op, fmt.Errorf("no such verb: %q", name)
	}
	for text := range strings.SplitSeq(strings.TrimSuffix(tail, ")"), ", ") {
		if arg, value, ok := strings.Cut(text, "="); ok {
			op.Args = append(op.Args, Arg{arg, value})
		}
	}
	return op, nil
}

// TestText: a history's text reads back as the same history.
func TestText(t *testing.T) {
	for seed := range uint64(40) {
		h := Generate(seed, 300)
		again, err := Parse(h.String())
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if again.String() != h.String() {
			t.Errorf("seed %d, kind %s: the history reads back as another one:\n%s", seed, h.Kind.Name, again)
		}
	}
}

// TestRepeats: a history has the same results each time, but for names of directories.
func TestRepeats(t *testing.T) {
	for _, seed := range []uint64{1, 3, 5, 9, 11, 13} {
		h := Generate(seed, 120)
		var texts [2]string
		for i := range texts {
			res, err := runOnce(t, h)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			texts[i] = withoutDirs(res.Text())
		}
		if texts[0] != texts[1] {
			t.Errorf("seed %d, kind %s: two runs differ:\n%s\nand\n%s", seed, h.Kind.Name, texts[0], texts[1])
		}
	}
}

// withoutDirs removes what differs between the directories of two runs.
func withoutDirs(text string) string {
	words := strings.Split(text, " ")
	for i, w := range words {
		if strings.Contains(w, "kvhost-history") {
			words[i] = "DIR" + w[strings.LastIndexByte(w, '/')+1:]
		}
	}
	return strings.Join(words, " ")
}

// Shorten returns a shorter history that fails too: it leaves operations and fault rules out, many at once and then
// fewer, and keeps what is left while fails says that it fails. It stops at the deadline.
func Shorten(h *History, fails func(*History) bool, deadline time.Time) *History {
	best := *h
	for size := max(1, len(best.Ops)/2); ; size = (size + 1) / 2 {
		shorter := false
		for from := 0; from < len(best.Ops); {
			if time.Now().After(deadline) {
				return &best
			}
			try := best
			try.Ops = slices.Delete(slices.Clone(best.Ops), from, min(from+size, len(best.Ops)))
			if fails(&try) {
				best, shorter = try, true
			} else {
				from += size
			}
		}
		for i := 0; i < len(best.Faults); {
			if time.Now().After(deadline) {
				return &best
			}
			try := best
			try.Faults = slices.Delete(slices.Clone(best.Faults), i, i+1)
			if fails(&try) {
				best, shorter = try, true
			} else {
				i++
			}
		}
		if size == 1 && !shorter {
			return &best
		}
	}
}
