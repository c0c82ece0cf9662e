package storetest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// ErrSyntax is a policy in a history that there is not.
var ErrSyntax = errors.New("storetest: bad history")

// History is a list of operations and the settings of the hosts that they run on.
type History struct {
	Kind   Kind
	Seed   uint64
	Hosts  []Host
	Faults []string // rules of package faultfs that hold in every life of every host
	Copies bool     // hosts that share a root may name a piece each as it likes, and store it twice
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

// String is the history's text.
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

func (h *History) host(id string) int {
	return slices.IndexFunc(h.Hosts, func(host Host) bool { return host.ID == id })
}

// TestRepeats: a history has the same results each time, but for names of directories, and for the call at which a host ends:
// the directories that are there at a start are counted beside the calls of operations.
func TestRepeats(t *testing.T) {
	testenv.Slow(t)
	for _, seed := range []uint64{1, 3, 5, 9, 11, 13} {
		h := Generate(seed, 120)
		h.Ops = slices.DeleteFunc(h.Ops, func(op Op) bool { return op.Verb == "Arm" })
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
