package plugintest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policy/wasmtest"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

var all = flag.Bool("hostile.all", false, "use every module, also of the classes that take long")

// slow are the classes that take long; the short run uses one in so many of their modules.
var slow = map[string]int{"bombs": 4, "runaways": 3}

const (
	inChild = "KVHOST_HOSTILE_CHILD"
	// memoryLimit is what the process that uses the modules may have, with all that they ask for.
	memoryLimit = 2 << 30
	// peakLimit is what it may really take.
	peakLimit = 640 << 20
	// guestMemory is the budget of all instances.
	guestMemory = 256 << 20
	// longestCall bounds a call of a role. It is generous, because machines are busy.
	longestCall = 5 * time.Second
)

// TestHostileModules loads and uses the modules in a process of its own, whose memory is limited: none of them may end it, take
// its memory, hold it up, or put words in its mouth.
func TestHostileModules(t *testing.T) {
	if os.Getenv(inChild) != "" {
		useAll(t)
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHostileModules$", "-test.v", fmt.Sprintf("-hostile.all=%v", *all))
	cmd.Env = append(os.Environ(), inChild+"=1", "GOMEMLIMIT=512MiB")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the process that uses the modules: %v:\n%s", err, out[max(0, len(out)-16000):])
	}
	for line := range strings.Lines(string(out)) {
		if _, figures, ok := strings.Cut(line, "hostile_test.go:"); ok {
			t.Log(strings.TrimSpace(figures))
		}
	}
}

// peak is the most memory that this process ever had.
func peak(t *testing.T) (bytes int64) {
	b, err := os.ReadFile("/proc/self/status")
	testenv.OK(t, err)
	for line := range strings.Lines(string(b)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &bytes); err == nil {
			return bytes << 10
		}
	}
	t.Fatal("no VmHWM in /proc/self/status")
	return 0
}

// counted counts lines of a log.
type counted struct{ lines int }

func (c *counted) Enabled(context.Context, slog.Level) bool { return true }
func (c *counted) WithAttrs([]slog.Attr) slog.Handler       { return c }
func (c *counted) WithGroup(string) slog.Handler            { return c }
func (c *counted) Handle(context.Context, slog.Record) error {
	c.lines++
	return nil
}

func useAll(t *testing.T) {
	testenv.OK(t, unix.Setrlimit(unix.RLIMIT_DATA, &unix.Rlimit{Cur: memoryLimit, Max: memoryLimit}))
	cache, err := sandbox.OpenCache(filepath.Join(t.TempDir(), "cache"))
	testenv.OK(t, err)
	tally := testenv.NewTally(t, "hostile")
	u := &user{T: t, budget: sandbox.NewMemoryBudget(guestMemory), cache: cache, path: filepath.Join(t.TempDir(), "hostile.wasm")}
	byClass := map[string][]wasmtest.Module{}
	for _, m := range wasmtest.Modules() {
		byClass[m.Class] = append(byClass[m.Class], m)
	}
	if len(byClass) != len(wasmtest.Classes) {
		t.Fatalf("modules of %d classes, want %d", len(byClass), len(wasmtest.Classes))
	}
	for _, class := range wasmtest.Classes {
		list := byClass[class]
		u.refused, u.used, u.longest, u.slowest = 0, 0, 0, ""
		start := time.Now()
		for i := range list {
			if every := slow[class]; !*all && every > 0 && i%every != 0 {
				continue
			}
			fmt.Printf("--- %s\n", &list[i]) // the last one is at fault when the process ends
			u.use(&list[i])
			tally.Add(1, 0, 0)
		}
		t.Logf("%s: %d modules refused, %d used, in %v; longest call %v (%s)", class, u.refused, u.used,
			time.Since(start).Round(time.Millisecond), u.longest.Round(time.Microsecond), u.slowest)
	}
	most := peak(t)
	t.Logf("peak of memory: %d MiB", most>>20)
	if most > peakLimit {
		t.Errorf("the process took %d MiB", most>>20)
	}
	if used := u.budget.Used(); used != 0 {
		t.Errorf("%d bytes of guests' memory are used by nobody", used)
	}
}

// user is a host as far as a policy can tell.
type user struct {
	*testing.T
	budget        *sandbox.MemoryBudget
	cache         *sandbox.Cache
	path          string
	refused, used int
	longest       time.Duration
	slowest       string
	module        *wasmtest.Module
}

