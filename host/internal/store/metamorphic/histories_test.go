package metamorphic

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging/faultfs"
)

// ErrSyntax is a history that cannot be read.
var ErrSyntax = errors.New("metamorphic: bad history")

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
	n, _ := strconv.ParseUint(o.get(name), 10, 64) // parseOp has seen it
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

// Parse reads a history's text. It skips empty lines and what follows "//".
func Parse(text string) (*History, error) {
	h := &History{}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line, _, _ = strings.Cut(line, "//")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if err := h.parseLine(line); err != nil {
			return nil, fmt.Errorf("%w: line %d: %q: %w", ErrSyntax, n, line, err)
		}
	}
	if h.Kind.Name == "" || len(h.Hosts) != h.Kind.hosts {
		return nil, fmt.Errorf("%w: %d hosts of kind %q", ErrSyntax, len(h.Hosts), h.Kind.Name)
	}
	for _, op := range h.Ops {
		if h.host(op.Host) < 0 {
			return nil, fmt.Errorf("%w: %s: no such host", ErrSyntax, op)
		}
	}
	return h, nil
}

func (h *History) parseLine(line string) (err error) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "kind":
		h.Kind, err = kindNamed(rest)
	case "seed":
		h.Seed, err = strconv.ParseUint(rest, 10, 64)
	case "host":
		var host Host
		host, err = parseHost(rest)
		h.Hosts = append(h.Hosts, host)
	case "fault":
		_, err = faultfs.ParseRules(rest)
		h.Faults = append(h.Faults, rest)
	default:
		var op Op
		op, err = parseOp(line)
		h.Ops = append(h.Ops, op)
	}
	return err
}

func parseHost(text string) (Host, error) {
	words := strings.Fields(text)
	if len(words) != 2 || words[1] != "none" && words[1] != "strict" {
		return Host{}, errors.New("want an id and a durability, none or strict")
	}
	return Host{ID: words[0], Strict: words[1] == "strict"}, nil
}

func (h *History) host(id string) int {
	for i := range h.Hosts {
		if h.Hosts[i].ID == id {
			return i
		}
	}
	return -1
}

// parseOp reads HOST.VERB(NAME=VALUE, ...).
func parseOp(line string) (Op, error) {
	head, tail, ok := strings.Cut(line, "(")
	host, name, dotted := strings.Cut(head, ".")
	tail, closed := strings.CutSuffix(tail, ")")
	if !ok || !dotted || !closed {
		return Op{}, errors.New("want host.Verb(name=value, ...)")
	}
	op := Op{Host: host, Verb: name}
	v, known := verbs[name]
	if !known {
		return op, errors.New("no such verb")
	}
	for text := range strings.SplitSeq(tail, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		arg, value, _ := strings.Cut(text, "=")
		i := slices.IndexFunc(v.args, func(a argument) bool { return a.name == arg })
		if i < 0 {
			return op, fmt.Errorf("%s has no argument %q", name, arg)
		}
		if !v.args[i].valid(value) {
			return op, fmt.Errorf("bad value of argument %q", text)
		}
		op.Args = append(op.Args, Arg{arg, value})
	}
	for _, a := range v.args {
		if !a.optional && !op.has(a.name) {
			return op, fmt.Errorf("%s needs an argument %s", name, a.name)
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

// TestBadText: a history that cannot be read says in which line.
func TestBadText(t *testing.T) {
	const head = "kind clean\nseed 1\nhost a none\n"
	for _, text := range []string{
		"",
		"kind unheard-of\n",
		"kind shared\nhost a none\n",
		"kind clean\nhost a\n",
		"kind clean\nhost a forever\n",
		head + "fault write: nonsense\n",
		head + "b.Crash()\n",
		head + "a.Dance()\n",
		head + "a.Crash\n",
		head + "a.Store()\n",
		head + "a.Store(entry=0)\n",
		head + "a.Store(entry=9/1)\n",
		head + "a.Store(entry=0/1, twice=true)\n",
		head + "a.Open(unplug=1)\n",
	} {
		if h, err := Parse(text); !errors.Is(err, ErrSyntax) {
			t.Errorf("%q is read as %v, error %v", text, h, err)
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

// FuzzParse reads histories, and writes them again.
func FuzzParse(f *testing.F) {
	for seed := range uint64(6) {
		f.Add(Generate(seed, 6).String())
	}
	f.Fuzz(func(t *testing.T, text string) {
		h, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(h.String())
		if err != nil || again.String() != h.String() {
			t.Fatalf("read back: %v\n%s\n%s", err, h, again)
		}
	})
}
