package storetest

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
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

// Kind is a sort of history: how many hosts there are on how many roots, and what can happen to them.
type Kind struct {
	Name   string
	hosts  int // two or more share a root
	roots  int
	faults string // rules, with a seed each
	power  bool   // the machine can lose its power
	lives  bool   // short lives that end badly; what was durable must be there in the next
	many   bool   // clients at the same time
	pauses bool   // operations on files that do not go on before their host has been given up
	memory bool   // the roots are in memory, which outlives the hosts
	levels bool   // each root is a level of its own
	stored bool   // the first root, the third and so on hold compressed pieces
	before bool   // of stored: the second root, the fourth and so on do, and the first must not
}

// exact says that a file which is removed stays so, and that what a lease is on cannot fail.
func (k *Kind) exact() bool { return k.faults == "" && !k.power }

// concurrent says that several clients or hosts are at work at the same time.
func (k *Kind) concurrent() bool { return k.many || k.hosts > 1 || k.levels && k.faults != "" }

// Kinds are all kinds of histories. The kind of a seed is its remainder.
func Kinds() []Kind { return slices.Clone(kinds) }

var kinds = []Kind{
	{Name: "clean", hosts: 1, roots: 1},
	{Name: "faults", hosts: 1, roots: 1, faults: ownFaults},
	{Name: "shared", hosts: 2, roots: 1},
	{Name: "two-roots", hosts: 1, roots: 2},
	{Name: "power", hosts: 1, roots: 1, power: true},
	{Name: "shared-with-faults", hosts: 2, roots: 1, faults: sharedFaults},
	{Name: "many-clients", hosts: 1, roots: 2, many: true},
	{Name: "two-roots-with-faults", hosts: 1, roots: 2, faults: ownFaults},
	{Name: "shared-by-many-clients", hosts: 2, roots: 1, many: true},
	{Name: "memory", hosts: 1, roots: 2, memory: true},
	{Name: "shared-by-many-clients-with-faults", hosts: 3, roots: 1, faults: sharedFaults, many: true},
	{Name: "shared-with-pauses", hosts: 2, roots: 1, pauses: true},
	{Name: "shared-by-many-clients-with-pauses", hosts: 3, roots: 1, many: true, pauses: true},
	{Name: "power-losses", hosts: 1, roots: 1, power: true, lives: true},
	{Name: "levels", hosts: 1, roots: 2, levels: true},
	{Name: "levels-with-faults", hosts: 1, roots: 3, levels: true, faults: ownFaults},
	{Name: "levels-by-many-clients", hosts: 1, roots: 3, levels: true, many: true},
	{Name: "compressed-with-faults", hosts: 1, roots: 2, stored: true, faults: ownFaults},
	{Name: "compressed-with-power-losses", hosts: 1, roots: 1, stored: true, power: true, lives: true},
	{Name: "compressed-levels", hosts: 1, roots: 3, stored: true, levels: true},
	{Name: "compressed-levels-behind-memory", hosts: 1, roots: 3, stored: true, before: true, levels: true},
	{Name: "levels-with-power-losses", hosts: 1, roots: 2, levels: true, power: true},
	{Name: "compressed-shared-with-faults", hosts: 2, roots: 1, stored: true, faults: sharedFaults},
	{Name: "compressed-shared-by-many-clients-with-pauses", hosts: 3, roots: 1, stored: true, many: true, pauses: true},
}

func kindNamed(name string) (Kind, error) {
	for _, k := range kinds {
		if k.Name == name {
			return k, nil
		}
	}
	return Kind{}, fmt.Errorf("no such kind of history: %q", name)
}

// These rules affect a few in a hundred calls of each sort.
const (
	ownFaults = `
write ** 2%% seed %d: enospc
write ** 1%% seed %d: short
publish ** 3%% seed %d: eio
publish ** 3%% seed %d: eio after
remove ** 2%% seed %d: eio
remove ** 2%% seed %d: eio after
open **_r* 1%% seed %d: emfile
open **.tmp 1%% seed %d: eio after
sync ** 3%% seed %d: eio
syncdir ** 2%% seed %d: eio
close ** 1%% seed %d: eio after
stat **_r* 1%% seed %d: estale
read ** 1%% seed %d: eio
`
	sharedFaults = `
write **.tmp 2%% seed %d: enospc
link ** 3%% seed %d: eio
link ** 3%% seed %d: eio after
remove ** 2%% seed %d: eio
remove ** 2%% seed %d: eio after
rename ** 1%% seed %d: eio
rename ** 1%% seed %d: eio after
open **_r* 1%% seed %d: emfile
open **.tmp 1%% seed %d: eio after
write **/log.* 1%% seed %d: eio
readdir **/shared/** 1%% seed %d: estale
stat **_r* 1%% seed %d: eio
`
)

var (
	seed      = flag.Uint64("seed", 0, "run the history of this seed only")
	kind      = flag.String("kind", "", "run histories of this kind only")
	ops       = flag.Int("ops", defaultOps, "operations of a history")
	histories = flag.Duration("time", 0, "continue with fresh seeds for so long")
)