func (u *user) use(m *wasmtest.Module) {
	u.module = m
	testenv.OK(u, os.WriteFile(u.path, m.Wasm, 0o600))
	said := &counted{}
	opt := policy.Options{
		Log: slog.New(said), Memory: u.budget, Cache: u.cache, Grants: []string{abi.GrantClock, abi.GrantMetrics, abi.GrantRandom},
		Compile: sandbox.CompileLimits{Memory: 512 << 20, CPU: 2 * time.Second, Time: 30 * time.Second},
	}
	p, err := policy.Open(u.Context(), u.path, opt)
	if errors.Is(err, policy.ErrSelfTest) { // it shows at once what it is: see what it would do later
		u.judge(err)
		opt.SkipSelfTest = true
		p, err = policy.Open(u.Context(), u.path, opt)
	}
	if err != nil {
		u.refused++
		if !errors.Is(err, policy.ErrBadModule) && !errors.Is(err, policy.ErrGrant) {
			u.Errorf("%s: refused with %v", m, err)
		}
		u.judge(err)
		return
	}
	u.used++
	u.judge(u.exercise(p, m.Role))
	if err := p.Close(context.Background()); err != nil {
		u.Errorf("closing %s: %v", m, err)
	}
	if said.lines > 1000 {
		u.Errorf("%s: %d lines of log", m, said.lines)
	}
}

// judge looks at an error that people will read.
func (u *user) judge(err error) {
	if err == nil {
		return
	}
	text := err.Error()
	if len(text) > 8192 || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }) {
		u.Errorf("%s: an error of %d bytes: %.300q", u.module, len(text), text)
	}
}

// timed makes a call, whose error must be one that a host expects.
func (u *user) timed(what string, f func() error) error {
	start := time.Now()
	err := f()
	took := time.Since(start)
	if took > u.longest {
		u.longest, u.slowest = took, u.module.String()+": "+what
	}
	if took > longestCall {
		u.Errorf("%s: %s took %v", u.module, what, took)
	}
	if err != nil && !errors.Is(err, policy.ErrFault) && !errors.Is(err, policy.ErrQuarantine) {
		u.Errorf("%s: %s ended with %v, want a fault or none", u.module, what, err)
	}
	u.judge(err)
	return err
}

const pieces = 300

func (u *user) exercise(p *policy.Module, role abi.Role) error {
	ctx := u.Context()
	switch role {
	case abi.RoleEvict:
		e, err := p.NewEvict(ctx, policy.EvictOptions{MaxSlots: 64, Capacity: 64 << 20, Seed: 1})
		if err != nil {
			return err
		}
		defer e.Close()
		for i := range uint32(pieces) {
			ev := abi.Event{Op: abi.OpInsert, Slot: i % 64, Key: uint64(i) + 1, Size: 4, Parent: abi.None, Time: uint64(i)}
			if i >= 64 {
				ev.Op = abi.OpTouch
			}
			if err := u.timed("event", func() error { return e.Event(ev) }); err != nil {
				return err
			}
			if i%40 == 0 {
				err := u.timed("victims", func() error {
					_, err := e.Victims(abi.Ask{Bytes: 1 << 16, MaxVictims: 8, Tenant: abi.None}, make([]uint32, 8))
					return err
				})
				if err != nil {
					return err
				}
			}
		}
		state, ok, err := e.Save(1 << 20)
		if err == nil && ok {
			next, err := p.NewEvict(ctx, policy.EvictOptions{MaxSlots: 64, Capacity: 64 << 20, Seed: 1, State: state})
			if err == nil {
				next.Close()
			}
			return err
		}
		return err
	case abi.RoleAdmit:
		a, err := p.NewAdmit(ctx, policy.AdmitOptions{})
		if err != nil {
			return err
		}
		defer a.Close()
		for i := range uint64(20) {
			if err := u.timed("admit", func() error { return a.Admit(make([]abi.Candidate, 1+i), make([]bool, 1+i)) }); err != nil {
				return err
			}
		}
	case abi.RolePlace:
		pl, err := p.NewPlace(ctx, policy.PlaceOptions{})
		if err != nil {
			return err
		}
		defer pl.Close()
		for id := range uint32(3) {
			if err := u.timed("namespace", func() error { return pl.Namespace(id, fmt.Sprintf("model=%d\n", id)) }); err != nil {
				u.judge(err)
			}
		}
		for i := range uint32(pieces) {
			q := abi.PlaceQuery{Namespace: i % 3, KeyLen: 32}
			q.Key[0], q.Key[1] = byte(i), byte(i>>8)
			err = u.timed("path", func() error {
				path, _, err := pl.Path(&q, nil)
				if err == nil && len(path) > 0 {
					err = policy.CheckPath(path)
				}
				return err
			})
		}
		return err
	case abi.RoleLayout:
		l, err := p.NewLayout(ctx, policy.LayoutOptions{})
		if err != nil {
			return err
		}
		defer l.Close()
		for id := range uint32(3) {
			g := kv.Uniform(16, 4, 2, 512)
			err := u.timed("plan", func() error {
				plan, err := l.Plan(id, 0, "model=a\n", g)
				if err == nil && plan.PayloadBytes() > 2*g.PageBytes()+kv.MinGaps {
					err = fmt.Errorf("a plan of %d bytes for %d", plan.PayloadBytes(), g.PageBytes())
				}
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}