// policies opens the first-party modules that histories use, compiled once. They stay open, so that all stores of all
// histories share their machine code: to load it again costs as much as ten operations.
var policies = sync.OnceValues(func() (opt policy.Options, err error) {
	names := []string{"lru", "fifo", "fanout"}
	if opt.Dir, err = policytest.Build(names...); err == nil {
		opt.Cache, err = policytest.OpenCache()
	} else if len(dist.Names()) > 0 { // without a toolchain the modules that the test binary was built with do
		opt.Cache, err = sandbox.OpenCache(filepath.Join(os.TempDir(), "kvhost-history-policies"))
	}
	for _, name := range names {
		if err == nil {
			_, err = policy.Open(context.Background(), name, opt)
		}
	}
	return opt, err
})

// TestHistories runs a history of each kind of several clients or hosts, and fresh seeds of all kinds for as long as -time says. A
// history that fails is written to the temporary directory; its seed and kind make it again.
func TestHistories(t *testing.T) {
	if *seed != 0 {
		h := generate(*seed)
		if *kind != "" { // the kinds may have become more since the seed failed
			h = generateKind(t, *kind, *seed)
		}
		run(t, h)
		return
	}
	p := &player{T: t, tally: testenv.NewTally(t, cmp.Or(*kind, "histories"))}
	for seed := uint64(1); seed <= uint64(len(Kinds())); seed++ {
		if h := generate(seed); *histories > 0 || h.Kind.concurrent() {
			p.play(h)
		}
	}
	testenv.FreshSeeds(*histories, func(seed uint64) bool {
		if !t.Failed() {
			p.play(generate(seed))
		}
		return !t.Failed()
	})
	p.end()
}

// TestHistoriesOfOneClient runs a history of each other kind, some more with power losses. The race detector finds nothing in them that it
// does not find in those of many clients.
func TestHistoriesOfOneClient(t *testing.T) {
	testenv.Slow(t)
	if *seed != 0 || *histories > 0 {
		return // TestHistories runs them
	}
	p := &player{T: t, tally: testenv.NewTally(t, "histories of one client")}
	kinds := uint64(len(Kinds()))
	for seed := uint64(1); seed <= kinds; seed++ {
		if h := generate(seed); !h.Kind.concurrent() {
			p.play(h)
		}
	}
	for i := range uint64(9) { // they are short
		p.play(generateKind(t, "power-losses", kinds+1+i))
	}
	p.end()
}

// player plays histories, and counts what comes of them.
type player struct {
	*testing.T
	tally *testenv.Tally
	count int
	all   Result
}

func (p *player) play(h *History) {
	if *kind != "" && h.Kind.Name != *kind {
		return
	}
	p.count++
	res := run(p.T, h)
	if res == nil { // it did not begin
		return
	}
	p.tally.Add(int64(len(res.Results)), res.Killed, 1)
	p.all.Stored += res.Stored
	p.all.Loads += res.Loads
	p.all.Hits += res.Hits
}

func (p *player) end() {
	p.Helper()
	p.Logf("%d histories: %d pieces stored, %d loads, %d of them returned bytes", p.count, p.all.Stored, p.all.Loads, p.all.Hits)
	if p.count > 0 && (p.all.Stored == 0 || p.all.Loads == 0 || p.all.Hits == 0) {
		p.Error("the histories are about nothing")
	}
}

func generate(seed uint64) *History { return Generate(seed, *ops) }

// generateKind makes the history of a seed, of the kind of this name.
func generateKind(t *testing.T, name string, seed uint64) *History {
	k, err := kindNamed(name)
	must(t, err)
	return GenerateKind(k, seed, *ops)
}

func run(t *testing.T, h *History) (res *Result) {
	t.Run(fmt.Sprintf("seed=%d/%s", h.Seed, h.Kind.Name), func(t *testing.T) {
		file := filepath.Join(os.TempDir(), fmt.Sprintf("kvhost-history-%d-%d.ops", h.Seed, os.Getpid()))
		save(t, file, h.String()) // a panic elsewhere, or a hang, leaves it there
		var err error
		if res, err = runOnce(t, h); err == nil {
			must(t, os.Remove(file))
			return
		}
		save(t, file, res.Text())
		t.Errorf("history of seed %d, kind %s, %d operations: %v", h.Seed, h.Kind.Name, len(h.Ops), err)
		t.Logf("the history with its results is in %s\nagain: go test ./host/internal/testkit/storetest -run TestHistories "+
			"-kind %s -seed %d -ops %d", file, h.Kind.Name, h.Seed, *ops)
	})
	return res
}

// runOnce runs a history in a fresh directory. It is in memory, where that takes half of the processor's time: no history is about the
// disk, and losses of power are a double's.
func runOnce(t *testing.T, h *History) (*Result, error) {
	return runIn(t, h, testenv.Dir(t))
}

// runIn is runOnce with the directory below another.
func runIn(t *testing.T, h *History, above string) (*Result, error) {
	opt, err := policies()
	must(t, err)
	dir, err := os.MkdirTemp(above, "kvhost-history")
	must(t, err)
	defer os.RemoveAll(dir)
	return Run(h, Options{Dir: dir, Policies: opt, Patience: testenv.Context(t)})
}

func save(t *testing.T, file, text string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(text), 0o600))
}

// must ends a test that cannot go on without what failed.
var must = testenv.OK
